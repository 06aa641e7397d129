"""Options in files: a YAML file that is named, and the table of the user's pyproject.toml.

Names are those of the arguments. The values of YAML are texts, as those of variables are: so `off` is a word and not a
truth value, and `1:4` is not a number of base 60, which YAML 1.1 makes of them.
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
    """The nearest pyproject.toml, of the working folder or of one above it; None where that folder is gone."""
    try:
        folder = Path.cwd()
    except FileNotFoundError:
        return None
    files = (place / "pyproject.toml" for place in (folder, *folder.parents))
    # Unlike `Path.is_file`, it does not raise where a folder above may not be looked into.
    return next((file for file in files if os.path.isfile(file)), None)


def read_yaml(file: Path) -> Iterator[tuple[str, str, str]]:
    """Place, name and text of each line of a YAML file.

    Raises:
        ConfigError: It cannot be read, is no mapping of texts, or has a name twice.
    """
    import yaml

    try:
        root = yaml.compose(_text(file), Loader=yaml.BaseLoader)
    except yaml.YAMLError as error:
        raise ConfigError(f"{file} is no YAML: {error}", hint=_FORM) from None
    if root is None:
        return
    if not isinstance(root, yaml.MappingNode):
        raise ConfigError(f"{file} has no options in it.", hint=_FORM)
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
    """Place, name and value of each line of the table `[tool.unsloth_multigpu]`.

    Raises:
        ConfigError: The file has the package's name in it and cannot be read.
    """
    text = _text(file)
    if _NAME not in text:
        return  # Its form is nobody's matter here then.
    if sys.version_info >= (3, 11):
        import tomllib
    else:
        import tomli as tomllib
    try:
        table = tomllib.loads(text).get("tool", {})
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{file} cannot be read: {error}.", hint="Mend it; other tools read it as well.") from None
    table = table.get(_NAME, {}) if isinstance(table, dict) else table
    where = f"{file}, [tool.{_NAME}]"
    if not isinstance(table, dict):
        raise ConfigError(f"{where} is {brief(table)}; expected a table.", hint="Write one option in a line below it.")
    yield from ((f"{where}: ", name, value) for name, value in table.items())


def _text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{file} cannot be read: {error}.", hint="Check the path and the file's rights.") from None
