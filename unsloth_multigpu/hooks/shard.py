"""Asks the engines of FSDP2 to shard the model: by variables, arguments of the Trainer, and how 4-bit weights lie."""

from __future__ import annotations

import functools
import inspect
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

from unsloth_multigpu.errors import SetupError
from unsloth_multigpu.patching import Patch
from unsloth_multigpu.shard.offload import UNSLOTH_VARIABLE as UNSLOTH_OFFLOAD
from unsloth_multigpu.shard.offload import asked_of_unsloth
from unsloth_multigpu.trainer_protocol import ArgumentsLike, OptionalArguments

# Read by `import unsloth` and when its Trainer is made. A value of the script stays.
_UNSLOTH_VARIABLE = "UNSLOTH_FSDP2"
# Without it Unsloth leaves frozen weights whole on every card that could hold the model, though parts were asked for.
_UNSLOTH_LAYOUT = "UNSLOTH_FSDP2_LAYOUT"
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
    os.environ.setdefault(UNSLOTH_OFFLOAD, "1")
    if not asked_of_unsloth(os.environ):
        raise SetupError(
            f"shard_offload=True, but {UNSLOTH_OFFLOAD}={os.environ[UNSLOTH_OFFLOAD]!r}.", hint="Leave one of them out."
        )


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
        Patch(
            target="transformers.trainer:Trainer.__init__",
            supports="transformers>=4.57,<6",
            wrap=_with_own_optimizer,
            reason="A Trainer refuses an optimizer of the script for FSDP 1; FSDP2 gives it the parts of its weights.",
            needs=("args", "model_init", "optimizers", "optimizer_cls_and_kwargs"),
            optional=True,
        ),
    ]


def _with_own_optimizer(original: Callable[..., None]) -> Callable[..., None]:
    """accelerate puts parts in the place of whole weights in any optimizer, as in the one that the Trainer makes."""
    signature = inspect.signature(original)

    @functools.wraps(original)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        try:
            bound = signature.bind(self, *args, **kwargs)
        except TypeError:  # It is the original's to say, which may also know older names of arguments.
            original(self, *args, **kwargs)
            return
        given = bound.arguments
        optimizers = given.get("optimizers") or (None, None)
        is_refused = given.get("model_init") is not None or given.get("optimizer_cls_and_kwargs") is not None
        if is_refused or optimizers == (None, None) or not getattr(given.get("args"), "fsdp", None):
            original(self, *args, **kwargs)
            return
        given["optimizers"] = (None, None)
        original(*bound.args, **bound.kwargs)
        self.optimizer, self.lr_scheduler = optimizers

    return __init__


def _stored_as_computed(original: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(original)
    def post_init(self: Any) -> None:
        original(self)
        # Unsloth packs them itself. What the script gives is kept, but for uint8, which is also the default.
        if self.load_in_4bit and not self.bnb_4bit_quant_storage.is_floating_point and "unsloth" not in sys.modules:
            self.bnb_4bit_quant_storage = self.bnb_4bit_compute_dtype

    return post_init
