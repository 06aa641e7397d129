"""Training over any grid of Flower: resumes from a saved round, runs the rounds, keeps what came out."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from flwr.app import ArrayRecord, MetricRecord
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Strategy
from torch import nn

from unsloth_multigpu.errors import ConfigError
from unsloth_multigpu.federated.adapters import write_arrays
from unsloth_multigpu.federated.apps import EvaluateFunction, TrainFunction, make_client_app
from unsloth_multigpu.federated.checkpoint import open_folder, read_round
from unsloth_multigpu.federated.client import ClientModel
from unsloth_multigpu.federated.option import FitOptions, check_callable
from unsloth_multigpu.federated.record import to_config_record, to_metric_record
from unsloth_multigpu.federated.report import FederatedResult, write_rounds
from unsloth_multigpu.federated.rounds import RoundPlan, Slots, SteeredStrategy
from unsloth_multigpu.federated.strategy import (
    check_needs_no_mod,
    check_strategy,
    describe,
    is_weighted_mean,
    make_strategy,
    without_privacy,
)
from unsloth_multigpu.federated.weights import Start, Trained, ask_for_start, check_same_model, start_of_model
from unsloth_multigpu.logs import get_logger

_log = get_logger(__name__)
ServerEvaluate = Callable[[nn.Module, int], Mapping[str, Any]]


def make_plan(
    server_id: str,
    model_builder: Callable[[], nn.Module],
    train_fn: TrainFunction | None,
    evaluate_fn: EvaluateFunction | None,
    client_app: ClientApp | None,
    *,
    strategy: str | Strategy,
    strategy_kwargs: Mapping[str, Any] | None,
    lora_aggregation: Literal["mean", "project", "exact"],
    seed: int,
    device: str,
) -> ServerPlan:
    """Makes one ClientApp of what `create_multigpu_flower_server` was given.

    Raises:
        ConfigError: The functions, the app, the model or the strategy cannot be used.
    """
    if isinstance(model_builder, nn.Module):
        raise ConfigError(
            "model_builder is a model; expected a function that makes one: each process builds its own.",
            hint="Put the lines that made it into a function, and pass that.",
        )
    _check_apps(train_fn, evaluate_fn, client_app)
    kind = _checked_strategy(strategy, strategy_kwargs)
    if client_app is None:
        check_needs_no_mod(kind)
    if lora_aggregation != "mean" and client_app is not None:
        raise _no_lora_aggregation(lora_aggregation, "client_app decides what travels")
    if lora_aggregation != "mean" and not is_weighted_mean(kind):
        fact = f"{type(kind).__name__} does not take the example-weighted mean, as FedAvg does"
        raise _no_lora_aggregation(lora_aggregation, fact)
    app = client_app
    if app is None:
        assert train_fn is not None
        app = make_client_app(model_builder, train_fn, evaluate_fn, server_id=server_id, seed=seed)
    return ServerPlan(
        server_id,
        model_builder,
        app,
        is_own_app=client_app is None,
        evaluates=client_app is not None or evaluate_fn is not None,
        strategy=strategy,
        strategy_kwargs=dict(strategy_kwargs or {}),
        description=describe(kind),
        lora_aggregation=lora_aggregation,
        seed=seed,
        device=device,
    )


@dataclass(frozen=True)
class ServerPlan:
    """What `create_multigpu_flower_server` was asked for, checked.

    Args:
        client_app: The clients' half.
        is_own_app: Whether this package made `client_app`, which then knows what a client starts from.
        evaluates: Whether clients are asked to evaluate.
        description: Settings of the strategy as it was given: one that changes its own has others after a round.
        device: Of the model that the server itself evaluates.
    """

    server_id: str
    model_builder: Callable[[], nn.Module]
    client_app: ClientApp
    is_own_app: bool
    evaluates: bool
    strategy: str | Strategy
    strategy_kwargs: Mapping[str, Any]
    description: Mapping[str, Any]
    lora_aggregation: Literal["mean", "project", "exact"]
    seed: int
    device: str

    def new_strategy(self) -> Strategy:
        """A fresh one where it has a name; an object is the user's, with the state that it has."""
        if isinstance(self.strategy, str):
            return make_strategy(self.strategy, self.strategy_kwargs)
        return self.strategy


class Evaluator:
    """Lets the server evaluate the global model itself.

    Args:
        evaluate: The user's function.
    """

    def __init__(self, plan: ServerPlan, evaluate: ServerEvaluate) -> None:
        self._is_own_app = plan.is_own_app
        self._model = ClientModel(plan.model_builder, plan.seed)
        self._device = torch.device(plan.device)
        self._evaluate = evaluate

    def __call__(self, server_round: int, arrays: ArrayRecord, residual: ArrayRecord | None) -> MetricRecord:
        try:
            if self._is_own_app:
                model = self._model.prepare(arrays, residual, self._device)
            else:
                # Such an app sends the whole state_dict(), see `start_of_model`.
                model = self._model.build(self._device)
                write_arrays(model.state_dict(), arrays)
            model.eval()
            return to_metric_record(self._evaluate(model, server_round), "server_evaluate")
        finally:
            if changed := self._model.release():
                text = "server_evaluate changed %s (and %d more tensors); the model is built again for the next round"
                _log.warning(text, changed[0], len(changed) - 1)


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
    begin_s = time.monotonic()
    strategy = plan.new_strategy()
    check_strategy(strategy, num_clients)
    facts = _facts(plan, num_clients, options)
    with _open_folder(options) as folder:
        saved = read_round(folder, facts) if folder else None
        if saved is not None and saved.server_round > options.num_rounds:
            raise ConfigError(
                f"num_rounds={options.num_rounds}, but {folder} is already the state after round {saved.server_round}.",
                hint="num_rounds counts all rounds, with those before a resume.",
            )
        if start is None and plan.is_own_app:
            start = ask_for_start(grid, len(slots.devices_of_slots) if slots else 1, options.round_timeout_s)
        start = start or start_of_model(plan.model_builder, plan.seed)
        _check_model(plan, start)
        if bare := without_privacy(strategy, start.arrays):
            _log.warning(
                "%s has no dimension (%d such tensors): Flower neither clips it nor adds noise to it",
                bare[0],
                len(bare),
            )
        if saved is not None:
            check_same_model(saved, start)
            saved.restore(strategy)
            if slots is not None:
                slots.load_client_states(saved.states)
            _log.info("resumes after round=%d of %s", saved.server_round, folder)
        if options.output_dir is not None:
            write_rounds(Path(options.output_dir), saved.history.rounds if saved else [], must_append=False)
        if slots is not None:
            slots.take_records()  # Asking for the first weights belongs to no round.
        evaluator = Evaluator(plan, server_evaluate) if server_evaluate else None
        steered = SteeredStrategy(
            strategy, _round_plan(plan, start, num_clients, options, facts, evaluator), saved, slots
        )
        startup_s = time.monotonic() - begin_s
        result = steered.run(
            grid, start.arrays, options.num_rounds, timeout_s=options.round_timeout_s, startup_s=startup_s
        )
        return result, Trained(result.result.arrays, steered.residual, start), start


def _round_plan(
    plan: ServerPlan,
    start: Start,
    num_clients: int,
    options: FitOptions,
    facts: Mapping[str, Any],
    evaluator: Evaluator | None,
) -> RoundPlan:
    config = dict(options.config or {})
    if plan.is_own_app:
        config["frozen-layout"] = list(start.layout)
    return RoundPlan(
        plan.server_id,
        num_clients,
        plan.seed,
        to_config_record(config),
        start.layout,
        start.buffers,
        plan.evaluates,
        plan.lora_aggregation,
        options.min_success,
        facts,
        Path(options.output_dir) if options.output_dir is not None else None,
        evaluator,
    )


def _facts(plan: ServerPlan, num_clients: int, options: FitOptions) -> dict[str, Any]:
    facts = {"server_id": plan.server_id, "num_clients": num_clients, "seed": plan.seed}
    facts |= {"lora_aggregation": plan.lora_aggregation, **plan.description}
    return facts | {f"config[{name!r}]": _json(value) for name, value in (options.config or {}).items()}


def _json(value: Any) -> Any:
    if isinstance(value, list):
        return [_json(item) for item in value]
    return value.hex() if isinstance(value, bytes) else value


def _open_folder(options: FitOptions) -> AbstractContextManager[Path | None]:
    if options.output_dir is not None:
        return open_folder(Path(options.output_dir), options.resume)
    if options.resume is None:
        return nullcontext()
    raise ConfigError(
        f"resume={options.resume!r} without output_dir: the rounds after it would not be saved.",
        hint="Set output_dir.",
    )


def _check_model(plan: ServerPlan, start: Start) -> None:
    reasons = start.obstacles.get(plan.lora_aggregation, ())
    if reasons:
        raise _no_lora_aggregation(plan.lora_aggregation, reasons[0])


def _no_lora_aggregation(mode: str, reason: str) -> ConfigError:
    return ConfigError(f"lora_aggregation={mode!r} cannot work here: {reason}.", hint="Use lora_aggregation='mean'.")


def _check_apps(train_fn: Any, evaluate_fn: Any, client_app: Any) -> None:
    if client_app is None:
        check_callable("train_fn", train_fn, "model, client")
        if evaluate_fn is not None:
            check_callable("evaluate_fn", evaluate_fn, "model, client")
    elif not isinstance(client_app, ClientApp):
        raise ConfigError(
            f"client_app={client_app!r} is no ClientApp.", hint="Pass an object of flwr.clientapp.ClientApp."
        )
    elif train_fn is not None or evaluate_fn is not None:
        raise ConfigError(
            "train_fn or evaluate_fn together with client_app, which has functions of its own.", hint="Leave one out."
        )


def _checked_strategy(strategy: Any, settings: Mapping[str, Any] | None) -> Strategy:
    if settings is not None and not isinstance(settings, Mapping):
        raise ConfigError(f"strategy_kwargs={settings!r} is no mapping.", hint="Pass a dict.")
    if isinstance(strategy, str):
        return make_strategy(strategy, settings or {})
    if not isinstance(strategy, Strategy):
        raise ConfigError(
            f"strategy={strategy!r}; expected a name such as 'fedavg' or a flwr.serverapp.strategy.Strategy.",
            hint="The strategies of flwr.server.strategy are an older kind; use those of flwr.serverapp.strategy.",
        )
    if settings:
        raise ConfigError(
            "strategy_kwargs together with an object as strategy.", hint="Give them to the object's class."
        )
    return strategy
