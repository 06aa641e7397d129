"""The model of a slot's process, which clients use one after the other with the global weights and their own seeds."""

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
from unsloth_multigpu.federated.adapters import exchanged_tensors, is_quantized, to_arrays, write_arrays
from unsloth_multigpu.group.manager import find_accelerator
from unsloth_multigpu.group.random_state import seeded_draws
from unsloth_multigpu.group.replicas import tensor_hashes

_CONTAINERS = (dict, OrderedDict, list, set)
# Key in a reply's "client" record: names of tensors that the client has changed although it must not.
CHANGED = "changed-weights"


@dataclass(frozen=True)
class FederatedClient:
    """The second argument of `train_fn` and `evaluate_fn`, after the model.

    Args:
        client_id: 0 .. num_clients - 1, for the client's part of the data (Flower's "partition-id").
        num_clients: Number of clients of the federation.
        server_round: Number of the round, from 1.
        device: Device of the model.
        config: Values of `fit(config=...)` and of the strategy.
        seed: Seed of this client in this round. Python, NumPy and torch are already seeded with it.
        server_id: Name of the server.
    """

    client_id: int
    num_clients: int
    server_round: int
    device: torch.device
    config: Mapping[str, Any] = field(default_factory=dict)
    seed: int = 0
    server_id: str = ""


def client_seed(seed: int, server_round: int, who: int | str) -> int:
    """Returns a 32-bit seed that depends only on the arguments, and not on the slot or on other clients."""
    digest = hashlib.blake2b(f"{seed}/{server_round}/{who}".encode(), digest_size=4).digest()
    return int.from_bytes(digest, "little")


@contextmanager
def seeded(seed: int, device: torch.device) -> Iterator[None]:
    """Seeds Python, NumPy and torch (all devices) within the context, and restores their states, also on `device`."""
    kept: dict[str, Any] = (
        {"devices": [device], "device_type": device.type} if device.type in KINDS else {"devices": []}
    )
    with seeded_draws(seed), torch.random.fork_rng(**kept):
        torch.manual_seed(seed)
        yield


def visible_device() -> torch.device:
    """Returns the device of this process. A slot sees at most one."""
    found = find_accelerator()
    return torch.device("cpu") if found is None or found.type not in KINDS else torch.device(found.type, 0)


class ClientModel:
    """The one model of a process, which is reset before each client.

    Reset are weights and buffers (to the global ones), gradients, requires_grad, and the modules' attributes: train or
    eval mode, numbers, hooks, PEFT's active adapter, `forward` (mixed precision wraps it again in each Trainer). Nested
    state, such as `model.config` and hooks of tensors, is not reset. After a client that has replaced a parameter,
    changed a frozen one or moved the model, it is built again.
    """

    def __init__(self, model_builder: Callable[[], nn.Module], seed: int) -> None:
        self._model_builder = model_builder
        self._seed = seed
        self._built: BuiltModel | None = None

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_built": None}  # Pickled without the built model.

    def build(self, device: torch.device) -> BuiltModel:
        """Returns the model, not reset. Builds it if there is none, with seeds, so that all processes have the same.

        A model that is quantized, distributed by `device_map` or not on the CPU is not moved to the device.
        """
        if self._built is not None:
            return self._built
        with seeded(self._seed, device):
            model = self._model_builder()
        if not isinstance(model, nn.Module):
            raise FederatedError(
                f"model_builder returned {type(model).__name__}, not a torch.nn.Module.",
                hint="Return only the model; create tokenizer and data in train_fn.",
            )
        is_on_cpu = all(tensor.device.type == "cpu" for tensor in (*model.parameters(), *model.buffers()))
        if is_on_cpu and not getattr(model, "hf_device_map", None) and not is_quantized(model):
            model.to(device)
        self._built = BuiltModel(model)
        return self._built

    def prepare(self, arrays: ArrayRecord, device: torch.device) -> nn.Module:
        """Returns the model, reset and with the global state.

        Raises FederatedError if its tensors differ from the server's in names or shapes.
        """
        built = self.build(device)
        built.reset()
        write_arrays(built.exchanged, arrays)
        return built.model

    def read(self) -> ArrayRecord:
        """Returns copies of the exchanged tensors after a client's training.

        Integers and bools become float64, because some strategies subtract or scale arrays or add noise in place.
        """
        tensors = self._built.current() if self._built else {}
        return to_arrays({n: v if v.is_floating_point() or v.is_complex() else v.double() for n, v in tensors.items()})

    def release(self) -> list[str]:
        """Frees what a client left. Returns tensors that `reset` cannot restore; then the model will be built again."""
        if self._built is None:
            return []
        before, now = self._built.marks, self._built.marked()
        changed = [name for name in before | now if before.get(name) != now.get(name)]
        if changed:
            self._built = None
        else:
            self._built.reset()
        if torch.cuda.is_initialized():
            gc.collect()  # A Trainer is a reference cycle that keeps its optimizer's memory.
        return changed


class BuiltModel:
    """A model and its original state. `marks` is the original result of `marked`."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.exchanged = exchanged_tensors(model)
        self._shapes = {name: tuple(value.shape) for name, value in self.exchanged.items()}
        self._trainable = [(parameter, parameter.requires_grad) for parameter in model.parameters()]
        self._attributes = [(vars(module), dict(vars(module))) for module in model.modules()]
        values = [value for _, kept in self._attributes for value in kept.values()]
        self._contents = [(value, value.copy()) for value in values if type(value) in _CONTAINERS]
        self._buffers = dict(model.named_buffers())
        # Not of a quantized model, whose base weights may be buffers.
        fixed = {} if is_quantized(model) else self._buffers
        self._caches = [
            (value, value.detach().to("cpu", copy=True))
            for name, value in fixed.items()
            if name not in self.exchanged and not value.is_inference() and not value.is_meta
        ]
        self.marks = self.marked()

    def reset(self) -> None:
        """Restores everything but the values of parameters and persistent buffers."""
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
        """Returns the exchanged tensors that the model has now.

        Raises FederatedError if a tensor is missing or has another shape.
        """
        now = dict(self.model.named_parameters()) | dict(self.model.named_buffers())
        for name, shape in self._shapes.items():
            if name not in now or tuple(now[name].shape) != shape:
                what = f"has shape {tuple(now[name].shape)}" if name in now else "is missing"
                raise FederatedError(
                    f"{name} {what} after the client's training; its shape was {shape}.",
                    hint="train_fn must train the model that it gets: add or merge adapters in model_builder, and "
                    "register buffers whose shape depends on data with persistent=False.",
                )
        return {name: now[name] for name in self.exchanged}

    def marked(self) -> dict[str, tuple[Any, ...]]:
        """Returns marks by the tensor's name, to find changes that `reset` cannot restore.

        A mark has the tensor's id, dtype, device and shape; for a frozen plain tensor also a hash of its values.
        """
        free = {id(cache) for cache, _ in self._caches} | {id(value) for value in self.exchanged.values()}
        # The original buffers, which a client may have replaced.
        named = {**self._buffers, **dict(self.model.named_parameters())}
        fixed = {name: value.data for name, value in named.items() if id(value) not in free and not value.is_meta}
        plain = {name: value for name, value in fixed.items() if type(value) is torch.Tensor}
        hashes = dict(zip(plain, tensor_hashes(list(plain.values())), strict=True))
        return {
            name: (id(value), value.dtype, value.device, value.shape, hashes.get(name)) for name, value in named.items()
        }


def _ids(container: Any) -> list[int]:
    """Returns the ids of the elements: `==` of tensors does not return a bool."""
    return [*map(id, container), *map(id, container.values() if isinstance(container, dict) else ())]
