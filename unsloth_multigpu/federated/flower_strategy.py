"""Creates Flower's strategies by name, and checks the settings, clients and replies that they get."""

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
# Flower's defaults are 2, so that it would wait forever with one client.
_MIN_NODES = ("min_train_nodes", "min_evaluate_nodes", "min_available_nodes")
# Strategies that apply an optimizer to the mean of the replies, which is right for parameters and wrong for buffers.
WITH_SERVER_OPTIMIZER = (flower.FedAdagrad, flower.FedAdam, flower.FedYogi, flower.FedAvgM)
# Strategies whose clients must clip with a mod of Flower, which the ClientApp of `make_client_app` does not have.
_CLIPPING = (flower.DifferentialPrivacyClientSideFixedClipping, flower.DifferentialPrivacyClientSideAdaptiveClipping)


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
            hint="Strategies of flwr.server.strategy belong to an older API; use those of flwr.serverapp.strategy.",
        )
    elif settings:
        raise ConfigError(
            "strategy_kwargs together with an instance as strategy.", hint="Pass them to the class of the instance."
        )
    for each in nested_strategies(strategy):
        if isinstance(each, _CLIPPING):
            name = type(each).__name__
            raise ConfigError(
                f"{name} needs clients that clip their updates with Flower's mod; those of train_fn do not.",
                hint=f"Use {name.replace('Client', 'Server')}.",
            )
    return strategy


def make_strategy(name: str, settings: Mapping[str, Any]) -> Strategy:
    """Creates the class of `flwr.serverapp.strategy` with a name such as "fedavg", "fedprox", "fedadam" or "krum".

    Case, "-" and "_" do not matter. `settings` are the arguments of the class; `min_*_nodes` are 1 if left out.

    Raises ConfigError for an unknown strategy; for unknown, missing or invalid arguments; and for "fedprox" without
    `proximal_mu`, which would be FedAvg.
    """
    classes = {key.lower(): getattr(flower, key) for key in flower.__all__}
    known = {n: cls for n, cls in classes.items() if issubclass(cls, Strategy) and not inspect.isabstract(cls)}
    cls = known.get(name.lower().replace("-", "").replace("_", ""))
    if cls is None:
        raise ConfigError(
            f"strategy={name!r}; expected one of {', '.join(sorted(known))}.",
            hint="Change strategy, or pass an instance of flwr.serverapp.strategy.Strategy.",
        )
    accepted = inspect.signature(cls).parameters
    arguments = {key: 1 for key in _MIN_NODES if key in accepted} | dict(settings)
    if "proximal_mu" in accepted and "proximal_mu" not in arguments:
        raise ConfigError(
            f"strategy={name!r} needs 'proximal_mu' in strategy_kwargs.", hint="Without it, use 'fedavg'."
        )
    try:
        # Flower's warnings here repeat what the user chose or what is an error above.
        with quiet_flower(logging.ERROR):
            return cls(**arguments)  # type: ignore[no-any-return]
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"strategy={name!r} refuses its arguments: {error}",
            hint=f"Change strategy_kwargs; it takes {', '.join(accepted)}.",
        ) from error


def nested_strategies(strategy: Strategy) -> Iterator[Strategy]:
    """Yields the strategy, then those that it wraps: strategies of differential privacy have a `.strategy`."""
    inner: Any = strategy
    while isinstance(inner, Strategy):
        yield inner
        inner = vars(inner).get("strategy")


def check_strategy(strategy: Strategy, num_clients: int) -> None:
    """Raises ConfigError if the strategy would wait for more clients than there are, or overrides `start`."""
    for each in nested_strategies(strategy):
        class_name = type(each).__name__
        if type(each).start is not Strategy.start:
            raise ConfigError(
                f"{class_name} has a start() of its own, which would not be called.",
                hint="Move its code to configure_train and aggregate_train.",
            )
        for name in (*_MIN_NODES, "num_sampled_clients"):
            value = vars(each).get(name)
            if isinstance(value, int) and value > num_clients:
                raise ConfigError(
                    f"{name}={value} of {class_name}, but num_clients={num_clients}: it would wait forever.",
                    hint=f"Set {name} to {num_clients} or less, or use more clients.",
                )


def is_weighted_mean(strategy: Strategy) -> bool:
    """True if the global weights are exactly the example-weighted mean of the clients' weights."""
    return isinstance(strategy, FedAvg) and type(strategy).aggregate_train is FedAvg.aggregate_train


def weight_key(strategy: Strategy) -> str:
    """Returns the name of the metric by which the strategy weights its clients."""
    keys = (vars(each).get("weighted_by_key") for each in nested_strategies(strategy))
    return next((key for key in keys if isinstance(key, str)), "num-examples")


def describe(strategy: Strategy) -> dict[str, Any]:
    """Returns the classes and settings of a strategy and those that it wraps, which must be equal after a resume."""
    nested = list(nested_strategies(strategy))
    described: dict[str, Any] = {"strategy": " of ".join(type(each).__name__ for each in nested)}
    for each in nested:
        values = vars(each).items()
        described |= {f"{type(each).__name__}.{name}": v for name, v in values if isinstance(v, int | float | str)}
    return described


@contextmanager
def quiet_flower(level: int = logging.WARNING) -> Iterator[None]:
    """Hides Flower's about 20 log lines of a round, unless this package's logger is at level DEBUG."""
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
    """Returns the replies for the strategy, including error replies, by client id; and a line for each failure.

    Clients without data (`weight_key` is 0) are left out: a median would count them, and they may lack metrics. Raises
    FederatedError if all clients failed, fewer than the fraction `min_success` succeeded, or none had training data.
    """
    kept: list[Message] = []
    failures: list[str] = []
    errors: list[str] = []
    for reply in sorted(replies, key=lambda reply: reply.metadata.src_node_id):
        name = f"client {reply.metadata.src_node_id - 1}"
        if reply.has_error():  # The reason names the client.
            errors.append(str(reply.error.reason))
            failures.append(f"left out: {errors[-1]}")
        elif changed := changed_by(reply.content):
            failures.append(f"{name}: {kind} left frozen values, a dtype or a device changed: {', '.join(changed)}")
            _log.warning("round %d: %s; its model is built again", server_round, failures[-1])
        if reply.has_content() and metric_of(reply.content, weight_key) == 0:
            failures.append(f"{name}: no data in {kind}")
        else:
            kept.append(reply)
    num_good = len(replies) - len(errors)
    # With a tolerance: in floating point 0.35 * 20 is a little more than 7.
    if errors and (not num_good or num_good < min_success * len(replies) - 1e-9):
        bound = f", min_success={min_success}" if num_good else ""
        raise FederatedError(
            f"round {server_round}: {num_good} of {len(replies)} clients succeeded in {kind}{bound}. "
            f"The first failure: {errors[0]}",
            hint=f"The log above shows the whole error. Correct {kind}_fn or model_builder.",
        )
    if num_good and len(kept) == len(errors) and kind == "train":
        raise FederatedError(
            f"round {server_round}: no client had data in train: all clients that succeeded report {weight_key}=0.",
            hint="train_fn must return (num_examples, metrics).",
        )
    return kept, failures


def changed_by(content: RecordDict) -> list[str]:
    """Returns the names of tensors that the client left changed: in frozen values, dtype or device."""
    changed = content.config_records.get("client", ConfigRecord()).get(CHANGED)
    return list(map(str, changed)) if isinstance(changed, list) else []


def metric_of(content: RecordDict, key: str) -> float:
    """Returns a metric of a reply; 1.0 if it is missing or no number, which the strategy may refuse."""
    value = next((record[key] for record in content.metric_records.values() if key in record), 1.0)
    return float(value) if isinstance(value, int | float) else 1.0


def cast_like(arrays: ArrayRecord, before: ArrayRecord) -> ArrayRecord:
    """Casts arrays, which may be float64, to their dtypes in `before`. Raises FederatedError for infinity or NaN."""
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
