"""How gradients are synchronized, as the user writes it: `strategy="diloco"`, `strategy=ump.DiLoCo(every_steps=8)`, or
as text in a variable and on the command line, `diloco:every_steps=8`.

What a strategy does in a training is in `strategies/`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

from unsloth_multigpu.errors import ConfigError
from unsloth_multigpu.option_type import Option, brief, did_you_mean, either, options_of, take_values


@dataclass(frozen=True)
class Strategy:
    """What all strategies have. `str(strategy)` is the text that names it and the options that are not the defaults.

    The docstring of each begins with what ranks send to each other.

    Args:
        name: In texts.
        is_synchronous: All ranks make one optimizer step together, so that their weights are equal after each.
        has_one_gradient: Every rank has the gradient of all of them before it steps.
    """

    name: ClassVar[str]
    is_synchronous: ClassVar[bool] = True
    has_one_gradient: ClassVar[bool] = False

    def __post_init__(self) -> None:
        take_values(self)

    def __str__(self) -> str:
        values = {name: (getattr(self, name), option.default) for name, option in options_of(type(self)).items()}
        changed = [f"{name}={_text(value)}" for name, (value, default) in values.items() if value != default]
        return f"{self.name}:{','.join(changed)}" if changed else self.name


@dataclass(frozen=True)
class DDP(Strategy):
    """Averaged gradients, while the backward still runs (torch's DistributedDataParallel): those of one GPU."""

    name = "ddp"
    has_one_gradient = True


@dataclass(frozen=True)
class AllReduce(Strategy):
    """Averaged gradients, after the backward. They are those of one GPU."""

    name = "allreduce"
    has_one_gradient = True


@dataclass(frozen=True)
class ParameterServer(Strategy):
    """Gradients to rank 0, whose optimizer alone steps; weights back. The gradients are those of one GPU."""

    name = "parameter_server"


@dataclass(frozen=True)
class LocalSGD(Strategy):
    """Averaged trainable weights, now and then; ranks train apart between two meetings.

    Args:
        every_steps: Optimizer steps between two meetings.
    """

    name = "local_sgd"
    is_synchronous = False

    every_steps: Annotated[int, Option(least=1)] = 16


@dataclass(frozen=True)
class DiLoCo(LocalSGD):
    """What ranks have changed since they met, now and then; an outer step with momentum takes the mean.

    Args:
        every_steps: Optimizer steps between two meetings.
        outer_learning_rate: Of the step that is made at a meeting.
        outer_momentum: Nesterov momentum of that step, below 1.
    """

    name = "diloco"

    outer_learning_rate: Annotated[float, Option()] = 0.7
    outer_momentum: Annotated[float, Option(below=1.0)] = 0.9


STRATEGIES: dict[str, type[Strategy]] = {cls.name: cls for cls in (DDP, AllReduce, ParameterServer, LocalSGD, DiLoCo)}


def read_strategy(shown: str, value: Any) -> Strategy:
    """The strategy that an option was given.

    Args:
        shown: The option or the variable.
        value: A strategy, or its text: `NAME` or `NAME:OPTION=VALUE,OPTION=VALUE`.

    Raises:
        ConfigError: No strategy, an option that it does not have, or a value that this cannot be.
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
        key, equals, text = (p.strip() for p in part.partition("="))
        if key not in known or not equals or key in given:
            what = "is given twice" if key in given else "has no value" if key in known else f"is no option of {name}"
            options = f"Options of {name}: {', '.join(known)}." if known else f"{name} has no options."
            raise ConfigError(
                f"{shown}={brief(value)}; {key!r} {what}.", hint=did_you_mean(key, {k: k for k in known}) + options
            )
        given[key] = known[key].parse(text)
    try:
        return STRATEGIES[name](**given)
    except ConfigError as error:  # It names the option; this text is where it stands.
        raise ConfigError(f"{shown}={brief(value)}; {error.args[0]}", hint=error.hint) from None


def _text(value: Any) -> str:
    """As `read_strategy` reads it back; 4 and 4.0 are one number."""
    return str(int(value)) if isinstance(value, float) and value.is_integer() else str(value)
