"""Has a program an option of its own of some name? Read in its source, without running it."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from unsloth_multigpu.cli.script import program_file

# Modules beside a script that are read, and no more: a folder of a project may have very many.
_MOST_FILES = 200


def may_take(program: Sequence[str], name: str) -> bool:
    """False where neither the program nor a module beside it, which it imports, has anything that could be the option.

    It is there as text (`add_argument("--steps")`, a click option, a line of docopt), as what parsers make of it
    (`args.steps`), or as the field or the parameter that a parser makes it from.

    Args:
        program: The script and its arguments, or `-m`, a module and its arguments.
        name: Of the option, without dashes in front.

    Returns:
        True as well where the source cannot be read.
    """
    first = program_file(program)
    if first is None:
        return True
    files, texts = [first], _texts(name)
    folder = first.parent
    identifier = name.replace("-", "_")
    for file in files:  # Grows meanwhile.
        try:
            tree = ast.parse(file.read_bytes())
        except (OSError, SyntaxError, ValueError):
            return True
        if any(_is_option(node, identifier, texts) for node in ast.walk(tree)):
            return True
        files += [f for f in _imported(tree, folder) if f not in files][: _MOST_FILES - len(files)]
    return False


def _texts(name: str) -> re.Pattern[str]:
    either = re.escape(name.replace("_", "-")).replace(r"\-", "[-_]")
    other = "" if name.startswith("no") else "(no[-_])?"
    return re.compile(rf"(?<![\w-])--{other}{either}(?![\w-])")


def _is_option(node: ast.AST, name: str, texts: re.Pattern[str]) -> bool:
    if isinstance(node, ast.Constant):
        return isinstance(node.value, str) and texts.search(node.value) is not None
    if isinstance(node, ast.Attribute):
        return node.attr == name
    if isinstance(node, ast.AnnAssign):
        return isinstance(node.target, ast.Name) and node.target.id == name
    return isinstance(node, ast.arg) and node.arg == name


def _imported(tree: ast.AST, folder: Path) -> Iterator[Path]:
    """Files in the script's folder and below it that a module imports, as far as its source shows them."""
    for node in ast.walk(tree):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = [node.module] if node.module else []
            names = [".".join([*base, *more]) for more in [[], *([alias.name] for alias in node.names)]]
        for name in filter(None, names):
            path = folder.joinpath(*name.split("."))
            yield from (f for f in (path.with_name(f"{path.name}.py"), path / "__init__.py") if f.is_file())
