"""Measures this rank's training: tokens, padding, waiting, memory and seconds. No collective, and nothing waits."""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from unsloth_multigpu.group.manager import DDPManager
from unsloth_multigpu.part import Override, Part
from unsloth_multigpu.report import STEPS, RankReport, RunReport
from unsloth_multigpu.step.feed import StepFeed
from unsloth_multigpu.trainer_protocol import ArgumentsLike, ControlLike, StateLike, TrainerLike
from unsloth_multigpu.wire.heartbeat import Figures, HeartbeatPage, Phase
from unsloth_multigpu.wire.process import read_peak_bytes

# The median of a step's seconds is that of so many last ones.
_MOST_STEPS = 512
# Reading an allocator's counters takes some 100 microseconds. They keep the peak themselves.
_MEMORY_EVERY_S = 1.0
# Ids of a model's own tokens, and the mask that says which of them are padding. Trainers of preferences have several.
_ENDS = (("input_ids", "attention_mask"), ("prompt_ids", "prompt_mask"), ("completion_ids", "completion_mask"))
_OTHER_IDS = ("decoder_input_ids",)
# What a report tells apart. The parts of a step are one, since only a part that waits for the device has its time.
_IN_REPORT = {
    **dict.fromkeys((Phase.COMPUTE, Phase.UPDATE, Phase.AGREE), STEPS),
    **dict.fromkeys((Phase.DATA, Phase.FILL), "loading data"),
    Phase.CALLBACKS: "callbacks",
    Phase.WARM_UP: "the first step",
    Phase.EVALUATE: "evaluations",
    Phase.SAVE: "saves",
    Phase.GENERATE: "generation",
    Phase.COMPILE: "compilation",
}


class Meter(Part):
    """Writes the figures of this rank into its heartbeat after each step.

    Seconds of a step go from the end of the step before to its own end, without evaluations and checkpoints. Seconds of
    waiting are those of `train.waiting` and of our own collectives. Sharded ranks synchronize in every layer, where
    waiting cannot be measured, so `waiting_s` is None.

    Attributes:
        figures: Up to the last finished step.
        resumed_step: Steps that were done before this training.
        runtime_s: What the Trainer itself calls the seconds of the training; None where it does not say.
        is_sharded: The ranks hold parts of the weights.
    """

    place = "figures"
    may_be_missed = True

    def __init__(
        self, trainer: TrainerLike, manager: DDPManager, beat: HeartbeatPage, steps: StepFeed | None = None
    ) -> None:
        self._trainer = trainer
        self._waits = manager.waits
        self._beat = beat
        self._feed = steps
        self._tokens = TokenCount()
        self._is_alone = manager.identity.world_size == 1
        self.figures = Figures()
        self.resumed_step = 0
        self.runtime_s: float | None = None
        self.is_sharded = False
        self._called_s = self._begin_s = self._since_s = time.monotonic()
        self._waited_before_s = 0.0
        self._spent_before_s = dict(beat.spent_s)
        self._num_steps = self._num_micro_batches = 0
        self._steps_s: deque[float] = deque(maxlen=_MOST_STEPS)
        self._memory_s = float("-inf")
        self._peak_bytes = self._held_bytes = 0

    @contextmanager
    def around(self) -> Iterator[None]:
        """The page shows no figures of an earlier training."""
        self._waits.count_on(self._trainer.args.device)
        self._beat.note(self.figures)
        self._beat.name_device(*_device_names(self._trainer.args.device))
        yield

    def overrides(self) -> dict[str, Override]:
        return {"compute_loss": self._compute_loss}

    def on_train_begin(self, args: ArgumentsLike, state: StateLike, control: ControlLike, **kwargs: Any) -> None:
        self._begin_s = self._since_s = time.monotonic()
        self.resumed_step = state.global_step
        self._waits.settle()
        self._waited_before_s = self._waits.seconds
        self._spent_before_s = dict(self._beat.spent_s)
        self._write(state)

    def on_pre_optimizer_step(self, args: ArgumentsLike, state: StateLike, control: ControlLike, **kwargs: Any) -> None:
        self._tokens.end_step()

    def on_step_end(self, args: ArgumentsLike, state: StateLike, control: ControlLike, **kwargs: Any) -> None:
        now_s = time.monotonic()
        self._num_steps += 1
        if self._num_steps == 2:  # In the first step kernels are compiled.
            self._steps_s.clear()
        self._steps_s.append(now_s - self._since_s)
        self._since_s = now_s
        self._waits.poll()
        if state.global_step >= state.max_steps:
            self._settle()
        self._write(state)

    def on_evaluate(self, args: ArgumentsLike, state: StateLike, control: ControlLike, **kwargs: Any) -> None:
        self._since_s = time.monotonic()

    def on_save(self, args: ArgumentsLike, state: StateLike, control: ControlLike, **kwargs: Any) -> None:
        self._since_s = time.monotonic()

    def on_log(self, args: ArgumentsLike, state: StateLike, control: ControlLike, **kwargs: Any) -> None:
        runtime_s = kwargs.get("logs", {}).get("train_runtime")
        if isinstance(runtime_s, int | float):
            self.runtime_s = float(runtime_s)

    def on_train_end(self, args: ArgumentsLike, state: StateLike, control: ControlLike, **kwargs: Any) -> None:
        # A callback may have ended the training early.
        if state.global_step < state.max_steps and self._num_steps:
            self._settle()
            self._write(state)

    def report(self, counts: tuple[int, int, int], train_s: float, sent_bytes: int | None) -> RankReport:
        """This rank's report, as that of rank 0 until it is gathered. `counts` are steps, samples and micro-batches."""
        measured = {field.name for field in dataclasses.fields(RankReport)} & {*vars(self.figures)}
        figures = {name: getattr(self.figures, name) for name in measured - {"num_steps", "num_samples"}}
        phases_s = dict.fromkeys(_IN_REPORT.values(), 0.0)
        for phase, name in _IN_REPORT.items():
            phases_s[name] += self._beat.spent_s[phase] - self._spent_before_s[phase]
        return RankReport(
            0,
            *counts,
            train_s=train_s,
            sent_bytes=sent_bytes,
            runtime_s=self.runtime_s,
            phases_s={name: seconds for name, seconds in phases_s.items() if seconds > 0.0},
            **figures,
        )

    def report_alone(self) -> RunReport:
        """Returns the report of a process that is not steered."""
        train_s = time.monotonic() - self._called_s
        mine = self.report((self._num_steps, 0, self._num_micro_batches), train_s, None)
        return RunReport((mine,), max_steps=self.figures.max_steps, resumed_step=self.resumed_step)

    def _compute_loss(self, original: Callable[..., Any], model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        """`Trainer.compute_loss` of one micro-batch. An evaluation calls it, too."""
        if model.training:
            self._num_micro_batches += 1
            micro_batch = None if self._feed is None else self._feed.passes.current
            if self._feed is None or not self._feed.passes.is_repeated:
                self._tokens.add(inputs, is_filler=micro_batch is not None and micro_batch.piece.is_filler)
        return original(model, inputs, *args, **kwargs)

    @property
    def _num_samples(self) -> int | None:
        return self._feed.passes.num_samples if self._feed is not None and self._feed.metrics.is_dealing else None

    def _settle(self) -> None:
        self._waits.settle()
        self._memory_s = float("-inf")

    def _write(self, state: StateLike) -> None:
        self._read_memory()
        waited_s = 0.0 if self._is_alone else self._waits.seconds - self._waited_before_s
        self.figures = Figures(
            max_steps=state.max_steps,
            num_steps=self._num_steps,
            num_samples=self._num_samples,
            num_tokens=self._tokens.num_tokens,
            num_padding_tokens=self._tokens.num_padding_tokens,
            waiting_s=None if self.is_sharded else waited_s,
            peak_bytes=self._peak_bytes,
            held_bytes=self._held_bytes,
            step_s=statistics.median(self._steps_s) if self._steps_s else None,
            loop_s=self._since_s - self._begin_s if self._num_steps else None,
            setup_s=self._begin_s - self._called_s,
        )
        self._beat.note(self.figures)

    def _read_memory(self) -> None:
        now_s = time.monotonic()
        if now_s - self._memory_s < _MEMORY_EVERY_S:
            return
        self._memory_s = now_s
        self._held_bytes, peak_bytes = _memory(self._trainer.args.device)
        # A script may set the allocator's peak back.
        self._peak_bytes = max(self._peak_bytes, peak_bytes)


class TokenCount:
    """Counts tokens and padding of micro-batches.

    A token is a place of `input_ids`, or of `prompt_ids` and `completion_ids`, which its mask leaves in; without a mask
    each place is one. It counts whether or not it has a label. All other places are padding. So the number of tokens
    of a step is the same on any number of ranks, that of padding is not. Rows without a mask are counted with what pads
    them. What a decoder is given beside `input_ids` is not counted.

    Attributes:
        num_tokens, num_padding_tokens: Of the steps that are over; None before the first micro-batch with tokens.
    """

    def __init__(self) -> None:
        self.num_tokens: int | None = None
        self.num_padding_tokens: int | None = None
        self._num_places = 0
        self._counted: Any = 0

    def add(self, inputs: Any, *, is_filler: bool) -> None:
        """Counts a micro-batch. A filler holds no token that counts: it only takes a rank's time."""
        for ids, mask in _token_ids(inputs):
            self._num_places += ids.numel()
            if is_filler:
                continue
            is_masked = mask is not None and mask.shape == ids.shape
            # On an accelerator it is computed there.
            self._counted = self._counted + (torch.count_nonzero(mask) if is_masked else ids.numel())

    def end_step(self) -> None:
        """Takes in the step. Called where the loop has just waited for the gradient, so that nothing waits here."""
        if self._num_places:
            self.num_tokens = int(self._counted)
            self.num_padding_tokens = self._num_places - self.num_tokens


def _token_ids(inputs: Any) -> Iterator[tuple[torch.Tensor, Any]]:
    for name, value in inputs.items() if isinstance(inputs, Mapping) else ():
        if not isinstance(value, torch.Tensor) or name in _OTHER_IDS:
            continue
        for ids_end, mask_end in _ENDS:
            if name.endswith(ids_end):
                mask = inputs.get(name.removesuffix(ids_end) + mask_end)
                yield value, mask if isinstance(mask, torch.Tensor) else None


def gather_reports(manager: DDPManager, mine: RankReport) -> tuple[RankReport, ...]:
    """Returns the reports of all ranks, in their order. Collective."""
    ranks = manager.gather_json(dataclasses.asdict(mine))
    return tuple(RankReport(**{**values, "rank": rank}) for rank, values in enumerate(ranks))


def _device_names(device: torch.device) -> tuple[str, str]:
    """Its name, and the one by which its driver knows it."""
    if device.type == "cpu":
        return "cpu", ""
    properties = torch.get_device_module(device).get_device_properties(device)
    return str(properties.name), str(getattr(properties, "uuid", ""))


def _memory(device: torch.device) -> tuple[int, int]:
    """Bytes now, and at most so far: what torch has allocated on an accelerator; on the CPU the process's own."""
    if device.type != "cpu":
        try:
            counters: Mapping[str, int] = torch.get_device_module(device).memory_stats(device)
        except RuntimeError:  # An allocator that the script has put in place of torch's counts nothing.
            counters = {}
        return counters.get("allocated_bytes.all.current", 0), counters.get("allocated_bytes.all.peak", 0)
    import psutil

    held_bytes = int(psutil.Process().memory_info().rss)
    return held_bytes, max(held_bytes, read_peak_bytes())
