"""The instrument of every arm: what a rank computed in each step, for how long, and on which samples.

Compute time of a micro-batch runs from the start of forward to the moment at which the first trainable parameter, the
last to get one, has its gradient. What follows is waiting for other ranks. Nothing is read from a GPU before the end.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, NamedTuple

from unsloth_multigpu.group.waits import Lap, moment
from unsloth_multigpu.tools.bench.data import NUM_ID_TOKENS
from unsloth_multigpu.wire.process import read_peak_bytes

if TYPE_CHECKING:
    import torch


# Wall time and CPU time in seconds, micro-batches so far.
_Mark = tuple[float, float, int]


class _MicroBatch(NamedTuple):
    """What a model was given.

    Args:
        ids: The rows' numbers as tokens: rows x 2. Where rows lie end to end: all tokens.
        counts: Of each row: tokens without padding; 0 = it fills the micro-batch of a rank that has no sample. Where
            rows lie end to end: the place of each token in its row, -1 in a filler.
        longest: Tokens of the longest row. Where rows lie end to end: all of them.
        begin: When it began.
    """

    ids: torch.Tensor
    counts: torch.Tensor
    longest: int
    begin: Any


class Meter:
    """Watches one model. Made before any other hook is put on it.

    Args:
        model: The model that the Trainer gets.
        vocab_size: Base of the numbers that the first tokens of a row are.
        is_cuda: It computes on a GPU.
    """

    def __init__(self, model: torch.nn.Module, *, vocab_size: int, is_cuda: bool) -> None:
        self._vocab_size = vocab_size
        self._is_cuda = is_cuda
        self._micro_batches: list[tuple[_MicroBatch, Any]] = []
        self._pending: _MicroBatch | None = None
        self._steps: list[tuple[_Mark, _Mark]] = []
        self._watched: set[int] = set()
        self._watch_end(model)
        model.register_forward_pre_hook(self._before_forward, with_kwargs=True)

    def __deepcopy__(self, memo: Any) -> Meter:
        """Itself: copies of the model, which the legacy path makes for further devices, have its hooks."""
        return self

    def mark_begin(self) -> None:
        """An epoch begins. What came before it belongs to no step."""
        self._begin = self._mark()

    def mark_step(self) -> None:
        """The step so far is whole."""
        end = self._mark()
        self._steps.append((self._begin, end))
        self._begin = end

    def steps(self) -> list[dict[str, Any]]:
        """One record per step, see `result.MeasuredStep`."""
        return [
            {
                "wall_s": after[0] - before[0],
                "cpu_s": after[1] - before[1],
                **self._computed(self._micro_batches[before[2] : after[2]]),
            }
            for before, after in self._steps
        ]

    def _mark(self) -> _Mark:
        if self._is_cuda:
            import torch

            torch.cuda.synchronize()  # Logging the loss, which most arms do in each step, waits as well.
        return time.perf_counter(), time.process_time(), len(self._micro_batches)

    def _watch_end(self, model: torch.nn.Module) -> None:
        last = next(parameter for parameter in model.parameters() if parameter.requires_grad)
        last.register_post_accumulate_grad_hook(self._after_backward)
        self._watched.add(id(model))

    def _computed(self, micro_batches: list[tuple[_MicroBatch, Any]]) -> dict[str, Any]:
        compute_s = 0.0
        samples: list[int] = []
        sizes = []
        for (ids, counts, longest, begin), end in micro_batches:
            compute_s += Lap(begin, end).seconds()
            if ids.dim() == 1:
                flat = ids.tolist()
                starts = [i for i, position in enumerate(counts.tolist()) if position == 0]
                samples += [flat[i] * self._vocab_size + flat[i + 1] for i in starts]
                sizes.append([1, longest, longest if starts else 0])
                continue
            rows = zip(ids.tolist(), counts.tolist(), strict=True)
            samples += [high * self._vocab_size + low for (high, low), count in rows if count]
            sizes.append([len(ids), longest, int(counts.sum())])
        return {"compute_s": compute_s, "micro_batches": sizes, "samples": samples}

    def _before_forward(self, model: Any, args: Any, kwargs: dict[str, Any]) -> None:
        import torch

        self._pending = None
        if not (model.training and torch.is_grad_enabled()):
            return  # Not a training step: the model is only tried.
        if id(model) not in self._watched:
            self._watch_end(model)  # A copy: torch copies the hooks of modules and not those of parameters.
        ids, is_sample = kwargs["input_ids"], (kwargs["labels"] != -100).any(dim=1)
        if "position_ids" in kwargs:  # Rows lie end to end; all have labels, or the micro-batch fills a rank.
            counts, ids_kept = torch.where(is_sample, kwargs["position_ids"][0], -1), ids[0]
        else:
            counts, ids_kept = kwargs["attention_mask"].sum(dim=1) * is_sample, ids[:, :NUM_ID_TOKENS]
        self._pending = _MicroBatch(ids_kept.clone(), counts, ids.shape[1], moment(ids.device))

    def _after_backward(self, parameter: Any) -> None:
        if self._pending is not None:
            self._micro_batches.append((self._pending, moment(self._pending.ids.device)))
            self._pending = None


def peak_bytes(is_cuda: bool) -> int:
    """Most memory that this process has held: what torch allocated, GPU by GPU added up, else resident memory."""
    if is_cuda:
        import torch

        return sum(int(torch.cuda.max_memory_allocated(i)) for i in range(torch.cuda.device_count()))
    return read_peak_bytes()
