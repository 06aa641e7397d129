"""Does a script multiply or divide by the number of ranks, as one that was written for torchrun does?"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from typing import NamedTuple

_VARIABLE = "WORLD_SIZE"
_FUNCTION = "get_world_size"
_PRINTING = {"print", "debug", "info", "warning", "error", "log"}
_OPERATORS = (ast.Mult, ast.Div, ast.FloorDiv, ast.Mod)


class Place(NamedTuple):
    """A line of the script, counted from 1, and the expression there."""

    line: int
    expression: str


def find_rank_arithmetic(source: str) -> Place | None:
    """The first place where a script multiplies by the number of ranks, or divides by it.

    Such a script keeps its global batch, its number of steps or its learning rate by itself, which is right where each
    rank takes a whole batch. Only the text is read. Comparisons (`if world_size > 1`) and printing do not count.

    Args:
        source: Text of the script.

    Returns:
        None where there is no such place, and where the text is not Python.
    """
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError):
        return None
    names: set[str] = set()
    places = []
    for node in _in_order(tree):
        for target, value in _assigned(node):
            if isinstance(target, ast.Name) and _is_number(value, names):
                names.add(target.id)
        is_sum = isinstance(node, (ast.BinOp, ast.AugAssign)) and isinstance(node.op, _OPERATORS)
        if is_sum and not _is_text(node) and any(_is_number(operand, names) for operand in _operands(node)):
            places.append(Place(node.lineno, ast.unparse(node)))
    # Of an expression within another one, the outer.
    return min(places, key=lambda place: (place.line, -len(place.expression)), default=None)


def _in_order(tree: ast.Module) -> list[ast.expr | ast.stmt]:
    nodes: list[ast.expr | ast.stmt] = []
    rest: list[ast.AST] = list(tree.body)
    while rest:
        node = rest.pop()
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and _is_loss(node.name):
            continue
        if isinstance(node, ast.JoinedStr) or (isinstance(node, ast.Call) and _name_of(node.func) in _PRINTING):
            continue
        if isinstance(node, (ast.expr, ast.stmt)):
            nodes.append(node)
        rest += ast.iter_child_nodes(node)
    return sorted(nodes, key=lambda node: (node.lineno, isinstance(node, (ast.BinOp, ast.AugAssign))))


def _name_of(node: ast.expr) -> str:
    """The last name of `a.b.c` and of `a.b.c()`."""
    node = node.func if isinstance(node, ast.Call) else node
    return str(getattr(node, "attr", getattr(node, "id", "")))


def _is_loss(name: str) -> bool:
    """Of a script's own loss: it sees one process, see `counted_as_one_process`."""
    return "loss" in name or name in ("forward", "training_step")


def _assigned(node: ast.AST) -> Iterator[tuple[ast.expr, ast.expr]]:
    """What is assigned to what; of `rank, world_size = 0, 1` each for itself."""
    if isinstance(node, ast.AnnAssign) and node.value is not None:
        yield node.target, node.value
    for target in node.targets if isinstance(node, ast.Assign) else ():
        assert isinstance(node, ast.Assign)
        if isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple):
            yield from zip(target.elts, node.value.elts, strict=False)
        else:
            yield target, node.value


def _operands(node: ast.AST) -> list[ast.expr]:
    if isinstance(node, ast.AugAssign):
        return [node.target, node.value]
    assert isinstance(node, ast.BinOp)
    return [node.left, node.right]


def _is_text(node: ast.AST) -> bool:
    """True for "%d ranks" % world_size and "-" * world_size."""
    return any(
        isinstance(operand, ast.JoinedStr) or (isinstance(operand, ast.Constant) and isinstance(operand.value, str))
        for operand in _operands(node)
    )


def _is_number(node: ast.expr, names: set[str]) -> bool:
    """True where an expression is the number of ranks, perhaps as another type: no condition, and no call with it."""
    if isinstance(node, ast.Name):
        return node.id in names
    if isinstance(node, ast.Attribute):
        owner = _name_of(node.value).lower()
        is_state = "accelerator" in owner or "state" in owner
        return node.attr == "world_size" or (node.attr == "num_processes" and is_state)
    if isinstance(node, ast.Subscript):
        return _is_variable(node.slice)
    if isinstance(node, ast.BoolOp):
        return any(_is_number(value, names) for value in node.values)
    if isinstance(node, ast.BinOp) and isinstance(node.op, _OPERATORS):
        return not _is_text(node) and any(_is_number(operand, names) for operand in _operands(node))
    if isinstance(node, ast.IfExp):
        return _is_number(node.body, names) or _is_number(node.orelse, names)
    if not isinstance(node, ast.Call):
        return False
    name = _name_of(node.func)
    if name == _FUNCTION or any(map(_is_variable, node.args)):  # os.environ.get("WORLD_SIZE", 1), os.getenv
        return True
    return name in ("int", "float", "max", "min") and any(_is_number(argument, names) for argument in node.args)


def _is_variable(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and node.value == _VARIABLE
