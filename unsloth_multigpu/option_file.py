"""Reads options from a YAML file and from pyproject.toml. `options` checks them."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from unsloth_multigpu.errors import ConfigError
from unsloth_multigpu.option_type import brief

# The table of pyproject.toml.
_TABLE = "unsloth_multigpu"
_FORM = "Write `name: value`, one in a line; options of a strategy as in `strategy: diloco:every_steps=8`."


def read_yaml(file: Path) -> Iterator[tuple[str, str, str, str]]:
    """Yields (place, shown name, option name, value) for each line of a YAML file.

    Values are read as text, like those of variables: YAML 1.1 would turn `off` into a truth value, `1:4` into 64.
    """
    import yaml

    try:
        root = yaml.compose(_text_of(file), Loader=yaml.BaseLoader)
    except yaml.YAMLError as error:
        raise ConfigError(f"{file} is not YAML: {error}", hint=_FORM) from None
    if root is None:
        return
    if not isinstance(root, yaml.MappingNode):
        raise ConfigError(f"{file} has no options.", hint=_FORM)
    seen = set()
    for key, node in root.value:
        place, name = f"{file}, line {key.start_mark.line + 1}: ", str(key.value)
        if not isinstance(node, yaml.ScalarNode):
            raise ConfigError(f"{place}{name} has several values; expected one.", hint=_FORM)
        if name in seen:
            raise ConfigError(f"{place}{name} is given twice.", hint="Leave one of them out.")
        seen.add(name)
        yield place, name, name, node.value


def read_pyproject(file: Path) -> Iterator[tuple[str, str, str, Any]]:
    """Yields the options in the table `[tool.unsloth_multigpu]`, like `read_yaml`."""
    text = _text_of(file)
    if _TABLE not in text:
        return  # A broken file without our table is not our error to report.
    if sys.version_info >= (3, 11):
        import tomllib
    else:
        import tomli as tomllib
    try:
        table = tomllib.loads(text).get("tool", {}).get(_TABLE, {})
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{file} cannot be read: {error}.", hint="Correct the file.") from None
    where = f"{file}, [tool.{_TABLE}]"
    if not isinstance(table, dict):
        raise ConfigError(f"{where} is {brief(table)}; expected a table.", hint="Write one option per line below it.")
    yield from ((f"{where}: ", name, name, value) for name, value in table.items())


def _text_of(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{file} cannot be read: {error}.", hint="Check the path and the permissions.") from None
