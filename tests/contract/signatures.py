"""Which functions and classes of other libraries this package calls by name, with which arguments, and what they take.

`collect` reads our syntax trees: imports and attribute chains become dotted names, and each call keeps its keywords.
`describe` asks an installed library for the same names, and `problems` compares. Recorded for the oldest and the newest
row of the matrix in signatures.json:

    python -m tests.contract.signatures ROW      # in the row's environment; `make signatures` does it for both

Not covered: methods of objects (`model.parameters()`), whose class a syntax tree does not tell; arguments of a dict
behind `**`, of `super()` and of `partial`; functions of torch that are written in C and say nothing of their arguments
(their names are); names in strings, as `getattr` takes them, which is how a feature is asked for.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import json
import sys
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "unsloth_multigpu"
RECORDED = Path(__file__).with_name("signatures.json")
LIBRARIES = frozenset({"torch", "transformers", "trl", "accelerate", "peft", "datasets", "wrapt"})
# Of a callable that does not tell its arguments, and of what is none.
NAME_ONLY = "exists"


@dataclass(frozen=True)
class Use:
    """A name of another library where it stands in our code.

    Args:
        name: Dotted, as `torch.distributed.FileStore`.
        place: File and line.
        is_call: It is called, with the arguments below; else it is only named.
        num_positional: Arguments without a keyword.
        keywords: Keywords.
        is_open: It is also passed arguments that the syntax tree does not show, by `*` or `**`.
    """

    name: str
    place: str
    is_call: bool = False
    num_positional: int = 0
    keywords: tuple[str, ...] = ()
    is_open: bool = False


def collect(package: Path = PACKAGE) -> list[Use]:
    """Every use in the modules below `package`."""
    return [
        use
        for path in sorted(package.rglob("*.py"))
        for use in uses_in(path.read_text(encoding="utf-8"), path.relative_to(package).as_posix())
    ]


def uses_in(source: str, file: str) -> list[Use]:
    """Every use in one module."""
    return _Reader(ast.parse(source), file).found


class _Reader(ast.NodeVisitor):
    """Walks a module whose imports give the dotted names, wherever in the file they stand."""

    def __init__(self, tree: ast.Module, file: str) -> None:
        self.found: list[Use] = []
        self._file = file
        self._names: dict[str, str] = {}
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                # `import a.b` makes `a` known.
                tops = (
                    (a.asname or a.name.split(".")[0], a.name if a.asname else a.name.split(".")[0]) for a in node.names
                )
                self._names |= {name: dotted for name, dotted in tops if dotted.split(".")[0] in LIBRARIES}
            elif isinstance(node, ast.ImportFrom) and _is_theirs(node):
                self._names |= {a.asname or a.name: f"{node.module}.{a.name}" for a in node.names}
        self.visit(tree)

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        for alias in node.names if _is_theirs(node) else ():
            self._note(f"{node.module}.{alias.name}", node)

    def visit_Import(self, node: ast.Import) -> None:
        for alias in node.names:
            if alias.name.split(".")[0] in LIBRARIES:
                self._note(alias.name, node)

    def visit_Attribute(self, node: ast.Attribute) -> None:
        if (name := self._dotted(node)) is not None:
            self._note(name, node)
        else:
            self.visit(node.value)

    def visit_Call(self, node: ast.Call) -> None:
        if (name := self._dotted(node.func)) is not None:
            keywords = tuple(keyword.arg for keyword in node.keywords if keyword.arg is not None)
            plain = [argument for argument in node.args if not isinstance(argument, ast.Starred)]
            is_open = len(plain) < len(node.args) or len(keywords) < len(node.keywords)
            self.found.append(Use(name, f"{self._file}:{node.lineno}", True, len(plain), keywords, is_open))
        self.generic_visit(node)

    def _note(self, name: str, node: ast.stmt | ast.expr) -> None:
        self.found.append(Use(name, f"{self._file}:{node.lineno}"))

    def _dotted(self, node: ast.expr) -> str | None:
        if isinstance(node, ast.Attribute):
            parent = self._dotted(node.value)
            return f"{parent}.{node.attr}" if parent else None
        return self._names.get(node.id) if isinstance(node, ast.Name) else None


def _is_theirs(node: ast.ImportFrom) -> bool:
    return bool(node.module) and not node.level and str(node.module).split(".")[0] in LIBRARIES


def describe(name: str) -> str | None:
    """The arguments of a callable without annotations and values (`(a, *, b=...)`); None where the name is absent."""
    parts = name.split(".")
    for length in range(len(parts), 0, -1):
        try:
            found = importlib.import_module(".".join(parts[:length]))
        except ModuleNotFoundError:
            continue
        try:
            for part in parts[length:]:
                found = getattr(found, part)
        except AttributeError:
            return None
        return _arguments(found)
    return None


def _arguments(found: object) -> str:
    if not callable(found):
        return NAME_ONLY
    try:
        signature = inspect.signature(found)
    except (ValueError, TypeError):
        return NAME_ONLY
    bare = [
        p.replace(annotation=p.empty, default=p.default if p.default is p.empty else ...)
        for p in signature.parameters.values()
    ]
    return str(signature.replace(parameters=bare, return_annotation=signature.empty)).replace("Ellipsis", "...")


def parse(text: str) -> inspect.Signature:
    """The opposite of what `describe` writes."""
    return inspect.signature(eval(f"lambda {text[1:-1]}: None"))


def problems(uses: Sequence[Use], known: Mapping[str, str | None]) -> list[tuple[str, str, str]]:
    """What `known` does not take: dotted name; place; why."""
    found = []
    for use in uses:
        if use.name not in known:
            found.append((use.name, use.place, "not recorded: `make signatures`"))
            continue
        text = known[use.name]
        if text is None:
            found.append((use.name, use.place, "absent"))
        elif use.is_call and text != NAME_ONLY:
            signature = parse(text)
            bind = signature.bind_partial if use.is_open else signature.bind
            try:
                bind(*[None] * use.num_positional, **dict.fromkeys(use.keywords))
            except TypeError as error:
                found.append((use.name, use.place, str(error)))
    return found


def main(row: str) -> None:
    warnings.simplefilter("ignore")
    recorded = json.loads(RECORDED.read_text(encoding="utf-8")) if RECORDED.exists() else {}
    recorded[row] = {name: describe(name) for name in sorted({use.name for use in collect()})}
    RECORDED.write_text(json.dumps(recorded, indent=1, sort_keys=True) + "\n", encoding="utf-8")
    print(f"{row}: {len(recorded[row])} names recorded, {sum(v is None for v in recorded[row].values())} absent")


if __name__ == "__main__":
    main(*sys.argv[1:])
