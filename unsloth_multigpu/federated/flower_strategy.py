"""Creates Flower's strategies by name, and checks what they are given: the clients and their replies."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Literal

from flwr.app import Array, ArrayRecord, ConfigRecord, Message, RecordDict
from flwr.serverapp import strategy as flower
from flwr.serverapp.strategy import FedAvg, Strategy

from unsloth_multigpu.errors import ConfigError, FederatedError
from unsloth_multigpu.federated.client import CHANGED
from unsloth_multigpu.federated.server import check
from unsloth_multigpu.logs import get_logger

_log = get_logger(__name__)

Kind = Literal["train", "evaluate"]
# Flower's defaults are 2: with one client it would wait forever for a second one.
_LEAST_NODES = ("min_train_nodes", "min_evaluate_nodes", "min_available_nodes")
# Strategies whose server applies an optimizer to the clients' mean, which is right for parameters only.
WITH_OPTIMIZER = (flower.FedAdagrad, flower.FedAdam, flower.FedYogi, flower.FedAvgM)
# Strategies whose clients must clip with one of Flower's mods, which the ClientApp of a train_fn does not have.
_WITH_MODS = (flower.DifferentialPrivacyClientSideFixedClipping, flower.DifferentialPrivacyClientSideAdaptiveClipping)


def checked_strategy(strategy: str | Strategy, settings: Mapping[str, Any] | None) -> Strategy:
    """Returns a new strategy for a name, or the instance itself.

    Raises ConfigError for an invalid strategy or settings, and for a strategy whose clients must clip their updates:
    without clipping, the noise does not hide a client's data.
    """
    check(isinstance(settings, Mapping | None), "strategy_kwargs", settings, "a dict")
    if isinstance(strategy, str):
        strategy = make_strategy(strategy, settings or {})
    elif not isinstance(strategy, Strategy):
        raise ConfigError(
            f"strategy={strategy!r}; expected a name such as 'fedavg' or a flwr.serverapp.strategy.Strategy.",
            hint="The strategies of flwr.server.strategy are an older kind; use those of flwr.serverapp.strategy.",
        )
    elif settings:
        raise ConfigError(
            "strategy_kwargs together with an instance as strategy.", hint="Pass them to the instance's class."
        )
    for layer in layers_of(strategy):
        if isinstance(layer, _WITH_MODS):
            name = type(layer).__name__
            raise ConfigError(
                f"{name} needs clients that clip their updates with Flower's mod; those of train_fn do not.",
                hint=f"Use {name.replace('Client', 'Server')}.",
            )
    return strategy


def make_strategy(name: str, settings: Mapping[str, Any]) -> Strategy:
    """Creates Flower's strategy of a name such as "fedavg", "fedprox", "fedadam" or "krum".

    It is the name of a class of `flwr.serverapp.strategy`; case, "-" and "_" do not matter. `settings` are the
    arguments of that class. `min_*_nodes` are 1 if they are left out.

    Raises ConfigError for an unknown strategy; for unknown, missing or invalid arguments; and for "fedprox" without
    `proximal_mu`, which would be FedAvg.
    """
    classes = {key.lower(): getattr(flower, key) for key in flower.__all__}
    kinds = {n: k for n, k in classes.items() if issubclass(k, Strategy) and not inspect.isabstract(k)}
    kind = kinds.get(name.lower().replace("-", "").replace("_", ""))
    if kind is None:
        raise ConfigError(
            f"strategy={name!r}; expected one of {', '.join(sorted(kinds))}.",
            hint="Change strategy, or pass an instance of flwr.serverapp.strategy.Strategy.",
        )
    accepted = inspect.signature(kind).parameters
    arguments = {key: 1 for key in _LEAST_NODES if key in accepted} | dict(settings)
    if "proximal_mu" in accepted and "proximal_mu" not in arguments:
        raise ConfigError(
            f"strategy={name!r} needs 'proximal_mu' in strategy_kwargs.", hint="Without it, use 'fedavg'."
        )
    try:
        # Flower's warnings here are about choices of the user, or errors above.
        with quiet_flower(logging.ERROR):
            return kind(**arguments)  # type: ignore[no-any-return]
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"strategy={name!r} refuses its arguments: {error}",
            hint=f"Change strategy_kwargs; it takes {', '.join(accepted)}.",
        ) from error


def layers_of(strategy: Strategy) -> Iterator[Strategy]:
    """Yields the strategy and those that it wraps: strategies of differential privacy have a `.strategy`."""
    inner: Any = strategy
    while isinstance(inner, Strategy):
        yield inner
        inner = vars(inner).get("strategy")


def check_strategy(strategy: Strategy, num_clients: int) -> None:
    """Checks that the strategy can work with this number of clients.

    Raises ConfigError if it would wait for more clients than there are, or overrides `start`.
    """
    for layer in layers_of(strategy):
        kind = type(layer).__name__
        if type(layer).start is not Strategy.start:
            raise ConfigError(
                f"{kind} has a start() of its own, which would not be called.",
                hint="Move its code to configure_train and aggregate_train.",
            )
        for name in (*_LEAST_NODES, "num_sampled_clients"):
            value = vars(layer).get(name)
            if isinstance(value, int) and value > num_clients:
                raise ConfigError(
                    f"{name}={value} of {kind}, but num_clients={num_clients}: it would wait forever.",
                    hint=f"Set {name} to {num_clients} or less, or use more clients.",
                )


def is_weighted_mean(strategy: Strategy) -> bool:
    """True if the global weights are exactly the example-weighted mean of the clients' weights."""
    return isinstance(strategy, FedAvg) and type(strategy).aggregate_train is FedAvg.aggregate_train


def weight_key(strategy: Strategy) -> str:
    """Returns the name of the metric by which the strategy weights its clients."""
    keys = (vars(layer).get("weighted_by_key") for layer in layers_of(strategy))
    return next((key for key in keys if isinstance(key, str)), "num-examples")


def describe(strategy: Strategy) -> dict[str, Any]:
    """Describes a strategy and its wrapped ones by class and settings, which must be equal after a resume."""
    layers = list(layers_of(strategy))
    described: dict[str, Any] = {"strategy": " of ".join(type(layer).__name__ for layer in layers)}
    for layer in layers:
        values = vars(layer).items()
        described |= {f"{type(layer).__name__}.{name}": v for name, v in values if isinstance(v, int | float | str)}
    return described


@contextmanager
def quiet_flower(level: int = logging.WARNING) -> Iterator[None]:
    """Hides Flower's log of a round, about 20 lines, unless our logger is at DEBUG level."""
    logger = logging.getLogger("flwr")
    before = logger.level
    if not logging.getLogger("unsloth_multigpu").isEnabledFor(logging.DEBUG):
        logger.setLevel(max(level, before))
    try:
        yield
    finally:
        logger.setLevel(before)


def check_replies(
    replies: Sequence[Message], kind: Kind, server_round: int, *, min_success: float, weight_key: str
) -> tuple[list[Message], list[str]]:
    """Returns the replies for the strategy, including errors, in the order of the clients; and one line per failure.

    Clients without data are left out: they would count in a median, and may lack metrics.

    Raises FederatedError if no client succeeded or had data, or fewer than `min_success` of them succeeded.
    """
    kept: list[Message] = []
    failures: list[str] = []
    lost: list[str] = []
    for reply in sorted(replies, key=lambda reply: reply.metadata.src_node_id):
        name = f"client {reply.metadata.src_node_id - 1}"
        if reply.has_error():  # The reason names the client.
            lost.append(str(reply.error.reason))
            failures.append(f"left out: {lost[-1]}")
        elif changed := changed_by(reply.content):
            failures.append(f"{name}: changed {', '.join(changed)} in {kind}, which must not change")
            _log.warning("round %d: %s; its model is built again", server_round, failures[-1])
        if reply.has_content() and weight_of(reply.content, weight_key) == 0:
            failures.append(f"{name}: no data in {kind}")
        else:
            kept.append(reply)
    num_good = len(replies) - len(lost)
    # 0.35 * 20 is a little more than 7.
    if lost and (not num_good or num_good < min_success * len(replies) - 1e-9):
        bound = f", min_success={min_success}" if num_good else ""
        raise FederatedError(
            f"round {server_round}: {num_good} of {len(replies)} clients succeeded in {kind}{bound}. "
            f"The first failure: {lost[0]}",
            hint=f"The log above shows the whole error. Correct {kind}_fn or model_builder.",
        )
    if num_good and len(kept) == len(lost) and kind == "train":
        raise FederatedError(
            f"round {server_round}: no client had data in train: all successful clients report 0 examples.",
            hint="train_fn returns (num_examples, metrics).",
        )
    return kept, failures


def changed_by(content: RecordDict) -> list[str]:
    """Returns the names of tensors, mostly frozen weights, that the client has changed and does not send."""
    changed = content.config_records.get("client", ConfigRecord()).get(CHANGED)
    return list(map(str, changed)) if isinstance(changed, list) else []


def weight_of(content: RecordDict, key: str) -> float:
    """Returns the reply's number of examples; 1 without one, which the strategy may refuse."""
    value = next((record[key] for record in content.metric_records.values() if key in record), 1.0)
    return float(value) if isinstance(value, int | float) else 1.0


def like(arrays: ArrayRecord, before: ArrayRecord) -> ArrayRecord:
    """Converts arrays to their earlier dtypes: means and optimizers turn float32 and integers into float64.

    Raises FederatedError for a value that is infinite or NaN.
    """
    import numpy as np

    found: dict[str, Array] = {}
    for name, array in arrays.items():
        value = array.numpy()
        if value.dtype.kind == "f" and not np.isfinite(value).all():
            raise FederatedError(
                f"{name} is infinite or NaN after aggregation.",
                hint="Lower the learning rate of the clients, or of the strategy (eta, server_learning_rate).",
            )
        dtype = np.dtype(before[name].dtype) if name in before else value.dtype
        if dtype != value.dtype:
            array = Array(np.asarray(np.rint(value) if dtype.kind in "iub" else value, dtype=dtype))
        found[name] = array
    return ArrayRecord(found)
