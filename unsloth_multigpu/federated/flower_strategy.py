"""Flower's strategies by name, and what has to fit between a strategy and the clients."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from flwr.serverapp import strategy as flower
from flwr.serverapp.strategy import FedAvg, Strategy

from unsloth_multigpu.errors import ConfigError
from unsloth_multigpu.federated.federated_option import check

# Flower's defaults are 2: with one client it would wait without end for a second one.
_LEAST_NODES = ("min_train_nodes", "min_evaluate_nodes", "min_available_nodes")
# Their clients have to clip with one of Flower's mods, which the ClientApp of a train_fn has not.
_WITH_MODS = (
    flower.DifferentialPrivacyClientSideFixedClipping,
    flower.DifferentialPrivacyClientSideAdaptiveClipping,
)


def checked_strategy(strategy: str | Strategy, settings: Mapping[str, Any] | None) -> Strategy:
    """A fresh strategy for a name, or the object itself.

    Raises:
        ConfigError: It is neither, settings do not go with it, or clients would have to clip their updates: with the
            noise alone a client's data would not be hidden.
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
            "strategy_kwargs together with an object as strategy.", hint="Give them to the object's class."
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
    """The strategy of Flower that has this name, as in "fedavg", "fedprox", "fedadam" or "krum".

    Args:
        name: Name of a class of `flwr.serverapp.strategy`; case, "-" and "_" do not matter.
        settings: Arguments of that class. `min_*_nodes` are 1 if they are left out.

    Raises:
        ConfigError: No such strategy; an argument that it does not know, that is missing or that it refuses; "fedprox"
            without `proximal_mu`, which would be FedAvg.
    """
    classes = {key.lower(): getattr(flower, key) for key in flower.__all__}
    kinds = {n: k for n, k in classes.items() if issubclass(k, Strategy) and not inspect.isabstract(k)}
    kind = kinds.get(name.lower().replace("-", "").replace("_", ""))
    if kind is None:
        raise ConfigError(
            f"strategy={name!r}; expected one of {', '.join(sorted(kinds))}.",
            hint="Change strategy, or pass an object of a class of flwr.serverapp.strategy.Strategy.",
        )
    accepted = inspect.signature(kind).parameters
    arguments = {key: 1 for key in _LEAST_NODES if key in accepted} | dict(settings)
    if "proximal_mu" in accepted and "proximal_mu" not in arguments:
        raise ConfigError(
            f"strategy={name!r} needs 'proximal_mu' in strategy_kwargs.", hint="Without it, use 'fedavg'."
        )
    try:
        # Each case that Flower warns of here was asked for, or is an error above.
        with quiet_flower(logging.ERROR):
            return kind(**arguments)  # type: ignore[no-any-return]
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"strategy={name!r} refuses its arguments: {error}",
            hint=f"Change strategy_kwargs; it takes {', '.join(accepted)}.",
        ) from error


def layers_of(strategy: Strategy) -> Iterator[Strategy]:
    """The strategy itself, and those that it wraps: the ones for differential privacy hold theirs as `.strategy`."""
    inner: Any = strategy
    while isinstance(inner, Strategy):
        yield inner
        inner = vars(inner).get("strategy")


def check_strategy(strategy: Strategy, num_clients: int) -> None:
    """Checks that the strategy can work with this number of clients.

    Raises:
        ConfigError: It would wait for more clients than there are, or has a loop of its own.
    """
    for layer in layers_of(strategy):
        kind = type(layer).__name__
        if type(layer).start is not Strategy.start:
            raise ConfigError(
                f"{kind} has a start() of its own, which would not be called.",
                hint="Put what it does into configure_train and aggregate_train.",
            )
        for name in (*_LEAST_NODES, "num_sampled_clients"):
            value = vars(layer).get(name)
            if isinstance(value, int) and value > num_clients:
                raise ConfigError(
                    f"{name}={value} of {kind}, but num_clients={num_clients}: it would wait forever.",
                    hint=f"Set {name} to {num_clients} or less, or use more clients.",
                )


def is_weighted_mean(strategy: Strategy) -> bool:
    """Whether the global weights are the example-weighted mean of the clients', and nothing else."""
    return isinstance(strategy, FedAvg) and type(strategy).aggregate_train is FedAvg.aggregate_train


def has_server_optimizer(strategy: Strategy) -> bool:
    """Whether the server takes a step of its own from the mean of the clients, which suits parameters only."""
    return isinstance(strategy, flower.FedAdagrad | flower.FedAdam | flower.FedYogi | flower.FedAvgM)


def weight_key(strategy: Strategy) -> str:
    """Name of the metric by which the strategy weights its clients."""
    keys = (vars(layer).get("weighted_by_key") for layer in layers_of(strategy))
    return next((key for key in keys if isinstance(key, str)), "num-examples")


def has_state(value: Any) -> bool:
    """Whether it can be saved and restored as torch's modules are, like an accountant of privacy."""
    return callable(getattr(value, "state_dict", None)) and callable(getattr(value, "load_state_dict", None))


def describe(strategy: Strategy) -> dict[str, Any]:
    """Class, plain settings and stateful parts of a strategy and of what it wraps: the same when a training resumes."""
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
    """Keeps Flower's own account of a round, some 20 lines, out of the log. With our logger on DEBUG it stays."""
    logger = logging.getLogger("flwr")
    before = logger.level
    if not logging.getLogger("unsloth_multigpu").isEnabledFor(logging.DEBUG):
        logger.setLevel(max(level, before))
    try:
        yield
    finally:
        logger.setLevel(before)
