"""Adds to an out-of-memory error which rank failed, in which micro-batch, and which option to set."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import torch

from unsloth_multigpu.errors import MultiGPUError
from unsloth_multigpu.trainer_protocol import ArgumentsLike

# torch's CPU allocator, drivers, cuBLAS and NCCL have no error class for it, only these texts.
_TEXT = re.compile(r"out of memory|can(no|')t allocate memory|ALLOC_FAILED", re.IGNORECASE)


def is_out_of_memory(error: BaseException) -> bool:
    """True for the errors of torch, an accelerator's libraries or Python that mean out of memory."""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    is_ours = isinstance(error, MultiGPUError)  # It may quote another rank's.
    return isinstance(error, RuntimeError) and not is_ours and bool(_TEXT.search(str(error)))


def explain(error: BaseException, *, rank: int, device: torch.device, place: str, hint: str) -> None:
    """Adds text to the error itself, so that its class stays, which the script may catch.

    Args:
        error: One that `is_out_of_memory`.
        rank: Of this process.
        device: On which it computes.
        place: What it was doing, with the size of the micro-batch.
        hint: What to set.
    """
    facts = f"rank {rank} ran out of memory on {device} in {place}"
    original = str(error)
    if original.startswith(f"rank {rank} ran out of memory"):
        return
    before = error.args
    # Into its first line, which the supervisor shows.
    error.args = (f"{facts}: {original or type(error).__name__}\nHint: {hint}",)
    if facts not in str(error):  # NumPy's class builds its own text.
        error.args = before
        if hasattr(error, "add_note"):
            error.add_note(f"{facts}\nHint: {hint}")


def advice(args: ArgumentsLike, device: torch.device, *, is_evaluation: bool) -> str:
    """Which options to change, given those of the training.

    Args:
        args: The `TrainingArguments`.
        device: On which the rank computes.
        is_evaluation: It was evaluating.
    """
    if is_evaluation:
        return f"Lower per_device_eval_batch_size (now {args.per_device_eval_batch_size})."
    ways = ["set max_tokens_per_micro_batch"]
    if (rows := args.per_device_train_batch_size) > 1:
        ways.append(
            f"lower per_device_train_batch_size (now {rows}) and raise gradient_accumulation_steps by the same factor"
        )
    if not args.gradient_checkpointing:
        ways.append("set gradient_checkpointing=True")
    ways.append("shorten the samples, or load the model with load_in_4bit=True")
    if device.type == "cpu":
        ways.append("start fewer ranks, which share the machine's memory")
    text = "; ".join(ways)
    return f"{text[0].upper()}{text[1:]}."


def size_of(inputs: Any) -> str:
    """ "8 rows x 512 tokens" of a micro-batch: its largest tensor of two dimensions. "" where it has none."""
    values = inputs.values() if isinstance(inputs, Mapping) else ()
    shapes = [v.shape for v in values if isinstance(v, torch.Tensor) and v.dim() == 2]
    if not shapes:
        return ""
    rows, tokens = max(shapes, key=lambda shape: shape.numel())
    return f"{rows} rows x {tokens} tokens"
