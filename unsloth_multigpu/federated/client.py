"""A client's side: Flower's ClientApp, and the one model of a process, which its clients use one after the other."""

from __future__ import annotations

import gc
import hashlib
import math
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from unsloth_multigpu.accelerator import KINDS
from unsloth_multigpu.errors import ConfigError, FederatedError
from unsloth_multigpu.federated import adapters
from unsloth_multigpu.group.manager import find_accelerator
from unsloth_multigpu.group.random_state import seeded_draws
from unsloth_multigpu.group.replicas import tensor_hashes

# Types of modules' attributes whose contents are restored.
_CONTAINERS = (dict, OrderedDict, list, set)
# Key in a reply's "client" record: names of tensors that the client changed and that a reset does not restore.
CHANGED = "changed-weights"


@dataclass(frozen=True)
class FederatedClient:
    """The second argument of `train_fn` and `evaluate_fn`, after the model.

    Args:
        client_id: 0 to num_clients - 1: chooses the client's data. Flower's "partition-id".
        num_clients: Number of all clients. Flower's "num-partitions".
        server_round: Number of the round, from 1.
        device: Device of the model.
        config: Values of `fit(config=...)`, and those that the strategy sends, such as "proximal-mu".
        seed: Seed of this client in this round, with which Python, NumPy and torch are already seeded.
        server_id: Name of the server.
    """

    client_id: int
    num_clients: int
    server_round: int
    device: torch.device
    config: Mapping[str, Any] = field(default_factory=dict)
    seed: int = 0
    server_id: str = ""


TrainFunction = Callable[[nn.Module, FederatedClient], tuple[int, Mapping[str, Any]]]
EvaluateFunction = Callable[[nn.Module, FederatedClient], tuple[float, int, Mapping[str, Any]]]


def make_client_app(
    model_builder: Callable[[], nn.Module],
    train_fn: TrainFunction,
    evaluate_fn: EvaluateFunction | None = None,
    *,
    server_id: str = "",
    seed: int = 0,
) -> ClientApp:
    """Creates a Flower ClientApp for a slot, a SuperNode or Flower's simulation.

    It answers "train", "query.initial" and, with `evaluate_fn`, "evaluate". The model is built at the first message and
    kept. `train_fn` gets it in train mode, `evaluate_fn` in eval mode. What they raise propagates; a SuperNode or a
    slot's grid turns it into an error reply. Arguments are those of `create_multigpu_flower_server`.
    """
    handler = _MessageHandler(ClientModel(model_builder, seed), train_fn, evaluate_fn, server_id, seed)
    app = ClientApp()
    app.train()(handler.train)
    app.query("initial")(handler.describe)
    if evaluate_fn is not None:
        app.evaluate()(handler.evaluate)
    return app


@dataclass(eq=False, repr=False)
class _MessageHandler:
    """Handles the messages of one process, one after the other."""

    model: ClientModel
    train_fn: TrainFunction
    evaluate_fn: EvaluateFunction | None
    server_id: str
    seed: int
    _changed: list[str] = field(init=False, default_factory=list)

    def train(self, message: Message, context: Context) -> Message:
        with self._prepared(message, context) as (client, model):
            model.train()
            mu = float(client.config.get("proximal-mu", 0.0))
            with proximal_term(model, mu) if mu else nullcontext(Counter[str]()) as counts:
                result = self.train_fn(model, client)
            num_examples, metrics = _unpack(result, 2, "train_fn", "(number of examples, metrics)")
            if mu and num_examples and not counts["steps"]:
                raise FederatedError(
                    f"proximal-mu is {mu}, but no torch optimizer took a step on the model's parameters.",
                    hint="FedProx needs a torch.optim.Optimizer over parameters of the model that train_fn gets.",
                )
            arrays = self.model.read()
        reply = self._reply(message, {"num-examples": num_examples}, metrics, "train_fn")
        reply.content["arrays"] = arrays
        return reply

    def evaluate(self, message: Message, context: Context) -> Message:
        assert self.evaluate_fn is not None
        with self._prepared(message, context) as (client, model):
            result = self.evaluate_fn(model.eval(), client)
        loss, num_examples, metrics = _unpack(result, 3, "evaluate_fn", "(loss, number of examples, metrics)")
        if not math.isfinite(loss := float(loss)) and num_examples:
            raise FederatedError(
                f"evaluate_fn returned the loss {loss}.", hint="Check the client's data, and its training's loss."
            )
        # Without data the loss may be NaN. Its weight in the mean is 0, but 0 * NaN is NaN.
        own = {"num-examples": num_examples, "loss": loss if num_examples else 0.0}
        return self._reply(message, own, metrics, "evaluate_fn")

    def describe(self, message: Message, context: Context) -> Message:
        """Replies with the fields of `training.InitialState`, of a model that no client has trained."""
        built = self.model.build_unused(visible_device())
        model, tensors = built.model, built.exchanged
        facts: dict[str, Any] = {
            "adapter_config": adapters.describe_adapter(model),
            "buffers": list(adapters.exchanged_buffers(model)),
            "not_projectable": adapters.not_projectable(model, tensors),
        }
        frozen = adapters.to_arrays(adapters.frozen_factors(model, tensors))
        content = RecordDict({"arrays": adapters.to_arrays(tensors), "frozen": frozen})
        content["config"] = ConfigRecord(facts)
        return Message(content, reply_to=message)

    @contextmanager
    def _prepared(self, message: Message, context: Context) -> Iterator[tuple[FederatedClient, nn.Module]]:
        """Yields the client, seeded, and the model with the global weights. Releases the model afterwards."""
        (arrays,) = message.content.array_records.values()
        config = {key: value for record in message.content.config_records.values() for key, value in record.items()}
        client = self._client(config, context)
        try:
            with seeded(client.seed, client.device):
                yield client, self.model.prepare(arrays, client.device)
        finally:
            self._changed = self.model.release()

    def _client(self, config: Mapping[str, Any], context: Context) -> FederatedClient:
        client_id, num_clients = context.node_config.get("partition-id"), context.node_config.get("num-partitions")
        if client_id is None or num_clients is None:
            raise FederatedError(
                f"This node has no partition-id or num-partitions; its node config is {dict(context.node_config)}.",
                hint="Start the SuperNode with --node-config 'partition-id=0 num-partitions=2'.",
            )
        client_id, server_round = int(client_id), int(config.get("server-round", 0))
        seed = client_seed(self.seed, server_round, client_id)
        device = visible_device()
        return FederatedClient(client_id, int(num_clients), server_round, device, config, seed, self.server_id)

    def _reply(self, message: Message, own: dict[str, Any], metrics: Any, source: str) -> Message:
        if taken := own.keys() & (metrics or {}).keys():
            raise ConfigError(
                f"The metric name {min(taken)!r} is reserved.", hint=f"Give the metric of {source} another name."
            )
        content = RecordDict({"metrics": to_metrics(own | dict(metrics or {}), source)})
        content["client"] = ConfigRecord({CHANGED: self._changed[:3]} if self._changed else {})
        return Message(content, reply_to=message)


def to_metrics(metrics: Mapping[str, Any], source: str) -> MetricRecord:
    """Converts metrics to a MetricRecord: NumPy numbers, tensors and bools, too. ConfigError names their `source`."""
    try:
        values = {name: value.tolist() if hasattr(value, "tolist") else value for name, value in metrics.items()}
        return MetricRecord({name: int(v) if isinstance(v, bool) else v for name, v in values.items()})
    except (TypeError, ValueError, AttributeError) as error:
        raise ConfigError(
            f"{source} returned {metrics!r}, which are not metrics: {error}",
            hint="Return a dict whose keys are str and whose values are numbers or lists of numbers.",
        ) from error


def _unpack(result: Any, length: int, name: str, form: str) -> tuple[Any, ...]:
    """Checks the tuple that a user's function returned, and converts its number of examples to int."""
    if isinstance(result, tuple) and len(result) == length and isinstance(result[-1], Mapping | None):
        *loss, num_examples, metrics = result
        if hasattr(num_examples, "__index__") and int(num_examples) >= 0:
            return *loss, int(num_examples), metrics
    raise FederatedError(
        f"{name} returned {result!r}, not {form}.",
        hint="The number of examples is an integer, 0 without data; without metrics, return an empty dict.",
    )


def client_seed(seed: int, server_round: int, who: int | str) -> int:
    """Returns a 32-bit seed that depends on the arguments only. `who` is a client id, or the kind of a selection."""
    digest = hashlib.blake2b(f"{seed}/{server_round}/{who}".encode(), digest_size=4).digest()
    return int.from_bytes(digest, "little")


@contextmanager
def seeded(seed: int, device: torch.device) -> Iterator[None]:
    """Seeds Python, NumPy and torch in the context. Restores their states afterwards, on the CPU and `device`."""
    forked: dict[str, Any] = (
        {"devices": [device], "device_type": device.type} if device.type in KINDS else {"devices": []}
    )
    with seeded_draws(seed), torch.random.fork_rng(**forked):
        torch.manual_seed(seed)
        yield


def visible_device() -> torch.device:
    """Returns this process's first accelerator, or the CPU. A slot sees at most one accelerator."""
    found = find_accelerator()
    return torch.device("cpu") if found is None or found.type not in KINDS else torch.device(found.type, 0)


class ClientModel:
    """The one model of a process, which is reset before each client.

    A reset sets weights and buffers to the global ones, removes gradients, and restores requires_grad and the modules'
    attributes: train or eval mode, numbers, hooks, PEFT's active adapter, `forward` (each Trainer with mixed precision
    wraps it). Nested state, such as `model.config`, and hooks of tensors stay. If a client has changed a frozen
    parameter, a dtype or a device, the model is built again.
    """

    def __init__(self, model_builder: Callable[[], nn.Module], seed: int) -> None:
        self._model_builder = model_builder
        self._seed = seed
        self._built: BuiltModel | None = None
        self._is_used = False

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_built": None}  # Each process builds its own.

    def build(self, device: torch.device) -> BuiltModel:
        """Returns the model without a reset. Builds it if there is none, seeded, so that all processes have the same.

        Moves it to the device, unless it is quantized, distributed by `device_map` or not on the CPU. Raises
        FederatedError if it is no module, or has no trainable parameter.
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
        if is_on_cpu and not getattr(model, "hf_device_map", None) and not adapters.is_quantized(model):
            model.to(device)
        self._built, self._is_used = BuiltModel(model), False
        return self._built

    def build_unused(self, device: torch.device) -> BuiltModel:
        """Returns the model with its initial weights: builds it again if `prepare` has given it to a client."""
        if self._is_used:
            self._built = None
            gc.collect()
        return self.build(device)

    def prepare(self, arrays: ArrayRecord, device: torch.device) -> nn.Module:
        """Returns the model, reset, with the global arrays. Raises FederatedError if names or shapes differ."""
        built = self.build(device)
        self._is_used = True
        built.reset()
        adapters.write_arrays(built.exchanged, arrays)
        return built.model

    def read(self) -> ArrayRecord:
        """Returns copies of the exchanged tensors after a client's training.

        Integers and bools become float64, because some strategies compute with arrays in place.
        """
        tensors = self._built.current() if self._built else {}
        numbers = {n: v if v.is_floating_point() or v.is_complex() else v.double() for n, v in tensors.items()}
        return adapters.to_arrays(numbers)

    def release(self) -> list[str]:
        """Resets the model, or drops it if a reset is not enough. Returns the names of the tensors that prevent it."""
        if self._built is None:
            return []
        now = self._built.fingerprint()
        changed = [name for name, original in self._built.original.items() if original != now[name]]
        if changed:
            self._built = None
        else:
            self._built.reset()
        if torch.cuda.is_initialized():
            gc.collect()  # A Trainer is a reference cycle, and keeps its optimizer's memory.
        return changed


class BuiltModel:
    """A model, and what `reset` needs. `original` is the result of `fingerprint` for the new model."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.exchanged = adapters.exchanged_tensors(model)
        self._shapes = {name: tuple(value.shape) for name, value in self.exchanged.items()}
        self._trainable = [(parameter, parameter.requires_grad) for parameter in model.parameters()]
        self._attributes = [(vars(module), dict(vars(module))) for module in model.modules()]
        values = [value for _, kept in self._attributes for value in kept.values()]
        self._contents = [(value, value.copy()) for value in values if type(value) in _CONTAINERS]
        buffers = dict(model.named_buffers())
        self._tensors = {**buffers, **dict(model.named_parameters())}
        # Buffers that are not exchanged. Not of a quantized model, whose base weights may be buffers.
        candidates = {} if adapters.is_quantized(model) else buffers
        self._local_buffers = [
            (value, value.detach().to("cpu", copy=True))
            for name, value in candidates.items()
            if name not in self.exchanged and not value.is_inference() and not value.is_meta
        ]
        self.original = self.fingerprint()

    def reset(self) -> None:
        """Restores everything but the values of parameters and exchanged buffers."""
        for attributes, kept in self._attributes:
            for name in attributes.keys() - kept.keys():
                del attributes[name]
            attributes.update(kept)
        for container, content in self._contents:
            if _ids(container) != _ids(content):  # In place, since handles of hooks refer to the container.
                container.clear()
                container.extend(content) if isinstance(container, list) else container.update(content)
        with torch.no_grad():
            for buffer, content in self._local_buffers:
                buffer.copy_(content)
        for parameter, requires_grad in self._trainable:
            parameter.grad = None
            parameter.requires_grad_(requires_grad)

    def current(self) -> dict[str, torch.Tensor]:
        """Returns the exchanged tensors by name. Raises FederatedError if one is missing or has another shape now."""
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

    def fingerprint(self) -> dict[str, tuple[Any, ...]]:
        """Returns what `reset` cannot restore, by name: dtype, device, shape, and a hash of a frozen plain tensor."""
        restored = {id(buffer) for buffer, _ in self._local_buffers} | {id(value) for value in self.exchanged.values()}
        frozen = {name: v.data for name, v in self._tensors.items() if id(v) not in restored and not v.is_meta}
        plain = {name: value for name, value in frozen.items() if type(value) is torch.Tensor}
        hashes = dict(zip(plain, tensor_hashes(list(plain.values())), strict=True))
        return {name: (v.dtype, v.device, v.shape, hashes.get(name)) for name, v in self._tensors.items()}


def _ids(container: Any) -> list[int]:
    """Returns the ids of the elements, to compare containers: `==` of tensors does not return a bool."""
    return [*map(id, container), *map(id, container.values() if isinstance(container, dict) else ())]


@contextmanager
def proximal_term(model: nn.Module, mu: float) -> Iterator[Counter[str]]:
    """Adds mu (w - w_global) to the gradient of each trainable parameter before each step of any optimizer.

    It is the gradient of mu/2 |w - w_global|^2 (Li et al. 2020, "Federated Optimization in Heterogeneous Networks"). It
    is added once per optimizer step, also with gradient accumulation, and after gradient clipping, which it does not
    take part in. w_global are the weights at entry. Yields a counter, whose "steps" are the optimizer steps so far.
    Raises FederatedError for a step with a closure, and at the end if a step raised an error.
    """
    global_weights = {p: p.detach().clone() for p in model.parameters() if p.requires_grad}
    counts = Counter[str]()

    @torch.no_grad()
    def before_step(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        # A step may call the step of its base class or of a wrapped optimizer.
        counts["depth"] += 1
        if counts["depth"] > 1:
            return
        if callable(kwargs.get("closure") or next(iter(args[1:]), None)):  # args[0] is the optimizer itself.
            # The closure computes the gradients inside the step, after this hook.
            raise FederatedError(
                f"proximal-mu does not work with {type(optimizer).__name__}.step(closure).",
                hint="Call step() without a closure, or use a strategy other than FedProx.",
            )
        # A fused optimizer unscales gradients inside its step, by the scale that torch.amp.GradScaler sets.
        scale = getattr(optimizer, "grad_scale", None)
        stepped = [p for group in optimizer.param_groups for p in group["params"] if p in global_weights]
        for parameter in stepped:
            term = (parameter - global_weights[parameter]).mul_(mu if scale is None else mu * scale)
            parameter.grad = term if parameter.grad is None else parameter.grad.add_(term)
        counts["steps"] += bool(stepped)

    def after_step(*_: Any) -> None:
        counts["depth"] -= 1

    with ExitStack() as stack:
        stack.callback(register_optimizer_step_pre_hook(before_step).remove)
        stack.callback(register_optimizer_step_post_hook(after_step).remove)
        yield counts
    if counts["depth"]:
        raise FederatedError(
            "An optimizer step raised an error that train_fn caught: later steps had no proximal term.",
            hint="Do not catch the error in train_fn, or use a strategy other than FedProx.",
        )
