"""Reads options from files: the YAML file of UNSLOTH_MULTIGPU_CONFIG, and the table in the user's pyproject.toml.

Names are those of the arguments. YAML values are read as text, like those of variables: YAML 1.1 would turn `off` into
a truth value and `1:4` into a number of base 60.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from unsloth_multigpu.errors import ConfigError
from unsloth_multigpu.option_type import brief

_NAME = "unsloth_multigpu"
_FORM = "Write `name: value`, one in a line; options of a strategy as in `strategy: diloco:every_steps=8`."


def find_pyproject() -> Path | None:
    """Returns the pyproject.toml of the working folder or the nearest folder above it; None without one."""
    try:
        folder = Path.cwd()
    except FileNotFoundError:
        return None
    files = (place / "pyproject.toml" for place in (folder, *folder.parents))
    # Unlike `Path.is_file`, it does not raise if a folder above is not readable.
    return next((file for file in files if os.path.isfile(file)), None)


def read_yaml(file: Path) -> Iterator[tuple[str, str, str]]:
    """Yields (place, name, text) of each option in a YAML file.

    Raises:
        ConfigError: The file cannot be read, is not a mapping of scalars, or has a name twice.
    """
    import yaml

    try:
        root = yaml.compose(_text(file), Loader=yaml.BaseLoader)
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
        yield place, name, node.value


def read_pyproject(file: Path) -> Iterator[tuple[str, str, Any]]:
    """Yields (place, name, value) of each option in the table `[tool.unsloth_multigpu]`.

    Raises:
        ConfigError: The file contains the package's name and cannot be parsed.
    """
    text = _text(file)
    if _NAME not in text:
        return  # A broken file without our table is not our error to report.
    if sys.version_info >= (3, 11):
        import tomllib
    else:
        import tomli as tomllib
    try:
        table = tomllib.loads(text).get("tool", {})
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{file} cannot be read: {error}.", hint="Correct the file.") from None
    table = table.get(_NAME, {}) if isinstance(table, dict) else table
    where = f"{file}, [tool.{_NAME}]"
    if not isinstance(table, dict):
        raise ConfigError(f"{where} is {brief(table)}; expected a table.", hint="Write one option per line below it.")
    yield from ((f"{where}: ", name, value) for name, value in table.items())


def _text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{file} cannot be read: {error}.", hint="Check the path and the permissions.") from None
