"""What one option is: the values it takes, what is said of others, and for whom it means something.

An option is a field of a frozen dataclass that was made with `option(...)`. Its row says everything about it but what
the code does with it. The options of a run are in `table`; those of a strategy in its class, in `strategy`.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
import numbers
import os
import reprlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any, ClassVar, NamedTuple

from unsloth_multigpu.errors import ConfigError

_TRUTH_VALUES = dict.fromkeys(("1", "true", "yes", "on"), True) | dict.fromkeys(("0", "false", "no", "off"), False)
# Of seconds 31 years, where torch counts nanoseconds in 64 bits; of anything else more than a training has.
_MOST = 1e9


class Scope(Enum):
    """For whom an option means something: it is refused where nothing would follow it.

    Values are the name in docs, and what it means.
    """

    RANKS = "several ranks", "refused with `enable_ddp=False`"
    DDP = "DDP", 'refused with another `strategy` than `"ddp"`'
    PLANNER = (
        "planner",
        'what deals samples by length; refused with `balance="off"`, `global_batch="scale"`, `batch_size_per_gpu`, '
        "and where ranks do not meet in every step",
    )
    TRAINER = "Trainer", "refused in a plain loop, and with FSDP 1, DeepSpeed or another kind of parallelism"
    NODES = "several nodes", "refused without `nnodes`"


class Kind:
    """The values of an option. Where the default is None, None is taken as well, and means "not given"."""

    value_type: ClassVar[type[Any]] = str  # Of a value on the command line; bool is a switch there.

    def words(self) -> tuple[str, ...]:
        """The texts that it takes, or that one begins with; none where these are not words."""
        return ()

    def shown(self) -> str:
        """What stands for a value in `--help`."""
        return self.value_type.__name__.upper()

    def parse(self, shown: str, text: str) -> Any:
        """The value that a text of a variable means.

        Args:
            shown: The name under which it was given.

        Raises:
            ConfigError: None.
        """
        return text

    def take(self, name: str, value: Any) -> Any:
        """The value as a config keeps it.

        Args:
            name: The name under which it was given.

        Raises:
            ConfigError: It cannot be used.
        """
        raise NotImplementedError


@dataclass(frozen=True)
class Choice(Kind):
    """One of some words.

    Args:
        known: All of them.
        hint: What to do, with {name} in it.
    """

    known: tuple[str, ...]
    hint: str = "Set {name} to one of them; `unsloth-multigpu doctor --options` says what each does."

    def words(self) -> tuple[str, ...]:
        """All of them."""
        return self.known

    def shown(self) -> str:
        """All of them."""
        return f"{{{','.join(self.known)}}}"

    def take(self, name: str, value: Any) -> Any:
        """One of the words."""
        if not isinstance(value, str) or value not in self.known:
            raise ConfigError(
                f"{name}={brief(value)}; expected {either(self.known)}.",
                hint=self._meant_by(value) + self.hint.format(name=name),
            )
        return value

    def _meant_by(self, value: Any) -> str:
        """The beginning of the hint: the word that is spelt like it, or the one that means yes or no."""
        text = str(value).lower() if isinstance(value, str | int) else ""
        if text in _TRUTH_VALUES:
            words = ("on", "auto") if _TRUTH_VALUES[text] else ("off",)
            return next((f"Did you mean {word!r}? " for word in words if word in self.known), "")
        return did_you_mean(text, {word: repr(word) for word in self.known})


@dataclass(frozen=True)
class Count(Kind):
    """A whole number.

    Args:
        minimum: The smallest.
        none_means: What None stands for, where it stands for something.
        hint: What to do; None = leave it out.
    """

    minimum: int
    none_means: str | None = None
    hint: str | None = None
    value_type = int

    def shown(self) -> str:
        """N."""
        return "N"

    def parse(self, shown: str, text: str) -> Any:
        """Of digits."""
        try:
            return int(text)
        except ValueError:
            raise ConfigError(
                f"{shown}={brief(text)}; expected a whole number.", hint=f"Set {shown}={max(self.minimum, 2)}, say."
            ) from None

    def take(self, name: str, value: Any) -> Any:
        """An int; of numpy's as well."""
        hint = self.hint or f"Leave {name} out{f' for {self.none_means}' if self.none_means else ''}."
        # bool is an int in Python; num_gpus=True is a mistake and not one GPU.
        if not isinstance(value, numbers.Integral) or isinstance(value, bool) or value < self.minimum:
            otherwise = f", or None for {self.none_means}" if self.none_means else ""
            raise ConfigError(
                f"{name}={brief(value)}; expected a whole number of at least {self.minimum}{otherwise}.", hint=hint
            )
        _check_size(name, int(value), hint)
        return int(value)


@dataclass(frozen=True)
class Number(Kind):
    """A finite number of at least 0.

    Args:
        expected: What it counts, as an error says it.
        below: It must be smaller; None = it has no limit of its own.
    """

    expected: str = "a number of at least 0"
    below: float | None = None
    value_type = float

    def shown(self) -> str:
        """NUMBER."""
        return "NUMBER"

    def parse(self, shown: str, text: str) -> Any:
        """As Python writes numbers."""
        try:
            return float(text)
        except ValueError:
            raise ConfigError(f"{shown}={brief(text)}; expected a number.", hint=f"Set {shown}=2, say.") from None

    def take(self, name: str, value: Any) -> Any:
        """A float."""
        if not is_number(value) or not 0 <= value < math.inf:
            raise ConfigError(f"{name}={brief(value)}; expected {self.expected}.", hint=f"Leave {name} out.")
        _check_size(name, value, f"Leave {name} out.")
        if self.below is not None and value >= self.below:
            raise ConfigError(
                f"{name}={brief(value)} grows without a limit; expected a number below {self.below:g}.",
                hint=f"Leave {name} out.",
            )
        return float(value)


@dataclass(frozen=True)
class Seconds(Number):
    """A time.

    Args:
        least: The shortest; None = any above 0.
        never: 0 is taken as well, and stands for no limit.
        reason: Why it cannot be shorter than `least`.
    """

    least: float | None = None
    never: bool = False
    reason: str = ""

    def shown(self) -> str:
        """SECONDS."""
        return "SECONDS"

    def take(self, name: str, value: Any) -> Any:
        """A float, in seconds."""
        hint = f"Leave {name} out."
        if self.never:
            if Number("seconds of at least 0").take(name, value) == 0:
                return 0.0
        elif not is_number(value) or not 0 < value <= _MOST:
            raise ConfigError(f"{name}={brief(value)}; expected seconds above 0, at most {_MOST:g}.", hint=hint)
        if self.least is not None and value < self.least:
            raise ConfigError(
                f"{name}={brief(value)}; {self.reason}, so expected at least {self.least:g}, or 0 for never.", hint=hint
            )
        return float(value)


class Switch(Kind):
    """True or False."""

    value_type = bool

    def parse(self, shown: str, text: str) -> Any:
        """One of several spellings."""
        if text.lower() not in _TRUTH_VALUES:
            raise ConfigError(f"{shown}={brief(text)}; expected a truth value.", hint=f"Set {shown}=1 or {shown}=0.")
        return _TRUTH_VALUES[text.lower()]

    def take(self, name: str, value: Any) -> Any:
        """A bool, and nothing that is only like one."""
        if not isinstance(value, bool):
            raise ConfigError(
                f"{name}={brief(value)}; expected True or False.", hint=f"Set {name}=True or {name}=False."
            )
        return value


class Text(Kind):
    """A text that is not empty, of which no more is known here."""

    def shown(self) -> str:
        """TEXT."""
        return "TEXT"

    def take(self, name: str, value: Any) -> Any:
        """The text."""
        if not isinstance(value, str) or not value:
            raise ConfigError(f"{name}={brief(value)}; expected a text.", hint=f"Leave {name} out.")
        return value


class Folder(Kind):
    """The name of a folder, or a path."""

    def shown(self) -> str:
        """FOLDER."""
        return "FOLDER"

    def take(self, name: str, value: Any) -> Any:
        """The name."""
        value = os.fspath(value) if isinstance(value, os.PathLike) else value
        if not isinstance(value, str) or not value:
            raise ConfigError(f"{name}={brief(value)}; expected a folder name.", hint=f'Set {name}="logs".')
        return value


class Nodes(Kind):
    """How many nodes."""

    def shown(self) -> str:
        """N."""
        return "N"

    def take(self, name: str, value: Any) -> Any:
        """The text."""
        value = str(value) if isinstance(value, int) and not isinstance(value, bool) else value
        if not isinstance(value, str) or not value.isascii() or not value.isdigit() or int(value) < 1:
            hint = f'Set {name}="2".'
            if isinstance(value, str) and ":" in value:
                hint = (
                    f"For nodes that come and go start this script with torchrun --nnodes {value} --nproc-per-node "
                    "NUM_GPUS --max-restarts 3 --rdzv-backend c10d --rdzv-endpoint HOST:29400 --rdzv-id ID train.py"
                )
            raise ConfigError(f"{name}={brief(value)}; expected a number.", hint=hint)
        return value


class Endpoint(Kind):
    """HOST:PORT."""

    def shown(self) -> str:
        """HOST:PORT."""
        return "HOST:PORT"

    def take(self, name: str, value: Any) -> Any:
        """The text."""
        if not isinstance(value, str) or not value.rpartition(":")[2].isdigit():
            raise ConfigError(f"{name}={brief(value)}; expected HOST:PORT.", hint=f'Set {name}="10.0.0.1:29400".')
        return value


@dataclass(frozen=True)
class Row:
    """One option.

    Args:
        kind: The values it takes.
        default: What it is where nobody gave it.
        help: What it does, in whole sentences: for `--help` and `docs/options.md`.
        otherwise: What the default None stands for.
        section: Where it stands in `docs/options.md`.
        scopes: For whom it means something; none = for every run.
        asking: Values that ask something of those; None = all but the default.
        commands: Commands that have it, of "run", "verify" and "chaos".
        is_of_node: Each node may set it for itself: it does not change the training.
    """

    kind: Kind
    default: Any
    help: str
    otherwise: str = "none"
    section: str = ""
    scopes: frozenset[Scope] = frozenset()
    asking: tuple[Any, ...] | None = None
    commands: tuple[str, ...] = ("run",)
    is_of_node: bool = False

    def asks(self, value: Any) -> bool:
        """True for a value that this package has to follow."""
        return value != self.default if self.asking is None else value in self.asking

    def line(self, default: str | None = None) -> str:
        """What `--help` says of it.

        Args:
            default: Of a command that has another default than a run.
        """
        if isinstance(self.default, bool):
            usual = "on" if self.default else "off"
        else:
            usual = self.otherwise if self.default is None else _plain(self.default)
        return f"{self.help} [{usual if default is None else default}]"


def option(default: Any, kind: Kind, help: str, *scopes: Scope, **more: Any) -> Any:
    """A field of a dataclass that is an option.

    Args:
        scopes, more: See `Row`.
    """
    row = Row(kind, default, help, scopes=frozenset(scopes), **more)
    return dataclasses.field(default=default, metadata={"row": row})


def rows(options: Any) -> dict[str, Row]:
    """The table: name -> row.

    Args:
        options: A dataclass of options, or an object of one.
    """
    return {field.name: field.metadata["row"] for field in dataclasses.fields(options)}


def take_values(options: Any) -> None:
    """Checks every option of an object that is being made, and brings it into the type that is kept.

    Raises:
        ConfigError: With the name and the value of the first that cannot be used.
    """
    for name, row in rows(options).items():
        value = getattr(options, name)
        if value is not None or row.default is not None:
            object.__setattr__(options, name, row.kind.take(name, value))


class CommandOption(NamedTuple):
    """An option of a command. A table of them may have plain tuples, too: type and text alone.

    Args:
        kind: Type of its value; bool for a switch.
        text: What it means.
        shown: What stands for a value in `--help`; "" = the name of the type.
        words: What a value is one of, or begins with, for the completion of shells.
        group: Heading under which `--help` lists it; "" = under none.
    """

    kind: type[Any]
    text: str
    shown: str = ""
    words: tuple[str, ...] = ()
    group: str = ""


def flag(name: str) -> str:
    """The option's name on the command line."""
    return "--" + name.replace("_", "-")


def either(words: Iterable[str]) -> str:
    """'a' or 'b' or 'c'."""
    return " or ".join(repr(word) for word in words)


def did_you_mean(name: str, known: Mapping[str, str]) -> str:
    """The beginning of a hint about an unknown name; "" where none that is known is like it.

    Args:
        known: Name -> how it is given.
    """
    found = difflib.get_close_matches(name, known, n=1)
    return f"Did you mean {known[found[0]]}? " if found else ""


def brief(value: object) -> str:
    """A value as an error shows it: of a long text or container, the beginning and the end."""
    shortener = reprlib.Repr()
    shortener.maxstring = shortener.maxother = 160
    return shortener.repr(value)


def is_number(value: object) -> bool:
    """True for an int or a float, of numpy's as well. bool is an int in Python, and no number here."""
    return isinstance(value, numbers.Real) and not isinstance(value, bool)


def _check_size(name: str, value: float, hint: str) -> None:
    if value > _MOST:
        raise ConfigError(f"{name}={brief(value)}; expected at most {_MOST:g}.", hint=hint)


def _plain(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)
