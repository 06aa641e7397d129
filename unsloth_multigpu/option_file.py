"""Options in files: a YAML file that is named, and the table of the user's pyproject.toml.

Names are those of the arguments. The values of YAML are texts, as those of variables are: so `off` is a word and not a
truth value, and `1:4` is not a number of base 60, which YAML 1.1 makes of them.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from unsloth_multigpu.errors import ConfigError
from unsloth_multigpu.row import Row, brief, did_you_mean

PYPROJECT_TABLE = "tool.unsloth_multigpu"
_NAME = "unsloth_multigpu"


def find_pyproject() -> Path | None:
    """The nearest pyproject.toml, of the working folder or of one above it; None where that folder is gone."""
    try:
        folder = Path.cwd()
    except FileNotFoundError:
        return None
    files = (place / "pyproject.toml" for place in (folder, *folder.parents))
    # Unlike `Path.is_file`, it does not raise where a folder above may not be looked into.
    return next((file for file in files if os.path.isfile(file)), None)


def read_yaml(file: Path, options: Mapping[str, Row]) -> dict[str, Any]:
    """The options of a YAML file: name -> value as a config keeps it.

    Raises:
        ConfigError: It cannot be read, is no mapping, has a name twice or one that is no option, or a value that cannot
            be used. File and line are named.
    """
    values: dict[str, Any] = {}
    for line, name, text in _pairs(file):
        where = f"{file}, line {line}"
        row = _row(where, name, text, options)
        if name in values:
            raise ConfigError(f"{where}: {name} is given twice.", hint="Leave one of them out.")
        values[name] = None if text.strip().lower() in ("", "none", "null", "~") else _taken(where, row, name, text)
    return {name: value for name, value in values.items() if value is not None}


def read_pyproject(file: Path, options: Mapping[str, Row]) -> dict[str, Any]:
    """The options of the table `[tool.unsloth_multigpu]`: name -> value as a config keeps it; none where there is none.

    Raises:
        ConfigError: The file has the package's name in it and cannot be read, or the table has a name that is no option
            or a value that cannot be used.
    """
    text = _text(file)
    if _NAME not in text:
        return {}  # Its form is nobody's matter here then.
    if sys.version_info >= (3, 11):
        import tomllib
    else:
        import tomli as tomllib
    try:
        tools = tomllib.loads(text).get("tool", {})
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{file} cannot be read: {error}.", hint="Mend it; other tools read it as well.") from None
    where = f"{file}, [{PYPROJECT_TABLE}]"
    table = tools.get(_NAME, {}) if isinstance(tools, dict) else tools
    if not isinstance(table, dict):
        raise ConfigError(f"{where} is {brief(table)}; expected a table.", hint="Write one option in a line below it.")
    values = {}
    for name, value in table.items():
        values[name] = _checked(where, _row(where, name, value, options), name, value)
    return values


def _pairs(file: Path) -> Iterator[tuple[int, str, str]]:
    """Line, name and text of each pair."""
    try:
        import yaml
    except ImportError as missing:
        raise ConfigError(
            f"{file} is YAML, and PyYAML is not installed.", hint="Install unsloth_multigpu again, which requires it."
        ) from missing
    try:
        root = yaml.compose(_text(file), Loader=yaml.BaseLoader)
    except yaml.YAMLError as error:
        raise ConfigError(f"{file} is no YAML: {error}", hint="Write `name: value`, one in a line.") from None
    if root is None:
        return
    if not isinstance(root, yaml.MappingNode):
        raise ConfigError(f"{file} has no options in it.", hint="Write `name: value`, one in a line.")
    for key, node in root.value:
        line, name = key.start_mark.line + 1, str(key.value)
        if not isinstance(node, yaml.ScalarNode):
            raise ConfigError(
                f"{file}, line {line}: {name} has several values; expected one.",
                hint="Options of a strategy stand behind a colon: `strategy: diloco:every_steps=8`.",
            )
        yield line, name, node.value


def _text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{file} cannot be read: {error}.", hint="Check the path and the file's rights.") from None


def _row(where: str, name: str, value: Any, options: Mapping[str, Row]) -> Row:
    known = {known: known for known in options}
    if name in known:
        return options[name]
    hint = did_you_mean(name, known) or f"Options: {', '.join(known)}."
    raise ConfigError(f"{where}: {name}={brief(value)} names no option.", hint=hint)


def _taken(where: str, row: Row, name: str, text: str) -> Any:
    """The value that a text means, as for a variable."""
    try:
        return row.kind.take(name, row.kind.parse(name, text.strip()))
    except ConfigError as error:
        raise ConfigError(f"{where}: {error.args[0]}", hint=error.hint) from None


def _checked(where: str, row: Row, name: str, value: Any) -> Any:
    try:
        return row.kind.take(name, value)
    except ConfigError as error:
        raise ConfigError(f"{where}: {error.args[0]}", hint=error.hint) from None
