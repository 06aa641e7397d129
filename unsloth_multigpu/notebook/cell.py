"""Cells as text: where `enable_multi_gpu()` is called, what only rank 0 runs, and what a worker runs again. Pure."""

from __future__ import annotations

import ast
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from unsloth_multigpu.accelerator import CPU_BACKEND
from unsloth_multigpu.errors import SetupError

# Magics that change the machine, ask the user, measure, or speak to the front end. They must run once only.
_CELL_MAGICS = """
! bash bigquery cmd file html javascript js latex markdown memit mprun perl pypy python2 ruby script sh shell sql svg
sx system timeit writefile
"""
_LINE_MAGICS = """
autosave bookmark cat clear conda config connect_info cp debug doctest_mode ed edit gui history killbgscripts ldir less
lf lk ll load loadpy logstart logstop ls lsmagic lx magic mamba man matplotlib memit micromamba mkdir more mprun mv
notebook page pastebin pdb pdoc pfile pinfo pinfo2 pip psearch psource pycat qtconsole quickref ranks recall rep rm
rmdir save sc shell store subshell sx system tb tensorboard timeit uv
"""
RANK_0_CELL_MAGICS = frozenset(_CELL_MAGICS.split())
RANK_0_LINE_MAGICS = frozenset(_LINE_MAGICS.split())
# These run Python in this process, which may read its rank; the others start programs, which must not see it.
MEASURING_MAGICS = frozenset({"timeit", "memit", "mprun", "debug", "pdb"})
# These read the history of the shell, which ranks above 0 do not keep.
HISTORY_MAGICS = frozenset({"macro", "rerun"})
# Modules with magics of front ends, which a worker does not have.
FRONT_ENDS = ("ipykernel.", "google.colab.")
# The module of aliases: commands of the system by a name that the user has chosen.
_ALIASES = "IPython.core.alias."
# Parts of the messages of torch and gloo when another rank has ended, or when the group was aborted.
_BROKEN = ("Connection closed by peer", "Connection reset", CPU_BACKEND, "NCCL", "ProcessGroup", "process group")
# Calls whose values only rank 0 has, by how they end in the source.
_VALUE_CALLS = ("input", "getpass", "get_ipython().getoutput", "userdata.get")
_CHANGING = "add append clear discard extend insert pop popitem remove reverse setdefault sort update"
_MUTATORS = frozenset(_CHANGING.split())
_ERROR_CHARACTERS = 2000
_RESTART = "Restart the kernel, and call enable_multi_gpu() in the first cell."


def is_rank_0_magic(kind: str, name: str, line: str, module: str | None) -> bool:
    """True for a magic that only rank 0 runs.

    Args:
        kind: "line" or "cell".
        name: Without its per cent signs.
        line: What follows it.
        module: Where its function is defined; None = the shell does not have it.
    """
    if module is None or f"{module}.".startswith((*FRONT_ENDS, _ALIASES)):
        return True
    if name == "store" and "-r" in line.split():
        return False  # This form reads, and every rank needs what it reads.
    return name in (RANK_0_LINE_MAGICS if kind == "line" else RANK_0_CELL_MAGICS)


def error_text(error: BaseException | None) -> str:
    """An error as a short text, in which ranks tell each other of it; "" = no error."""
    return "" if error is None else f"{type(error).__name__}: {error}"[:_ERROR_CHARACTERS]


def names_broken_group(error: BaseException) -> bool:
    """True for an error that may be only a consequence of another rank's error."""
    return any(text in f"{type(error).__name__} {error}" for text in _BROKEN)


def log_header(cell_number: int, source: str) -> str:
    """What a worker writes into its log before the output of a cell."""
    return f"---- cell {cell_number}\n{source}\n----\n"


def parse_ranks(text: str, num_ranks: int) -> frozenset[int]:
    """Reads "0", "0,2" or "all".

    Raises:
        ValueError: Another text, or a rank that does not exist.
    """
    if text.strip() == "all":
        return frozenset(range(num_ranks))
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() and int(part) < num_ranks for part in parts):
        raise ValueError(f"{text.strip()!r} names no ranks: 0 .. {num_ranks - 1}, a list as 0,1, or all.")
    return frozenset(map(int, parts))


def split_at(source: str, line: int, transform: Callable[[str], str] = lambda body: body) -> tuple[str, str]:
    """Cuts a cell before the top-level statement that `line` belongs to.

    Args:
        source: Python, after IPython has transformed it.
        line: Counted from 1; in the body, where the cell is one cell magic around it such as %%time.
        transform: Turns the body of a cell magic into Python, as IPython does.

    Raises:
        SetupError: The line is in a loop, of which a part has been run.
    """
    body = ast.parse(source).body
    if (magic := _magic_around(body)) is not None:
        before, rest = split_at(transform(magic.args[2].value), line, transform)  # type: ignore[attr-defined]
        magic.args[2] = ast.Constant(rest)
        return before, ast.unparse(magic)
    found = [statement for statement in body if _first_line(statement) <= line <= (statement.end_lineno or 0)]
    # There may be several statements in that line: a; b; c.
    found.sort(key=lambda statement: "enable_multi_gpu" not in ast.unparse(statement))
    if not found:
        return "", source
    statement = found[0]
    for node in ast.walk(statement):
        if isinstance(node, ast.For | ast.While | ast.AsyncFor) and node.lineno <= line <= (node.end_lineno or 0):
            raise SetupError("enable_multi_gpu() was called in a loop.", hint="Call it before the loop.")
    lines = source.split("\n")
    first = _first_line(statement)
    start = lines[first - 1].encode()
    # A decorator is on a line of its own, before the column of its function.
    column = statement.col_offset if first == statement.lineno else 0
    before = "\n".join([*lines[: first - 1], start[:column].decode()])
    return before, "\n".join([start[column:].decode(), *lines[first:]])


def _first_line(statement: ast.stmt) -> int:
    decorators: list[ast.expr] = getattr(statement, "decorator_list", [])
    return min([statement.lineno, *(decorator.lineno for decorator in decorators)])


def _magic_around(body: Sequence[ast.stmt]) -> ast.Call | None:
    """The call, if the whole cell is one cell magic with Python in it."""
    call = body[0].value if len(body) == 1 and isinstance(body[0], ast.Expr) else None
    if not isinstance(call, ast.Call) or ast.unparse(call.func) != "get_ipython().run_cell_magic":
        return None
    texts = [argument.value if isinstance(argument, ast.Constant) else None for argument in call.args]
    if len(texts) != 3 or not all(isinstance(text, str) for text in texts) or texts[0] in RANK_0_CELL_MAGICS:
        return None
    return call


def replay_sources(sources: Iterable[str], values: Mapping[str, Any]) -> list[str]:
    """The code that gives a worker what rank 0 has from these cells. Values that only rank 0 has are written into it.

    Args:
        sources: Transformed cells, in order. A source that is not Python did nothing and becomes "".
        values: The variables of rank 0, as they are after the cells.

    Raises:
        SetupError: A value is not plain data, or its variable was changed later.
    """
    trees = [_parse(source) for source in sources]
    replay = _Replay(values, _changes(trees))
    return ["" if tree is None else ast.unparse(ast.fix_missing_locations(replay.visit(tree))) for tree in trees]


class _Replay(ast.NodeTransformer):
    def __init__(self, values: Mapping[str, Any], changes: Mapping[str, set[str]]) -> None:
        self._values = values
        self._changes = changes

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        return node  # Its body does not run here.

    visit_AsyncFunctionDef = visit_Lambda = visit_FunctionDef  # type: ignore[assignment]

    def visit_Assign(self, node: ast.Assign) -> ast.AST:
        if not any(map(_is_value_of_rank_0, ast.walk(node.value))):
            return node
        target = node.targets[0]
        name = target.id if len(node.targets) == 1 and isinstance(target, ast.Name) else None
        if name is None or name not in self._values or self._changes[name] != {ast.dump(node)}:
            raise _unknown(node, "and which was changed or lost since")
        literal = as_literal(self._values[name])
        if literal is None:
            raise _unknown(node, f"and which is not plain data but {type(self._values[name]).__name__}")
        node.value = ast.parse(literal, mode="eval").body
        return node


def bound_names(sources: Iterable[str]) -> set[str]:
    """Names that cells bind, in whatever scope, as far as their text tells it.

    Args:
        sources: Transformed cells.
    """
    found: set[str] = set()
    for tree in filter(None, map(_parse, sources)):
        for node in ast.walk(tree):
            if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load):
                found.add(node.id)
            elif isinstance(node, ast.alias):
                found.add(node.asname or node.name.partition(".")[0])
            elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                found.add(node.name)
    return found


def _unknown(node: ast.Assign, why: str) -> SetupError:
    return SetupError(
        f"enable_multi_gpu() comes after `{ast.unparse(node)[:200]}`, a value that only this process has, {why}.",
        hint=_RESTART,
    )


def _parse(source: str) -> ast.Module | None:
    try:
        return ast.parse(source)
    except (SyntaxError, ValueError):
        return None


def _changes(trees: Iterable[ast.Module | None]) -> Mapping[str, set[str]]:
    """For each name: the statements that bind or change it, as text."""
    found = defaultdict(set)
    for tree in filter(None, trees):
        for node in ast.walk(tree):
            if isinstance(node, ast.Assign):
                for target in node.targets:
                    for part in ast.walk(target):
                        if isinstance(part, ast.Name):
                            found[part.id].add(ast.dump(node))
            elif isinstance(node, ast.AugAssign | ast.AnnAssign | ast.For | ast.NamedExpr):
                for part in ast.walk(node.target):
                    if isinstance(part, ast.Name):
                        found[part.id].add(ast.dump(node))
            elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in _MUTATORS:
                found[ast.unparse(node.func.value)].add(ast.dump(node))
            elif isinstance(node, ast.Delete):
                for gone in node.targets:
                    found[ast.unparse(gone).partition("[")[0]].add(ast.dump(node))
    return found


def _is_value_of_rank_0(node: ast.AST) -> bool:
    if not isinstance(node, ast.Call):
        return False
    called = ast.unparse(node.func)
    if called == "get_ipython().run_line_magic" and node.args and isinstance(node.args[0], ast.Constant):
        return node.args[0].value in RANK_0_LINE_MAGICS
    return any(called == name or called.endswith(f".{name}") for name in _VALUE_CALLS)


def as_literal(value: Any) -> str | None:
    """The Python literal of a plain value; None for other values."""
    if value is None or type(value) in (bool, int, str) or (type(value) is float and math.isfinite(value)):
        return repr(value)
    if isinstance(value, list | tuple):
        parts = [as_literal(part) for part in value]
        if None in parts:
            return None
        plain = f"[{', '.join(map(str, parts))}]"
        if type(value).__name__ == "SList":  # The type of `x = !cmd`: a list that also has `x.s`.
            return f"__import__('IPython.utils.text', fromlist=['SList']).SList({plain})"
        return plain if type(value) is list else f"tuple({plain})" if type(value) is tuple else None
    if type(value) is dict:
        pairs = [(as_literal(key), as_literal(part)) for key, part in value.items()]
        is_plain = all(key is not None and part is not None for key, part in pairs)
        return f"{{{', '.join(f'{key}: {part}' for key, part in pairs)}}}" if is_plain else None
    return None
