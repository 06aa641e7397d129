"""Asks the engines of FSDP2 to shard the model: by variables, arguments of the Trainer, and how 4-bit weights lie."""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable
from typing import Any, cast

from unsloth_multigpu.patching import Patch
from unsloth_multigpu.trainer_protocol import ArgumentsLike, OptionalArguments

# Read by `import unsloth` and when its Trainer is made. A value of the script stays.
_UNSLOTH_VARIABLE = "UNSLOTH_FSDP2"
# What TrainingArguments(fsdp=True) takes for its own defaults, written out where the default may change.
_FSDP_CONFIG = {"version": 2, "reshard_after_forward": True}


def ask_unsloth_to_shard() -> None:
    """Unsloth shards what its Trainer is given; it reads the variable when it is imported."""
    os.environ.setdefault(_UNSLOTH_VARIABLE, "1")


def ask_accelerate_to_shard(args: ArgumentsLike) -> None:
    """Sets `TrainingArguments.fsdp`, unless the script has, or Unsloth is to shard the model."""
    if "unsloth" in sys.modules or getattr(args, "fsdp", None):
        return
    arguments = cast(OptionalArguments, args)
    arguments.fsdp = True
    arguments.fsdp_config = {**_FSDP_CONFIG, **(arguments.fsdp_config or {})}


def shard_patches() -> list[Patch]:
    """Patches that make a model fit for sharding."""
    return [
        Patch(
            target="transformers.utils.quantization_config:BitsAndBytesConfig.post_init",
            supports="transformers>=4.57,<6",
            wrap=_stored_as_computed,
            reason="FSDP2 shards 4-bit weights only where they are packed in a floating-point type.",
            optional=True,
        )
    ]


def _stored_as_computed(original: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(original)
    def post_init(self: Any) -> None:
        original(self)
        # Unsloth packs them itself. What the script gives is kept, but for uint8, which is also the default.
        if self.load_in_4bit and not self.bnb_4bit_quant_storage.is_floating_point and "unsloth" not in sys.modules:
            self.bnb_4bit_quant_storage = self.bnb_4bit_compute_dtype

    return post_init
