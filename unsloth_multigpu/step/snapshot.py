"""Runs a pass over a step without side effects: no dropout, no exchange, and all changed state is restored."""

from __future__ import annotations

import functools
import gc
import inspect
import math
import operator
import random
import types
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from unsloth_multigpu.group.random_state import kept_random_state
from unsloth_multigpu.group.shards import has_shards, tried_pass
from unsloth_multigpu.group.waits import Lap, moment
from unsloth_multigpu.library import is_library
from unsloth_multigpu.part import TrainerLike
from unsloth_multigpu.seam import instance_attribute
from unsloth_multigpu.step.comparison import sketch
from unsloth_multigpu.wire.heartbeat import HeartbeatPage

# Errors of code that computes a micro-batch, which a comparison reports.
ERRORS = (ArithmeticError, AssertionError, AttributeError, LookupError, TypeError, ValueError)

_DROPOUTS = {
    *(functional.dropout, functional.dropout1d, functional.dropout2d, functional.dropout3d),
    *(functional.alpha_dropout, functional.feature_alpha_dropout),
    *(torch.dropout, torch.dropout_, torch.alpha_dropout, torch.feature_dropout),
}
# The first parameters of all of them.
_DROPOUT = inspect.signature(lambda input, p=0.5, training=True, inplace=False, **_: None)
_ATTENTIONS = {
    functional.scaled_dot_product_attention: inspect.signature(
        lambda query, key, value, attn_mask=None, dropout_p=0.0, *_, **__: None
    ),
    functional.multi_head_attention_forward: inspect.signature(functional.multi_head_attention_forward),
}
_CLASS_LOSSES = {functional.cross_entropy, functional.nll_loss}
_MOST_CLASSES = 10_000

# Containers of the standard library. Mappings of other libraries may create values on access: transformers' tables of
# models import all models.
_CONTAINERS = (list, dict, set, deque, OrderedDict, defaultdict, Counter)
_PLAIN = (int, float, complex, str, bytes, bool, type(None), torch.Tensor, list, dict, set, deque)
# Containers with more items than `_MOST_ITEMS` are data, not state. Above `_MOST_PARTS`, items are not followed.
_MOST_ITEMS, _MOST_PARTS = 10_000, 1000
# Larger tensors, and larger NumPy arrays, are data.
_MOST_ELEMENTS, _MOST_IN_ARRAY = 2**24, 10_000
_MOST_OBJECTS = 200_000
_DATA = ("train_dataset", "eval_dataset")
# Modules of library classes that wrap a script's collator or data set.
_WRAPPERS = ("torch.utils.data", "transformers.trainer_utils", "transformers.data", "trl.trainer")
# Attributes of every module. A pass changes only the buffers among them.
_OF_MODULES = frozenset(vars(nn.Module()))


class WithoutDropout(TorchFunctionMode):
    """Switches dropout off and records class weights.

    `model.eval()` would also switch off other behaviour of training, and some quantized layers repack their weights
    when they leave training mode (`bitsandbytes.nn.Linear4bit` on the CPU).

    Attributes:
        has_dropped: A dropout was switched off.
        numbers: See `numbers_of`.
        has_drawn, gradient, seconds: Set by the caller: random numbers were drawn nevertheless; a sketch of the
            gradient; the time of the pass.
    """

    def __init__(self) -> None:
        super().__init__()
        self.has_dropped = self.has_drawn = False
        self.numbers: dict[str, float] = {}
        self.gradient: list[float] = []
        self.seconds = 0.0
        self._tables: set[tuple[float, ...]] = set()

    @property
    def class_weights(self) -> tuple[float, ...]:
        """Class weights, if all class losses with weights have the same ones."""
        return next(iter(self._tables)) if len(self._tables) == 1 else ()

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func in _DROPOUTS:
            bound = _DROPOUT.bind(*args, **kwargs)
            bound.apply_defaults()
            self.has_dropped |= bool(bound.arguments["p"] and bound.arguments["training"])
            return bound.arguments["input"]
        if (signature := _ATTENTIONS.get(func)) is not None:
            bound = signature.bind(*args, **kwargs)
            self.has_dropped |= bool(bound.arguments.get("dropout_p"))
            bound.arguments["dropout_p"] = 0.0
            args, kwargs = bound.args, bound.kwargs
        elif func in _CLASS_LOSSES:
            weight = inspect.signature(func).bind(*args, **kwargs).arguments.get("weight")
            if isinstance(weight, torch.Tensor) and weight.numel() <= _MOST_CLASSES:
                self._tables.add(tuple(weight.detach().double().tolist()))
        return func(*args, **kwargs)


@contextmanager
def kept_training_state(trainer: TrainerLike) -> Iterator[WithoutDropout]:
    """Surrounds a pass without dropout, and restores, on exit, all state that forward and backward may change.

    This covers random states, gradients, and what `KeptObjects` finds from the trainer. Writes to files or trackers
    cannot be undone; `Trainer.log` does nothing meanwhile.
    """
    device = trainer.args.device
    devices = [] if device.type == "cpu" else [device]
    modules = [value for value in vars(trainer).values() if isinstance(value, nn.Module)]
    # The optimizer may have parameters that are in no module of the Trainer, such as those of several losses in a dict.
    groups = trainer.optimizer.param_groups if trainer.optimizer is not None else []
    trained = [*(p for module in modules for p in module.parameters()), *(p for g in groups for p in g["params"])]
    gradients = [(p, p.grad) for p in {id(p): p for p in trained}.values()]
    with ExitStack() as stack:
        stack.enter_context(kept_random_state())
        stack.enter_context(torch.random.fork_rng(devices, device_type=device.type if devices else "cuda"))
        stack.enter_context(KeptObjects(trainer))
        stack.enter_context(instance_attribute(trainer, "log", lambda *args, **kwargs: None))
        for parameter, gradient in gradients:
            parameter.grad = None
            stack.callback(setattr, parameter, "grad", gradient)
        # It clears gradients after an error.
        stack.enter_context(tried_pass(trainer.model))
        result = stack.enter_context(WithoutDropout())
        yield result
        result.numbers = numbers_of(trainer)


class KeptObjects:
    """Restores, at the end of a context, the state of objects: counters, metrics, running sums, buffers, generators.

    It follows, breadth-first, the roots, modules, objects and classes of the script, closures and global variables of
    the script's functions, and plain containers. New attributes are deleted, except for objects of libraries, so that
    a teacher model is not loaded again in each pass.
    """

    def __init__(self, *roots: Any) -> None:
        self._roots = {id(root) for root in roots}
        # References keep the objects alive, so that ids stay unique.
        self._seen: dict[int, Any] = {}
        self._next = deque(roots)
        self._restoring: list[Callable[[], Any]] = []
        while self._next and len(self._seen) < _MOST_OBJECTS:
            value = self._next.popleft()
            if not isinstance(value, (int, float, str, bytes, type(None))) and id(value) not in self._seen:
                self._seen[id(value)] = value
                self._look(value)

    def __enter__(self) -> KeptObjects:
        return self

    def __exit__(self, *_: object) -> None:
        self.restore()

    def restore(self) -> None:
        """Restores the saved state."""
        for restore in self._restoring:
            restore()

    def _look(self, value: Any) -> None:
        if type(value) is torch.Tensor:
            if value.numel() <= _MOST_ELEMENTS:
                self._restoring.append(functools.partial(_restore_tensor, value, value.detach().clone()))
        elif _is_of_numpy(value) and hasattr(value, "flags"):
            if value.size <= _MOST_IN_ARRAY and value.flags.writeable:  # A NumPy scalar never is.
                self._restoring.append(functools.partial(_restore_array, value, value.copy()))
        elif (generator := _generator_of(value)) is not None:
            self._restoring.append(functools.partial(generator[1], generator[0]()))
        elif _is_container(value):
            self._container(value)
        elif isinstance(value, types.FunctionType):
            self._function(value)
        elif isinstance(value, (functools.partial, types.MethodType, tuple)):
            self._next += gc.get_referents(value)[:_MOST_PARTS]
        elif hasattr(value, "__dict__") and not isinstance(value, (type, types.ModuleType)):
            self._attributes(value)

    def _attributes(self, value: Any) -> None:
        """Saves the attributes of an object, and follows methods and class attributes of the script's classes."""
        is_own = id(value) in self._roots or _is_own(value)
        if not (is_own or isinstance(value, nn.Module)):
            return
        self._variables(vars(value))
        for cls in type(value).__mro__:
            if not is_library(cls.__module__):
                self._next += vars(cls).values()

    def _container(self, value: Any) -> None:
        if len(value) > _MOST_ITEMS:
            return
        is_dict = isinstance(value, dict)
        keys, items = list(value), list(value.values()) if is_dict else []

        def restore() -> None:
            now = [*value, *(value.values() if is_dict else ())]
            if len(now) != len(keys) + len(items) or not all(map(operator.is_, now, [*keys, *items])):
                value.clear()
                # A mapping: `Counter.update` would count pairs.
                held: Any = dict(zip(keys, items, strict=True)) if is_dict else keys
                (value.update if isinstance(value, (dict, set)) else value.extend)(held)

        self._restoring.append(restore)
        if len(keys) <= _MOST_PARTS:
            self._next += items if is_dict else keys

    def _function(self, function: types.FunctionType) -> None:
        for cell in function.__closure__ or ():
            with suppress(ValueError):  # An empty one.
                self._restoring.append(functools.partial(setattr, cell, "cell_contents", cell.cell_contents))
                self._next.append(cell.cell_contents)
        self._variables(vars(function))
        if not is_library(function.__module__ or ""):
            self._variables(function.__globals__, function.__code__.co_names)

    def _variables(self, values: dict[str, Any], names: Iterable[str] | None = None) -> None:
        """Saves attributes or variables: all, or those with the given names."""

        def now() -> list[str]:
            return [name for name in (values if names is None else names) if name in values and name not in _DATA]

        kept = {name: values[name] for name in now()}

        def restore() -> None:
            for name in now():
                value = values[name]
                if name not in kept and (isinstance(value, _PLAIN) or _is_of_numpy(value) or _is_own(value)):
                    del values[name]  # An attribute of the class becomes visible again.
            values.update(kept)

        self._restoring.append(restore)
        kept_names = set(kept)
        if kept.keys() >= _OF_MODULES:
            self._next += (kept["_buffers"], *kept["_modules"].values())
            kept_names -= _OF_MODULES
        self._next += (kept[name] for name in kept_names)


def numbers_of(trainer: TrainerLike) -> dict[str, float]:
    """Returns the numbers that a script keeps on its trainer, by name, without those of libraries."""
    cls: type = type(trainer)
    own = {name: value for name, value in vars(trainer).items() if name not in _names_of_libraries(cls)}
    return {f"{cls.__name__}.{n}": v for n, v in own.items() if isinstance(v, (int, float)) and not math.isnan(v)}


@functools.cache
def _names_of_libraries(cls: type) -> frozenset[str]:
    """Returns the names used by library methods of a class: attributes with these names belong to the library."""
    libraries = [each for each in cls.__mro__ if is_library(each.__module__)]
    methods = [inspect.unwrap(f) for each in libraries for f in vars(each).values() if callable(f)]
    return frozenset(name for method in methods if hasattr(method, "__code__") for name in method.__code__.co_names)


def _is_own(value: Any) -> bool:
    """True for an object of a script's class, and for library objects that wrap one."""
    module = type(value).__module__
    return not is_library(module) or module.startswith(_WRAPPERS)


def _is_of_numpy(value: Any) -> bool:
    """True for a NumPy array or scalar."""
    return type(value).__module__ == "numpy"


def _is_container(value: Any) -> bool:
    is_one = isinstance(value, (list, dict, set, deque))
    return is_one and (type(value) in _CONTAINERS or not is_library(type(value).__module__))


def _restore_tensor(tensor: torch.Tensor, held: torch.Tensor) -> None:
    # An unnecessary write would raise the tensor's version, which autograd checks.
    if not torch.equal(tensor.detach(), held):
        with torch.no_grad():
            tensor.detach().copy_(held)


def _restore_array(array: Any, held: Any) -> None:
    if array.flags.writeable and array.shape == held.shape:  # The script may have frozen or resized it.
        array[...] = held


def _generator_of(value: Any) -> tuple[Callable[[], Any], Callable[[Any], Any]] | None:
    """Returns functions that read and write the state of a random generator; None for other objects."""
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


class LonePass:
    """Computes gradients that are neither synchronized nor applied. The caller restores the state of the training."""

    def __init__(self, trainer: TrainerLike, beat: HeartbeatPage) -> None:
        self._trainer = trainer
        self._beat = beat
        # Parameters that got a gradient, if DDP searches for unused ones.
        self._used: list[nn.Parameter] = []

    def gradient(
        self, model: nn.Module, num_micro_batches: int, compute: Callable[[nn.Module, int], object]
    ) -> tuple[list[float], float]:
        """Computes micro-batches one after the other.

        Args:
            model: The wrapped model of the training.
            compute: Runs forward and backward pass, given the model without DDP's wrapper and the micro-batch's index.

        Returns:
            A sketch of the gradient, and the seconds on this rank.
        """
        trainer, accelerator = self._trainer, self._trainer.accelerator
        device, gradient_state = trainer.args.device, accelerator.gradient_state
        before = gradient_state.sync_gradients
        # DDP would count this pass as one of the training. In one process there is no DDP.
        bare = model.module if isinstance(model, nn.parallel.DistributedDataParallel) else model
        begin = moment(device)
        try:
            for i in range(num_micro_batches):
                is_last = i == num_micro_batches - 1
                gradient_state._set_sync_gradients(is_last)
                # Sharded ranks all compute the same gradient here, so its mean is unchanged.
                is_synced = is_last and has_shards(trainer.model)
                if is_synced:
                    # The loop may be within `no_sync`. Leaving such a context turns the reduction of shards on again:
                    # otherwise this gradient would be added to that of the next pass.
                    with accelerator.no_sync(model):
                        pass
                self._beat.mark(micro_batch=i)
                with nullcontext() if is_synced else accelerator.no_sync(model):
                    compute(bare, i)
        finally:
            gradient_state._set_sync_gradients(before)
        seconds = Lap(begin, moment(device)).seconds()
        if getattr(model, "find_unused_parameters", False):
            self._used += [p for p in model.parameters() if p.grad is not None]
        return sketch(trainer.model), seconds

    def zero_used(self) -> None:
        """Gives parameters of earlier passes a zero gradient: DDP takes them for used in its next all-reduce."""
        for parameter in self._used:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)

    def end(self) -> None:
        """Ends a comparison, after the gradients of the training are restored."""
        self.zero_used()
        self._used.clear()
