"""Flower's strategies by name, and what has to fit between a strategy and the clients."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from flwr.app import ArrayRecord
from flwr.serverapp import strategy as flower
from flwr.serverapp.strategy import FedAvg, Strategy

from unsloth_multigpu.errors import ConfigError
from unsloth_multigpu.federated.option import check_count, check_number

# Flower's defaults are 2: with one client it would wait without end for a second one.
_LEAST_NODES = ("min_train_nodes", "min_evaluate_nodes", "min_available_nodes")
_FRACTIONS = ("fraction_train", "fraction_evaluate")


def make_strategy(name: str, settings: Mapping[str, Any]) -> Strategy:
    """The strategy of Flower that has this name, as in "fedavg", "fedprox", "fedadam" or "krum".

    Args:
        name: Name of a class of `flwr.serverapp.strategy`; case, "-" and "_" do not matter.
        settings: Arguments of that class. `min_*_nodes` are 1 if they are left out.

    Raises:
        ConfigError: No such strategy; an argument that it does not know, that is missing or that it refuses; "fedprox"
            without `proximal_mu`, which would be FedAvg.
    """
    kind = _class_of(name)
    arguments = _checked_settings(name, kind, settings)
    try:
        # Each case that Flower warns of here was asked for, or is an error above.
        with quiet_flower(logging.ERROR):
            return kind(**arguments)
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"strategy={name!r} refuses its arguments: {error}", hint="Change strategy_kwargs."
        ) from error


def strategy_names() -> dict[str, type[Strategy]]:
    """Every strategy that this version of Flower has, by its name in lower case."""
    found = {name: getattr(flower, name) for name in flower.__all__}
    return {
        name.lower(): kind
        for name, kind in found.items()
        if inspect.isclass(kind) and issubclass(kind, Strategy) and not inspect.isabstract(kind)
    }


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
                    hint=f"Set {name} to {num_clients} or less.",
                )


def check_needs_no_mod(strategy: Strategy) -> None:
    """Raises ConfigError where clients must clip their updates themselves, which the ClientApp of a train_fn does not.

    With the noise alone a client's data would not be hidden.
    """
    mods = {
        flower.DifferentialPrivacyClientSideFixedClipping: "fixedclipping_mod",
        flower.DifferentialPrivacyClientSideAdaptiveClipping: "adaptiveclipping_mod",
    }
    for layer in layers_of(strategy):
        for kind, mod in mods.items():
            if isinstance(layer, kind):
                raise ConfigError(
                    f"{kind.__name__} needs Flower's {mod} in the ClientApp; train_fn makes one without.",
                    hint=f"Use {kind.__name__.replace('Client', 'Server')}, or client_app=ClientApp(mods=[{mod}]).",
                )


def without_privacy(strategy: Strategy, arrays: ArrayRecord) -> list[str]:
    """Arrays that a strategy for differential privacy sends on as they are: NumPy computes no 0-d array in place."""
    is_private = any(
        "DifferentialPrivacy" in kind.__name__ for layer in layers_of(strategy) for kind in type(layer).mro()
    )
    return [name for name, array in arrays.items() if not array.shape] if is_private else []


def nodes_needed(strategy: Strategy) -> int:
    """Nodes without which the strategy does not begin; 2 at least, as Flower has it."""
    values = [vars(layer).get(name) for layer in layers_of(strategy) for name in _LEAST_NODES]
    return max([2, *(value for value in values if isinstance(value, int))])


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


def describe(strategy: Strategy) -> dict[str, Any]:
    """Class and plain settings of a strategy and of what it wraps, to be compared when a training resumes."""
    described: dict[str, Any] = {}
    name_of_layer = "strategy"
    for layer in layers_of(strategy):
        described[name_of_layer] = type(layer).__name__
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


def _class_of(name: str) -> type[Strategy]:
    names = strategy_names()
    kind = names.get(name.lower().replace("-", "").replace("_", ""))
    if kind is None:
        raise ConfigError(
            f"strategy={name!r}; expected one of {', '.join(sorted(names))}.",
            hint="Change strategy, or pass an object of a class of flwr.serverapp.strategy.Strategy.",
        )
    return kind


def _checked_settings(name: str, kind: type[Strategy], settings: Mapping[str, Any]) -> dict[str, Any]:
    accepted = inspect.signature(kind).parameters
    for unknown in [key for key in settings if key not in accepted]:
        raise ConfigError(
            f"strategy_kwargs has {unknown!r}, which strategy={name!r} does not know.",
            hint=f"It takes {', '.join(accepted)}.",
        )
    arguments = {key: 1 for key in _LEAST_NODES if key in accepted} | dict(settings)
    missing = [key for key, p in accepted.items() if p.default is p.empty and key not in arguments]
    if missing:
        raise ConfigError(
            f"strategy={name!r} needs {', '.join(missing)}.",
            hint=f"Set strategy_kwargs={{{missing[0]!r}: ...}}.",
        )
    if "proximal_mu" in accepted and "proximal_mu" not in arguments:
        raise ConfigError(
            f"strategy={name!r} without proximal_mu would be FedAvg.",
            hint="Set strategy_kwargs={'proximal_mu': 0.1}, say: the weight of the term that the clients add.",
        )
    for key in _FRACTIONS:
        if key in arguments:
            check_number(f"strategy_kwargs[{key!r}]", arguments[key], low=0.0, high=1.0, expected="a share from 0 to 1")
    # 0 nodes are what Flower itself sets for a fraction of 0.
    for key in [key for key in _LEAST_NODES if arguments.get(key, 0) != 0]:
        check_count(f"strategy_kwargs[{key!r}]", arguments[key])
    return arguments
