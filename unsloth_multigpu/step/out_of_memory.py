"""Adds to an out-of-memory error which rank failed, in which micro-batch, and which option to set."""

from __future__ import annotations

import re
from collections.abc import Iterable

import torch

from unsloth_multigpu.accelerator import KINDS
from unsloth_multigpu.errors import MultiGPUError
from unsloth_multigpu.group.shards import part_of
from unsloth_multigpu.part import ArgumentsLike
from unsloth_multigpu.words import in_gib

# torch's CPU allocator, drivers, cuBLAS and NCCL have no error class for it, only these texts.
_TEXT = re.compile(r"out of memory|can(no|')t allocate memory|ALLOC_FAILED", re.IGNORECASE)


def is_out_of_memory(error: BaseException) -> bool:
    """True for errors of torch, of an accelerator's libraries or of Python that mean out of memory."""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    is_ours = isinstance(error, MultiGPUError)  # It may quote the error of another rank.
    return isinstance(error, RuntimeError) and not is_ours and bool(_TEXT.search(str(error)))


def explain(error: BaseException, *, rank: int, device: torch.device, place: str, hint: str) -> None:
    """Adds rank, device, place and hint to the error itself, so that scripts can still catch its class."""
    facts = f"rank {rank} ran out of memory on {device} in {place}"
    original = str(error)
    if original.startswith(f"rank {rank} ran out of memory"):
        return
    # The supervisor shows the first line.
    error.args = (f"{facts}: {original or type(error).__name__}\nHint: {hint}",)


def num_refused(device: torch.device) -> int:
    """Returns how many allocations on the device failed in this process: libraries may replace the error of one."""
    if device.type not in KINDS:
        return 0
    return int(getattr(torch, device.type).memory_stats(device).get("num_ooms", 0))


def filled(device: torch.device, **held: Iterable[torch.Tensor]) -> str:
    """Describes a device's memory: "peak 23.1 GiB of 23.7, with weights 14.2, gradients 0.3"; "" for the CPU.

    `held` has the tensors of each kind. Tensors on other devices are left out.
    """
    if device.type not in KINDS:
        return ""
    module = getattr(torch, device.type)
    parts = []
    for name, tensors in held.items():
        mine = [part_of(t) for t in tensors]
        parts.append(f"{name} {in_gib(sum(t.nbytes for t in mine if t.device.type == device.type))}")
    peak = f"peak {in_gib(module.max_memory_allocated(device))} GiB of {in_gib(module.mem_get_info(device)[1])}"
    return ", with ".join([peak, *([", ".join(parts)] if parts else [])])


def loading_advice(num_ranks: int, *, shards: bool) -> str:
    """Returns a hint on how to load a model that does not fit one GPU; `shards`: it is sharded already."""
    if shards:
        return "Load it with load_in_4bit=True, so that each rank keeps only its part of a weight, or use more GPUs."
    return (
        f"enable_multi_gpu(shard='on') divides the model between the {num_ranks} ranks, a 4-bit model already while it "
        "is loaded; load_in_4bit=True takes about a quarter of the memory of 16 bits."
    )


def advice(args: ArgumentsLike, *, is_evaluation: bool, shards: bool | None, offloads: bool) -> str:
    """Returns which options to change.

    Args:
        shards: The model is sharded; None = there is one rank.
        offloads: The shards are on the host.
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
    if shards is False and args.device.type != "cpu":
        ways.append("divide the model between the ranks by enable_multi_gpu(shard='on')")
    elif shards and not offloads:
        ways.append("set shard_offload=True")
    ways.append("shorten the samples, or load the model with load_in_4bit=True")
    if args.device.type == "cpu":
        ways.append("start fewer ranks, which share the machine's memory")
    text = "; ".join(ways)
    return f"{text[0].upper()}{text[1:]}."
