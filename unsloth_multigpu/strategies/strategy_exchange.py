"""Runs a strategy in Hugging Face's loop, in place of DDP."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from unsloth_multigpu.errors import SetupError
from unsloth_multigpu.group.manager import DDPManager
from unsloth_multigpu.logs import get_logger
from unsloth_multigpu.part import ArgumentsLike, ControlLike, GradientExchange, Override, StateLike, TrainerLike
from unsloth_multigpu.strategies.sync import AllReduceSync, DiLoCoSync, GradientSync, LocalSGDSync, ParameterServerSync
from unsloth_multigpu.strategy import AllReduce, DiLoCo, LocalSGD, ParameterServer, Strategy

logger = get_logger(__name__)

_SYNCS: dict[type[Strategy], type[GradientSync]] = {
    AllReduce: AllReduceSync,
    ParameterServer: ParameterServerSync,
    LocalSGD: LocalSGDSync,
    DiLoCo: DiLoCoSync,
}
# File of a checkpoint, next to the Trainer's own files.
STATE_FILE = "unsloth_multigpu_sync.pt"


class Exchange(GradientExchange):
    """Calls a `GradientSync` from methods and callbacks of one Trainer.

    Attributes:
        sync: Runs the strategy; None before the training.
    """

    keeps = ("args.average_tokens_across_devices",)

    def __init__(self, trainer: TrainerLike, manager: DDPManager) -> None:
        super().__init__(trainer, manager)
        self._config = manager.config
        self.sync: GradientSync | None = None

    @contextmanager
    def around(self) -> Iterator[None]:
        """Lets each rank divide its loss by its own tokens if ranks do not synchronize in every step."""
        if not self._config.is_synchronous:
            # To count tokens over all ranks is a collective in every step.
            self._trainer.args.average_tokens_across_devices = False
        yield

    def overrides(self) -> dict[str, Override]:
        return {"prepare_model": self._prepare_alone, "training_step": self._training_step}

    def on_train_begin(self, args: ArgumentsLike, state: StateLike, control: ControlLike, **kwargs: Any) -> None:
        """Creates `sync` for the prepared model and optimizer. Collective."""
        trainer = self._trainer
        if isinstance(trainer.model_wrapped, nn.parallel.DistributedDataParallel):
            raise SetupError(
                f"strategy='{self._config.strategy}', but the model is wrapped in DDP, by the script or an "
                "earlier training.",
                hint="Create a new Trainer with the plain model, or set strategy='ddp'.",
            )
        is_loss_scaled = trainer.accelerator.scaler is not None
        optimizer = getattr(trainer.optimizer, "optimizer", trainer.optimizer)  # torch's, inside accelerate's.
        sync_of = _SYNCS[type(self._config.strategy)]
        self.sync = sync_of(trainer.model, optimizer, self._config.strategy, is_loss_scaled=is_loss_scaled)
        self.sync.begin()
        logger.info("strategy=%s: %s", self._config.strategy, type(self.sync).__name__)

    def on_optimizer_step(self, args: ArgumentsLike, state: StateLike, control: ControlLike, **kwargs: Any) -> None:
        assert self.sync is not None
        with self._manager.waits.counted():
            self.sync.after_step()

    def on_step_end(self, args: ArgumentsLike, state: StateLike, control: ControlLike, **kwargs: Any) -> None:
        """Synchronizes the ranks' weights before they are read. Collective."""
        if control.should_save or control.should_evaluate or control.should_training_stop:
            self.before_read()

    def on_epoch_end(self, args: ArgumentsLike, state: StateLike, control: ControlLike, **kwargs: Any) -> None:
        """Synchronizes before weights are read, and after the last epoch, since the best checkpoint is loaded next."""
        if control.should_save or control.should_evaluate or self.ends_training():
            self.before_read()

    def on_train_end(self, args: ArgumentsLike, state: StateLike, control: ControlLike, **kwargs: Any) -> None:
        self.before_read()

    def before_read(self) -> None:
        """Makes the weights of all ranks equal. Collective."""
        if self.sync is not None:
            with self._manager.waits.counted():
                self.sync.synchronize()

    @property
    def parameters(self) -> Sequence[nn.Parameter]:
        assert self.sync is not None
        return self.sync.parameters

    @property
    def are_replicas_equal(self) -> bool:
        """True if the weights of all ranks are equal, as they are before the training."""
        return self.sync is None or self.sync.are_replicas_equal

    @property
    def may_stop(self) -> bool:
        """False between two synchronizations, if ranks do not synchronize in every step."""
        return not isinstance(self._config.strategy, LocalSGD) or self.are_replicas_equal

    def sent_bytes(self, num_steps: int) -> int | None:
        return None if self.sync is None else self.sync.sent_bytes

    def save_state(self, folder: Path) -> None:
        """Adds the strategy's state to a checkpoint; writes no file if there is none."""
        state = {} if self.sync is None else self.sync.state_dict()
        if state:
            torch.save(state, folder / STATE_FILE)

    def load_state(self, folder: Path) -> None:
        """Loads what `save_state` has written; warns if the file of a strategy with state is missing. Collective."""
        assert self.sync is not None
        file = folder / STATE_FILE
        self._manager.check_same({STATE_FILE: file.is_file()})
        if file.is_file():
            self.sync.load_state_dict(torch.load(file, map_location="cpu", weights_only=True))
        elif self.sync.state_dict():
            logger.warning("%s is missing: strategy=%s begins with a new state", file, self._config.strategy)

    def _prepare_alone(self, original: Callable[..., Any], model: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """Overrides `Accelerator.prepare_model`: does not wrap the model in DDP."""
        is_trained = not kwargs.get("evaluation_mode") and any(p.requires_grad for p in model.parameters())
        if is_trained and getattr(model, "_orig_mod", model) is not self._trainer.model:
            raise SetupError(
                f"A {type(model).__name__} is trained in addition to the Trainer's model, and its gradients would not "
                "be synchronized.",
                hint="Set strategy='ddp'.",
            )
        placement = args[0] if args else kwargs.get("device_placement")
        return original(model, placement, evaluation_mode=True)

    def _training_step(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Overrides `Trainer.training_step`: calls `after_backward` after the last backward pass of a step."""
        loss = original(*args, **kwargs)
        if self._trainer.accelerator.sync_gradients:
            assert self.sync is not None
            with self._manager.waits.counted():
                self.sync.after_backward()
        return loss
