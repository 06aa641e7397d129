"""Parses cells: splits one at `enable_multi_gpu()`, and lists the magics that only rank 0 runs. Pure."""

from __future__ import annotations

import ast
from collections.abc import Callable, Sequence

from unsloth_multigpu.accelerator import CPU_BACKEND
from unsloth_multigpu.errors import SetupError

# Magics that change the machine, ask the user, measure, or use the front end. Only rank 0 runs them.
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
# These run Python in this process, which may need the rank's variables. The others start programs, which must not see
# them.
MEASURING_MAGICS = frozenset({"timeit", "memit", "mprun", "debug", "pdb"})
# These return a value.
VALUE_MAGICS = frozenset({"sx", "system"})
# These read the history of the shell, which only rank 0 has.
HISTORY_MAGICS = frozenset({"macro", "rerun"})
# Modules with magics of front ends, which a worker does not have.
_FRONT_ENDS = ("ipykernel.", "google.colab.")
# The module of aliases of system commands.
_ALIASES = "IPython.core.alias."
# Parts of error messages of torch and gloo after another rank has ended or the group was aborted.
_BROKEN = ("Connection closed by peer", "Connection reset", CPU_BACKEND, "NCCL", "ProcessGroup", "process group")
_ERROR_CHARACTERS = 2000


def is_rank_0_magic(kind: str, name: str, line: str, module: str | None) -> bool:
    """True for a magic that only rank 0 runs.

    `kind` is "line" or "cell", `name` has no per cent signs, `line` is the rest of the line, and `module` defines the
    magic's function; None = the shell does not have it.
    """
    if module is None or f"{module}.".startswith((*_FRONT_ENDS, _ALIASES)):
        return True
    if name == "store" and "-r" in line.split():
        return False  # It restores values, which every rank needs.
    return name in (RANK_0_LINE_MAGICS if kind == "line" else RANK_0_CELL_MAGICS)


def error_text(error: BaseException | None) -> str:
    """Formats an error for messages between ranks, as rank 0's own error if it reports one; "" = no error."""
    if error is None:
        return ""
    return (getattr(error, "of_rank_0", "") or f"{type(error).__name__}: {error}")[:_ERROR_CHARACTERS]


def names_broken_group(error: BaseException) -> bool:
    """True for an error that may be a consequence of another rank's error."""
    return any(text in f"{type(error).__name__} {error}" for text in _BROKEN)


def log_header(cell_number: int, source: str) -> str:
    """Returns the text that a worker writes to its log before the output of a cell."""
    return f"---- cell {cell_number}\n{source}\n----\n"


def split_at(source: str, line: int, transform: Callable[[str], str] = lambda body: body) -> tuple[str, str]:
    """Splits a cell before the top-level statement that contains `line`, which is counted from 1.

    Args:
        source: Python code, after IPython's transformation. If the whole cell is a cell magic such as %%time, `line` is
            a line of its body.
        transform: IPython's transformation of the body of a cell magic.

    Raises:
        SetupError: The line is in a loop, a part of which was already run.
    """
    body = ast.parse(source).body
    if (magic := _magic_around(body)) is not None:
        before, rest = split_at(transform(magic.args[2].value), line, transform)  # type: ignore[attr-defined]
        magic.args[2] = ast.Constant(rest)
        return before, ast.unparse(magic)
    found = [statement for statement in body if _first_line(statement) <= line <= (statement.end_lineno or 0)]
    # The line may have several statements: a; b; c.
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
    # Decorators have lines of their own before the function.
    column = statement.col_offset if first == statement.lineno else 0
    before = "\n".join([*lines[: first - 1], start[:column].decode()])
    return before, "\n".join([start[column:].decode(), *lines[first:]])


def _first_line(statement: ast.stmt) -> int:
    decorators: list[ast.expr] = getattr(statement, "decorator_list", [])
    return min([statement.lineno, *(decorator.lineno for decorator in decorators)])


def _magic_around(body: Sequence[ast.stmt]) -> ast.Call | None:
    """Returns the call of the magic if the whole cell is one cell magic with Python code; else None."""
    call = body[0].value if len(body) == 1 and isinstance(body[0], ast.Expr) else None
    if not isinstance(call, ast.Call) or ast.unparse(call.func) != "get_ipython().run_cell_magic":
        return None
    texts = [argument.value if isinstance(argument, ast.Constant) else None for argument in call.args]
    if len(texts) != 3 or not all(isinstance(text, str) for text in texts) or texts[0] in RANK_0_CELL_MAGICS:
        return None
    return call


def is_python(source: str) -> bool:
    """False for a transformed cell with a syntax error, of which nothing was run."""
    try:
        ast.parse(source)
    except (SyntaxError, ValueError):
        return False
    return True
