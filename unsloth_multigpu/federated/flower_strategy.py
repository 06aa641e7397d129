"""Creates Flower's strategies by name, and checks that a strategy fits the clients."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from flwr.serverapp import strategy as flower
from flwr.serverapp.strategy import FedAvg, Strategy

from unsloth_multigpu.errors import ConfigError
from unsloth_multigpu.federated.server import check

# Flower's defaults are 2: with one client it would wait forever for a second one.
_LEAST_NODES = ("min_train_nodes", "min_evaluate_nodes", "min_available_nodes")
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


def has_server_optimizer(strategy: Strategy) -> bool:
    """True if the server applies an optimizer to the clients' mean, which is right for parameters only."""
    return isinstance(strategy, flower.FedAdagrad | flower.FedAdam | flower.FedYogi | flower.FedAvgM)


def weight_key(strategy: Strategy) -> str:
    """Returns the name of the metric by which the strategy weights its clients."""
    keys = (vars(layer).get("weighted_by_key") for layer in layers_of(strategy))
    return next((key for key in keys if isinstance(key, str)), "num-examples")


def has_state(value: Any) -> bool:
    """True if a value has `state_dict` and `load_state_dict`, such as a privacy accountant."""
    return callable(getattr(value, "state_dict", None)) and callable(getattr(value, "load_state_dict", None))


def describe(strategy: Strategy) -> dict[str, Any]:
    """Describes a strategy and its wrapped ones by class, settings and stateful parts. Must be equal after a resume."""
    described: dict[str, Any] = {}
    name_of_layer = "strategy"
    for layer in layers_of(strategy):
        described[name_of_layer] = type(layer).__name__
        described[f"parts of {name_of_layer}"] = sorted(name for name, value in vars(layer).items() if has_state(value))
        accepted = inspect.signature(type(layer)).parameters
        for name, value in vars(layer).items():
            if name in accepted and isinstance(value, int | float | str):
                described[f"{name_of_layer}.{name}"] = value
        name_of_layer += ".strategy"
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
