"""Keeps what the script's own code may change when a step is computed once more, which must leave no trace."""

from __future__ import annotations

import collections
import copy
import functools
import random
import types
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
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
# A container of more is data and no state of a loss; copying it for each pass would cost.
_MOST_ITEMS = 10_000
# The same of a tensor's elements.
_MOST_ELEMENTS = 2**20
# Functions and objects that are followed, and items of a list that are.
_MOST_OBJECTS, _MOST_PARTS = 500, 50
_DATA = ("train_dataset", "eval_dataset")
# Where libraries keep what lies around a script's collator or data set.
_WRAPPERS = ("torch.utils.data", "transformers.trainer_utils", "transformers.data", "trl.trainer")


@contextmanager
def kept_training_state(trainer: TrainerLike) -> Iterator[None]:
    """Restores on leaving what a forward and backward pass of the trainer's loss may have changed.

    That is: random states, gradients, buffers of the model (running statistics, counters), attributes of the trainer,
    of the model's modules, of the script's loss function, of its classes and of its objects that these have, and
    variables which that function, and those it calls, close over or read from their modules; of containers the
    contents, where these are plain values or tensors. What is new is deleted. What the loss writes elsewhere (a file, a
    tracker) cannot be taken back; `Trainer.log` does nothing meanwhile.
    """
    modules = list(_modules(trainer))
    owned = [value for name, value in vars(trainer).items() if name not in _DATA]
    owned += [value for module in modules if _is_own(module) for value in vars(module).values()]
    known = {id(o) for o in (trainer, *modules)}
    with ExitStack() as stack:
        stack.enter_context(kept_random_state())
        stack.enter_context(_forked(trainer.args.device))
        stack.enter_context(_kept_tensors(modules))
        # A model of a library stays: loading one, such as a teacher, takes too long to do it in each call.
        stack.callback(_keep(vars(trainer)))
        for module in modules:
            stack.callback(_keep(vars(module), takes_all_new=_is_own(module)))
        for restore in _keep_reached([*_loss_functions(trainer), *owned], known):
            stack.callback(restore)
        for cls in _own_classes([trainer, *modules]):
            stack.callback(_keep_class(cls))
        stack.enter_context(_silent(trainer))
        yield


@contextmanager
def kept_data_state(loader: Any) -> Iterator[None]:
    """Restores on leaving what reading rows and collating them may have changed in the collator and the data set.

    Attributes of both and of what they wrap, and generators that they have for themselves.

    Args:
        loader: Of the training, as the Trainer built it.
    """
    roots = [loader.collate_fn, loader.dataset]
    with ExitStack() as stack:
        for restore in _keep_reached(roots, set()):
            stack.callback(restore)
        for cls in _own_classes(roots):
            stack.callback(_keep_class(cls))
        yield


def _forked(device: torch.device) -> Any:
    """Keeps the random state of an accelerator."""
    if device.type == "cpu":
        return torch.random.fork_rng([])
    return torch.random.fork_rng([device], device_type=device.type)


@contextmanager
def _kept_tensors(modules: Sequence[nn.Module]) -> Iterator[None]:
    buffers = [(m, n, b, b.detach().clone()) for m in modules for n, b in m._buffers.items() if b is not None]
    names = [(m, set(m._buffers), [n for n, b in m._buffers.items() if b is None]) for m in modules]
    gradients = [(p, p.grad) for m in modules for p in m._parameters.values() if p is not None]
    for parameter, _ in gradients:
        parameter.grad = None
    try:
        yield
    finally:
        for module, before, empty in names:
            for name in set(module._buffers) - before:
                del module._buffers[name]
            module._buffers.update(dict.fromkeys(empty))
        with torch.no_grad():
            for module, name, buffer, value in buffers:
                module._buffers[name] = buffer
                # One that is not written would count as changed: autograd knows versions of tensors.
                if not torch.equal(buffer, value):
                    buffer.copy_(value)
        for parameter, gradient in gradients:
            parameter.grad = gradient


def _keep(
    values: dict[str, Any],
    names: Sequence[str] | None = None,
    *,
    takes_all_new: bool = False,
) -> Callable[[], None]:
    """Notes attributes or variables.

    Args:
        values: Of an object or a module.
        names: Only these; None = all.
        takes_all_new: New ones of any type are deleted; else those of libraries stay, which keep caches.

    Returns:
        Restores them.
    """

    def now() -> list[str]:
        return [name for name in (values if names is None else names) if name in values and name not in _DATA]

    kept = {name: _copied(values[name]) for name in now()}

    def restore() -> None:
        for name in now():
            if name not in kept and (takes_all_new or _is_state(values[name]) or _is_own(values[name])):
                del values[name]  # An attribute of the class is seen again.
        for name, value in kept.items():
            values[name] = _restored(value)

    return restore


def _keep_class(cls: type) -> Callable[[], None]:
    """Notes the plain attributes of a class, such as a counter or a list that all its objects share."""
    kept = {name: _copied(value) for name, value in vars(cls).items() if _is_shared_state(name, value)}

    def restore() -> None:
        for name in [n for n, value in vars(cls).items() if n not in kept and _is_shared_state(n, value)]:
            delattr(cls, name)
        for name, value in kept.items():
            if vars(cls).get(name) is not _restored(value):
                setattr(cls, name, value[0])

    return restore


def _is_shared_state(name: str, value: Any) -> bool:
    return not name.startswith("__") and _is_state(value)


def _own_classes(objects: Sequence[Any]) -> list[type]:
    classes = {cls for o in objects for cls in type(o).__mro__ if not is_library(cls.__module__)}
    return sorted(classes, key=lambda cls: (cls.__module__, cls.__qualname__))


def _keep_reached(roots: Sequence[Any], known: set[int]) -> Iterator[Callable[[], None]]:
    """Notes what functions and objects hold: closures, variables that functions name, attributes of the script's own.

    Args:
        roots: Of libraries these are looked into as well where they are functions, collators or data sets.
        known: Ids of objects that are kept otherwise.
    """
    # A list keeps the objects, and so their ids, alive.
    stack: list[Any] = list(reversed(roots))
    seen: list[Any] = []
    while stack and len(seen) < _MOST_OBJECTS:
        value = stack.pop()
        if id(value) in known:
            continue
        found = _held_by(value)
        if found is None:
            continue
        known.add(id(value))
        seen.append(value)
        for values, names in found.spaces:
            yield _keep(values, names)
        for cell in found.cells:
            yield functools.partial(_restore_cell, cell, _copied(cell.cell_contents))
        stack.extend(reversed(found.others))


@dataclass(frozen=True)
class _Held:
    """What a function or an object may write to.

    Args:
        spaces: Attributes, or variables of which names are given.
        cells: Of its closure.
        others: What it leads to.
    """

    spaces: list[tuple[dict[str, Any], Sequence[str] | None]] = field(default_factory=list)
    cells: list[types.CellType] = field(default_factory=list)
    others: list[Any] = field(default_factory=list)


def _held_by(value: Any) -> _Held | None:
    if isinstance(value, functools.partial):
        return _Held(others=[value.func, *value.args, *value.keywords.values()])
    if isinstance(value, types.MethodType):
        return _Held(others=[value.__self__, value.__func__])
    if isinstance(value, types.FunctionType):
        cells = [cell for cell in value.__closure__ or () if _is_filled(cell)]
        held = _Held([(vars(value), None)], cells, [cell.cell_contents for cell in cells])
        if not is_library(value.__module__ or ""):
            names = value.__code__.co_names
            held.spaces.append((value.__globals__, names))
            held.others.extend(value.__globals__[name] for name in names if name in value.__globals__)
        return held
    if type(value) in (list, tuple) and len(value) <= _MOST_PARTS:
        return _Held(others=list(value))
    is_wrapper = type(value).__module__.startswith(_WRAPPERS)
    if (
        not (is_wrapper or _is_own(value))
        or isinstance(value, (type, types.ModuleType))
        or not hasattr(value, "__dict__")
    ):
        return None
    return _Held([(vars(value), None)], others=[v for name, v in vars(value).items() if name not in _DATA])


def _is_own(value: Any) -> bool:
    """True for an object of a class of the script."""
    return not is_library(type(value).__module__)


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
    return _is_made_of(value, _PLAIN)


def _is_state(value: Any) -> bool:
    """True for plain values and tensors, and for containers that hold no more of them than a state would."""
    return _is_made_of(value, (*_PLAIN, torch.Tensor))


def _is_made_of(value: Any, kinds: tuple[type, ...]) -> bool:
    stack, num_items = [value], 0
    while stack:
        item = stack.pop()
        if _is_container(item):
            num_items += len(item)
            if num_items > _MOST_ITEMS:
                return False
            stack.extend(item.values() if isinstance(item, dict) else item)
        elif not isinstance(item, kinds):
            return False
    return True


def _is_container(value: Any) -> bool:
    return type(value) in _STANDARD or (isinstance(value, _CONTAINERS) and not is_library(type(value).__module__))


def _copied(value: Any) -> tuple[Any, Any]:
    """The object, and a copy of what it holds where that can be restored: containers, tensors, generators."""
    if _is_container(value):
        return value, _copy(value) if _is_state(value) else None
    if type(value) is torch.Tensor:
        return value, value.detach().clone() if value.numel() <= _MOST_ELEMENTS else None
    generator = _generator_of(value)
    return value, None if generator is None else generator[0]()


def _generator_of(value: Any) -> tuple[Callable[[], Any], Callable[[Any], Any]] | None:
    """Reads and writes the state of a random generator; None for anything else."""
    if isinstance(value, random.Random) and not isinstance(value, random.SystemRandom):
        return value.getstate, value.setstate
    if isinstance(value, torch.Generator):
        return value.get_state, value.set_state
    if not type(value).__module__.startswith("numpy.random"):
        return None
    bits = getattr(value, "bit_generator", None)
    if bits is not None:
        return lambda: bits.state, lambda state: setattr(bits, "state", state)
    return (value.get_state, value.set_state) if hasattr(value, "set_state") else None


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
    if held is None:
        return value
    if isinstance(value, torch.Tensor):
        if not torch.equal(value.detach(), held):
            with torch.no_grad():
                value.detach().copy_(held)
    elif (generator := _generator_of(value)) is not None:
        generator[1](held)
    elif not (_is_plain(value) and _is_plain(held)) or value != held:
        value.clear()
        (value.update if isinstance(value, (dict, set)) else value.extend)(held)
    return value


def _restore_cell(cell: types.CellType, kept: tuple[Any, Any]) -> None:
    cell.cell_contents = _restored(kept)


@contextmanager
def _silent(trainer: TrainerLike) -> Iterator[None]:
    """Keeps what the loss logs by itself out of trackers and the history."""
    with instance_attribute(trainer, "log", lambda *args, **kwargs: None):
        yield
