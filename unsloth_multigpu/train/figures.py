"""Measures this rank's training: tokens, padding, waiting, memory and seconds. Adds them to what the Trainer logs.

Nothing here is collective.
"""

from __future__ import annotations

import statistics
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn

from unsloth_multigpu.deal.measure import Stopwatch
from unsloth_multigpu.group.manager import DDPManager
from unsloth_multigpu.logs import get_logger
from unsloth_multigpu.part import ArgumentsLike, ControlLike, Override, Part, StateLike, TrainerLike
from unsloth_multigpu.report import STEPS, Figures, RankReport, RunReport, rates_of
from unsloth_multigpu.seam import instance_attribute
from unsloth_multigpu.step.feed import StepFeed
from unsloth_multigpu.wire.heartbeat import HeartbeatPage, Phase, read_beats
from unsloth_multigpu.wire.process import read_peak_bytes
from unsloth_multigpu.words import GIB

logger = get_logger(__name__)

# The median time of a step is that of this many last steps.
_MOST_STEPS = 512
# Reading the counters of an allocator takes about 100 microseconds. They record the peak themselves.
_MEMORY_EVERY_S = 1.0
# Ends of the names of token ids and of their padding masks. Trainers of preferences have several of each.
_ENDS = (("input_ids", "attention_mask"), ("prompt_ids", "prompt_mask"), ("completion_ids", "completion_mask"))
_OTHER_IDS = ("decoder_input_ids",)
# Names of phases in a report. The phases of a step share a name: a device works asynchronously, and its time counts for
# the phase that waits for it.
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

# Prefix of logged figures. The console shows them in one of `_LINES` lines, because they triple a line's length.
_PREFIX, _LINES = "multigpu/", 10


class Meter(Part):
    """Writes the figures of this rank into its heartbeat after each step.

    The time of a step begins at the end of the step before, and excludes evaluations and checkpoints. Waiting is
    measured by `Waiting` and by our own collectives. It cannot be measured if the ranks hold parts of the weights,
    because they synchronize in every layer: `waiting_s` is None.

    Attributes:
        figures: Figures up to the last finished step.
        resumed_step: Steps that were done before this training.
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
        """Clears the figures of an earlier training from the heartbeat page."""
        self._waits.count_on(self._trainer.args.device)
        device, device_id = _device_names(self._trainer.args.device)
        self._beat.note(self.figures, device=device, device_id=device_id)
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
        self._write(state, is_last=state.global_step >= state.max_steps)

    def on_evaluate(self, args: ArgumentsLike, state: StateLike, control: ControlLike, **kwargs: Any) -> None:
        self._since_s = time.monotonic()

    on_save = on_evaluate

    def on_train_end(self, args: ArgumentsLike, state: StateLike, control: ControlLike, **kwargs: Any) -> None:
        # A callback may have ended the training early.
        if state.global_step < state.max_steps and self._num_steps:
            self._write(state, is_last=True)

    def report(self, counts: tuple[int, int, int], train_s: float, sent_bytes: int | None) -> RankReport:
        """Returns this rank's report, without its number. `counts` are steps, samples and micro-batches."""
        counted = dict(zip(("num_steps", "num_samples", "num_micro_batches"), counts, strict=True))
        logged = [line["train_runtime"] for line in self._trainer.state.log_history if "train_runtime" in line]
        phases_s = dict.fromkeys(_IN_REPORT.values(), 0.0)
        for phase, name in _IN_REPORT.items():
            phases_s[name] += self._beat.spent_s[phase] - self._spent_before_s[phase]
        return RankReport(
            **{**vars(self.figures), **counted},
            rank=0,
            train_s=train_s,
            sent_bytes=sent_bytes,
            runtime_s=logged[-1] if logged else None,
            phases_s={name: seconds for name, seconds in phases_s.items() if seconds > 0.0},
        )

    def report_alone(self) -> RunReport:
        """Returns the report of a process whose training has no other parts of this package."""
        train_s = time.monotonic() - self._called_s
        mine = self.report((self._num_steps, 0, self._num_micro_batches), train_s, None)
        return RunReport((mine,), max_steps=self.figures.max_steps, resumed_step=self.resumed_step)

    def _compute_loss(self, original: Callable[..., Any], model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        """Overrides `Trainer.compute_loss`: counts a micro-batch. An evaluation calls it, too."""
        if model.training:
            self._num_micro_batches += 1
            micro_batch = None if self._feed is None else self._feed.passes.current
            if self._feed is None or not self._feed.passes.is_repeated:
                self._tokens.add(inputs, is_filler=micro_batch is not None and micro_batch.piece.is_filler)
        return original(model, inputs, *args, **kwargs)

    def _write(self, state: StateLike, *, is_last: bool = False) -> None:
        if is_last:
            self._waits.settle()
        if is_last or time.monotonic() - self._memory_s >= _MEMORY_EVERY_S:
            self._memory_s = time.monotonic()
            self._held_bytes, peak_bytes = _memory(self._trainer.args.device)
            # A script may reset the peak of the allocator.
            self._peak_bytes = max(self._peak_bytes, peak_bytes)
        feed = self._feed
        num_samples = feed.passes.num_samples if feed is not None and feed.metrics.is_dealing else None
        waited_s = 0.0 if self._is_alone else self._waits.seconds - self._waited_before_s
        self.figures = Figures(
            max_steps=state.max_steps,
            num_steps=self._num_steps,
            num_samples=num_samples,
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


class TokenCount:
    """Counts tokens and padding of micro-batches.

    A token is an element of `input_ids`, or of `prompt_ids` and `completion_ids`, that the mask selects; without a
    mask, each element. It counts whether or not it has a label. All other elements are padding. So the number of tokens
    of a step does not depend on the number of ranks, but the padding does. Decoder inputs are not counted.

    Attributes:
        num_tokens, num_padding_tokens: Counts of the finished steps; None before the first micro-batch with tokens.
    """

    def __init__(self) -> None:
        self.num_tokens: int | None = None
        self.num_padding_tokens: int | None = None
        self._num_elements = 0
        self._counted: Any = 0

    def add(self, inputs: Any, *, is_filler: bool) -> None:
        """Counts a micro-batch. All tokens of a filler are padding: it only takes time of this rank."""
        for ids, mask in _token_ids(inputs):
            self._num_elements += ids.numel()
            if is_filler:
                continue
            is_masked = mask is not None and mask.shape == ids.shape
            # Stays on the accelerator, so that nothing waits.
            self._counted = self._counted + (torch.count_nonzero(mask) if is_masked else ids.numel())

    def end_step(self) -> None:
        """Adds the step. Called when the loop has just waited for the gradient, so this does not wait."""
        if self._num_elements:
            self.num_tokens = int(self._counted)
            self.num_padding_tokens = self._num_elements - self.num_tokens


def _token_ids(inputs: Any) -> Iterator[tuple[torch.Tensor, Any]]:
    for name, value in inputs.items() if isinstance(inputs, Mapping) else ():
        if not isinstance(value, torch.Tensor) or name in _OTHER_IDS:
            continue
        for ids_end, mask_end in _ENDS:
            if name.endswith(ids_end):
                mask = inputs.get(name.removesuffix(ids_end) + mask_end)
                yield value, mask if isinstance(mask, torch.Tensor) else None


class Waiting(Part):
    """Measures how long DDP waits for other ranks while a step is computed, and adds it to `manager.waits`.

    DDP synchronizes buffers before a forward pass, and gradients from this rank's last gradient to the end of the
    backward pass. The former is not measured if the complete model is compiled.
    """

    place = "waits"
    may_be_missed = True

    def __init__(self, trainer: TrainerLike, manager: DDPManager) -> None:
        self._waits = manager.waits
        self._watch = Stopwatch(trainer.args.device)
        self._forward: Any = None

    def overrides(self) -> dict[str, Override]:
        return {"training_step": self._training_step}

    def _training_step(self, original: Callable[..., Any], model: nn.Module, *args: Any, **kwargs: Any) -> Any:
        with self._watching_forward(model), self._watch.timing(model):
            result = original(model, *args, **kwargs)
        if self._watch.last_gradient is not None:
            self._waits.add(self._watch.last_gradient, self._waits.now())
        return result

    @contextmanager
    def _watching_forward(self, model: nn.Module) -> Iterator[None]:
        """Hooks the start of DDP's forward pass and that of its module. DDP synchronizes buffers in between."""
        inner: nn.Module | None = model.module if isinstance(model, nn.parallel.DistributedDataParallel) else None
        # `torch.compile(model)` and `model.compile()` would compile the hook as well.
        is_compiled = hasattr(inner, "_orig_mod") or getattr(inner, "_compiled_call_impl", None) is not None
        with ExitStack() as stack:
            if inner is not None and not is_compiled:
                stack.callback(model.register_forward_pre_hook(self._enter_ddp).remove)
                stack.callback(inner.register_forward_pre_hook(self._enter_module).remove)
            yield

    def _enter_ddp(self, *_: Any) -> None:
        self._forward = self._waits.now()

    def _enter_module(self, *_: Any) -> None:
        # A module with gradient checkpointing may be called again in the backward pass.
        begin, self._forward = self._forward, None
        if begin is not None:
            self._waits.add(begin, self._waits.now())


class LogFigures(Part):
    """Adds throughput, waiting, padding, the slowest rank and peak memory to each logged line with a training loss.

    They describe the time since the line before. They are read on rank 0 from the heartbeat pages in `run_dir`, so they
    are those of the ranks on its machine, or of rank 0 alone if another launcher has started the ranks. Unknown numbers
    are left out. Trackers get them with every line, the console with every tenth.
    """

    place = "log"
    may_be_missed = True

    def __init__(self, trainer: TrainerLike, meter: Meter, run_dir: str | None) -> None:
        self._trainer = trainer
        self._meter = meter
        self._run_dir = run_dir
        self._before: dict[int, Figures] = {}
        self._num_shown = 0

    @contextmanager
    def around(self) -> Iterator[None]:
        from transformers import PrinterCallback, ProgressCallback

        if self._meter.is_sharded:
            unknown = "multigpu/waiting and multigpu/slowest_rank are not logged"
            logger.info("%s: waiting is not measured if ranks hold parts of the weights", unknown)
        with ExitStack() as stack:
            for callback in self._trainer.callback_handler.callbacks:
                if isinstance(callback, PrinterCallback | ProgressCallback):
                    stack.enter_context(instance_attribute(callback, "on_log", partial(self._show, callback.on_log)))
            yield

    def overrides(self) -> dict[str, Override]:
        return {"call_event": self._call_event}

    def _call_event(self, original: Callable[..., Any], event: str, *args: Any, **kwargs: Any) -> Any:
        """Overrides `CallbackHandler.call_event`: adds the numbers to a line with a loss, before trackers get it."""
        if event == "on_log" and "loss" in kwargs["logs"] and self._meter.figures.num_steps:
            logs, history, numbers = kwargs["logs"], self._trainer.state.log_history, self._numbers()
            if history and history[-1].get("loss") is logs["loss"]:  # `Trainer.log` has appended a copy of the line.
                history[-1].update(numbers)
            kwargs["logs"] = {**logs, **numbers}
        return original(event, *args, **kwargs)

    def _show(self, original: Callable[..., Any], *args: Any, logs: dict[str, Any], **kwargs: Any) -> Any:
        """Replaces `on_log` of a callback that prints the line."""
        if any(name.startswith(_PREFIX) for name in logs):
            self._num_shown += 1
            if self._num_shown % _LINES:
                logs = {name: value for name, value in logs.items() if not name.startswith(_PREFIX)}
        return original(*args, logs=logs, **kwargs)

    def _numbers(self) -> dict[str, float]:
        beats = {} if self._run_dir is None else read_beats(self._run_dir)
        # Rank 0 comes first: the rates refer to its time. A rank that is missing in `before` has begun since.
        now = {0: self._meter.figures, **{rank: beat.figures for rank, beat in beats.items() if rank}}
        before, self._before = self._before, now
        gained = {rank: figures.since(before.get(rank, Figures())) for rank, figures in now.items()}
        rates = rates_of(list(gained.values()))
        found = {name: rates[name] for name in ("tokens_per_s", "padding", "waiting")}
        if rates["waiting"] is not None and len(gained) > 1:
            # The others wait for the rank that waits least.
            found["slowest_rank"] = min(gained, key=lambda rank: gained[rank].waiting_s or 0.0)
        peaks = [figures.peak_bytes for figures in now.values() if figures.peak_bytes]
        found["peak_memory_gib"] = max(peaks) / GIB if peaks else None
        return {_PREFIX + name: round(value, 5) for name, value in found.items() if value is not None}


def _device_names(device: torch.device) -> tuple[str, str]:
    """Returns the name of a device, and the driver's id of it."""
    if device.type == "cpu":
        return "cpu", ""
    properties = torch.get_device_module(device).get_device_properties(device)
    return str(properties.name), str(getattr(properties, "uuid", ""))


def _memory(device: torch.device) -> tuple[int, int]:
    """Returns current and peak bytes: allocated by torch on a device, or resident memory of the process on the CPU."""
    if device.type != "cpu":
        try:
            counters: Mapping[str, int] = torch.get_device_module(device).memory_stats(device)
        except RuntimeError:  # An allocator of the script, in place of torch's, counts nothing.
            counters = {}
        return counters.get("allocated_bytes.all.current", 0), counters.get("allocated_bytes.all.peak", 0)
    import psutil

    held_bytes = int(psutil.Process().memory_info().rss)
    return held_bytes, max(held_bytes, read_peak_bytes())
