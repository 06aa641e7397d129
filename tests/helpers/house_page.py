"""Writes the parts of docs/architecture.md that follow from the code: layers, arrows between folders, order of parts.

`python -m tests.helpers.house_page` writes the page and its picture; a test compares the page.
"""

from __future__ import annotations

import ast
import textwrap
from collections import defaultdict
from pathlib import Path

from tests.helpers.pages import with_generated
from tests.unit.test_house_rules import (
    DATA,
    EDGES,
    FACE,
    FRONT,
    LAYERS,
    MODULES,
    OUTSIDE,
    PURE,
    ROOT,
    RUNTIME,
    imports,
    module_name,
    own_module,
    room,
)

PAGE = ROOT / "docs" / "architecture.md"
PICTURE = ROOT / "docs" / "pictures" / "folders.svg"
KINDS = (
    ({DATA}, "data", "the standard library", "no"),
    (set(PURE), "contracts", "data; wrapt, packaging, psutil", "no"),
    (set(RUNTIME), "runtime", "what lies lower", "yes, unless pure"),
    ({EDGES}, "edges", "contracts and pure modules; the runtime inside functions; never each other", "no"),
    (set(FRONT), "front", "contracts and pure modules; the rest inside functions", "no"),
    (set(OUTSIDE), "outside", "everything that lies lower", "yes"),
    ({FACE}, "face", "nothing until a name is asked for", "no"),
)


def arrows() -> set[tuple[str, str]]:
    """Which folder imports which, inside functions as well; not what is there for type checkers alone."""
    found = set()
    for path in MODULES:
        me = module_name(path)
        for name, where, _ in imports(ast.parse(path.read_text(encoding="utf-8")), me):
            if name.startswith("unsloth_multigpu.") and where != "typing":
                found.add((room(me), room(own_module(name))))
    return {(a, b) for a, b in found if a != b}


def circles(found: set[tuple[str, str]]) -> list[str]:
    """Folders that reach themselves."""
    below: dict[str, set[str]] = defaultdict(set)
    for a, b in found:
        below[a].add(b)
    reached = {a: set(direct) for a, direct in below.items()}
    for _ in below:
        reached = {a: direct.union(*(reached.get(b, set()) for b in direct)) for a, direct in reached.items()}
    return sorted(a for a, all_below in reached.items() if a in all_below)


def needed(found: set[tuple[str, str]]) -> set[tuple[str, str]]:
    """Without the arrows that follow from others, for the picture."""
    below: dict[str, set[str]] = defaultdict(set)
    for a, b in found:
        below[a].add(b)

    def reaches(start: str, end: str) -> bool:
        return any(b == end or reaches(b, end) for b in below[start])

    return {(a, b) for a, b in found if not any(c != b and reaches(c, b) for c in below[a])}


def layer_table() -> str:
    """One row for each layer."""
    questions = {name: _question(ROOT / "unsloth_multigpu" / name / "__init__.py") for name in LAYERS}
    lines = ["| Layer | Kind | Folders and files | May import | torch at module top |", "|---|---|---|---|---|"]
    for layer in sorted(set(LAYERS.values())):
        kind, may, torch = next((k, m, t) for layers, k, m, t in KINDS if layer in layers)
        names = [f"`{n}`" + (f": {questions[n]}" if questions[n] else "") for n, of in LAYERS.items() if of == layer]
        lines.append(f"| {layer} | {kind} | {'<br>'.join(names)} | {may} | {torch} |")
    return "\n".join(lines)


def _question(path: Path) -> str:
    text = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) if path.is_file() else None
    return (text or "").partition("\n")[0]


def parts_list() -> str:
    """The order in which parts stand on a Trainer."""
    from unsloth_multigpu.train.loop import PLACES

    return textwrap.fill(", ".join(f"`{name}`" for name, _ in PLACES) + ".", 120)


def written(page: str) -> str:
    """The page with what follows from the code."""
    for name, text in (("layers", layer_table()), ("parts", parts_list())):
        page = with_generated(page, name, text)
    return page


def draw(path: Path) -> None:
    """Folders in rows by their layer, and the arrows that do not follow from others.

    Files that lie in no folder and on one layer are one box. Everything imports the data, so those arrows are left out.
    """
    import matplotlib as mpl

    mpl.use("svg")
    mpl.rcParams["svg.hashsalt"] = "folders"
    from matplotlib import pyplot as plt

    boxes = {name: _box(name) for name in LAYERS if LAYERS[name] not in (DATA, FACE)}
    found = {(boxes[a], boxes[b]) for a, b in arrows() if a in boxes and b in boxes and boxes[a] != boxes[b]}
    rows = [list(dict.fromkeys(b for n, b in boxes.items() if LAYERS[n] == y)) for y in sorted(set(LAYERS.values()))]
    rows = [row for row in rows if row]
    places = {n: (2 * i - (len(row) - 1) + 0.5 * (-1) ** y, y) for y, row in enumerate(rows) for i, n in enumerate(row)}
    figure, axes = plt.subplots(figsize=(9, 0.75 * len(rows)))
    for a, b in sorted(needed(found)):
        style = {"arrowstyle": "-|>", "color": "0.5", "lw": 0.9, "shrinkA": 12, "shrinkB": 12}
        axes.annotate("", places[b], places[a], arrowprops={**style, "connectionstyle": "arc3,rad=0.06"})
    for name, (x, y) in places.items():
        frame = {"boxstyle": "round,pad=0.4", "fc": "white", "ec": "0.2", "lw": 0.9}
        axes.text(x, y, name, ha="center", va="center", fontsize=10, bbox=frame)
    axes.set(xlim=(-4.2, 4.2), ylim=(-0.6, len(rows) - 0.4))
    axes.axis("off")
    path.parent.mkdir(exist_ok=True)
    figure.savefig(path, bbox_inches="tight", metadata={"Date": None})


def _box(name: str) -> str:
    def is_file(other: str) -> bool:
        return (ROOT / "unsloth_multigpu" / f"{other}.py").is_file()

    together = [other for other, of in LAYERS.items() if of == LAYERS[name] and is_file(other)]
    return ", ".join(together) if is_file(name) else name


if __name__ == "__main__":
    PAGE.write_text(written(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
    draw(PICTURE)
