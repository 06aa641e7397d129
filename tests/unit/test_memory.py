"""Out of memory: which errors it is, and what is added to them."""

from types import SimpleNamespace

import pytest
import torch

from unsloth_multigpu.errors import DistributedError
from unsloth_multigpu.step.out_of_memory import advice, explain, is_out_of_memory

CPU = torch.device("cpu")

ERRORS = [
    torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."),
    RuntimeError("CUDA error: out of memory"),
    RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
    torch.distributed.DistBackendError("NCCL error in: x.cpp, Last error:\nCuda failure 2 'out of memory'"),
    RuntimeError("unable to mmap 4096 bytes from file <x>: Cannot allocate memory (12)"),
    MemoryError(),
]
OTHERS = [
    RuntimeError("mat1 and mat2 shapes cannot be multiplied"),
    DistributedError("rank 0 failed: CUDA out of memory", hint="x"),  # Another rank's.
    OSError("CUDA out of memory"),
]


def test_out_of_memory_is_recognised():
    assert [error for error in [*ERRORS, *OTHERS] if is_out_of_memory(error)] == ERRORS


def test_explanation_keeps_the_class_and_torchs_text_and_is_made_once():
    with pytest.raises(RuntimeError) as info:
        torch.empty(2**60, dtype=torch.uint8)
    error, original = info.value, str(info.value)
    for _ in range(2):
        explain(error, rank=3, device=CPU, place="micro-batch 0 of step 4 (2 rows x 9 tokens)", hint="Do this.")
    first, hint = str(error).splitlines()[0], str(error).splitlines()[-1]
    assert type(error) is RuntimeError
    assert original in str(error)
    assert first.startswith("rank 3 ran out of memory on cpu in micro-batch 0 of step 4 (2 rows x 9 tokens): ")
    assert first.count("rank 3") == 1
    assert hint == "Hint: Do this."


def arguments(**changes):
    usual = {"per_device_train_batch_size": 4, "per_device_eval_batch_size": 8, "gradient_checkpointing": False}
    return SimpleNamespace(**{**usual, **changes})


def test_advice_is_what_can_still_be_set():
    def told(args, shards=None, *, is_evaluation=False, offloads=False):
        return advice(args, is_evaluation=is_evaluation, shards=shards, offloads=offloads)

    on_cpu = told(arguments(device=CPU))
    assert on_cpu.startswith("Set max_tokens_per_micro_batch; lower per_device_train_batch_size (now 4) and")
    assert "fewer ranks" in on_cpu
    gpu = torch.device("cuda", 0)
    least = arguments(per_device_train_batch_size=1, gradient_checkpointing=True, device=gpu)
    on_gpu = told(least)
    assert on_gpu == "Set max_tokens_per_micro_batch; shorten the samples, or load the model with load_in_4bit=True."
    whole, parts = (told(least, shards) for shards in (False, True))
    assert "; divide the model between the ranks by enable_multi_gpu(shard='on'); " in whole
    assert "; set shard_offload=True; " in parts
    assert "shard" not in told(least, True, offloads=True)
    assert told(least, is_evaluation=True) == "Lower per_device_eval_batch_size (now 8)."
