"""A client's turn on the one model of its process: the global weights go in, its own seeds hold, and nothing stays."""

from __future__ import annotations

import gc
import hashlib
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from flwr.app import ArrayRecord
from torch import nn

from unsloth_multigpu.accelerator import KINDS
from unsloth_multigpu.errors import FederatedError
from unsloth_multigpu.federated.adapters import (
    is_quantized,
    to_arrays,
    travelling_tensors,
    write_arrays,
)
from unsloth_multigpu.group.random_state import seeded_draws
from unsloth_multigpu.group.replicas import tensor_hashes

_CONTAINERS = (dict, OrderedDict, list, set)


@dataclass(frozen=True)
class FederatedClient:
    """What `train_fn` and `evaluate_fn` get in addition to the model.

    Args:
        client_id: 0 .. num_clients - 1: which part of the data this client has (Flower's "partition-id").
        num_clients: Of the whole federation.
        server_round: From 1 on.
        device: Where the model is.
        config: What `fit(config=...)` and the strategy sent.
        seed: Of this client in this round. Python, NumPy and torch are seeded with it already.
        server_id: Of the server.
    """

    client_id: int
    num_clients: int
    server_round: int
    device: torch.device
    config: Mapping[str, Any] = field(default_factory=dict)
    seed: int = 0
    server_id: str = ""


def client_seed(seed: int, server_round: int, who: int | str) -> int:
    """32 bits that depend on all three and on nothing else: not on the place, not on who came before."""
    digest = hashlib.blake2b(f"{seed}/{server_round}/{who}".encode(), digest_size=4).digest()
    return int.from_bytes(digest, "little")


@contextmanager
def seeded(seed: int, device: torch.device) -> Iterator[None]:
    """Seeds Python, NumPy and torch (all devices) and puts back what their states were, on `device` as well."""
    backend = getattr(torch, device.type) if device.type in KINDS else None
    state = None if backend is None else backend.get_rng_state(device)
    with seeded_draws(seed):
        try:
            torch.manual_seed(seed)
            yield
        finally:
            if backend is not None:
                backend.set_rng_state(state, device)


def visible_device() -> torch.device:
    """The device of this process: a slot sees at most one."""
    kinds = [kind for kind in KINDS if hasattr(torch, kind) and getattr(torch, kind).is_available()]
    return torch.device(kinds[0], 0) if kinds else torch.device("cpu")


def build_model(model_builder: Callable[[], nn.Module], device: torch.device, seed: int) -> nn.Module:
    """Calls `model_builder` with the seeds set, so that LoRA starts alike in all processes, and moves the model.

    A model that is quantised, spread over devices by `device_map` or not on the CPU stays where its builder put it.
    """
    with seeded(seed, device):
        model = model_builder()
    if not isinstance(model, nn.Module):
        raise FederatedError(
            f"model_builder returned {type(model).__name__}, not a torch.nn.Module.",
            hint="Return the model alone; make tokenizer and data in train_fn.",
        )
    is_on_cpu = all(tensor.device.type == "cpu" for tensor in (*model.parameters(), *model.buffers()))
    if is_on_cpu and not getattr(model, "hf_device_map", None) and not is_quantized(model):
        model.to(device)
    return model


class ClientModel:
    """One model per process, for one client after the other. Each finds it as the builder left it.

    Set before each client are the global weights and buffers, gradients, requires_grad, and the modules' attributes:
    train or eval mode, numbers, hooks, PEFT's active adapter, `forward` (mixed precision wraps it again in each
    Trainer). What lies deeper stays, as `model.config` and hooks of tensors. A client that replaced a parameter,
    changed a frozen one or moved the model has it built again for the next one.
    """

    def __init__(self, model_builder: Callable[[], nn.Module], seed: int) -> None:
        self._model_builder = model_builder
        self._seed = seed
        self._built: BuiltModel | None = None

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_built": None}  # Another process gets the builder, not the built model.

    def build(self, device: torch.device) -> BuiltModel:
        """The model, built if there is none, as its builder or the last client left it."""
        if self._built is None:
            self._built = BuiltModel(build_model(self._model_builder, device, self._seed))
        return self._built

    def prepare(self, arrays: ArrayRecord, device: torch.device) -> nn.Module:
        """The model with the global state in it; raises FederatedError where its tensors differ from the server's."""
        built = self.build(device)
        built.reset()
        write_arrays(built.travelling, arrays)
        if not built.marks:
            built.marks = built.marked()
        return built.model

    def read(self) -> ArrayRecord:
        """The travelling tensors after a client's training, copied.

        Integers and truth values as float64: some strategies subtract or scale arrays or add noise in place.
        """
        tensors = self._built.current() if self._built else {}
        is_float = {name: value.is_floating_point() or value.is_complex() for name, value in tensors.items()}
        return to_arrays({name: value if is_float[name] else value.double() for name, value in tensors.items()})

    def release(self) -> list[str]:
        """Frees what a client left; returns the tensors that `reset` cannot put back: the model is built again."""
        if self._built is None:
            return []
        before = self._built.marks
        now = self._built.marked() if before else {}
        changed = [name for name in before | now if before.get(name) != now.get(name)]
        if changed:
            self._built = None
        else:
            self._built.reset()
        if torch.cuda.is_initialized():
            gc.collect()  # A Trainer is a cycle: its optimizer's memory would stay until the next collection.
        return changed


class BuiltModel:
    """A model and what it was like when it was built; `marks` is `marked` as it was before the client."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.travelling = travelling_tensors(model)
        self.marks: dict[str, tuple[Any, ...]] = {}
        self._shapes = {name: tuple(value.shape) for name, value in self.travelling.items()}
        self._trainable = [(parameter, parameter.requires_grad) for parameter in model.parameters()]
        self._attributes = [(vars(module), dict(vars(module))) for module in model.modules()]
        values = [value for _, kept in self._attributes for value in kept.values()]
        self._contents = [(value, value.copy()) for value in values if type(value) in _CONTAINERS]
        self._buffers = dict(model.named_buffers())
        # Not those of a quantised model: its base weights may be buffers.
        fixed = {} if is_quantized(model) else self._buffers
        self._caches = [
            (value, value.detach().to("cpu", copy=True))
            for name, value in fixed.items()
            if name not in self.travelling and not value.is_inference() and not value.is_meta
        ]

    def reset(self) -> None:
        """Puts back all but the values of parameters and persistent buffers."""
        for attributes, kept in self._attributes:
            for name in attributes.keys() - kept.keys():
                del attributes[name]
            attributes.update(kept)
        for container, content in self._contents:
            if _ids(container) != _ids(content):  # In place, because handles of hooks refer to it.
                container.clear()
                container.extend(content) if isinstance(container, list) else container.update(content)
        with torch.no_grad():
            for cache, content in self._caches:
                cache.copy_(content)
        for parameter, requires_grad in self._trainable:
            parameter.grad = None
            parameter.requires_grad_(requires_grad)

    def current(self) -> dict[str, torch.Tensor]:
        """The travelling tensors as the model has them now; one that is gone or of another shape is an error."""
        now = dict(self.model.named_parameters()) | dict(self.model.named_buffers())
        for name, shape in self._shapes.items():
            if name not in now or tuple(now[name].shape) != shape:
                what = f"has shape {tuple(now[name].shape)}" if name in now else "is gone"
                raise FederatedError(
                    f"{name} {what} after the client's training, {shape} was its shape.",
                    hint="train_fn must train the model that it gets: add or merge adapters in model_builder, and give "
                    "buffers whose shape depends on data persistent=False.",
                )
        return {name: now[name] for name in self.travelling}

    def marked(self) -> dict[str, tuple[Any, ...]]:
        """By which to see what `reset` cannot put back, by the tensor's name.

        Of each tensor which one it is, its dtype, device and shape; of a frozen one also the hash of its values, but
        for a library's own kind of tensor.
        """
        free = {id(cache) for cache, _ in self._caches} | {id(value) for value in self.travelling.values()}
        # Buffers as they were: a client may put others into their places.
        named = {**self._buffers, **dict(self.model.named_parameters())}
        fixed = {name: value.data for name, value in named.items() if id(value) not in free and not value.is_meta}
        plain = {name: value for name, value in fixed.items() if type(value) is torch.Tensor}
        hashes = dict(zip(plain, tensor_hashes(list(plain.values())), strict=True))
        return {
            name: (id(value), value.dtype, value.device, value.shape, hashes.get(name)) for name, value in named.items()
        }


def _ids(container: Any) -> list[int]:
    """What is in it, by identity: tensors do not compare to a truth value."""
    return [*map(id, container), *map(id, container.values() if isinstance(container, dict) else ())]
