"""Parameters that became trainable or frozen between two steps: DDP is rebuilt, or they are refused."""

from __future__ import annotations

import functools
import json
import time
from collections.abc import Set
from typing import Any

from unsloth_multigpu.errors import DivergenceError, RankTimeoutError, SetupError
from unsloth_multigpu.group.manager import DDPManager
from unsloth_multigpu.group.shards import has_shards, is_sharded
from unsloth_multigpu.logs import get_logger
from unsloth_multigpu.part import TrainerLike
from unsloth_multigpu.train.ddp import ddp_settings, exchanged_of, names_of, names_outside_ddp
from unsloth_multigpu.wire.digest import digest_hex

logger = get_logger(__name__)

# Changes of what is trained that are logged at INFO: some recipes change the trained layers in every step.
_NUM_LOGGED = 5


def follow(trainer: TrainerLike, manager: DDPManager, ddp: Any, training: int, number: int) -> None:
    """Rebuilds DDP for the parameters that are trainable now. Added ones start with rank 0's values. Collective.

    `training` and `number` are the numbers of this `train()` in the process and of this change in it.

    Raises:
        DivergenceError: A rank has changed other parameters, or none.
        SetupError: See `rebuild_ddp`.
    """
    wanted, step = exchanged_of(ddp.module), trainer.state.global_step
    added, removed = wanted - ddp.exchanged, ddp.exchanged - wanted
    names = names_of(trainer.model, added or removed)
    changed = [(name, id(p) in added) for name, p in trainer.model.named_parameters() if id(p) in added | removed]
    other = _disagreement(manager, training, number, f"{step} {digest_hex(json.dumps(changed).encode())}")
    if other:
        raise DivergenceError(
            f"After step {step} {names} became trainable or frozen on rank {manager.rank}{other}.",
            hint="Let a callback change `requires_grad` on all ranks alike: by step or epoch, not by rank.",
        )
    settings = ddp_settings(ddp.module, trainer.args)
    rebuild_ddp(ddp, settings.get("find_unused_parameters", ddp.default_find_unused))
    # A layer that is initialized again when it is unfrozen may have different random weights on each rank.
    manager.broadcast_tensors(p for p in ddp.module.parameters() if id(p) in added)
    log = logger.info if number <= _NUM_LOGGED else logger.debug
    facts = (step, len(added), len(removed), names)
    log("after step %d %d parameter(s) became trainable and %d frozen: %s; DDP was rebuilt", *facts)


def _disagreement(manager: DDPManager, training: int, number: int, change: str) -> str:
    """Waits until every rank has made the same change. Otherwise their collectives would not match.

    Returns:
        Which rank has made another change, or none; "" if there is no such rank.
    """
    # Two keys in turn are enough: a rank starts change n + 2 after all ranks have made n + 1, so all have read n.
    key, begin = f"trained/{number % 2}", f"{training}/{number} "
    manager.publish(f"{key}/{manager.rank}", begin + change)

    def read(rank: int) -> str | None:
        theirs = manager.read(f"{key}/{rank}") or ""
        return theirs.removeprefix(begin) if theirs.startswith(begin) else None

    # Half of the limit, so that this error comes before the timeout of another rank's collective.
    deadline_s = time.monotonic() + manager.config.timeout_s / 2
    for rank in range(manager.identity.world_size):
        what, limit_s = f"rank {rank} to change what is trained", max(0.0, deadline_s - time.monotonic())
        try:
            theirs = manager.wait(functools.partial(read, rank), what, timeout_s=limit_s)
        except RankTimeoutError:
            return f" and not on rank {rank}"
        if theirs != change:
            return f"; rank {rank} has changed others"
    return ""


def rebuild_ddp(ddp: Any, find_unused_parameters: bool) -> None:
    """Lets DDP exchange the gradients of the parameters that are trainable now. Called between two steps on all ranks.

    The object stays, because the loop and accelerate refer to it. Its reducer is rebuilt, as if DDP were unpickled. The
    old reducer removes its hooks from the parameters when it is freed.

    Raises:
        SetupError: DDP has a state that belongs to the parameters it was made with.
    """
    if getattr(ddp, "_comm_hooks", ()) or getattr(ddp, "_use_python_reducer", False):
        raise SetupError(
            "parameters became trainable or frozen, and DDP has a communication hook or torch's Python reducer, with "
            "which it cannot be rebuilt.",
            hint="Leave that out, or set what is trained before train().",
        )
    # accelerate may have moved parameters to the device after they were left out.
    ddp.parameters_to_ignore = ddp.parameters_to_ignore & {*names_outside_ddp(ddp.module)}
    ddp.find_unused_parameters = find_unused_parameters
    ddp.__setstate__(ddp.__getstate__())
    ddp.exchanged = exchanged_of(ddp.module)


def refusal(trainer: TrainerLike, added: Set[int], strategy: str) -> SetupError:
    """Returns the error about parameters whose gradients cannot be synchronized; "" = the strategy is DDP."""
    model, names, step = trainer.model, names_of(trainer.model, added), trainer.state.global_step
    hint = "Make it trainable before train()."
    if strategy:
        who, hint = f"strategy='{strategy}'", "Set strategy='ddp', or make it trainable before train()."
    elif not has_shards(model):
        who, hint = "the script's own DDP", "Give the Trainer the plain model."
    elif any(is_sharded(p) for p in model.parameters() if id(p) in added):
        who = "FSDP"
    else:
        return SetupError(
            f"{names} came out of step {step} unsharded: a part of the model was called by itself, for example by "
            "model.model(...). FSDP2 shards weights again only after a call of the complete model.",
            hint="Call the model itself, in callbacks and in the loss.",
        )
    return SetupError(
        f"{names} became trainable after step {step}, but {who} exchanges what was trainable at its start.",
        hint=hint,
    )
