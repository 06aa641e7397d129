"""Marks the phases of a training in the heartbeat, so that the supervisor can tell a slow rank from a hung one."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch.utils.data import IterableDataset

from unsloth_multigpu.part import Override, Part
from unsloth_multigpu.trainer_protocol import ArgumentsLike, ControlLike, StateLike, TrainerLike
from unsloth_multigpu.wire.heartbeat import HeartbeatPage, Phase

_GENERATES = ("_generate_and_score_completions", "generate_on_policy_outputs")
_PASSES = ("compute_ref_log_probs", "compute_reference_log_probs")


class Guard(Part):
    """Marks the phases of a training in this rank's heartbeat. `Checkpoints` marks evaluations and saves."""

    place = "phases"

    def __init__(self, trainer: TrainerLike, beat: HeartbeatPage) -> None:
        self.trainer = trainer
        self.beat = beat
        self._compiler = CompilerPhase(beat)
        self._is_warm = False
        self.is_epoch_new = False

    @contextmanager
    def around(self) -> Iterator[None]:
        """Marks the time before the first step, and the return to the script."""
        self.beat.mark(Phase.SETUP, step=0, micro_batch=0)
        try:
            yield
        finally:
            self.beat.mark(Phase.SCRIPT)
            self._compiler.leave()

    def overrides(self) -> dict[str, Override]:
        found: dict[str, Override] = {"get_batch_samples": self._batch_samples, "training_step": self._training_step}
        # Some trainers generate samples inside a training step, for minutes. Some pass over all data first.
        for names, phase in ((_GENERATES, Phase.GENERATE), (_PASSES, None)):
            found |= {n: functools.partial(self._within, phase) for n in names if hasattr(self.trainer, n)}
        return found

    def on_train_begin(self, args: ArgumentsLike, state: StateLike, control: ControlLike, **kwargs: Any) -> None:
        self.beat.mark(step=state.global_step)

    def on_epoch_begin(self, args: ArgumentsLike, state: StateLike, control: ControlLike, **kwargs: Any) -> None:
        self.is_epoch_new = True

    def on_pre_optimizer_step(self, args: ArgumentsLike, state: StateLike, control: ControlLike, **kwargs: Any) -> None:
        self.beat.mark()  # The norm of the gradients has been read.

    def on_optimizer_step(self, args: ArgumentsLike, state: StateLike, control: ControlLike, **kwargs: Any) -> None:
        # Next the loop counts the step and calls the script's callbacks, which are not part of the work of the step.
        self._is_warm = True
        self.beat.mark(Phase.UPDATE, step=state.global_step + 1, micro_batch=0, is_done=True)

    def on_step_end(self, args: ArgumentsLike, state: StateLike, control: ControlLike, **kwargs: Any) -> None:
        if control.should_save:  # Callbacks that upload a checkpoint belong to saving it.
            self.beat.mark(Phase.SAVE)

    def on_epoch_end(self, args: ArgumentsLike, state: StateLike, control: ControlLike, **kwargs: Any) -> None:
        if control.should_training_stop:
            self.beat.mark(Phase.ENDED)
        elif control.should_save:
            self.beat.mark(Phase.SAVE)

    def on_prediction_step(self, args: ArgumentsLike, state: StateLike, control: ControlLike, **kwargs: Any) -> None:
        self.beat.mark()

    def on_train_end(self, args: ArgumentsLike, state: StateLike, control: ControlLike, **kwargs: Any) -> None:
        self.beat.mark(Phase.ENDED)

    def _batch_samples(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self._compiler.enter()
        # In SETUP, the first samples may take long: workers start, and a resumed stream is read up to its position.
        if self.beat.phase != Phase.SETUP:
            # At the start of an epoch, a stream fills its buffer again.
            is_stream = isinstance(self.trainer.train_dataset, IterableDataset)
            self.beat.mark(Phase.FILL if self.is_epoch_new and is_stream else Phase.DATA)
        self.is_epoch_new = False
        result = original(*args, **kwargs)
        self.beat.mark(Phase.COMPUTE)
        return result

    def _training_step(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self.beat.mark(Phase.COMPUTE if self._is_warm else Phase.WARM_UP)
        result = original(*args, **kwargs)
        # The count of micro-batches distinguishes the update of a step from the time after the step. The device may
        # have only begun: the next read of a value waits for all of its work.
        self.beat.mark(Phase.UPDATE if self._is_warm else Phase.WARM_UP, micro_batch=self.beat.micro_batch + 1)
        return result

    def _within(self, phase: Phase | None, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        with self.beat.within(phase):
            return original(*args, **kwargs)


class CallbackPhase(Part):
    """Marks the time in callbacks of the script and of libraries, which are called before ours."""

    place = "callbacks"
    may_be_missed = True
    # Not WARM_UP: a longer limit applies until the end of the first step.
    _MARKED = (Phase.DATA, Phase.FILL, Phase.COMPUTE, Phase.UPDATE, Phase.AGREE)

    def __init__(self, beat: HeartbeatPage) -> None:
        self._beat = beat
        self._before: Phase | None = None
        self._depth = 0

    def overrides(self) -> dict[str, Override]:
        return {"call_event": self._call_event}

    def _call_event(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self._depth += 1
        try:
            if self._depth == 1 and self._beat.phase in self._MARKED:
                self._before = self._beat.phase
                self._beat.mark(Phase.CALLBACKS)
            return original(*args, **kwargs)
        finally:
            self._end()
            self._depth -= 1

    def _end(self, *_: Any, **kwargs: Any) -> None:
        # Our callback is called last, and this part first in it. A callback may log, which is a nested event.
        if self._depth == 1 and self._beat.phase == Phase.CALLBACKS:
            self._beat.mark(self._before)

    on_step_begin = on_substep_end = on_pre_optimizer_step = on_optimizer_step = _end
    on_step_end = on_epoch_begin = on_epoch_end = on_log = _end


class CompilerPhase:
    """Marks the time in which torch.compile compiles."""

    def __init__(self, beat: HeartbeatPage) -> None:
        self._beat = beat
        self._before: Phase | None = None
        self._handler: Any = None

    def enter(self) -> None:
        """Starts listening to the compiler, if it was imported."""
        module = sys.modules.get("torch._dynamo.callback")
        if self._handler is None and module is not None:
            self._handler = module.callback_handler
            self._handler.register_start_callback(self._begin)
            self._handler.register_end_callback(self._end)

    def leave(self) -> None:
        """Stops listening."""
        # A script may have cleared the handler meanwhile.
        if self._handler is not None and self._begin in self._handler.start_callbacks:
            self._handler.remove_start_callback(self._begin)
            self._handler.remove_end_callback(self._end)
        self._handler = None

    def _begin(self, *_: Any) -> None:
        # Older versions of torch also report nested compilations.
        if self._beat.phase != Phase.COMPILE:
            self._before = self._beat.phase
        self._beat.mark(Phase.COMPILE)

    def _end(self, *_: Any) -> None:
        # The main thread may have continued while another one compiled the backward pass.
        if self._beat.phase == Phase.COMPILE:
            self._beat.mark(self._before)
