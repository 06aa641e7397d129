"""Asks the engines of FSDP2 to shard the model: by variables, arguments of the Trainer, and how 4-bit weights lie."""

from __future__ import annotations

import functools
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

from unsloth_multigpu.errors import SetupError
from unsloth_multigpu.patching import Patch
from unsloth_multigpu.trainer_protocol import ArgumentsLike, OptionalArguments

# Read by `import unsloth` and when its Trainer is made. A value of the script stays.
_UNSLOTH_VARIABLE = "UNSLOTH_FSDP2"
# Without it Unsloth leaves frozen weights whole on every card that could hold the model, though parts were asked for.
_UNSLOTH_LAYOUT = "UNSLOTH_FSDP2_LAYOUT"
_UNSLOTH_OFFLOAD = "UNSLOTH_FSDP2_CPU_OFFLOAD"
# What TrainingArguments(fsdp=True) takes for its own defaults, written out where the default may change.
_FSDP_CONFIG = {"version": 2, "reshard_after_forward": True}


def ask_unsloth_to_shard(*, offload: bool = False) -> None:
    """Unsloth shards what its Trainer is given; it reads the variables when it is imported and when it shards.

    Args:
        offload: A rank's part is to lie in the host's memory.

    Raises:
        SetupError: The script's environment says otherwise.
    """
    os.environ.setdefault(_UNSLOTH_VARIABLE, "1")
    os.environ.setdefault(_UNSLOTH_LAYOUT, "sharded")
    if not offload:
        return
    value = os.environ.setdefault(_UNSLOTH_OFFLOAD, "1")
    if value.strip().lower() not in ("1", "true", "yes", "on"):  # As Unsloth reads it.
        raise SetupError(f"shard_offload=True, but {_UNSLOTH_OFFLOAD}={value!r}.", hint="Leave one of them out.")


def ask_accelerate_to_shard(args: ArgumentsLike, *, offload: bool = False) -> None:
    """Sets `TrainingArguments.fsdp`, unless the script has, or Unsloth is to shard the model.

    Args:
        offload: A rank's part is to lie in the host's memory, also where the script has set `fsdp`.

    Raises:
        SetupError: The script's own fsdp_config says otherwise.
    """
    if "unsloth" in sys.modules:
        return
    arguments = cast(OptionalArguments, args)
    has_asked = bool(getattr(args, "fsdp", None))
    if has_asked and not offload:
        return
    given = arguments.fsdp_config or {}
    if isinstance(given, str):  # TrainingArguments takes the name of a file as well.
        given = json.loads(Path(given).read_text(encoding="utf-8"))
    config = {**given} if has_asked else {**_FSDP_CONFIG, **given}
    if offload and not config.setdefault("cpu_offload", True):
        raise SetupError(
            "shard_offload=True, but fsdp_config of TrainingArguments says cpu_offload=False.",
            hint="Leave one of them out.",
        )
    arguments.fsdp = arguments.fsdp or True
    arguments.fsdp_config = config


def shard_patches() -> list[Patch]:
    """Patches that make a model fit for sharding."""
    return [
        Patch(
            target="transformers.utils.quantization_config:BitsAndBytesConfig.post_init",
            supports="transformers>=4.57,<6",
            wrap=_stored_as_computed,
            reason="FSDP2 shards 4-bit weights only where they are packed in a floating-point type.",
            optional=True,
        ),
    ]


def _stored_as_computed(original: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(original)
    def post_init(self: Any) -> None:
        original(self)
        # Unsloth packs them itself. What the script gives is kept, but for uint8, which is also the default.
        if self.load_in_4bit and not self.bnb_4bit_quant_storage.is_floating_point and "unsloth" not in sys.modules:
            self.bnb_4bit_quant_storage = self.bnb_4bit_compute_dtype

    return post_init
