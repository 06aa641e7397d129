"""Tells which optimizers of `TrainingArguments.optim` can train a sharded model. Pure."""

from __future__ import annotations

# Optimizers of bitsandbytes without "bnb" in their names.
_OF_BITSANDBYTES = {"adamw_8bit", "lion_8bit", "lion_32bit", "ademamix", "ademamix_8bit"}


def trains_parts(name: str, *, with_unsloth: bool) -> bool:
    """True if the optimizer can train the shards of FSDP2.

    bitsandbytes' optimizers take plain tensors only, which Unsloth's FSDP2 (2026.10.9) passes to Adam and AdamW.
    transformers' Adafactor would mix shards with whole rows and columns.

    Args:
        name: `TrainingArguments.optim`.
        with_unsloth: Unsloth shards the model.
    """
    is_of_bitsandbytes = "bnb" in name or name.startswith("paged_") or name in _OF_BITSANDBYTES
    return name != "adafactor" and (not is_of_bitsandbytes or (with_unsloth and "adam" in name))
