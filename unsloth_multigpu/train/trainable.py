"""Follows which parameters are trained, since a script may freeze or unfreeze them between two steps."""

from __future__ import annotations

import functools
import json
import time
from collections.abc import Set
from typing import Any

from torch import nn

from unsloth_multigpu.errors import DivergenceError, RankTimeoutError, SetupError
from unsloth_multigpu.group.manager import DDPManager
from unsloth_multigpu.group.shards import has_shards, is_sharded
from unsloth_multigpu.logs import get_logger
from unsloth_multigpu.part import GradientExchange, Part
from unsloth_multigpu.train.ddp import ddp_settings, exchanged_of, rebuild_ddp
from unsloth_multigpu.trainer_protocol import ArgumentsLike, ControlLike, StateLike, TrainerLike
from unsloth_multigpu.wire.digest import digest_hex
from unsloth_multigpu.words import listed

logger = get_logger(__name__)

_NUM_LOGGED = 5


class TrainedParameters(Part):
    """Checks in every step that DDP synchronizes the gradients of all trainable parameters, and rebuilds it if not.

    DDP is made for the parameters that are trainable at that time. If a callback unfreezes layers between two steps,
    DDP is rebuilt on all ranks and the new parameters start with rank 0's values, so the training is that of one
    process. A change within a step comes too late and is an error. Other strategies, and a DDP made by the script,
    cannot be rebuilt: there additional trainable parameters are an error.

    Cost: two walks over the model's modules per step. Ranks communicate only after a change.

    Attributes:
        is_changed: DDP was rebuilt, and the ranks have not been compared since.
        of_step: Ids of the parameters that were trainable when this step started; None before the first one.
    """

    place = "trained"

    def __init__(self, trainer: TrainerLike, manager: DDPManager, exchange: GradientExchange, training: int) -> None:
        super().__init__(trainer, manager)
        self._exchange = exchange
        self._training = training
        self.is_changed = False
        self._num_changes = 0
        self.of_step: frozenset[int] | None = None

    def on_step_begin(self, args: ArgumentsLike, state: StateLike, control: ControlLike, **kwargs: Any) -> None:
        """Makes sure that the gradients of all trainable parameters are synchronized."""
        trained = frozenset(id(p) for p in all_parameters(self._trainer.model) if p.requires_grad)
        before, self.of_step = self.of_step, trained
        if trained == before:
            return
        ddp = getattr(self._trainer.model_wrapped, "_orig_mod", self._trainer.model_wrapped)
        kept = self._exchange.parameters
        if kept is None and hasattr(ddp, "exchanged"):
            self._follow(ddp)
            return
        known = before if kept is None else frozenset(map(id, kept))
        if known is not None and (added := trained - known):
            self._refuse(added)

    def on_pre_optimizer_step(self, args: ArgumentsLike, state: StateLike, control: ControlLike, **kwargs: Any) -> None:
        """Refuses parameters that were frozen or unfrozen within the step: their gradients were not synchronized."""
        trained, model = self.of_step or frozenset(), self._trainer.model_wrapped
        is_searched = getattr(getattr(model, "_orig_mod", model), "find_unused_parameters", True)
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

    def _follow(self, ddp: Any) -> None:
        wanted = exchanged_of(ddp.module)
        added, removed = wanted - ddp.exchanged, ddp.exchanged - wanted
        # With find_unused_parameters, DDP skips frozen parameters by itself.
        if not added and (not removed or ddp.find_unused_parameters):
            return
        self._agree(added, removed)
        settings = ddp_settings(ddp.module, self._trainer.args)
        rebuild_ddp(ddp, settings.get("find_unused_parameters", ddp.default_find_unused))
        # A layer that is initialized again when it is unfrozen may have different random weights on each rank.
        self._manager.broadcast_tensors(p for p in ddp.module.parameters() if id(p) in added)
        # Some recipes change the trained layers in every step.
        log = logger.info if self._num_changes <= _NUM_LOGGED else logger.debug
        log(
            "after step %d %d parameter(s) became trainable and %d frozen: %s; DDP was rebuilt",
            self._step,
            len(added),
            len(removed),
            self._names(added or removed),
        )
        self.is_changed = True

    def _refuse(self, added: Set[int]) -> None:
        what = f"{self._names(added)} became trainable after step {self._step}, but"
        model, hint = self._trainer.model, "Make it trainable before train()."
        if self._exchange.parameters is not None:
            who = f"strategy='{self._manager.config.strategy}'"
            hint = "Set strategy='ddp', or make it trainable before train()."
        elif not has_shards(model):
            who, hint = "the script's own DDP", "Give the Trainer the plain model."
        elif any(is_sharded(p) for p in model.parameters() if id(p) in added):
            who = "FSDP"
        else:
            raise SetupError(
                f"{self._names(added)} came out of step {self._step} unsharded: a part of the model was called by "
                "itself (model.model(...), say). FSDP2 shards weights again only after a call of the complete model.",
                hint="Call the model itself, in callbacks and in the loss.",
            )
        raise SetupError(f"{what} {who} exchanges what was trainable when it was made.", hint=hint)

    def _agree(self, added: Set[int], removed: Set[int]) -> None:
        """Waits until every rank has changed the same parameters. Otherwise their collectives would not match.

        Raises:
            DivergenceError: A rank has changed other parameters, or none.
        """
        mine, self._num_changes = self._manager.identity.rank, self._num_changes + 1
        names = [(n, id(p) in added) for n, p in self._trainer.model.named_parameters() if id(p) in added | removed]
        number = f"{self._training}/{self._num_changes}"
        word = f"{number} {self._step} {digest_hex(json.dumps(names).encode())}"
        # Two keys in turn are enough: a rank starts change n + 2 after all ranks made change n + 1, so have read n.
        key = f"trained/{self._num_changes % 2}"
        self._manager.publish(f"{key}/{mine}", word)

        def read(rank: int) -> str | None:
            theirs = self._manager.read(f"{key}/{rank}") or ""
            return theirs if theirs.startswith(f"{number} ") else None

        # Half of the limit, so that this error comes before the timeout of another rank's collective.
        deadline_s, where = time.monotonic() + self._manager.config.timeout_s / 2, ""
        for rank in range(self._manager.identity.world_size):
            what = f"rank {rank} to change which parameters are trained"
            try:
                limit_s = max(0.0, deadline_s - time.monotonic())
                if self._manager.wait(functools.partial(read, rank), what, timeout_s=limit_s) != word:
                    where = f"on rank {mine}; rank {rank} has changed others"
            except RankTimeoutError:
                where = f"on rank {mine} and not on rank {rank}"
            if where:
                raise DivergenceError(
                    f"After step {self._step} {self._names(added or removed)} became trainable or frozen {where}.",
                    hint="Let a callback change `requires_grad` on all ranks alike: by step or epoch, not by rank.",
                )

    @property
    def _step(self) -> int:
        return int(self._trainer.state.global_step)

    def _names(self, ids: Set[int]) -> str:
        return listed([name for name, p in self._trainer.model.named_parameters() if id(p) in ids])


def all_parameters(model: nn.Module) -> list[nn.Parameter]:
    """Returns the parameters of a model, shared ones repeatedly. `model.parameters()` is slower: it builds names."""
    return [p for module in model.modules() for p in module._parameters.values() if p is not None]
