"""The instrument of every arm: what a rank computed in each step, for how long, and on which samples.

Compute time of a micro-batch runs from the start of forward to the moment at which the first trainable parameter, the
last to get one, has its gradient. What follows is waiting for other ranks. Nothing is read from a GPU before the end.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from unsloth_multigpu.tools.bench.data import NUM_ID_TOKENS
from unsloth_multigpu.wire.process import read_peak_bytes

if TYPE_CHECKING:
    import torch


# Wall time and CPU time in seconds, micro-batches so far.
_Mark = tuple[float, float, int]


class Clock:
    """Measures one span at a time: on the CPU by its clock, on a GPU by events of the current stream.

    Args:
        is_cuda: Work on a GPU is measured.
        speed: Below 1 it sleeps until a span took as long as at that speed. A stream is idle meanwhile, which delays
            all later work.
    """

    def __init__(self, *, is_cuda: bool, speed: float) -> None:
        self._is_cuda = is_cuda
        self._speed = speed
        self._spans: list[tuple[Any, Any]] = []

    def begin(self) -> None:
        self._begin = self._mark()

    def end(self) -> None:
        end = self._mark()
        if self._speed < 1:
            if self._is_cuda:
                end.synchronize()
            time.sleep(self._seconds(self._begin, end) * (1 / self._speed - 1))
            end = self._mark()
        self._spans.append((self._begin, end))

    def spans_s(self) -> list[float]:
        """All spans, in seconds."""
        if self._is_cuda:
            import torch

            torch.cuda.synchronize()
        return [self._seconds(begin, end) for begin, end in self._spans]

    def _seconds(self, begin: Any, end: Any) -> float:
        return float(begin.elapsed_time(end) / 1e3 if self._is_cuda else end - begin)

    def _mark(self) -> Any:
        if not self._is_cuda:
            return time.perf_counter()
        import torch

        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event


class Meter:
    """Watches one model. Made before any other hook is put on it, so that a simulated slowness is part of its work.

    Args:
        model: The model that the Trainer gets.
        vocab_size: Base of the numbers that the first tokens of a row are.
        is_cuda: It computes on a GPU.
        speed: 1 = its own; a slower rank is simulated by sleeping.
    """

    def __init__(self, model: torch.nn.Module, *, vocab_size: int, is_cuda: bool, speed: float) -> None:
        self._vocab_size = vocab_size
        self._is_cuda = is_cuda
        self._clock = Clock(is_cuda=is_cuda, speed=speed)
        # Of each micro-batch: the rows' numbers as tokens, their tokens without padding, the length of the longest.
        # Where rows lie end to end: all tokens, their places in their rows, -1 in a filler, and how many they are.
        self._micro_batches: list[tuple[torch.Tensor, torch.Tensor, int]] = []
        self._pending: tuple[torch.Tensor, torch.Tensor, int] | None = None
        self._steps: list[tuple[_Mark, _Mark]] = []
        self._watched: set[int] = set()
        self._watch_end(model)
        model.register_forward_pre_hook(self._before_forward, with_kwargs=True)

    def __deepcopy__(self, memo: Any) -> Meter:
        """Itself: copies of the model, which the legacy path makes for further devices, have its hooks."""
        return self

    def mark_begin(self) -> None:
        """An epoch begins, or this arm's turn. What came before it belongs to no step."""
        self._begin = self._mark()

    def mark_step(self) -> None:
        """The step so far is whole."""
        end = self._mark()
        self._steps.append((self._begin, end))
        self._begin = end

    def extend_step(self) -> None:
        """What came since the last step belongs to it: ranks that step by themselves meet at an epoch's end."""
        self._steps[-1] = (self._steps[-1][0], self._mark())

    def steps(self) -> list[dict[str, Any]]:
        """One record per step, see `result.MeasuredStep`."""
        spans_s = self._clock.spans_s()
        return [self._step(begin, end, spans_s) for begin, end in self._steps]

    def _mark(self) -> _Mark:
        if self._is_cuda:
            import torch

            torch.cuda.synchronize()  # Logging the loss, which most arms do in each step, waits as well.
        return time.perf_counter(), time.process_time(), len(self._micro_batches)

    def _watch_end(self, model: torch.nn.Module) -> None:
        last = next(parameter for parameter in model.parameters() if parameter.requires_grad)
        last.register_post_accumulate_grad_hook(self._after_backward)
        self._watched.add(id(model))

    def _step(self, before: _Mark, after: _Mark, spans_s: Sequence[float]) -> dict[str, Any]:
        first, last = before[2], after[2]
        samples: list[int] = []
        sizes = []
        for ids, num_tokens, longest in self._micro_batches[first:last]:
            if ids.dim() == 1:
                flat = ids.tolist()
                starts = [i for i, position in enumerate(num_tokens.tolist()) if position == 0]
                samples += [flat[i] * self._vocab_size + flat[i + 1] for i in starts]
                sizes.append([1, longest, longest if starts else 0])
                continue
            # A row without a label is no sample: it fills the micro-batch of a rank that has none.
            rows = zip(ids.tolist(), num_tokens.tolist(), strict=True)
            samples += [high * self._vocab_size + low for (high, low), count in rows if count]
            sizes.append([len(ids), longest, int(num_tokens.sum())])
        return {
            "wall_s": after[0] - before[0],
            "cpu_s": after[1] - before[1],
            "compute_s": sum(spans_s[first:last]),
            "micro_batches": sizes,
            "samples": samples,
        }

    def _before_forward(self, model: Any, args: Any, kwargs: dict[str, Any]) -> None:
        import torch

        self._pending = None
        if not (model.training and torch.is_grad_enabled()):
            return  # Not a training step: the model is only tried.
        if id(model) not in self._watched:
            self._watch_end(model)  # A copy: torch copies the hooks of modules and not those of parameters.
        ids, is_sample = kwargs["input_ids"], (kwargs["labels"] != -100).any(dim=1)
        if "position_ids" in kwargs:  # Rows lie end to end; all have labels, or the micro-batch fills a rank.
            self._pending = (ids[0].clone(), torch.where(is_sample, kwargs["position_ids"][0], -1), ids.shape[1])
        else:
            num_tokens = kwargs["attention_mask"].sum(dim=1) * is_sample
            self._pending = (ids[:, :NUM_ID_TOKENS].clone(), num_tokens, ids.shape[1])
        self._clock.begin()

    def _after_backward(self, parameter: Any) -> None:
        if self._pending is not None:
            self._clock.end()
            self._micro_batches.append(self._pending)
            self._pending = None


def num_compiled() -> int:
    """Functions that torch has compiled so far in this process, again for another shape included."""
    utils = sys.modules.get("torch._dynamo.utils")
    return 0 if utils is None else int(utils.counters["frames"]["ok"])


def is_expandable() -> bool:
    """Whether memory that torch has taken from the driver is in segments that can grow."""
    import torch

    return any(segment["is_expandable"] for segment in torch.cuda.memory_snapshot())


def reserved_bytes() -> int:
    """Most memory that torch has taken from the driver, GPU by GPU added up."""
    import torch

    return sum(int(torch.cuda.max_memory_reserved(i)) for i in range(torch.cuda.device_count()))


def peak_bytes(is_cuda: bool) -> int:
    """Most memory that this process has held: what torch allocated, GPU by GPU added up, else resident memory."""
    if is_cuda:
        import torch

        return sum(int(torch.cuda.max_memory_allocated(i)) for i in range(torch.cuda.device_count()))
    return read_peak_bytes()
