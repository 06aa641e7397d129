"""The values of the option `strategy`: `ump.DiLoCo(every_steps=8)`, or the text "diloco:every_steps=8".

Their implementations are in `strategies/`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

from unsloth_multigpu.errors import ConfigError
from unsloth_multigpu.option_type import Option, brief, did_you_mean, either, options_of, take_values


@dataclass(frozen=True)
class Strategy:
    """Base of all strategies. `str(strategy)` is its text: the name, and the options that differ from their defaults.

    The docstring of each begins with what ranks exchange.

    Args:
        name: Name in the text.
        is_synchronous: Ranks synchronize in every optimizer step, so that their weights are equal after it.
        has_one_gradient: Every rank has the mean gradient of all ranks before the optimizer step.
    """

    name: ClassVar[str]
    is_synchronous: ClassVar[bool] = True
    has_one_gradient: ClassVar[bool] = False

    def __post_init__(self) -> None:
        take_values(self)

    def __str__(self) -> str:
        values = {name: (getattr(self, name), option.default) for name, option in options_of(type(self)).items()}
        changed = [f"{name}={value}" for name, (value, default) in values.items() if value != default]
        return f"{self.name}:{','.join(changed)}" if changed else self.name


@dataclass(frozen=True)
class DDP(Strategy):
    """Gradients, averaged during the backward pass by torch's DistributedDataParallel. They are those of one GPU."""

    name = "ddp"
    has_one_gradient = True


@dataclass(frozen=True)
class AllReduce(Strategy):
    """Gradients, averaged after the backward pass. They are those of one GPU."""

    name = "allreduce"
    has_one_gradient = True


@dataclass(frozen=True)
class ParameterServer(Strategy):
    """Gradients to rank 0, which makes the optimizer step, and weights back. The gradients are those of one GPU."""

    name = "parameter_server"


@dataclass(frozen=True)
class LocalSGD(Strategy):
    """Trainable weights, averaged every few steps. In between, each rank trains by itself.

    Args:
        every_steps: Optimizer steps between two synchronizations.
    """

    name = "local_sgd"
    is_synchronous = False

    every_steps: Annotated[int, Option(least=1)] = 16


@dataclass(frozen=True)
class DiLoCo(LocalSGD):
    """Changes of the weights, averaged every few steps. An outer step applies the mean to the last common weights.

    Args:
        every_steps: Optimizer steps between two synchronizations.
        outer_learning_rate: Learning rate of the outer step.
        outer_momentum: Nesterov momentum of the outer step, below 1.
    """

    name = "diloco"

    outer_learning_rate: Annotated[float, Option()] = 0.7
    outer_momentum: Annotated[float, Option(below=1.0)] = 0.9


STRATEGIES: dict[str, type[Strategy]] = {cls.name: cls for cls in (DDP, AllReduce, ParameterServer, LocalSGD, DiLoCo)}


def read_strategy(shown: str, value: Any) -> Strategy:
    """Converts the value of the option `strategy`: a strategy, or its text `NAME` or `NAME:OPTION=VALUE,OPTION=VALUE`.

    Raises:
        ConfigError: An unknown strategy, an option that it does not have, or an invalid value. `shown` is the option's
            name in the message.
    """
    if type(value) in STRATEGIES.values():
        return value  # type: ignore[no-any-return]
    name, _, rest = value.partition(":") if isinstance(value, str) else ("", "", "")
    if name not in STRATEGIES:
        raise ConfigError(
            f"{shown}={brief(value)}; expected {either(STRATEGIES)}, with options as in 'diloco:every_steps=8'.",
            hint=f"{did_you_mean(name, {n: n for n in STRATEGIES})}docs/strategies.md says what each does.",
        )
    known, given = options_of(STRATEGIES[name]), dict[str, Any]()
    for part in rest.split(",") if rest else ():
        key, _, text = (p.strip() for p in part.partition("="))
        if key not in known or key in given:
            problem = "is given twice" if key in given else f"is not an option of {name}"
            hint = f"{did_you_mean(key, {k: k for k in known})}Options of {name}: {', '.join(known) or 'none'}."
            raise ConfigError(f"{shown}={brief(value)}; {key!r} {problem}.", hint=hint)
        given[key] = known[key].parse(text)
    try:
        return STRATEGIES[name](**given)
    except ConfigError as error:  # Adds the whole text to the error about one of its options.
        raise ConfigError(f"{shown}={brief(value)}; {error.args[0]}", hint=error.hint) from None
