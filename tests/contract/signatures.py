"""Which functions and classes of other libraries this package calls by name, with which arguments, and what they take.

`collect` reads our syntax trees: imports and attribute chains become dotted names, and each call keeps its keywords,
also those of a dict behind `**` that is written in the same file. `describe` asks an installed library for the same
names, and `problems` compares. Recorded for the oldest and the newest row of the matrix in signatures.json:

    python -m tests.contract.signatures ROW      # in the row's environment; `make signatures` does it for both

Not covered: methods of objects (`model.parameters()`), whose class a syntax tree does not tell; functions of torch that
are written in C and say nothing of their arguments (their names are); names in strings, as `getattr` takes them, which
is how a feature is asked for.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import json
import sys
import warnings
from collections.abc import Iterator, Mapping, Sequence
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
        num_positional: Arguments without a keyword, `self` of a `super()` call among them.
        keywords: Keywords, also those that are passed under a condition.
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
    """Walks a module with a stack of scopes: local name -> dotted name, or None for a name that is our own."""

    def __init__(self, tree: ast.Module, file: str) -> None:
        self.found: list[Use] = []
        self._file = file
        self._functions = {node.name: node for node in ast.walk(tree) if isinstance(node, _FUNCTIONS)}
        self._scopes: list[dict[str, str | None]] = [_names(tree.body)]
        self._bodies: list[Sequence[ast.stmt]] = [tree.body]
        self._bases: list[str | None] = []
        for node in tree.body:
            self.visit(node)

    def visit_FunctionDef(self, node: ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda) -> None:
        arguments = node.args
        own = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs, arguments.vararg, arguments.kwarg]
        body = [] if isinstance(node, ast.Lambda) else node.body
        # Annotations, defaults and decorators belong outside, where they are names of the library all the same.
        self._scopes.append({**{a.arg: None for a in own if a is not None}, **_names(body)})
        self._bodies.append(body)
        self.generic_visit(node)
        self._scopes.pop()
        self._bodies.pop()

    visit_AsyncFunctionDef = visit_FunctionDef
    visit_Lambda = visit_FunctionDef

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        bases = [self._dotted(base) for base in node.bases]
        self._bases.append(next(filter(None, bases), None))
        self.generic_visit(node)
        self._bases.pop()

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        if node.module and not node.level and node.module.split(".")[0] in LIBRARIES:
            for alias in node.names:
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
        name, num_before, arguments = self._dotted(node.func), 0, node.args
        if name is None and (inherited := self._inherited(node.func)) is not None:
            name, num_before = inherited
        elif name is None and _last(node.func) == "partial" and arguments and (of := self._dotted(arguments[0])):
            self._note_call(of, node, arguments[1:], 0, is_open=True)
        if name is not None:
            self._note_call(name, node, arguments, num_before)
        self.generic_visit(node)

    def _note_call(
        self, name: str, node: ast.Call, arguments: Sequence[ast.expr], num_before: int, is_open: bool = False
    ) -> None:
        keywords = [keyword.arg for keyword in node.keywords if keyword.arg is not None]
        is_open = is_open or any(isinstance(argument, ast.Starred) for argument in arguments)
        for keyword in (k for k in node.keywords if k.arg is None):
            keys = self._keys(keyword.value)
            is_open = is_open or keys is None
            keywords += keys or ()
        num = num_before + sum(not isinstance(argument, ast.Starred) for argument in arguments)
        place = f"{self._file}:{node.lineno}"
        self.found.append(Use(name, place, True, num, tuple(dict.fromkeys(keywords)), is_open))

    def _note(self, name: str, node: ast.AST) -> None:
        self.found.append(Use(name, f"{self._file}:{node.lineno}"))  # type: ignore[attr-defined]

    def _dotted(self, node: ast.expr) -> str | None:
        if isinstance(node, ast.Attribute):
            parent = self._dotted(node.value)
            return f"{parent}.{node.attr}" if parent else None
        if isinstance(node, ast.Name):
            return next((scope[node.id] for scope in reversed(self._scopes) if node.id in scope), None)
        return None

    def _inherited(self, node: ast.expr) -> tuple[str, int] | None:
        """`super().__init__` is the base class, `super().method` its function with one argument more."""
        is_super = (
            isinstance(node, ast.Attribute)
            and isinstance(node.value, ast.Call)
            and isinstance(node.value.func, ast.Name)
            and node.value.func.id == "super"
        )
        base = self._bases[-1] if self._bases else None
        if not is_super or base is None:
            return None
        method = _last(node)
        return (base, 0) if method == "__init__" else (f"{base}.{method}", 1)

    def _keys(self, node: ast.expr) -> list[str] | None:
        """Keys of a dict; None = the file does not show them."""
        own: list[str] = []
        parts: list[ast.expr] = []
        if isinstance(node, ast.Dict):
            parts = [value for key, value in zip(node.keys, node.values, strict=True) if key is None]
            names = [getattr(key, "value", None) for key in node.keys if key is not None]
            own = [name for name in names if isinstance(name, str)]
            if len(own) < len(names):
                return None
        elif isinstance(node, ast.IfExp):
            parts = [node.body, node.orelse]
        elif isinstance(node, ast.BinOp) and isinstance(node.op, ast.BitOr):
            parts = [node.left, node.right]
        elif isinstance(node, ast.Name):
            parts = list(self._assigned(node.id))
        elif isinstance(node, ast.Call) and (function := self._functions.get(_last(node.func) or "")) is not None:
            parts = [n.value for n in ast.walk(function) if isinstance(n, ast.Return) and n.value is not None]
        found = [self._keys(part) for part in parts]
        if None in found or not (found or isinstance(node, ast.Dict)):
            return None
        return [*own, *(key for keys in found for key in keys or ())]

    def _assigned(self, name: str) -> Iterator[ast.expr]:
        """What the innermost function puts into a variable."""
        for node in _statements(self._bodies[-1]):
            for target, value in _assignments(node):
                if isinstance(target, ast.Subscript) and _last(target.value) == name:
                    yield ast.Dict(keys=[target.slice], values=[value])
                elif isinstance(target, ast.Name) and target.id == name:
                    yield value


_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


def _last(node: ast.expr) -> str | None:
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else None


def _statements(body: Sequence[ast.stmt]) -> Iterator[ast.stmt]:
    """Statements of one scope, also in blocks; not those of functions and classes in it."""
    for node in body:
        yield node
        if isinstance(node, (*_FUNCTIONS, ast.ClassDef)):
            continue
        for field in ("body", "orelse", "finalbody"):
            yield from _statements(getattr(node, field, []))
        for handler in [*getattr(node, "handlers", []), *getattr(node, "cases", [])]:
            yield from _statements(handler.body)


def _assignments(node: ast.stmt) -> Iterator[tuple[ast.expr, ast.expr]]:
    if isinstance(node, ast.Assign):
        yield from ((target, node.value) for target in node.targets)
    elif isinstance(node, (ast.AnnAssign, ast.AugAssign)) and node.value is not None:
        yield node.target, node.value


def _names(body: Sequence[ast.stmt]) -> dict[str, str | None]:
    """Local name -> dotted name of what a scope imports; None for what it assigns or defines itself."""
    names: dict[str, str | None] = {}
    for node in _statements(body):
        if isinstance(node, ast.Import):
            for alias in node.names:
                top = alias.name.split(".")[0]
                dotted = alias.name if alias.asname else top
                names[alias.asname or top] = dotted if top in LIBRARIES else None
        elif isinstance(node, ast.ImportFrom):
            is_theirs = bool(node.module) and not node.level and str(node.module).split(".")[0] in LIBRARIES
            for alias in node.names:
                names[alias.asname or alias.name] = f"{node.module}.{alias.name}" if is_theirs else None
        elif isinstance(node, (*_FUNCTIONS, ast.ClassDef)):
            names[node.name] = None
        else:
            names |= {t.id: None for t, _ in _assignments(node) if isinstance(t, ast.Name)}
    return names


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
