"""Follows which parameters are trained: they may become trainable, or frozen, while a training runs."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence, Set
from typing import Any

from torch import nn

from unsloth_multigpu.errors import DivergenceError, RankTimeoutError, SetupError
from unsloth_multigpu.group.exchange import GradientExchange
from unsloth_multigpu.group.manager import DDPManager
from unsloth_multigpu.group.shards import has_shards
from unsloth_multigpu.group.shards import is_sharded as is_shard
from unsloth_multigpu.logs import get_logger
from unsloth_multigpu.part import Override, Part
from unsloth_multigpu.train.ddp import ReadableDDP, ddp_settings, exchanged_of, rebuild_ddp
from unsloth_multigpu.trainer_protocol import TrainerLike
from unsloth_multigpu.wire.digest import digest_hex
from unsloth_multigpu.words import listed

logger = get_logger(__name__)

_NUM_LOGGED = 5


class TrainedParameters(Part):
    """Lets DDP exchange the gradients of what is trainable, and checks that at every step.

    DDP knows the parameters that were trainable when it was made. A callback that unfreezes layers changes them between
    two steps: then DDP is rebuilt on all ranks, newly trained parameters begin with rank 0's values, and the training
    is that of one process. Within a step it is too late, and an error. Other strategies keep the parameters that they
    began with: there more of them are an error.

    Cost: one walk over the model's modules per step. Ranks talk to each other only where something has changed.

    Args:
        trainer: A `transformers.Trainer` or subclass.
        manager: This rank's manager.
        exchange: The gradient strategy in DDP's place.
        training: How many calls of `train()` this process made before.

    Attributes:
        is_changed: DDP was rebuilt, and the ranks have not been compared since.
    """

    place = "trained"

    def __init__(
        self, trainer: TrainerLike, manager: DDPManager, exchange: GradientExchange | None, training: int
    ) -> None:
        self._trainer = trainer
        self._manager = manager
        self._exchange = exchange
        self._training = training
        self.is_changed = False
        self._num_changes = 0
        self._seen: tuple[int, ...] | None = None
        self._is_between_steps = True

    def overrides(self) -> dict[str, Override]:
        return {"training_step": self._training_step}

    def _training_step(self, original: Callable[..., Any], model: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """`Trainer.training_step`: of a whole step where we feed it, else of a micro-batch."""
        every = all_parameters(self._trainer.model)
        trained = [p for p in every if p.requires_grad]
        ids = tuple(map(id, trained))
        if ids != self._seen:
            if self._seen is not None and not self._is_between_steps:
                self._refuse_within_a_step(set(ids) ^ set(self._seen))
            self._follow(model, trained)
            self._seen = ids
        loss = original(model, *args, **kwargs)
        self._check_end(every, set(ids), model)
        self._is_between_steps = bool(self._trainer.accelerator.sync_gradients)
        return loss

    def _follow(self, model: nn.Module, trained: Sequence[nn.Parameter]) -> None:
        """Makes sure that the gradients of all trained parameters are exchanged."""
        ids = set(map(id, trained))
        if self._exchange is not None:
            more = ids - set(map(id, self._exchange.parameters))
            if more:
                raise SetupError(
                    f"{self._names(more)} became trainable after step {self._step}, but strategy="
                    f"'{self._manager.config.strategy}' exchanges what was trainable when the training began.",
                    hint="Set strategy='ddp', or make it trainable before train().",
                )
            return
        ddp = getattr(model, "_orig_mod", model)
        if not isinstance(ddp, ReadableDDP):
            self._follow_foreign(ids)
            return
        wanted = exchanged_of(ddp.module)
        added, removed = wanted - ddp.exchanged, ddp.exchanged - wanted
        # Where DDP searches for what a step leaves out, frozen parameters are left out.
        if not added and (not removed or ddp.find_unused_parameters):
            return
        self._agree(added, removed)
        settings = ddp_settings(ddp.module, self._manager.config, self._trainer.args)
        rebuild_ddp(ddp, settings.get("find_unused_parameters", ddp.default_find_unused))
        # A layer that is initialized again when it is unfrozen may draw other numbers on each rank.
        self._manager.broadcast_tensors(p for p in trained if id(p) in added)
        # Some recipes train other layers in every step.
        log = logger.info if self._num_changes <= _NUM_LOGGED else logger.debug
        log(
            "after step %d %d parameter(s) became trainable and %d frozen: %s; DDP was rebuilt",
            self._step,
            len(added),
            len(removed),
            self._names(added or removed),
        )
        self.is_changed = True

    def _follow_foreign(self, ids: set[int]) -> None:
        """For FSDP, and for a DDP that the script has made, whose settings cannot be read."""
        if self._seen is None or not ids - set(self._seen):
            return
        is_sharded = has_shards(self._trainer.model)
        new = [p for p in all_parameters(self._trainer.model) if id(p) in ids - set(self._seen)]
        if is_sharded and not any(map(is_shard, new)):
            raise SetupError(
                f"{self._names(ids - set(self._seen))} came whole out of step {self._step}: a part of the model was "
                "called by itself (model.model(...), say). FSDP2 divides weights again behind the whole model only.",
                hint="Call the model itself, in callbacks and in the loss.",
            )
        exchanges = "FSDP shards" if is_sharded else "the script's own DDP exchanges"
        raise SetupError(
            f"{self._names(ids - set(self._seen))} became trainable after step {self._step}, but {exchanges} what was "
            "trainable when it was made.",
            hint="Make it trainable before train()." if is_sharded else "Give the Trainer the plain model.",
        )

    def _agree(self, added: Set[int], removed: Set[int]) -> None:
        """Waits until every rank has changed the same parameters: a rank that has not would be in another collective.

        Raises:
            DivergenceError: A rank has changed others, or none.
        """
        identity, self._num_changes = self._manager.identity, self._num_changes + 1
        names = [(n, id(p) in added) for n, p in self._trainer.model.named_parameters() if id(p) in added | removed]
        mine = json.dumps([self._step, digest_hex(json.dumps(names).encode())])
        prefix = f"trained/{self._training}/{self._num_changes}"
        self._manager.publish(f"{prefix}/{identity.rank}", mine)
        # Before the collective of the other ranks times out, whose error says less.
        deadline = time.monotonic() + self._manager.config.timeout_s / 2
        for rank in sorted(set(range(identity.world_size)) - {identity.rank}):
            try:
                theirs = self._manager.wait_for(
                    f"{prefix}/{rank}",
                    f"rank {rank} to change which parameters are trained",
                    timeout_s=max(0.0, deadline - time.monotonic()),
                )
            except RankTimeoutError as error:
                raise self._divergence(added or removed, f"on rank {identity.rank} and not on rank {rank}") from error
            if theirs != mine:
                raise self._divergence(added or removed, f"on rank {identity.rank}; rank {rank} has changed others")

    def _divergence(self, changed: Set[int], where: str) -> DivergenceError:
        return DivergenceError(
            f"After step {self._step} {self._names(changed)} became trainable or frozen {where}.",
            hint="Let a callback change `requires_grad` on all ranks alike: by step or epoch, not by rank or time.",
        )

    def _check_end(self, every: Sequence[nn.Parameter], ids: set[int], model: nn.Module) -> None:
        """A change after the backward is followed in the next step. A change before it came too late."""
        is_searched = getattr(getattr(model, "_orig_mod", model), "find_unused_parameters", True)
        missed = {
            id(p)
            for p in every
            if (p.requires_grad and id(p) not in ids and p.grad is not None)
            or (not p.requires_grad and id(p) in ids and p.grad is None and not is_searched)
        }
        if missed:
            self._refuse_within_a_step(missed)

    def _refuse_within_a_step(self, changed: set[int]) -> None:
        raise SetupError(
            f"{self._names(changed)} became trainable or frozen within step {self._step + 1}: its gradient in this "
            "step is not that of all ranks.",
            hint="Change `requires_grad` between steps: in on_epoch_begin, on_step_begin or on_step_end of a callback.",
        )

    @property
    def _step(self) -> int:
        return int(self._trainer.state.global_step)

    def _names(self, ids: Set[int]) -> str:
        return listed([name for name, p in self._trainer.model.named_parameters() if id(p) in ids])


def all_parameters(model: nn.Module) -> list[nn.Parameter]:
    """The parameters of a model, each once. A fifth of the time of `model.parameters()`, which spells all names."""
    found: dict[int, nn.Parameter] = {}
    seen: set[int] = set()
    stack: list[nn.Module | None] = [model]
    while stack:
        module = stack.pop()
        if module is None or id(module) in seen:
            continue
        seen.add(id(module))
        stack.extend(module._modules.values())
        for parameter in module._parameters.values():
            if parameter is not None:
                found[id(parameter)] = parameter
    return list(found.values())


def parameters_beside_the_model(trainer: TrainerLike) -> list[tuple[str, Any]]:
    """Names and tensors of what the optimizer trains outside the model: DDP does not exchange these gradients."""
    own = {id(p) for p in trainer.model.parameters()}
    return [
        (f"parameter {i} of the optimizer's group {g}, which is not in the model", p)
        for g, group in enumerate(trainer.optimizer.param_groups)
        for i, p in enumerate(group["params"])
        if p.requires_grad and id(p) not in own
    ]
