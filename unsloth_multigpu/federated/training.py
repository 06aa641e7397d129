"""Training over any grid of Flower: resumes from a saved round, runs the rounds, keeps what came out."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Strategy
from torch import nn

from unsloth_multigpu.errors import ConfigError, FederatedError, ResumeError
from unsloth_multigpu.federated.adapters import layout_of, save_adapter
from unsloth_multigpu.federated.aggregation import to_tensor
from unsloth_multigpu.federated.apps import EvaluateFunction, TrainFunction, make_client_app, to_metrics
from unsloth_multigpu.federated.checkpoint import SavedRound, open_folder, read_round
from unsloth_multigpu.federated.client import ClientModel
from unsloth_multigpu.federated.option import FitOptions, check_callable
from unsloth_multigpu.federated.report import FederatedResult, write_rounds
from unsloth_multigpu.federated.rounds import Rounds, Slots
from unsloth_multigpu.federated.strategy import (
    check_strategy,
    checked_strategy,
    describe,
    is_weighted_mean,
)
from unsloth_multigpu.logs import get_logger

_log = get_logger(__name__)
ServerEvaluate = Callable[[nn.Module, int], Mapping[str, Any]]
LoraAggregation = Literal["mean", "project", "exact"]
# Loading a base model may take longer than a round of small clients.
_LEAST_TIMEOUT_S = 300.0


class ServerPlan:
    """What `create_multigpu_flower_server` was asked for, checked.

    Attributes:
        client_app: Flower's half for the clients.
        evaluates: Whether clients evaluate.
        description: Settings of the strategy as it was given: one that changes its own has others after a round.
        device: Of the model that the server itself evaluates.

    Raises:
        ConfigError: The functions, the model or the strategy cannot be used.
    """

    def __init__(
        self,
        server_id: str,
        model_builder: Callable[[], nn.Module],
        train_fn: TrainFunction,
        evaluate_fn: EvaluateFunction | None,
        *,
        strategy: str | Strategy,
        strategy_kwargs: Mapping[str, Any] | None,
        lora_aggregation: LoraAggregation,
        seed: int,
        device: str,
    ) -> None:
        if isinstance(model_builder, nn.Module):
            raise ConfigError(
                "model_builder is a model; expected a function that makes one: each process builds its own.",
                hint="Put the lines that made it into a function, and pass that.",
            )
        check_callable("train_fn", train_fn, "model, client")
        if evaluate_fn is not None:
            check_callable("evaluate_fn", evaluate_fn, "model, client")
        kind = checked_strategy(strategy, strategy_kwargs)
        if lora_aggregation != "mean" and not is_weighted_mean(kind):
            fact = f"{type(kind).__name__} does not take the example-weighted mean, as FedAvg does"
            raise _no_lora_aggregation(lora_aggregation, fact)
        self.server_id = server_id
        self.model_builder = model_builder
        self.client_app = make_client_app(model_builder, train_fn, evaluate_fn, server_id=server_id, seed=seed)
        self.evaluates = evaluate_fn is not None
        self.description = describe(kind)
        self.lora_aggregation = lora_aggregation
        self.seed = seed
        self.device = torch.device(device)
        self._strategy = strategy
        self._strategy_kwargs = dict(strategy_kwargs or {})

    def new_strategy(self) -> Strategy:
        """A fresh one where it has a name; an object is the user's, with the state that it has."""
        return checked_strategy(self._strategy, self._strategy_kwargs)


@dataclass(frozen=True)
class Start:
    """What a client says of a freshly built model.

    Args:
        layout: Names and shapes of what does not travel.
        adapter_config: For `save_adapter`; "" where the model has no adapter.
        frozen: Parts of the adapter that are not trained.
        buffers: Names of arrays that are no parameters.
        obstacles: "project" and "exact" -> why they cannot work with this model.
    """

    arrays: ArrayRecord
    layout: Sequence[str] = ()
    adapter_config: str = ""
    frozen: ArrayRecord = field(default_factory=ArrayRecord)
    buffers: Sequence[str] = ()
    obstacles: Mapping[str, Sequence[str]] = field(default_factory=dict)


@dataclass(frozen=True)
class Trained:
    """The global state after a training.

    Args:
        residual: What exact aggregation of LoRA left in addition to the arrays, for the original base weights.
    """

    arrays: ArrayRecord
    residual: ArrayRecord | None
    start: Start

    def state_dict(self) -> dict[str, torch.Tensor]:
        """The travelling tensors, copies on the CPU."""
        return _tensors(self.arrays)

    def save(self, folder: Path) -> None:
        """Writes a PEFT adapter, or model.safetensors; raises OSError where the disk is full or fails."""
        folder.mkdir(parents=True, exist_ok=True)
        if self.start.adapter_config:
            # Buffers are the base model's unless training has changed them; other tools refuse names they do not know.
            same = [name for name in self.start.buffers if self.arrays[name] == self.start.arrays.get(name)]
            state = {name: value for name, value in self.state_dict().items() if name not in same}
            save_adapter(folder, state | _tensors(self.start.frozen), self.residual, self.start.adapter_config)
            return
        from safetensors.torch import save_file

        save_file(self.state_dict(), folder / "model.safetensors")


def train(
    plan: ServerPlan,
    grid: Grid,
    num_clients: int,
    options: FitOptions,
    *,
    slots: Slots | None = None,
    server_evaluate: ServerEvaluate | None = None,
    start: Start | None = None,
) -> tuple[FederatedResult, Trained, Start]:
    """Trains over any grid of Flower.

    Args:
        slots: The grid, if it is this package's own.
        start: What an earlier call returned, so that no client has to be asked again.

    Raises:
        ConfigError: Something does not fit the strategy, the model or the folder.
        ResumeError: The saved round belongs to another training.
        FederatedError: A round cannot be finished.
    """
    begin_s, strategy = time.monotonic(), plan.new_strategy()
    check_strategy(strategy, num_clients)
    facts = _facts(plan, num_clients, options)
    output_dir = None if options.output_dir is None else Path(options.output_dir)
    with nullcontext() if output_dir is None else open_folder(output_dir, options.resume) as folder:
        saved = read_round(folder, facts, options.num_rounds) if folder else None
        if start is None:
            start = ask_for_start(grid, len(slots.devices_of_slots) if slots else 1, options.round_timeout_s)
        if reasons := start.obstacles.get(plan.lora_aggregation):
            raise _no_lora_aggregation(plan.lora_aggregation, reasons[0])
        if saved is not None:
            check_same_model(saved, start)
            saved.restore(strategy)
            _log.info("resumes after round=%d of %s", saved.server_round, folder)
        if output_dir is not None:
            write_rounds(output_dir, saved.reports if saved else [], must_append=False)
        if slots is not None:
            slots.records = []  # Asking for the first weights belongs to no round.
        evaluate = server_evaluator(plan, server_evaluate) if server_evaluate else None
        rounds = Rounds(
            plan,
            options,
            start,
            grid,
            num_clients,
            strategy,
            facts=facts,
            evaluate=evaluate,
            saved=saved,
            slots=slots,
        )
        result = rounds.run(startup_s=time.monotonic() - begin_s)
        return result, Trained(rounds.arrays, rounds.residual, start), start


def ask_for_start(grid: Grid, num_asked: int, timeout_s: float) -> Start:
    """Lets clients build their model, seeded, and takes the first one that says what it is.

    Args:
        num_asked: How many at once: one per slot, which all load what they need meanwhile.

    Raises:
        FederatedError: No client could.
    """
    limit_s = max(timeout_s, _LEAST_TIMEOUT_S)
    asked = sorted(grid.get_node_ids())[:num_asked]
    messages = [Message(RecordDict({"config": ConfigRecord()}), node_id, "query.initial") for node_id in asked]
    replies = list(grid.send_and_receive(messages, timeout=limit_s))
    for reply in replies:
        if reply.has_content():
            return _start_of(reply.content)
    reason = str(replies[0].error.reason) if replies else f"no answer within {limit_s:g} s"
    raise FederatedError(
        f"no client could build its model: {reason}",
        hint="The log above shows the whole error. Does model_builder() work in a script of its own?",
    )


def check_same_model(saved: SavedRound, start: Start) -> None:
    """Raises ResumeError, naming a tensor, where a saved round is not one of the clients' model."""
    before, now = (_shapes(state.arrays) | layout_of(state.layout) for state in (saved, start))
    for name in [*before, *now]:
        if before.get(name) != now.get(name):
            raise ResumeError(
                f"round {saved.server_round} has {name} of shape {before.get(name)}, the model of model_builder has "
                f"{now.get(name)}.",
                hint="Use the model_builder of the training that stopped.",
            )


def _tensors(arrays: ArrayRecord) -> dict[str, torch.Tensor]:
    """Copies; safetensors wants them contiguous, and a transposed parameter is not."""
    contiguous = torch.contiguous_format
    return {name: to_tensor(array).clone(memory_format=contiguous) for name, array in arrays.items()}


def _shapes(arrays: ArrayRecord) -> dict[str, str]:
    return {name: str(tuple(array.shape)) for name, array in arrays.items()}


def _start_of(content: RecordDict) -> Start:
    config: Mapping[str, Any] = content.config_records["config"]
    return Start(
        content.array_records["arrays"],
        config["frozen-layout"],
        config["adapter-config"],
        content.array_records.get("adapter-frozen", ArrayRecord()),
        config["buffers"],
        {"project": config["not-projectable"], "exact": [*config["not-projectable"], *config["not-foldable"]]},
    )


def server_evaluator(
    plan: ServerPlan, evaluate: ServerEvaluate
) -> Callable[[int, ArrayRecord, ArrayRecord | None], MetricRecord]:
    """Lets the server evaluate the global model itself, by the user's function."""
    model = ClientModel(plan.model_builder, plan.seed)

    def evaluate_round(server_round: int, arrays: ArrayRecord, residual: ArrayRecord | None) -> MetricRecord:
        try:
            prepared = model.prepare(arrays, residual, plan.device).eval()
            return to_metrics(evaluate(prepared, server_round), "server_evaluate")
        finally:
            if changed := model.release():
                text = "server_evaluate changed %s (and %d more tensors); the model is built again for the next round"
                _log.warning(text, changed[0], len(changed) - 1)

    return evaluate_round


def _facts(plan: ServerPlan, num_clients: int, options: FitOptions) -> dict[str, Any]:
    facts = {"server_id": plan.server_id, "num_clients": num_clients, "seed": plan.seed}
    facts |= {"lora_aggregation": plan.lora_aggregation, **plan.description}
    return facts | {f"config[{name!r}]": repr(value) for name, value in (options.config or {}).items()}


def _no_lora_aggregation(mode: str, reason: str) -> ConfigError:
    return ConfigError(f"lora_aggregation={mode!r} cannot work here: {reason}.", hint="Use lora_aggregation='mean'.")
