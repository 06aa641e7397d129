"""How gradients meet, as the user says it: `strategy="diloco"`, `strategy=ump.DiLoCo(every_steps=8)`, or as text in a
variable and on the command line, `diloco:every_steps=8`.

What a strategy does in a training is in `strategies/`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar

from unsloth_multigpu.errors import ConfigError
from unsloth_multigpu.row import Count, Kind, Number, brief, did_you_mean, either, option, rows, take_values


@dataclass(frozen=True)
class Strategy:
    """What all strategies have. `str(strategy)` is the text that names it and the options that are not the defaults.

    Args:
        name: In texts.
        exchanges: What ranks send to each other, for `docs/options.md`.
    """

    name: ClassVar[str]
    exchanges: ClassVar[str]

    def __post_init__(self) -> None:
        take_values(self)

    def __str__(self) -> str:
        changed = [f"{n}={_text(getattr(self, n))}" for n, row in rows(self).items() if getattr(self, n) != row.default]
        return f"{self.name}:{','.join(changed)}" if changed else self.name

    @property
    def is_synchronous(self) -> bool:
        """True if all ranks make one optimizer step together, so that their weights are equal after each."""
        return True

    @property
    def has_one_gradient(self) -> bool:
        """True if every rank has the gradient of all of them before it steps."""
        return False


@dataclass(frozen=True)
class DDP(Strategy):
    """torch's DistributedDataParallel: averaged gradients, sent while the backward still runs. The default."""

    name = "ddp"
    exchanges = "Averaged gradients, while the backward still runs. The gradients are those of one GPU."

    @property
    def has_one_gradient(self) -> bool:
        """True."""
        return True


@dataclass(frozen=True)
class AllReduce(Strategy):
    """Averaged gradients, sent after the backward.

    Args:
        bucket_mb: MiB of a message; 0 = a message for each tensor.
    """

    name = "allreduce"
    exchanges = "Averaged gradients, after the backward. The gradients are those of one GPU."

    bucket_mb: float = option(25.0, Number(), "MiB of a message; 0 = a message for each tensor.")

    @property
    def has_one_gradient(self) -> bool:
        """True."""
        return True


@dataclass(frozen=True)
class ParameterServer(Strategy):
    """Ranks send gradients to rank 0, whose optimizer alone steps, and get its weights.

    Args:
        bucket_mb: MiB of a message; 0 = a message for each tensor.
    """

    name = "parameter_server"
    exchanges = "Gradients to rank 0, whose optimizer alone steps; weights back. The gradients are those of one GPU."

    bucket_mb: float = option(25.0, Number(), "MiB of a message; 0 = a message for each tensor.")


@dataclass(frozen=True)
class LocalSGD(Strategy):
    """Ranks train apart, and average their trainable weights now and then.

    Args:
        every_steps: Optimizer steps between two meetings.
    """

    name = "local_sgd"
    exchanges = "Averaged trainable weights, now and then; ranks train apart between two meetings."

    every_steps: int = option(16, Count(1), "Optimizer steps between two meetings.")

    @property
    def is_synchronous(self) -> bool:
        """False."""
        return False


@dataclass(frozen=True)
class DiLoCo(LocalSGD):
    """Ranks train apart; when they meet, an outer optimizer with momentum steps on the mean of what they have changed.

    Args:
        every_steps: Optimizer steps between two meetings.
        outer_learning_rate: Of the step at a meeting.
        outer_momentum: Nesterov momentum of that step, below 1.
    """

    name = "diloco"
    exchanges = "What ranks have changed since they met, now and then; an outer step with momentum takes the mean."

    outer_learning_rate: float = option(0.7, Number(), "Of the step that is made at a meeting.")
    outer_momentum: float = option(0.9, Number(below=1.0), "Nesterov momentum of that step.")


STRATEGIES: dict[str, type[Strategy]] = {cls.name: cls for cls in (DDP, AllReduce, ParameterServer, LocalSGD, DiLoCo)}


class StrategyKind(Kind):
    """A strategy, or the text that names one: "diloco", "diloco:every_steps=8,outer_momentum=0"."""

    def words(self) -> tuple[str, ...]:
        """The names."""
        return tuple(STRATEGIES)

    def shown(self) -> str:
        """The names, and that options may follow."""
        return f"{{{','.join(STRATEGIES)}}}[:OPTION=VALUE,...]"

    def parse(self, shown: str, text: str) -> Strategy:
        """See `read_strategy`."""
        return read_strategy(shown, text)

    def take(self, name: str, value: Any) -> Strategy:
        """An object of one of the classes above."""
        if isinstance(value, str):
            return read_strategy(name, value)
        if type(value) not in STRATEGIES.values():
            raise _not_a_strategy(name, value)
        return value  # type: ignore[no-any-return]


def read_strategy(shown: str, text: str) -> Strategy:
    """The strategy that a text names, with its defaults for what the text leaves out.

    Args:
        shown: The option or variable that had the text.
        text: `NAME` or `NAME:OPTION=VALUE,OPTION=VALUE`.

    Raises:
        ConfigError: No strategy, an option that it does not have, or a value that this cannot be.
    """
    name, colon, rest = text.partition(":")
    if name not in STRATEGIES:
        raise _not_a_strategy(shown, text)
    known, given = rows(STRATEGIES[name]), dict[str, Any]()
    for part in rest.split(",") if colon else ():
        key, equals, value = (p.strip() for p in part.partition("="))
        if key not in known:
            options = f"Options of {name}: {', '.join(known)}." if known else f"{name} has no options."
            raise ConfigError(
                f"{shown}={brief(text)}; {name} has no option {key!r}.",
                hint=did_you_mean(key, {k: k for k in known}) + options,
            )
        if not equals or key in given:
            what = "is given twice" if key in given else "has no value"
            raise ConfigError(
                f"{shown}={brief(text)}; {key} {what}.",
                hint=f"Set {shown}={name}:{key}={known[key].default or 2}, say.",
            )
        with _inside(shown, text):
            given[key] = known[key].kind.parse(key, value)
    with _inside(shown, text):
        return STRATEGIES[name](**given)


@contextmanager
def _inside(shown: str, text: str) -> Iterator[None]:
    """An error about a part of the text says where the text stood."""
    try:
        yield
    except ConfigError as error:
        raise ConfigError(f"{shown}={brief(text)}; {error.args[0]}", hint=error.hint) from None


def _not_a_strategy(shown: str, value: Any) -> ConfigError:
    meant = did_you_mean(value.partition(":")[0], {n: n for n in STRATEGIES}) if isinstance(value, str) else ""
    return ConfigError(
        f"{shown}={brief(value)}; expected {either(STRATEGIES)}, with options as in 'diloco:every_steps=8'.",
        hint=f"{meant}Set {shown} to one of them; `unsloth-multigpu doctor --options` says what each does.",
    )


def _text(value: Any) -> str:
    """As `read_strategy` reads it back; 4 and 4.0 are one number."""
    return str(int(value)) if isinstance(value, float) and value.is_integer() else str(value)
