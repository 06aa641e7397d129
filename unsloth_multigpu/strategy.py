"""How gradients meet, as the user says it: `strategy="diloco"`, `strategy=ump.DiLoCo(every_steps=8)`, or as text in a
variable and on the command line, `diloco:every_steps=8`.

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

    Args:
        name: In texts.
        exchanges: What ranks send to each other, for `docs/options.md`.
        is_synchronous: All ranks make one optimizer step together, so that their weights are equal after each.
        has_one_gradient: Every rank has the gradient of all of them before it steps.
    """

    name: ClassVar[str]
    exchanges: ClassVar[str]
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
    """torch's DistributedDataParallel: averaged gradients, sent while the backward still runs. The default."""

    name = "ddp"
    exchanges = "Averaged gradients, while the backward still runs. The gradients are those of one GPU."
    has_one_gradient = True


@dataclass(frozen=True)
class AllReduce(Strategy):
    """Averaged gradients, sent after the backward."""

    name = "allreduce"
    exchanges = "Averaged gradients, after the backward. The gradients are those of one GPU."
    has_one_gradient = True


@dataclass(frozen=True)
class ParameterServer(Strategy):
    """Ranks send gradients to rank 0, whose optimizer alone steps, and get its weights."""

    name = "parameter_server"
    exchanges = "Gradients to rank 0, whose optimizer alone steps; weights back. The gradients are those of one GPU."


@dataclass(frozen=True)
class LocalSGD(Strategy):
    """Ranks train apart, and average their trainable weights now and then.

    Args:
        every_steps: Optimizer steps between two meetings.
    """

    name = "local_sgd"
    exchanges = "Averaged trainable weights, now and then; ranks train apart between two meetings."
    is_synchronous = False

    every_steps: Annotated[int, Option(least=1)] = 16


@dataclass(frozen=True)
class DiLoCo(LocalSGD):
    """Ranks train apart; when they meet, an outer optimizer with momentum steps on the mean of what they have changed.

    Args:
        every_steps: Optimizer steps between two meetings.
        outer_learning_rate: Of the step that is made at a meeting.
        outer_momentum: Nesterov momentum of that step, below 1.
    """

    name = "diloco"
    exchanges = "What ranks have changed since they met, now and then; an outer step with momentum takes the mean."

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
            hint=f"{did_you_mean(name, {n: n for n in STRATEGIES})}`unsloth-multigpu doctor --options` says what each "
            "does.",
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
