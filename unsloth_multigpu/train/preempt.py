"""Stops a training on a signal: all ranks at the same point, after a save, without a collective."""

from __future__ import annotations

import atexit
import math
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from unsloth_multigpu.group.shards import find_engine
from unsloth_multigpu.logs import get_logger
from unsloth_multigpu.part import Part
from unsloth_multigpu.train.lead import Lead, Moment
from unsloth_multigpu.trainer_protocol import ArgumentsLike, ControlLike, StateLike, TrainerLike
from unsloth_multigpu.wire.event import REPEAT_S, EventWriter, StopRequest, ask_to_stop, read_request
from unsloth_multigpu.wire.process import is_alive, only_here, signals_handled
from unsloth_multigpu.wire.wait import wait_until

if TYPE_CHECKING:
    from unsloth_multigpu.group.manager import DDPManager

logger = get_logger(__name__)

# Signals that a rank without our supervisor catches itself.
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)


class Caught:
    """Catches signals in a rank without our supervisor. After `repeat_s`, a second signal has its usual effect."""

    def __init__(self, signals: Sequence[signal.Signals] = SIGNALS, repeat_s: float = REPEAT_S) -> None:
        self._signals = signals
        self._repeat_s = repeat_s
        self.signal_number = 0
        self._time_s = 0.0
        self._open = ExitStack()

    @contextmanager
    def while_open(self) -> Iterator[None]:
        """Handles the signals while the context is open. Signals that are ignored stay ignored."""
        with self._open:
            self._open.enter_context(signals_handled(self._signals, self._receive))
            yield

    def _receive(self, signal_number: int, _frame: object) -> None:
        if not self.signal_number:
            self.signal_number, self._time_s = signal_number, time.monotonic()
        elif time.monotonic() - self._time_s > self._repeat_s:
            self._open.close()
            os.kill(os.getpid(), signal_number)


@dataclass(eq=False, repr=False)
class Preemption(Part):
    """Stops one training on a signal. Through `lead` all ranks learn of the signal at the same point of the loop.

    Args:
        may_stop: Returns False between two synchronizations of independent ranks, where a stop would change the
            training. It is equal on all ranks.

    Attributes:
        signal_number: The signal on which the ranks are stopping, 0 = none.
    """

    place = "preemption"

    trainer: TrainerLike
    manager: DDPManager
    events: EventWriter | None
    lead: Lead
    may_stop: Callable[[], bool] = lambda: True
    signal_number: int = field(init=False, default=0)
    _cuts_off_evaluation: bool = field(init=False, default=False)
    _caught: Caught = field(init=False)
    _is_heard: bool = field(init=False, default=False)
    _saved_step: int = field(init=False, default=-1)

    def __post_init__(self) -> None:
        self._is_cell = self.manager.identity.launcher == "notebook"
        # In a notebook, the monitor handles a second Stop.
        self._caught = Caught((signal.SIGINT,), math.inf) if self._is_cell else Caught()

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
        self._is_heard = listens or self.events is not None
        with ExitStack() as stack:
            if listens:
                stack.enter_context(self._caught.while_open())
            if self._is_heard:
                self.lead.asked = self._asked
            yield
            # A signal after the last step: the script must not be interrupted in the middle of what follows.
            if self._is_stopping(Moment.END):
                self.save_and_leave(can_save=not self.trainer.args.load_best_model_at_end)

    def on_step_end(self, args: ArgumentsLike, state: StateLike, control: ControlLike, **kwargs: Any) -> None:
        # Several ranks have just agreed on the flags of their callbacks, and on the signal with them.
        if self._is_stopping(Moment.STEP if self.manager.identity.world_size == 1 else None):
            is_at_end = args.eval_strategy == "epoch" and float(state.epoch or 0.5).is_integer()
            self._cuts_off_evaluation = control.should_evaluate or is_at_end
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
            self._cuts_off_evaluation = control.should_evaluate  # False in one that a callback has started.
            self.save_and_leave()

    def cuts_off_evaluation(self) -> bool:
        """True if the ranks stop before or in an evaluation of the loop, which a resumed training makes."""
        return self._cuts_off_evaluation

    def _is_stopping(self, moment: Moment | None) -> bool:
        """True from the point at which all ranks stop. `moment` is the present point; None = they have just agreed."""
        if self._is_heard and not self.signal_number and self.may_stop():
            if moment is not None:
                self.lead.follow(moment, 0, int(self.trainer.state.global_step))
            self.signal_number = self.lead.signal_number
            if self.signal_number and self.events is not None:
                self.events.write("stopping", signal=signal.Signals(self.signal_number).name)
        return self.signal_number != 0

    def _request(self) -> StopRequest | None:
        return None if self.events is None else read_request(self.events.run_dir)

    def _asked(self) -> int:
        request = self._request()
        return self._caught.signal_number if request is None else request.signal_number

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
