"""Watches which parameters are trained: DDP exchanges the gradients of those that were trainable when it was made."""

from __future__ import annotations

from collections.abc import Set
from typing import Any

from torch import nn

from unsloth_multigpu.errors import SetupError
from unsloth_multigpu.group.shards import has_shards, is_sharded
from unsloth_multigpu.options import MultiGPUConfig
from unsloth_multigpu.part import GradientExchange, Part
from unsloth_multigpu.trainer_protocol import ArgumentsLike, ControlLike, StateLike, TrainerLike
from unsloth_multigpu.words import listed

_HINT = (
    "Make it trainable before train(), and let the callback freeze it from on_train_begin on, with "
    "TrainingArguments(ddp_find_unused_parameters=True)."
)


class TrainedParameters(Part):
    """Refuses a change of what is trained that the exchange of gradients cannot follow.

    A callback may freeze what was trainable when the training began, and make it trainable again, between two steps and
    where DDP searches for parameters without a gradient. Cost: two walks over the model's modules per step.
    """

    place = "trained"

    def __init__(self, trainer: TrainerLike, config: MultiGPUConfig, exchange: GradientExchange | None) -> None:
        self._trainer = trainer
        self._config = config
        self._exchange = exchange
        self._trained: frozenset[int] | None = None

    def on_step_begin(self, args: ArgumentsLike, state: StateLike, control: ControlLike, **kwargs: Any) -> None:
        """Makes sure that the gradients of all trained parameters are exchanged, and that DDP waits for no other."""
        trained = frozenset(id(p) for p in all_parameters(self._trainer.model) if p.requires_grad)
        before, self._trained = self._trained, trained
        if trained == before:
            return
        ddp, known = self._wrapper, before
        if self._exchange is not None:
            known = frozenset(map(id, self._exchange.parameters))
        elif hasattr(ddp, "exchanged"):
            known = ddp.exchanged
            if (removed := known - trained) and not ddp.find_unused_parameters:
                raise SetupError(
                    f"{self._names(removed)} became frozen after step {self._step}, and DDP waits for its gradient.",
                    hint="Set TrainingArguments(ddp_find_unused_parameters=True).",
                )
        if known is not None and (added := trained - known):
            self._refuse(added)

    def on_pre_optimizer_step(self, args: ArgumentsLike, state: StateLike, control: ControlLike, **kwargs: Any) -> None:
        """Refuses what has changed before or in the backward pass: its gradient is not that of all ranks."""
        trained = self._trained or frozenset()
        is_searched = getattr(self._wrapper, "find_unused_parameters", True)
        missed = {
            id(p)
            for p in all_parameters(self._trainer.model)
            if (p.requires_grad and id(p) not in trained and p.grad is not None)
            or (not p.requires_grad and id(p) in trained and p.grad is None and not is_searched)
        }
        if missed:
            raise SetupError(
                f"{self._names(missed)} became trainable or frozen within step {self._step + 1}: its gradient in this "
                "step is not that of all ranks.",
                hint="Change `requires_grad` between steps: in on_epoch_begin, on_step_begin or on_step_end of a "
                "callback.",
            )

    def _refuse(self, added: Set[int]) -> None:
        what = f"{self._names(added)} became trainable after step {self._step}, but"
        if not has_shards(self._trainer.model):
            raise SetupError(
                f"{what} strategy='{self._config.strategy}' exchanges what was trainable when the training began.",
                hint=_HINT,
            )
        if not any(is_sharded(p) for p in self._trainer.model.parameters() if id(p) in added):
            raise SetupError(
                f"{self._names(added)} came whole out of step {self._step}: a part of the model was called by itself "
                "(model.model(...), say). FSDP2 divides weights again behind the whole model only.",
                hint="Call the model itself, in callbacks and in the loss.",
            )
        raise SetupError(
            f"{what} FSDP shards what was trainable when it was made.", hint="Make it trainable before train()."
        )

    @property
    def _wrapper(self) -> Any:
        return getattr(self._trainer.model_wrapped, "_orig_mod", self._trainer.model_wrapped)

    @property
    def _step(self) -> int:
        return int(self._trainer.state.global_step)

    def _names(self, ids: Set[int]) -> str:
        return listed([name for name, p in self._trainer.model.named_parameters() if id(p) in ids])


def all_parameters(model: nn.Module) -> list[nn.Parameter]:
    """The parameters of a model, some more than once. Faster than `model.parameters()`, which spells all names."""
    return [p for module in model.modules() for p in module._parameters.values() if p is not None]


def parameters_beside_the_model(trainer: TrainerLike) -> list[tuple[str, Any]]:
    """Names and tensors of what the optimizer trains outside the model: DDP does not exchange these gradients."""
    own = {id(p) for p in trainer.model.parameters()}
    return [
        (f"parameter {i} of the optimizer's group {g}, which is not in the model", p)
        for g, group in enumerate(trainer.optimizer.param_groups)
        for i, p in enumerate(group["params"])
        if p.requires_grad and id(p) not in own
    ]
