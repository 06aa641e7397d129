"""Declares options as dataclass fields. The field has type, checks, group and default; the docstring has the help.

    max_restarts: Annotated[int, Option("When something fails", least=0)] = 0

`options_of` reads them from the class. The options of a run are in `options`, those of a strategy in `strategy`.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import inspect
import numbers
import os
import re
import reprlib
import types
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Annotated, Any, get_args, get_origin, get_type_hints

from unsloth_multigpu.errors import ConfigError

_TRUTH_VALUES = dict.fromkeys(("1", "true", "yes", "on"), True) | dict.fromkeys(("0", "false", "no", "off"), False)
# Upper limit of any number. In seconds it is 31 years: torch counts nanoseconds in 64 bits.
_MOST = 1e9


class Scope(Enum):
    """Where an option applies; elsewhere setting it is an error. Values: name and description in the docs."""

    RANKS = "several ranks", "refused with `enable_ddp=False`"
    PLANNER = (
        "planner",
        'divides samples by length; refused with `balance="off"`, `global_batch="scale"`, `batch_size_per_gpu`, and '
        "with strategies that do not synchronize every step",
    )
    TRAINER = "Trainer", "refused in a plain loop, and with FSDP 1, DeepSpeed or another kind of parallelism"
    NODES = "several nodes", "refused without `nnodes`"


@dataclass(frozen=True)
class Option:
    """Annotation of an option's field. If the default is None, None is valid and means "not given".

    Args:
        group: Heading under which it is listed.
        scopes: Where it applies; empty = everywhere.
        asking: Values that need those scopes; None = all but the default.
        choices: Valid values of a text; empty = any text.
        pattern: Regular expression for the texts if `choices` is empty.
        least, below: Limits of a number.
        zero_is_never: 0 is valid, too, and means "never".
        check: Replaces all checks here: takes the option's name and the value, and returns the value to keep.
        shown: Placeholder for a value in `--help`.
        hint: What to do about an invalid value; "" = leave the option out.
        otherwise: Meaning of the default None, in words.
        commands: Commands with this option: "run", "verify" or "chaos". () = no command has it.
        is_of_node: May differ between nodes, because it does not change the training.
        type, default, help: Set by `options_of`, from the field and the docstring of its class.
    """

    group: str = ""
    scopes: tuple[Scope, ...] = ()
    asking: tuple[Any, ...] | None = None
    choices: tuple[str, ...] = ()
    pattern: str = ".+"
    least: float = 0
    below: float | None = None
    zero_is_never: bool = False
    check: Callable[[str, Any], Any] | None = None
    shown: str = ""
    hint: str = ""
    otherwise: str = "none"
    commands: tuple[str, ...] = ("run",)
    is_of_node: bool = False
    type: type[Any] = str
    default: Any = None
    help: str = ""

    def parse(self, text: str) -> Any:
        """Converts the text of a variable or file to the option's type. Returns the text itself if that fails."""
        if self.type is bool:
            return _TRUTH_VALUES.get(text.lower(), text)
        if self.type in (int, float):
            try:
                return self.type(text)
            except ValueError:
                return text
        return text

    def take(self, name: str, value: Any) -> Any:
        """Checks a value that was given under `name`, and returns it in the option's type.

        Raises:
            ConfigError: The value is invalid.
        """
        if self.check is not None:
            return self.check(name, value)
        if self.type is str and not self.choices:
            value = os.fspath(value) if isinstance(value, os.PathLike) else value
        if not self._fits(value):
            raise ConfigError(f"{name}={brief(value)}; expected {self.expected()}.", hint=self._hint(name, value))
        return self.type(value)

    def asks(self, value: Any) -> bool:
        """True if the value needs the option's scopes."""
        return value != self.default if self.asking is None else value in self.asking

    def expected(self) -> str:
        """Describes the valid values."""
        if self.type is bool:
            return "True or False"
        if self.type is str:
            return either(self.choices) if self.choices else self.metavar()
        kind = "a whole number" if self.type is int else "a number"
        most = f"at most {_MOST:g}" if self.below is None else f"below {self.below:g}"
        return f"{kind} of at least {self.least:g} and {most}{', or 0 for never' if self.zero_is_never else ''}"

    def metavar(self) -> str:
        """Returns the placeholder for a value in `--help`."""
        if self.choices:
            return f"{{{','.join(self.choices)}}}"
        return self.shown or {int: "N", float: "NUMBER"}.get(self.type, "TEXT")

    def usual(self) -> str:
        """Describes the default."""
        if isinstance(self.default, bool):
            return "on" if self.default else "off"
        if self.default is None:
            return self.otherwise
        return f"{self.default:g}" if isinstance(self.default, float) else str(self.default)

    def _fits(self, value: Any) -> bool:
        if self.type is bool:
            return isinstance(value, bool)
        if self.type is str:
            return isinstance(value, str) and bool(
                value in self.choices if self.choices else re.fullmatch(self.pattern, value)
            )
        # Numbers of Python and numpy. num_gpus=True is a mistake, not one GPU.
        kind: Any = numbers.Integral if self.type is int else numbers.Real
        if isinstance(value, bool) or not isinstance(value, kind):
            return False
        is_low_enough = value <= _MOST if self.below is None else value < self.below
        return (self.least <= value and is_low_enough) or (self.zero_is_never and value == 0)

    def _hint(self, name: str, value: Any) -> str:
        if (text := str(value).lower()) in _TRUTH_VALUES:
            same = ("on", "auto") if _TRUTH_VALUES[text] else ("off",)
            meant = next((f"Did you mean {word!r}? " for word in same if word in self.choices), "")
        else:
            meant = did_you_mean(text, {word: repr(word) for word in self.choices})
        return f"{meant}{self.hint or f'Leave {name} out: its default is {self.usual()}.'}"


def options_of(cls: Any) -> Mapping[str, Option]:
    """Returns the options of a dataclass by name, with type, default and help.

    Raises:
        TypeError: A field has no `Option` in its annotation.
    """
    return _read_options(cls)  # mypy lets no dataclass through to a cached function.


@functools.cache
def _read_options(cls: Any) -> Mapping[str, Option]:
    hints, found = get_type_hints(cls, include_extras=True), dict[str, Option]()
    arguments = str(inspect.getdoc(cls)).partition("\nArgs:\n")[2].partition("\n\n")[0]
    _, *entries = re.split(r"^    (\w+): ", arguments, flags=re.MULTILINE)
    helps = {name: " ".join(text.split()) for name, text in zip(entries[::2], entries[1::2], strict=True)}
    for field in dataclasses.fields(cls):
        if get_origin(hints[field.name]) is not Annotated:
            raise TypeError(f"{cls.__name__}.{field.name} is annotated with no Option.")
        kind, option = get_args(hints[field.name])
        plain = get_args(kind)[0] if isinstance(kind, types.UnionType) else kind
        text = helps.get(field.name, "")
        found[field.name] = dataclasses.replace(option, type=plain, default=field.default, help=text)
    return types.MappingProxyType(found)


def take_values(options: Any) -> None:
    """Checks the options of a frozen dataclass instance and converts them to their types. For `__post_init__`.

    Raises:
        ConfigError: The first invalid value.
    """
    for name, option in options_of(type(options)).items():
        value = getattr(options, name)
        if value is not None or option.default is not None:
            object.__setattr__(options, name, option.take(name, value))


def unknown_option(shown: str, value: object, name: str, known: Mapping[str, str]) -> ConfigError:
    """Returns the error about a name that is not an option.

    Args:
        shown: The name as the user wrote it, with its place.
        name: The name in the form of the keys of `known`, whose values are how a user writes them here.
    """
    hint = did_you_mean(name, known) or f"Options: {', '.join(known.values())}."
    return ConfigError(f"{shown}={brief(value)} is not an option.", hint=hint)


def flag(name: str) -> str:
    """Returns the option's name on the command line."""
    return "--" + name.replace("_", "-")


def either(words: Iterable[str]) -> str:
    """Returns "'a' or 'b' or 'c'"."""
    return " or ".join(repr(word) for word in words)


def did_you_mean(name: str, known: Mapping[str, str]) -> str:
    """Returns "Did you mean ...? " for a misspelt key of `known`, with its value; "" if no key is similar."""
    found = difflib.get_close_matches(name, known, n=1)
    return f"Did you mean {known[found[0]]}? " if found else ""


def brief(value: object) -> str:
    """Returns `repr(value)`, shortened in the middle if it is long."""
    shortener = reprlib.Repr()
    shortener.maxstring = shortener.maxother = 160
    return shortener.repr(value)
