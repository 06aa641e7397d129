"""Keeps what the script's own code may change when it is run once more: a trial must leave no trace."""

from __future__ import annotations

import collections
import copy
import functools
import types
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn

from unsloth_multigpu.group.random_state import kept_random_state
from unsloth_multigpu.seam import instance_attribute
from unsloth_multigpu.step.effect import is_library
from unsloth_multigpu.trainer_protocol import TrainerLike

# Numbers and texts, and containers of them: counters, lists of metrics, running sums.
_PLAIN = (int, float, complex, str, bytes, bool, type(None))
_CONTAINERS = (list, dict, set, collections.deque)
# Those of the standard library, which hold what they show. A mapping of a library may make its values when it is asked
# for them: transformers' tables of models import all models.
_STANDARD = frozenset({*_CONTAINERS, collections.OrderedDict, collections.defaultdict, collections.Counter})
# A container of more is data and no state of a loss; copying it at each trial would cost.
_MOST_ITEMS = 10_000
_DATA = ("train_dataset", "eval_dataset")


@contextmanager
def kept_training_state(trainer: TrainerLike) -> Iterator[None]:
    """Restores on leaving what a forward and backward pass of the trainer's loss may have changed.

    That is: random states, gradients, buffers of the model (running statistics, counters), attributes of the trainer,
    of the model's modules and of the script's loss function, and variables which that function closes over or reads
    from its module; of containers the contents, where these are plain values. What the loss writes elsewhere (a file, a
    tracker) cannot be taken back; `Trainer.log` does nothing meanwhile.
    """
    with ExitStack() as stack:
        stack.enter_context(kept_random_state())
        stack.enter_context(_forked(trainer.args.device))
        stack.enter_context(_kept_tensors(list(_modules(trainer))))
        for values in _namespaces(trainer):
            stack.callback(
                functools.partial(_restore, values, {n: _copied(v) for n, v in values.items() if n not in _DATA})
            )
        for cell in _cells(trainer):
            stack.callback(functools.partial(_restore_cell, cell, _copied(cell.cell_contents)))
        stack.enter_context(_silent(trainer))
        yield


def _forked(device: torch.device) -> Any:
    """Keeps the random state of an accelerator."""
    if device.type == "cpu":
        return torch.random.fork_rng([])
    return torch.random.fork_rng([device], device_type=device.type)


@contextmanager
def _kept_tensors(modules: Sequence[nn.Module]) -> Iterator[None]:
    buffers = [(m, n, b, b.detach().clone()) for m in modules for n, b in m._buffers.items() if b is not None]
    gradients = [(p, p.grad) for m in modules for p in m._parameters.values() if p is not None]
    for parameter, _ in gradients:
        parameter.grad = None
    try:
        yield
    finally:
        with torch.no_grad():
            for module, name, buffer, value in buffers:
                module._buffers[name] = buffer
                # One that is not written would count as changed: autograd knows versions of tensors.
                if not torch.equal(buffer, value):
                    buffer.copy_(value)
        for parameter, gradient in gradients:
            parameter.grad = gradient


def _namespaces(trainer: TrainerLike) -> list[dict[str, Any]]:
    """Dictionaries of attributes and variables that the loss may write."""
    found = [vars(trainer), *(vars(module) for module in _modules(trainer))]
    for function in _loss_functions(trainer):
        owner = getattr(function, "__self__", None)
        found.extend(vars(o) for o in (function, owner) if o not in (None, trainer) and hasattr(o, "__dict__"))
        code = getattr(getattr(function, "__func__", function), "__code__", None)
        variables = getattr(function, "__globals__", {})
        if code is not None:
            found.append(_Names(variables, code.co_names))
    return found


class _Names(dict[str, Any]):
    """The variables of a module that one function names; writes go to the module."""

    def __init__(self, variables: dict[str, Any], names: tuple[str, ...]) -> None:
        super().__init__({name: variables[name] for name in names if name in variables})
        self._variables = variables

    def __setitem__(self, name: str, value: Any) -> None:
        self._variables[name] = value

    def __contains__(self, name: object) -> bool:
        return name in self._variables

    def __getitem__(self, name: str) -> Any:
        return self._variables[name]


def _cells(trainer: TrainerLike) -> list[types.CellType]:
    cells = [cell for f in _loss_functions(trainer) for cell in getattr(f, "__closure__", None) or ()]
    return [cell for cell in cells if _is_filled(cell) and _is_plain(cell.cell_contents)]


def _is_filled(cell: types.CellType) -> bool:
    try:
        cell.cell_contents  # noqa: B018
    except ValueError:
        return False
    return True


def _loss_functions(trainer: TrainerLike) -> list[Any]:
    """The script's own functions of the loss; those of libraries keep nothing but in attributes."""
    named = next((vars(cls)["compute_loss"] for cls in type(trainer).__mro__ if "compute_loss" in vars(cls)), None)
    # `self.loss = some_function` is a usual way to hand one in.
    found = [named, getattr(trainer, "compute_loss_func", None)]
    found += [v for v in vars(trainer).values() if isinstance(v, (types.FunctionType, functools.partial))]
    return [getattr(f, "func", f) for f in found if callable(f)]


def _modules(trainer: TrainerLike) -> Iterator[nn.Module]:
    """Those of the model, and of losses that are modules of their own."""
    for value in {id(m): m for m in (trainer.model, *vars(trainer).values()) if isinstance(m, nn.Module)}.values():
        yield from value.modules()


def _is_plain(value: Any) -> bool:
    """True for a plain value, and for containers that hold no more of them than a state would."""
    stack, num_items = [value], 0
    while stack:
        item = stack.pop()
        if _is_container(item):
            num_items += len(item)
            if num_items > _MOST_ITEMS:
                return False
            stack.extend(item.values() if isinstance(item, dict) else item)
        elif not isinstance(item, _PLAIN):
            return False
    return True


def _is_container(value: Any) -> bool:
    return type(value) in _STANDARD or (isinstance(value, _CONTAINERS) and not is_library(type(value).__module__))


def _copied(value: Any) -> tuple[Any, Any]:
    """The object, and a copy of it where it is a container that can be restored."""
    return value, _copy(value) if _is_container(value) and _is_plain(value) else None


def _copy(value: Any) -> Any:
    """A copy of a container and of those in it; not of attributes of the container itself."""
    if not _is_container(value):
        return value
    held = copy.copy(value)
    if not isinstance(held, set):
        for key in held if isinstance(held, dict) else range(len(held)):
            held[key] = _copy(held[key])
    return held


def _restored(kept: tuple[Any, Any]) -> Any:
    """The same object with what it held: others may hold it as well."""
    value, held = kept
    if held is not None and value != held:
        value.clear()
        (value.update if isinstance(value, (dict, set)) else value.extend)(held)
    return value


def _restore(values: dict[str, Any], kept: Mapping[str, tuple[Any, Any]]) -> None:
    for name in [name for name in values if name not in kept and name not in _DATA and _is_plain(values[name])]:
        del values[name]  # Made by the trial.
    for name, value in kept.items():
        values[name] = _restored(value)


def _restore_cell(cell: types.CellType, kept: tuple[Any, Any]) -> None:
    cell.cell_contents = _restored(kept)


@contextmanager
def _silent(trainer: TrainerLike) -> Iterator[None]:
    """Keeps what the loss logs by itself out of trackers and the history."""
    with instance_attribute(trainer, "log", lambda *args, **kwargs: None):
        yield
