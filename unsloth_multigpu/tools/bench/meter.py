"""Measures every arm: compute time and samples of each step of a rank.

The compute time of a micro-batch ends when the first trainable parameter gets its gradient, the last of all. The time
after that is waiting for other ranks. Nothing is read from a GPU before the end.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, NamedTuple

from unsloth_multigpu.group.waits import Lap, moment
from unsloth_multigpu.tools.fingerprint import fingerprints
from unsloth_multigpu.wire.process import read_peak_bytes

if TYPE_CHECKING:
    import torch


# Wall time and CPU time in seconds, micro-batches so far.
_Mark = tuple[float, float, int]


class _MicroBatch(NamedTuple):
    """The inputs of a forward pass.

    Args:
        inputs: `input_ids`, with `position_ids` for padding-free batches, else `attention_mask`.
        is_sample: For each row; False = filler in the micro-batch of a rank without a sample.
        begin: Start time.
    """

    inputs: dict[str, torch.Tensor]
    is_sample: torch.Tensor
    begin: Any


class Meter:
    """Measures one model on a GPU or the CPU by hooks. Created before any other hook is registered."""

    def __init__(self, model: torch.nn.Module, *, is_cuda: bool) -> None:
        self._is_cuda = is_cuda
        self._micro_batches: list[tuple[_MicroBatch, Any]] = []
        self._pending: _MicroBatch | None = None
        self._steps: list[tuple[_Mark, _Mark]] = []
        self._watched: set[int] = set()
        self._watch_end(model)
        model.register_forward_pre_hook(self._before_forward, with_kwargs=True)

    def __deepcopy__(self, memo: Any) -> Meter:
        """Returns itself: copies of the model, which the legacy path makes for further devices, share its hooks."""
        return self

    def mark_begin(self) -> None:
        """Called at the start of an epoch: the time before it belongs to no step."""
        self._begin = self._mark()

    def mark_step(self) -> None:
        """Called at the end of a step."""
        end = self._mark()
        self._steps.append((self._begin, end))
        self._begin = end

    def steps(self) -> list[dict[str, Any]]:
        """Returns one record per step, see `bench_result`."""
        return [
            {
                "wall_s": after[0] - before[0],
                "cpu_s": after[1] - before[1],
                **_computed(self._micro_batches[before[2] : after[2]]),
            }
            for before, after in self._steps
        ]

    def _mark(self) -> _Mark:
        if self._is_cuda:
            import torch

            torch.cuda.synchronize()  # Most arms synchronize in each step in any case, when they log the loss.
        return time.perf_counter(), time.process_time(), len(self._micro_batches)

    def _watch_end(self, model: torch.nn.Module) -> None:
        last = next(parameter for parameter in model.parameters() if parameter.requires_grad)
        last.register_post_accumulate_grad_hook(self._after_backward)
        self._watched.add(id(model))

    def _before_forward(self, model: Any, args: Any, kwargs: dict[str, Any]) -> None:
        import torch

        self._pending = None
        if not (model.training and torch.is_grad_enabled()):
            return  # Not a training step.
        if id(model) not in self._watched:
            self._watch_end(model)  # A copy of the model has no hooks on parameters.
        ids = kwargs["input_ids"]
        more = "position_ids" if "position_ids" in kwargs else "attention_mask"
        inputs = {name: kwargs[name].clone() for name in ("input_ids", more)}
        self._pending = _MicroBatch(inputs, (kwargs["labels"] != -100).any(dim=1), moment(ids.device))

    def _after_backward(self, parameter: Any) -> None:
        if self._pending is not None:
            self._micro_batches.append((self._pending, moment(self._pending.is_sample.device)))
            self._pending = None


def _computed(micro_batches: list[tuple[_MicroBatch, Any]]) -> dict[str, Any]:
    """Returns compute time, sizes and samples of micro-batches, see `bench_result`."""
    samples: list[str] = []
    sizes = []
    for (inputs, is_sample, _), _ in micro_batches:
        kept = {name: value[is_sample] for name, value in inputs.items()}
        samples += fingerprints(kept).elements()
        tokens = kept["attention_mask"].sum() if "attention_mask" in kept else kept["input_ids"].numel()
        sizes.append([*inputs["input_ids"].shape, int(tokens)])
    compute_s = sum(Lap(batch.begin, end).seconds() for batch, end in micro_batches)
    return {"compute_s": compute_s, "micro_batches": sizes, "samples": samples}


def peak_bytes(is_cuda: bool) -> int:
    """Returns the peak memory of this process: torch's allocations summed over GPUs, on the CPU resident memory."""
    if is_cuda:
        import torch

        return sum(int(torch.cuda.max_memory_allocated(i)) for i in range(torch.cuda.device_count()))
    return read_peak_bytes()
