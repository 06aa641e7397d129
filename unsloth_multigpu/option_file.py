"""Options in a YAML file.

Names are those of the arguments. The values are texts, as those of variables are: so `off` is a word and not a
truth value, and `1:4` is not a number of base 60, which YAML 1.1 makes of them.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from unsloth_multigpu.errors import ConfigError

_FORM = "Write `name: value`, one in a line; options of a strategy as in `strategy: diloco:every_steps=8`."


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


def _text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{file} cannot be read: {error}.", hint="Check the path and the file's rights.") from None
