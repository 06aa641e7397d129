"""Makes the ranks of a notebook equal again, after a cell that failed or was stopped on some of them.

Imported inside functions only.
"""

from __future__ import annotations

import json
import sys
import weakref
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from unsloth_multigpu.errors import DistributedError, DivergenceError, SetupError
from unsloth_multigpu.group.manager import DDPManager, local_device
from unsloth_multigpu.group.model import inner_name, torch_optimizer
from unsloth_multigpu.group.replicas import persistent_buffers, replicated_tensors
from unsloth_multigpu.train.loop import Loop
from unsloth_multigpu.trainer_protocol import OptionalTrainer, TrainerLike
from unsloth_multigpu.wire.digest import digest_of

# Values that a message can hold as they are.
_PLAIN = (bool, int, float, str, type(None))


@dataclass(frozen=True)
class _Noted:
    """A trainer, and what steers it."""

    trainer: weakref.ref[TrainerLike]
    loop: Loop


class Trainings:
    """The trainers that this session has trained, by the number of their last training.

    A number is recorded once all ranks have agreed on the training, so it means the same trainer on all of them, also
    where some ranks have released theirs.
    """

    def __init__(self) -> None:
        self._noted: dict[int, _Noted] = {}
        self._wrappers: weakref.WeakSet[nn.Module] = weakref.WeakSet()

    def __bool__(self) -> bool:
        return bool(self._noted)

    @property
    def is_cut(self) -> bool:
        """True where an exception has ended a training before its end."""
        return any(trainer.is_in_train for noted in self._noted.values() if (trainer := noted.trainer()) is not None)

    def note(self, number: int, loop: Loop) -> None:
        """Remembers a trainer that is about to be steered.

        Args:
            number: Which training of this session it is.
            loop: The parts that steer it. It does not refer to the Trainer after `let_go`.
        """
        trainer = loop.trainer
        self._noted = {n: noted for n, noted in self._noted.items() if noted.trainer() not in (None, trainer)}
        self._noted[number] = _Noted(weakref.ref(trainer), loop)

    def note_wrapper(self, model: nn.Module) -> None:
        """Remembers the wrapper that a plain loop trains, which holds the process group."""
        if isinstance(model, nn.parallel.DistributedDataParallel):
            self._wrappers.add(model)

    def unwrap(self) -> None:
        """Removes from all trainers what belongs to a process group or to a training that was cut off."""
        for noted in self._noted.values():
            if (trainer := noted.trainer()) is not None:
                noted.loop.let_go()  # An exception may have interrupted an earlier `let_go`.
                trainer.is_in_train = False
                _take_ddp_off(trainer)
        for wrapper in self._wrappers:
            _retire(wrapper)
        self._wrappers.clear()

    def end(self, *, keeps_global_batch: bool) -> None:
        """Makes each trainer usable by this process alone.

        Args:
            keeps_global_batch: Trainers that make their own samples were given a rank's part of the batch.
        """
        self.unwrap()
        for noted in self._noted.values():
            trainer = noted.trainer()
            if trainer is not None and keeps_global_batch and hasattr(trainer.args, "steps_per_generation"):
                trainer.train = _refuse_part_of_batch

    def make_equal(self, manager: DDPManager, num_finished: int) -> int:
        """Gives every rank rank 0's trainable weights, buffers and optimizer states. Collective.

        Ranks that were stopped may be one optimizer step apart, and a wrong optimizer state shows only steps later.

        Args:
            num_finished: How many trainings this rank has finished.

        Returns:
            How many rank 0 has finished.

        Raises:
            DivergenceError: On all ranks: a trainer differs between ranks, or cannot be sent.
        """
        live = {n: trainer for n, noted in self._noted.items() if (trainer := noted.trainer()) is not None}
        facts = {number: _facts_of(trainer) for number, trainer in live.items()}
        texts = [json.loads(text) for text in manager.gather_texts(json.dumps([facts, num_finished]))]
        ranks = [text[0] for text in texts]
        # A trainer that is gone on one rank cannot be trained again.
        for number in sorted(n for n in map(int, ranks[0]) if all(str(n) in rank for rank in ranks)):
            _check_same_facts(number, [rank[str(number)] for rank in ranks])
            _send_trainer(manager, live[number])
        return int(texts[0][1])


def become_one_process() -> None:
    """Makes accelerate forget the other ranks, also in objects that were made for several processes."""
    state = sys.modules.get("accelerate.state")
    if state is None or not state.PartialState._shared_state:
        return
    kept = dict(state.AcceleratorState._shared_state)
    # transformers does the same for every TrainingArguments. All objects of these classes share one state, so this
    # changes those that trainers hold as well. Settings such as the precision are kept.
    is_cpu = state.PartialState._shared_state["_cpu"]
    state.AcceleratorState._reset_state(reset_partial_state=True)
    alone = vars(state.PartialState(cpu=is_cpu))
    if kept:
        state.AcceleratorState._shared_state.update({**kept, **alone})


def _refuse_part_of_batch(*_args: Any, **_kwargs: Any) -> Any:
    raise SetupError(
        "This Trainer was built as one of several ranks: its steps would see a part of the samples only.",
        hint="Make a new Trainer, with new arguments.",
    )


def _take_ddp_off(trainer: TrainerLike) -> None:
    """Removes the wrapper: its group has ended, and its buckets may be in the middle of a step."""
    accelerator = trainer.accelerator
    for model in (trainer.model_wrapped, *accelerator._models):
        if (ddp := _ddp_in(model)) is not None:
            ddp._remove_autograd_hooks()
    accelerator._models = [model for model in accelerator._models if _ddp_in(model) is None]
    trainer.model_wrapped = trainer.model
    # The gradients are views into the buckets.
    trainer.model.zero_grad(set_to_none=True)
    if getattr(trainer, "_buffered_inputs", None) is not None:
        # TRL's generated samples. Ranks may have used different numbers of them.
        cast(OptionalTrainer, trainer)._buffered_inputs = None


def _retire(wrapper: Any) -> None:
    """Makes a plain loop's wrapper raise: its optimizer is not known, and may be one step apart from other ranks'."""

    def forward(*_args: Any, **_kwargs: Any) -> Any:
        raise DistributedError(
            "This model was wrapped for a process group that is gone, since a cell failed or was stopped.",
            hint="Wrap what unwrap_model(model) returns, and make a new optimizer. Alone, train that model.",
        )

    wrapper._remove_autograd_hooks()
    wrapper.forward = forward


def _ddp_in(model: nn.Module) -> nn.parallel.DistributedDataParallel | None:
    while True:
        if isinstance(model, nn.parallel.DistributedDataParallel):
            return model
        if (name := inner_name(model)) is None:
            return None
        model = getattr(model, name)


def _parameters_of(optimizer: Any) -> list[nn.Parameter]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _facts_of(trainer: TrainerLike) -> dict[str, Any]:
    """What must be equal on two ranks before one can take the state of the other."""
    optimizer = torch_optimizer(trainer)
    weights = [(n, tuple(p.shape), str(p.dtype)) for n, p in replicated_tensors(trainer.model)]
    shapes = optimizer and [tuple(p.shape) for p in _parameters_of(optimizer)]
    return {
        "class": type(trainer).__name__,
        "trainable weights": [len(weights), digest_of(weights)],
        "optimizer": optimizer and [type(optimizer).__name__, len(shapes), digest_of(shapes)],
    }


def _check_same_facts(number: int, ranks: list[dict[str, Any]]) -> None:
    for rank, facts in enumerate(ranks):
        # A rank that was stopped before its first step has no optimizer yet.
        different = [n for n, v in facts.items() if v != ranks[0][n] and (n != "optimizer" or (v and ranks[0][n]))]
        if different:
            values = [f"{n}: rank 0 has {ranks[0][n]}, rank {rank} has {facts[n]}" for n in different]
            raise DivergenceError(
                f"Training number {number + 1} of this notebook cannot be made equal: {'; '.join(values)}.",
                hint="Load the model again and make a new Trainer.",
            )


def _send_trainer(manager: DDPManager, trainer: TrainerLike) -> None:
    """Collective."""
    optimizer, model = torch_optimizer(trainer), trainer.model
    weights = [t for _, t in replicated_tensors(model)]
    send_state(manager, {"weights": weights, "buffers": list(persistent_buffers(model))})
    states = None if optimizer is None else [optimizer.state.get(p) for p in _parameters_of(optimizer)]
    states, kept = send_state(manager, states)
    if kept:
        raise DivergenceError(
            f"The state of {type(optimizer).__name__} holds {kept[0]}, which cannot be sent to other ranks.",
            hint="Make a new Trainer with a new optimizer, on all ranks.",
        )
    _take_optimizer_states(trainer, states)
    optimizer, scheduler = torch_optimizer(trainer), trainer.lr_scheduler
    groups = optimizer and [{k: v for k, v in g.items() if k != "params"} for g in optimizer.param_groups]
    scaler = trainer.accelerator.scaler
    mine = {
        "groups": groups,
        "scheduler": scheduler and scheduler.state_dict(),
        "scaler": scaler and scaler.state_dict(),
        "step": getattr(trainer, "_step", None),  # How many micro-batches TRL has taken from its generated samples.
    }
    state, _ = send_state(manager, mine)
    if manager.identity.rank == 0:
        return
    for group, values in zip(optimizer.param_groups if groups else (), state["groups"] or (), strict=False):
        group.update(values)
    if scheduler is not None and state["scheduler"] is not None:
        scheduler.load_state_dict(state["scheduler"])
    if scaler is not None and state["scaler"]:
        scaler.load_state_dict(state["scaler"])
    if mine["step"] is not None:
        cast(OptionalTrainer, trainer)._step = state["step"]


def _take_optimizer_states(trainer: TrainerLike, states: list[Any] | None) -> None:
    """Puts rank 0's states in place of this rank's. On rank 0 they are the same objects."""
    if states is None:
        if trainer.optimizer is not None:
            torch_optimizer(trainer).state.clear()
        return
    if trainer.optimizer is None and any(states):
        trainer.create_optimizer()
    optimizer = torch_optimizer(trainer)
    for parameter, state in zip(_parameters_of(optimizer) if optimizer else (), states, strict=False):
        if state:
            optimizer.state[parameter] = state
        else:
            optimizer.state.pop(parameter, None)


def send_state(manager: DDPManager, mine: Any) -> tuple[Any, list[str]]:
    """Gives every rank rank 0's state. Collective.

    Tensors of the same shape and type are overwritten in place; for others new ones are made.

    Args:
        mine: This rank's state: dicts, lists, tuples, tensors, numbers and texts.

    Returns:
        Rank 0's state; and the type names of values that cannot be sent, of which each rank keeps its own.
    """
    sent: list[torch.Tensor] = []
    kept: list[str] = []
    if manager.identity.rank == 0:
        plain = _to_plain(mine, sent, kept)
        manager.broadcast_text(json.dumps([plain, kept]))
        manager.broadcast_tensors(sent)
        return mine, kept
    plain, kept = json.loads(manager.broadcast_text(""))
    state = _from_plain(plain, mine, sent, local_device(manager.identity, manager.config))
    manager.broadcast_tensors(sent)
    return state, kept


def _to_plain(value: Any, tensors: list[torch.Tensor], kept: list[str]) -> Any:
    """A value as `[kind, ...]`. Its tensors are appended to `tensors`, in order."""
    if isinstance(value, torch.Tensor) and is_traceable_wrapper_subclass(value):
        # For example torchao's: only the class itself can make one.
        names, _ = value.__tensor_flatten__()
        return ["wrapper", [[name, _to_plain(getattr(value, name), tensors, kept)] for name in names]]
    if isinstance(value, torch.Tensor):
        tensors.append(value)
        return ["tensor", list(value.shape), str(value.dtype).removeprefix("torch."), value.device.type]
    if isinstance(value, Mapping):
        return ["dict", [[key, _to_plain(item, tensors, kept)] for key, item in value.items()]]
    if isinstance(value, (list, tuple)):
        return [type(value).__name__, [_to_plain(item, tensors, kept) for item in value]]
    if isinstance(value, _PLAIN):
        return ["plain", value]
    kept.append(type(value).__name__)
    return ["kept"]


def _from_plain(plain: Any, mine: Any, tensors: list[torch.Tensor], device: torch.device) -> Any:
    """Builds the value, with the parts of `mine` that fit. The tensors to be filled are appended to `tensors`."""
    kind, *rest = plain
    if kind == "wrapper":
        for name, part in rest[0]:
            _from_plain(part, getattr(mine, name, None), tensors, device)
        return mine
    if kind == "tensor":
        shape, dtype, place = rest
        fits = isinstance(mine, torch.Tensor) and list(mine.shape) == shape and str(mine.dtype) == f"torch.{dtype}"
        if not fits:
            mine = torch.empty(shape, dtype=getattr(torch, dtype), device="cpu" if place == "cpu" else device)
        tensors.append(mine)
        return mine
    if kind == "dict":
        named = mine if isinstance(mine, Mapping) else {}
        return {key: _from_plain(item, named.get(key), tensors, device) for key, item in rest[0]}
    if kind == "plain":
        return rest[0]
    if kind == "kept":
        return mine
    own = list(mine) if isinstance(mine, (list, tuple)) else []
    items = [_from_plain(item, own[i] if i < len(own) else None, tensors, device) for i, item in enumerate(rest[0])]
    return tuple(items) if kind == "tuple" else items
