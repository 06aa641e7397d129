"""Counts the steps of a training: reports to the supervisor, verifies the seams, and compares the ranks' weights."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from unsloth_multigpu.group.manager import DDPManager
from unsloth_multigpu.group.replicas import ReplicaProof
from unsloth_multigpu.part import GradientExchange, Part
from unsloth_multigpu.seam import verify_calls
from unsloth_multigpu.train.ddp import parameters_beside_the_model
from unsloth_multigpu.train.preempt import Preemption
from unsloth_multigpu.train.trainable import TrainedParameters
from unsloth_multigpu.trainer_protocol import ArgumentsLike, ControlLike, StateLike, TrainerLike
from unsloth_multigpu.wire.event import EventWriter


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
                facts = {"exit_code": exit_code(error)} if isinstance(error, SystemExit) else {}
                self._tell("left_training", error=f"{type(error).__name__}: {error}", **facts)
            raise
        self._tell("trained")

    def _tell(self, kind: str, **facts: Any) -> None:
        if self.events is not None:
            self.events.write(kind, **facts)

    def on_train_begin(self, args: ArgumentsLike, state: StateLike, control: ControlLike, **kwargs: Any) -> None:
        from transformers import set_seed

        rank = self.manager.identity.rank
        if rank > 0:
            set_seed(args.seed + rank)

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
        # Ranks that step independently have equal weights only after a synchronization. The checkpoint of this step is
        # saved later.
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


def exit_code(error: SystemExit) -> int:
    """Returns the exit code that Python uses: the number given, 0 for None, 1 for a text."""
    return error.code if isinstance(error.code, int) else int(error.code is not None)
