"""Reports a training to the supervisor: phases in the heartbeat, and steps, after which weights are compared."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from torch.utils.data import IterableDataset

from unsloth_multigpu.group.manager import DDPManager
from unsloth_multigpu.group.random_state import seed_all
from unsloth_multigpu.group.replicas import ReplicaProof
from unsloth_multigpu.part import ArgumentsLike, ControlLike, GradientExchange, Override, Part, StateLike, TrainerLike
from unsloth_multigpu.seam import verify_calls
from unsloth_multigpu.train.ddp import TrainedParameters, parameters_beside_the_model
from unsloth_multigpu.train.lead import Preemption
from unsloth_multigpu.wire.event import EventWriter
from unsloth_multigpu.wire.heartbeat import HeartbeatPage, Phase

_GENERATES = ("_generate_and_score_completions", "generate_on_policy_outputs")
_PASSES = ("compute_ref_log_probs", "compute_reference_log_probs")


@dataclass(eq=False, repr=False)
class Progress(Part):
    """Counts the optimizer steps of one training.

    Args:
        trained: Records that DDP was rebuilt; None in one process.
        preemption: Reports to the supervisor itself if a signal stops the training.

    Attributes:
        num_steps: Steps of this training, without those before the checkpoint that it resumes from.
    """

    place = "progress"

    trainer: TrainerLike
    manager: DDPManager
    events: EventWriter | None
    replicas: ReplicaProof
    exchange: GradientExchange
    trained: TrainedParameters | None
    preemption: Preemption
    num_steps: int = field(init=False, default=0)
    _is_proof_due: bool = field(init=False, default=False)

    @contextmanager
    def around(self) -> Iterator[None]:
        """Reports the start and the end of the training to the supervisor."""
        self._tell("training")
        try:
            yield
        except BaseException as error:
            if not self.preemption.signal_number:
                facts: dict[str, Any] = {"error": f"{type(error).__name__}: {error}"}
                if isinstance(error, SystemExit):  # As Python: 0 for None, 1 for a text.
                    facts["exit_code"] = error.code if isinstance(error.code, int) else int(error.code is not None)
                self._tell("left_training", **facts)
            raise
        self._tell("trained")

    def _tell(self, kind: str, **facts: Any) -> None:
        if self.events is not None:
            self.events.write(kind, **facts)

    def on_train_begin(self, args: ArgumentsLike, state: StateLike, control: ControlLike, **kwargs: Any) -> None:
        # The loop then loads the random states in a checkpoint, which may be of fewer ranks.
        rank = self.manager.identity.rank
        if rank > 0 or state.global_step > 0:
            seed_all(args.seed + rank + state.global_step)

    def on_step_begin(self, args: ArgumentsLike, state: StateLike, control: ControlLike, **kwargs: Any) -> None:
        self._verify_first_step()

    def on_step_end(self, args: ArgumentsLike, state: StateLike, control: ControlLike, **kwargs: Any) -> None:
        self.num_steps += 1
        if self.num_steps == 1:
            verify_calls(self.trainer, "step")
        if self.trained is not None and self.trained.is_changed:
            self.trained.is_changed = False
            self._is_proof_due = self.manager.config.verify_every > 0
        self._is_proof_due = self._is_proof_due or self.replicas.is_due(state.global_step)
        # Ranks that step independently have equal weights only after a synchronization. Checkpoints are saved later.
        if self._is_proof_due and self.exchange.are_replicas_equal:
            self._compare(state.global_step)
            self._is_proof_due = False

    def on_save(self, args: ArgumentsLike, state: StateLike, control: ControlLike, **kwargs: Any) -> None:
        verify_calls(self.trainer, "save")

    def on_train_end(self, args: ArgumentsLike, state: StateLike, control: ControlLike, **kwargs: Any) -> None:
        self._verify_first_step()
        # The weights that the script saves now must have been compared; the best checkpoint may just have been loaded.
        if self.replicas.is_unchecked(state.global_step, is_reloaded=args.load_best_model_at_end):
            self._compare(state.global_step)

    def _verify_first_step(self) -> None:
        # Logging and saving come after `on_step_end`.
        if self.num_steps == 1:
            verify_calls(self.trainer, "step end")

    def _compare(self, step: int) -> None:
        """Compares the ranks' weights. Independent ranks do not synchronize what is trained outside the model."""
        beside = parameters_beside_the_model(self.trainer) if self.manager.config.is_synchronous else []
        self.replicas.check(self.trainer.model, step, beside, None if self.trained is None else self.trained.of_step)


class PhaseMarks(Part):
    """Marks the phases of a training in this rank's heartbeat. `Checkpoints` marks evaluations and saves."""

    place = "phases"

    def __init__(self, trainer: TrainerLike, beat: HeartbeatPage) -> None:
        self.trainer = trainer
        self.beat = beat
        self._is_warm = False
        # torch's handler of callbacks while it compiles, and the phase before.
        self._compiler: Any = None
        self._before_compiling: Phase | None = None
        self.is_epoch_new = False

    @contextmanager
    def around(self) -> Iterator[None]:
        """Marks the time before the first step, and the return to the script."""
        self.beat.mark(Phase.SETUP, step=0, micro_batch=0)
        try:
            yield
        finally:
            self.beat.mark(Phase.SCRIPT)
            self._leave_compiler()

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
        self._enter_compiler()
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

    def _enter_compiler(self) -> None:
        """Starts to mark the time in which torch.compile compiles, if its compiler was imported."""
        module = sys.modules.get("torch._dynamo.callback")
        if self._compiler is None and module is not None:
            self._compiler = module.callback_handler
            self._compiler.register_start_callback(self._begin_compiling)
            self._compiler.register_end_callback(self._end_compiling)

    def _leave_compiler(self) -> None:
        # A script may have cleared the handler meanwhile.
        if self._compiler is not None and self._begin_compiling in self._compiler.start_callbacks:
            self._compiler.remove_start_callback(self._begin_compiling)
            self._compiler.remove_end_callback(self._end_compiling)
        self._compiler = None

    def _begin_compiling(self, *_: Any) -> None:
        # Older versions of torch also report nested compilations.
        if self.beat.phase != Phase.COMPILE:
            self._before_compiling = self.beat.phase
        self.beat.mark(Phase.COMPILE)

    def _end_compiling(self, *_: Any) -> None:
        # The main thread may have continued while another one compiled the backward pass.
        if self.beat.phase == Phase.COMPILE:
            self.beat.mark(self._before_compiling)


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
