"""Lets accelerate wrap the model in DDP with our settings, and checks that the training uses it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import nn

from unsloth_multigpu.errors import DivergenceError, SetupError
from unsloth_multigpu.group.manager import DDPManager, gradient_backend
from unsloth_multigpu.logs import get_logger
from unsloth_multigpu.options import MultiGPUConfig
from unsloth_multigpu.part import Override, Part
from unsloth_multigpu.seam import instance_attribute
from unsloth_multigpu.train.compression import check_compression, compression_settings
from unsloth_multigpu.train.ddp import NamesOutsideDDP, ReadableDDP, ddp_settings, forget_evaluation, make_readable
from unsloth_multigpu.trainer_protocol import ArgumentsLike, ControlLike, StateLike, TrainerLike

logger = get_logger(__name__)


class DDPWrapping(Part):
    """Exchanges gradients by DDP.

    Args:
        trainer: A `transformers.Trainer` or subclass.
        manager: This rank's manager, one of several.
    """

    place = "exchange"

    def __init__(self, trainer: TrainerLike, manager: DDPManager) -> None:
        self._trainer = trainer
        self._config: MultiGPUConfig = manager.config
        # False from the start of a training by DDP until its first forward pass.
        self._is_forward_seen = True

    @contextmanager
    def around(self) -> Iterator[None]:
        """Checks how gradients are to be sent.

        Raises:
            SetupError: They cannot be compressed as asked.
        """
        accelerator, compression = self._trainer.accelerator, self._config.grad_compression
        if compression is not None:
            backend = gradient_backend(self._trainer.args.device)
            hook = str(getattr(accelerator.ddp_handler, "comm_hook", "no"))
            check_compression(compression, backend, hook, is_loss_scaled=accelerator.scaler is not None)
            logger.info("grad_compression=%s: gradients are sent smaller and are no longer exact", compression)
        forget_evaluation(self._trainer)
        yield

    def overrides(self) -> dict[str, Override]:
        return {"prepare_model": self._prepare_model}

    def _prepare_model(self, original: Callable[..., Any], model: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """`Accelerator.prepare_model`, which makes DDP and is all that reads its settings."""
        # transformers 4 makes new settings just before. The script's are restored for the next `train()`.
        from accelerate.utils import DistributedDataParallelKwargs

        accelerator, compression = self._trainer.accelerator, self._config.grad_compression
        handler = accelerator.ddp_handler or DistributedDataParallelKwargs()
        settings = ddp_settings(model, self._config, self._trainer.args)
        if compression is not None:
            settings.update(compression_settings(compression))
        with ExitStack() as stack:
            stack.enter_context(instance_attribute(accelerator, "ddp_handler", handler))
            for name, value in settings.items():
                stack.enter_context(instance_attribute(handler, name, value))
            left_alone = NamesOutsideDDP(model)
            stack.enter_context(instance_attribute(model, "_ddp_params_and_buffers_to_ignore", left_alone))
            wrapped = original(model, *args, **kwargs)
        inner = getattr(wrapped, "_orig_mod", wrapped)
        is_trained = not kwargs.get("evaluation_mode") and any(p.requires_grad for p in model.parameters())
        if is_trained and not isinstance(inner, nn.parallel.DistributedDataParallel):
            raise SetupError("accelerate did not wrap the model in DDP.", hint="Load the model again.")
        if is_trained:
            make_readable(inner, model, handler.find_unused_parameters)
        return wrapped

    def on_train_begin(self, args: ArgumentsLike, state: StateLike, control: ControlLike, **kwargs: Any) -> None:
        """Looks for the first forward pass by DDP."""
        wrapped = self._trainer.model_wrapped
        if not isinstance(wrapped, ReadableDDP):
            return  # A compiler wraps it and would trace the hook, or it is the script's own DDP.

        def see(*_: Any) -> None:
            self._is_forward_seen = True
            handle.remove()

        self._is_forward_seen = False
        handle = wrapped.register_forward_pre_hook(see)

    def on_step_end(self, args: ArgumentsLike, state: StateLike, control: ControlLike, **kwargs: Any) -> None:
        """Refuses a step in which each rank has used its own gradients, before its weights are saved."""
        if not self._is_forward_seen:
            raise DivergenceError(
                f"The forward pass passed by DDP in step {state.global_step}: the model that compute_loss is given was "
                "not called, and the ranks' gradients did not meet.",
                hint="Call the model that compute_loss(model, inputs) is given, not self.model or model.module.",
            )
