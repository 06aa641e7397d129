"""Makes all ranks follow rank 0: its `TrainerControl`, which callbacks change, and the signal on which all ranks stop.

This is no collective: rank 0 publishes a value in the store and continues, and the other ranks read it. After a signal
all ranks stop at the same point, after a save.
"""

from __future__ import annotations

import atexit
import enum
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partialmethod
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

from unsloth_multigpu.errors import DivergenceError
from unsloth_multigpu.group.manager import DDPManager
from unsloth_multigpu.group.shards import find_engine
from unsloth_multigpu.logs import get_logger
from unsloth_multigpu.part import ArgumentsLike, ControlLike, GradientExchange, Part, StateLike, TrainerLike
from unsloth_multigpu.wire.event import REPEAT_S, EventWriter, StopRequest, ask_to_stop, read_request
from unsloth_multigpu.wire.heartbeat import HeartbeatPage, Phase
from unsloth_multigpu.wire.process import is_alive, only_here, signals_handled
from unsloth_multigpu.wire.wait import wait_until

logger = get_logger(__name__)

# Keys are reused after this many points, so that none has to be deleted. Between two collectives, a rank can only be a
# few points ahead of another.
_RING = 4096
_HINT = "Let rank 0 alone do no long work, such as in a callback, or raise timeout_s."
# The Trainer waits for its last upload on rank 0. If rank 0 dies meanwhile, the launcher ends the run.
_UPLOAD_LIMIT_S = 86_400.0
_FLAGS = ("should_log", "should_evaluate", "should_save", "should_epoch_stop", "should_training_stop")


class Moment(enum.Enum):
    """The points of Hugging Face's loop at which the ranks read rank 0's value."""

    BATCH = "its next batch"
    STEP = "the end of a step"
    SUBSTEP = "the end of a micro-batch"
    EPOCH = "the end of an epoch"
    LOG = "a log"
    EVALUATED_BATCH = "a batch of an evaluation"
    EVALUATION = "an evaluation"
    SAVE = "a save"
    END = "the end of train()"


class Lead:
    """Rank 0's values in one training.

    Attributes:
        asked: Returns the signal that this rank has received, 0 = none.
        signal_number: The signal on which all ranks stop, 0 = none. It only changes inside `follow`.
    """

    def __init__(self, manager: DDPManager, beat: HeartbeatPage) -> None:
        self._manager = manager
        self._beat = beat
        self._training = 0
        self._num_points = 0
        self.asked: Callable[[], int] = lambda: 0
        self.signal_number = 0

    def begin(self) -> None:
        """Called when all ranks start a training. Its number separates its keys from those of other trainings."""
        self._training = self._manager.number_of_training()

    @property
    def name(self) -> str:
        """Prefix of this training's keys."""
        return f"lead/{self._training}"

    def follow(self, moment: Moment, flags: int, step: int) -> int:
        """Returns rank 0's flags at one of the points that all ranks reach in the same order. `flags` are this rank's.

        Raises:
            RankTimeoutError: Rank 0 did not reach this point.
            DivergenceError: Rank 0 reached another point.
            DistributedError: Rank 0 has left the cell.
        """
        manager, index = self._manager, self._num_points
        asked = self.signal_number or self.asked()
        if manager.identity.world_size == 1:
            self.signal_number = asked
            return flags
        self._num_points += 1
        asked_key = f"{self.name}/asked"
        if manager.identity.rank == 0:
            self.signal_number = asked or int(manager.read(asked_key) or 0)
            word = (self._training, index, moment.name, flags, self.signal_number)
            manager.publish(self._key(index), " ".join(map(str, word)))
            return flags
        if asked and not self.signal_number:
            manager.publish(asked_key, str(asked))
        there, of_rank_0, signal_number = self._read(index) or self._wait(index, moment, step)
        self.signal_number = int(signal_number)
        if there != moment.name:
            raise DivergenceError(
                f"After step {step} rank {manager.rank} is at {moment.value}, rank 0 at {Moment[there].value}.",
                hint="Let all ranks call train(), evaluate() and save in the same order, on data of the same length.",
            )
        return int(of_rank_0)

    def _wait(self, index: int, moment: Moment, step: int) -> list[str]:
        """Waits for rank 0, which may be slower, or busy in a callback."""
        what, manager = f"rank 0 to reach {moment.value} after step {step}", self._manager
        # A rank with a batch is ahead of rank 0, as in the all-reduce in which it would otherwise wait for it. At the
        # end, rank 0 may still upload, and the watchdog does not limit that.
        phase = {Moment.BATCH: Phase.COMPUTE, Moment.END: Phase.ENDED}.get(moment, Phase.AGREE)
        limit_s = _UPLOAD_LIMIT_S if moment is Moment.END else manager.config.timeout_s
        with self._beat.within(phase), manager.waits.counted():
            return manager.wait(lambda: self._read(index), what, timeout_s=limit_s, hint=_HINT)

    def _read(self, index: int) -> list[str] | None:
        """Returns moment, flags and signal of a point; None if rank 0 has not reached it."""
        training, there, *word = (self._manager.read(self._key(index)) or "-1 -1").split()
        return word if (int(training), int(there)) == (self._training, index) else None

    def _key(self, index: int) -> str:
        return f"lead/point/{index % _RING}"


class OneDecision(Part):
    """Copies rank 0's `control` to all ranks before the loop acts on it.

    Callbacks run on every rank and need not agree: they may read a clock, their own GPU, or decide on rank 0 only. An
    evaluation, a save or a stop on one rank alone would hang.

    Ranks that step independently do not wait for each other: between two synchronizations they follow the arguments of
    the training, such as `save_steps`, and decisions of callbacks take effect at the next synchronization.
    """

    place = "decision"

    def __init__(self, trainer: TrainerLike, manager: DDPManager, lead: Lead, exchange: GradientExchange) -> None:
        super().__init__(trainer, manager)
        self._lead = lead
        self._exchange = exchange
        self._is_log_due = False
        self._postponed, self._step_of_epoch_end = 0, -1
        # Flags that rank 0 has set so far, and those that this rank alone has set.
        self._decided = self._overruled = 0

    @contextmanager
    def around(self) -> Iterator[None]:
        """Warns at the end about decisions that had no effect."""
        yield
        if lost := _names(self._overruled & ~self._decided):
            fact = "a callback of rank %d has set control.%s, and none of rank 0 did: rank 0's decision counts"
            logger.warning(fact + ". Let the callback decide alike on all ranks", self._manager.rank, lost)
        if self._postponed:
            logger.warning("control.%s had no effect, because the training had ended", _names(self._postponed))

    def on_log(self, args: ArgumentsLike, state: StateLike, control: ControlLike, **kwargs: Any) -> None:
        # A script may log on one rank only. The first call after a step is the loop's own, on all ranks.
        is_loops, self._is_log_due = self._is_log_due, False
        if is_loops:
            self._agree(Moment.LOG, args, state, control)

    def _agree(
        self, moment: Moment, args: ArgumentsLike, state: StateLike, control: ControlLike, **kwargs: Any
    ) -> None:
        """Writes rank 0's flags into `control`. Raises the errors of `Lead.follow`."""
        step, mine = int(state.global_step), _flags_of(control)
        if moment not in (Moment.EVALUATION, Moment.SAVE) and not self._exchange.may_stop:
            found = mine & self._scheduled(moment)
            late = mine & ~found
            if late & ~self._postponed and self._manager.rank == 0:
                logger.info("%s after step %d waits for the next synchronization of the ranks", _names(late), step)
            self._postponed |= late
        else:
            # All ranks reach this point: they have just computed, logged, evaluated or saved together.
            mine, self._postponed = mine | self._postponed, 0
            found = self._lead.follow(moment, mine, step)
            self._decided |= found
        self._overruled |= mine & ~found
        for i, name in enumerate(_FLAGS):
            setattr(control, name, bool(found >> i & 1))
        if moment in (Moment.STEP, Moment.EPOCH):
            self._is_log_due = control.should_log and step > self._trainer._globalstep_last_logged

    on_step_end = partialmethod(_agree, Moment.STEP)
    on_substep_end = partialmethod(_agree, Moment.SUBSTEP)
    on_epoch_end = partialmethod(_agree, Moment.EPOCH)
    on_evaluate = partialmethod(_agree, Moment.EVALUATION)
    on_save = partialmethod(_agree, Moment.SAVE)

    def _scheduled(self, moment: Moment) -> int:
        """Returns the flags that the arguments of the training set here, equal on all ranks."""
        from transformers import DefaultFlowCallback

        flow, control = DefaultFlowCallback(), SimpleNamespace(**dict.fromkeys(_FLAGS, False))
        event: Any = {Moment.STEP: flow.on_step_end, Moment.EPOCH: flow.on_epoch_end}.get(moment, flow.on_substep_end)
        event(self._trainer.args, self._trainer.state, control)
        if moment is Moment.EPOCH:
            # After an epoch without a step the loop stops, for example at the end of a stream.
            before, self._step_of_epoch_end = self._step_of_epoch_end, self._trainer.state.global_step
            control.should_training_stop |= before == self._step_of_epoch_end
        return _flags_of(control)


def _flags_of(control: Any) -> int:
    return sum(bool(getattr(control, name)) << i for i, name in enumerate(_FLAGS))


def _names(flags: int) -> str:
    return ", ".join(name for i, name in enumerate(_FLAGS) if flags >> i & 1)


@dataclass(eq=False, repr=False)
class Preemption(Part):
    """Stops one training on a signal. Through `lead` all ranks learn of the signal at the same point of the loop.

    Attributes:
        signal_number: The signal on which the ranks are stopping, 0 = none.
        cuts_off_evaluation: They stop before or in an evaluation of the loop. A resumed training then runs it.
    """

    place = "preemption"

    trainer: TrainerLike
    manager: DDPManager
    events: EventWriter | None
    lead: Lead
    exchange: GradientExchange
    signal_number: int = field(init=False, default=0)
    cuts_off_evaluation: bool = field(init=False, default=False)
    # The signal that this rank has caught itself, and when.
    _caught: tuple[int, float] = field(init=False, default=(0, 0.0))
    _open: ExitStack = field(init=False, default_factory=ExitStack)
    _saved_step: int = field(init=False, default=-1)

    @contextmanager
    def around(self) -> Iterator[None]:
        """Listens for signals.

        Raises:
            KeyboardInterrupt: On all ranks, after SIGINT.
            SystemExit: On all ranks, with 128 + n after another signal n.
        """
        identity = self.manager.identity
        # Stop ends a cell at once, except for sharded models: ranks one step apart would leave shards of two steps.
        is_without_supervisor = self.events is None and (not self._is_cell or find_engine(self.trainer) is not None)
        listens = is_without_supervisor and (identity.world_size > 1 or self.manager.config.resume == "auto")
        if listens and identity.rank == 0 and threading.current_thread() is not threading.main_thread():
            logger.warning(
                "train() does not run in the main thread, the only one in which Python handles signals: SIGTERM "
                "ends this process without a save. Save every few steps (save_steps)"
            )
        self.lead.asked = self._asked
        with self._open:
            if listens:
                others = () if self._is_cell else (signal.SIGTERM, signal.SIGUSR1)
                self._open.enter_context(signals_handled((signal.SIGINT, *others), self._catch))
            yield
            # A signal after the last step: the script must not be interrupted in the middle of what follows. Rank 0 may
            # still upload, for longer than a collective may take.
            if self._is_stopping(Moment.END):
                self.save_and_leave(can_save=not self.trainer.args.load_best_model_at_end)

    def _catch(self, signal_number: int, _frame: object) -> None:
        """Handles a signal. After `REPEAT_S` a second one has its usual effect; a notebook's monitor handles it."""
        number, time_s = self._caught
        if not number:
            self._caught = signal_number, time.monotonic()
        elif time.monotonic() - time_s > REPEAT_S and not self._is_cell:
            self._open.close()
            os.kill(os.getpid(), signal_number)

    def on_step_end(self, args: ArgumentsLike, state: StateLike, control: ControlLike, **kwargs: Any) -> None:
        # Several ranks have just agreed on the flags of their callbacks, and on the signal with them.
        if self._is_stopping(Moment.STEP if self.manager.identity.world_size == 1 else None):
            is_at_end = args.eval_strategy == "epoch" and float(state.epoch or 0.5).is_integer()
            self.cuts_off_evaluation = control.should_evaluate or is_at_end
            # The loop still logs this step, so that the saved history is complete.
            control.should_save = self.is_save_wanted
            control.should_evaluate = False
            control.should_training_stop = True

    def on_save(self, args: ArgumentsLike, state: StateLike, control: ControlLike, **kwargs: Any) -> None:
        self._saved_step = state.global_step
        if self.events is not None:
            # Repeats the event of a running training, with the path of its checkpoint.
            self.events.write("training", checkpoint=self._checkpoint())
        if self.signal_number:
            self.leave()

    def on_epoch_end(self, args: ArgumentsLike, state: StateLike, control: ControlLike, **kwargs: Any) -> None:
        # Nothing was saved. An evaluation, or loading the best model, would take time that is not left.
        if self.signal_number:
            self.leave()

    def on_prediction_step(self, args: ArgumentsLike, state: StateLike, control: ControlLike, **kwargs: Any) -> None:
        if self._is_stopping(Moment.EVALUATED_BATCH):  # All ranks have the same number of evaluation batches.
            self.cuts_off_evaluation = control.should_evaluate  # False in one that a callback has started.
            self.save_and_leave()

    def _is_stopping(self, moment: Moment | None) -> bool:
        """True from the point at which all ranks stop. `moment` is the current point; None = they have just agreed."""
        if not self.signal_number and self.exchange.may_stop:
            if moment is not None:
                self.lead.follow(moment, 0, int(self.trainer.state.global_step))
            self.signal_number = self.lead.signal_number
            if self.signal_number and self.events is not None:
                self.events.write("stopping", signal=signal.Signals(self.signal_number).name)
        return self.signal_number != 0

    @property
    def _is_cell(self) -> bool:
        return self.manager.identity.launcher == "notebook"

    def _request(self) -> StopRequest | None:
        return None if self.events is None else read_request(self.events.run_dir)

    def _asked(self) -> int:
        request = self._request()
        return self._caught[0] if request is None else request.signal_number

    @property
    def is_save_wanted(self) -> bool:
        """True if this step is to be saved and has not been."""
        saves = self.trainer.args.save_strategy != "no" or self.manager.config.resume == "auto"
        return saves and self._saved_step != self.trainer.state.global_step

    def save_and_leave(self, *, can_save: bool = True) -> NoReturn:
        """Saves as the loop does after a step, and leaves the training."""
        trainer = self.trainer
        if can_save and self.is_save_wanted:
            trainer._save_checkpoint(trainer.model_wrapped, None)
            trainer.callback_handler.on_save(trainer.args, trainer.state, trainer.control)
        self.leave()

    def _checkpoint(self) -> str:
        if self._saved_step < 0:
            return ""
        return str(Path(self.trainer._get_output_dir(None), f"checkpoint-{self._saved_step}").resolve())

    def leave(self) -> NoReturn:
        """Waits until all ranks have saved, and raises the exception that ends the training."""
        request = self._request()
        deadline_s = time.monotonic() + self.manager.config.grace_s if request is None else request.deadline_s
        if not self._wait_for_all(deadline_s):
            logger.warning("not all ranks have saved within grace_s=%g", self.manager.config.grace_s)
        name = signal.Signals(self.signal_number).name
        if self.events is not None:
            if request is None:  # Only the supervisor of another node has received the signal.
                ask_to_stop(self.events.run_dir, StopRequest(self.signal_number, deadline_s))
            self.events.write("stopped", signal=name, checkpoint=self._checkpoint())
        elif self.manager.identity.rank == 0:
            step = self.trainer.state.global_step
            logger.info("stopped by %s after step %d, checkpoint=%s", name, step, self._checkpoint() or "none")
        if self._is_cell:
            self.trainer.is_in_train = False  # All ranks leave the training here, so it does not count as interrupted.
        if self.signal_number == signal.SIGINT:
            raise KeyboardInterrupt
        raise SystemExit(128 + self.signal_number)

    def _wait_for_all(self, deadline_s: float) -> bool:
        """Waits until all ranks have saved, because the first process that ends makes the launcher end all."""
        manager, identity = self.manager, self.manager.identity
        if identity.world_size == 1:
            return True
        keys = [f"{self.lead.name}/left/{rank}" for rank in range(identity.world_size)]
        manager.publish(keys[identity.rank], str(os.getpid()))
        if not wait_until(lambda: all(map(manager.is_published, keys)), deadline_s):
            return False
        first_pid = int(manager.read(keys[identity.rank - identity.local_rank]) or 0)
        if first_pid != os.getpid():
            # Trackers finish their work when local rank 0 ends.
            atexit.register(only_here(wait_until), lambda: not is_alive(first_pid), deadline_s)
        return True
