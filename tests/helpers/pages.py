"""Generates docs/options.md and docs/seams.md from the code: `python -m tests.helpers.pages`.

A test compares both.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterable, Sequence
from pathlib import Path

from unsloth_multigpu.option_type import Option, Scope, flag, options_of
from unsloth_multigpu.options import GROUPS, MultiGPUConfig, variable
from unsloth_multigpu.seam import SEAMS, InstanceSeam
from unsloth_multigpu.strategy import STRATEGIES, Strategy
from unsloth_multigpu.tools.doctor.patch_check import all_patches

DOCS = Path(__file__).parents[2] / "docs"
_CALLED = {
    "step": "in each step",
    "step end": "after each step",
    "save": "for each checkpoint",
    "": "in some trainings",
}
_INTRODUCTION = """<!-- Generated: python -m tests.helpers.pages -->
# Options

Every option of a run is an argument of `enable_multi_gpu()`, a variable, and a line of a file ([below](#in-a-file)).
The first of these that sets an option counts: argument, variable, YAML file, `pyproject.toml`. Options with a flag are
also options of `unsloth-multigpu run`, and count as variables there. An unknown argument or variable with our prefix is
an error, and so is an option without effect. The last column says where an option applies (empty: everywhere); if
values stand before a colon, only these are limited:

"""
_REPLAY = """
`enable_multi_gpu(replay=True)` is an argument for [notebooks](notebook.md) only: if a model was loaded before the call,
the workers also run the earlier cells.
"""
_FILES = """
## In a file

`unsloth-multigpu run --config multigpu.yaml train.py` reads a YAML file with the names of the arguments. For a script
that calls `enable_multi_gpu()`, set the variable `UNSLOTH_MULTIGPU_CONFIG` to the file:

```yaml
num_gpus: 2
strategy: diloco:every_steps=8
max_restarts: 3
hang_timeout_s: 300
```

Values are written as in variables, so `off` is text and not a truth value; `null` or nothing means "not given". Options
of a whole project are in the `pyproject.toml` of the working folder, or of the nearest folder above it:

```toml
[tool.unsloth_multigpu]
hang_timeout_s = 300
resume = "auto"
```

An unknown name, a name that is given twice and an invalid value are errors that name file and line. `verify` and
`chaos` read the same files.
"""
_STRATEGIES = """
## Strategies

`strategy` is an object, `ump.DiLoCo(every_steps=8)`, or a text, `"diloco"` for the defaults or
`"diloco:every_steps=8,outer_momentum=0"`. [strategies.md](strategies.md) describes each.
"""
_COLUMNS = ("Argument, variable, flag", "Default", "Meaning", "Applies to")
_STRATEGY_COLUMNS = ("Strategy", "Option", "Default", "Meaning")


def options_markdown() -> str:
    """The whole page."""
    parts = [_INTRODUCTION, *(f"- {scope.value[0]}: {scope.value[1]}\n" for scope in Scope)]
    for group in GROUPS:
        members = {name: row for name, row in options_of(MultiGPUConfig).items() if row.group == group}
        parts.append(f"\n## {group}\n")
        parts.append("\n" + markdown_table(_COLUMNS, [_option_cells(name, row) for name, row in members.items()]))
    strategies = [cells for cls in STRATEGIES.values() for cells in _strategy_cells(cls)]
    parts += [_REPLAY, _FILES, _STRATEGIES, "\n", markdown_table(_STRATEGY_COLUMNS, strategies)]
    return "".join(parts)


def _option_cells(name: str, row: Option) -> list[str]:
    flags = [f"`{flag(name)}`" for command in ("run",) if command in row.commands]
    asked_by = "" if row.asking is None else f"{', '.join(_code(v) for v in row.asking)}: "
    scopes = ", ".join(scope.value[0] for scope in Scope if scope in row.scopes)
    names = "<br>".join([f"`{name}`", f"`{variable(name)}`", *flags])
    return [names, _default(row), row.help, asked_by + scopes if scopes else ""]


def _strategy_cells(cls: type[Strategy]) -> list[list[str]]:
    first = [f'`ump.{cls.__name__}`, `"{cls.name}"`', "", "", str(inspect.getdoc(cls)).partition("\n")[0]]
    return [first, *(["", f"`{name}`", _default(row), row.help] for name, row in options_of(cls).items())]


def _default(row: Option) -> str:
    return row.otherwise if row.default is None else _code(row.default)


def _code(value: object) -> str:
    if isinstance(value, (str, Strategy)):
        return f'`"{value}"`'
    return f"`{value:g}`" if isinstance(value, float) else f"`{value}`"


def seams_markdown() -> str:
    """The page `docs/seams.md`. The same on every machine."""
    lines = [
        "<!-- Generated: python -m tests.helpers.pages -->",
        "# Seams",
        "",
        "Every function of another library that this package patches. `unsloth-multigpu doctor` checks that each patch",
        "can be applied on your machine. A missing required function is an error; the others are skipped, because some",
        "supported versions do not have them.",
        "",
        markdown_table(
            ("Target", "Supported", "Required", "Reason"),
            [(f"`{p.target}`", f"`{p.supports}`", "no" if p.optional else "yes", p.reason) for p in all_patches()],
        ),
        "## While a Trainer trains",
        "",
        "These methods are replaced on one object during `train()`. When it begins, each must exist with these",
        "parameters. If one that must be called in each step, or for each checkpoint, is not called, the training ends",
        "with an error.",
        "",
        markdown_table(("Target", "Parameters", "Called", "Required", "Reason"), map(_seam_cells, SEAMS.values())),
    ]
    return "\n".join(lines)


def _seam_cells(seam: InstanceSeam) -> list[str]:
    parameters = ", ".join(f"`{name}`" for name in seam.needs)
    target, required = f"`{seam.owner}.{seam.name}`", "no" if seam.optional else "yes"
    return [target, parameters, _CALLED[seam.called], required, seam.reason]


def markdown_table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """The table in Markdown. The last line ends with a line break, too."""
    return "".join([_markdown_line(columns), "|" + "---|" * len(columns) + "\n", *map(_markdown_line, rows)])


def _markdown_line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |\n"


def with_generated(page: str, name: str, text: str) -> str:
    """The page with `text` between its marks of this name."""
    mark = re.compile(rf"(<!-- {name}: generated -->\n).*?(<!-- end -->)", re.DOTALL)
    assert mark.search(page), name
    return mark.sub(lambda found: f"{found[1]}\n{text}\n\n{found[2]}", page)


if __name__ == "__main__":
    for name, text in (("options.md", options_markdown()), ("seams.md", seams_markdown())):
        (DOCS / name).write_text(text, encoding="utf-8")
