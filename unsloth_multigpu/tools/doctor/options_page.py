"""The table of options as Markdown: `unsloth-multigpu doctor --options > docs/options.md`."""

from __future__ import annotations

from unsloth_multigpu.option_type import Option, Scope, flag, options_of
from unsloth_multigpu.options import GROUPS, MultiGPUConfig, variable
from unsloth_multigpu.strategy import STRATEGIES, Strategy
from unsloth_multigpu.text_table import markdown_table

_INTRODUCTION = """<!-- Generated: unsloth-multigpu doctor --options > docs/options.md -->
# Options

Every option of a run: an argument of `enable_multi_gpu()`, a variable, and a line of a file ([below](#in-a-file)).
Arguments win over variables, variables over the YAML file, the file over `pyproject.toml`, and that over defaults.
Those with a flag are options of `unsloth-multigpu run`, too, where they count as variables. An unknown argument,
variable with our prefix or name in a file is an error, and so is an option that nothing would follow. The last column
says who follows an option that not every run follows, or, in front of a colon, which of its values:

"""
_REPLAY = """
`enable_multi_gpu(replay=True)` is no option of a run: in a [notebook](notebook.md) where a model was loaded before the
line, the workers run those cells too.
"""
_FILES = """
## In a file

`unsloth-multigpu run --config multigpu.yaml train.py`, or the variable `UNSLOTH_MULTIGPU_CONFIG` where the script has
the line, reads a YAML file with the names of the arguments:

```yaml
num_gpus: 2
strategy: diloco:every_steps=8
max_restarts: 3
hang_timeout_s: 300
```

Values are written as in variables, so `off` is the word; `null` or nothing means "not given". What a project always
wants stands in the `pyproject.toml` of the working folder, or of the nearest one above it:

```toml
[tool.unsloth_multigpu]
hang_timeout_s = 300
resume = "auto"
```

A name that is no option, one that is given twice and a value that cannot be used are errors that name file and line.
`verify` and `chaos` read the same files.
"""
_STRATEGIES = """
## Strategies

`strategy` takes a strategy with its options, `strategy=ump.DiLoCo(every_steps=8)`, or its name, `strategy="diloco"`,
for its defaults. A text has options behind a colon, also in `UNSLOTH_MULTIGPU_STRATEGY` and `--strategy`:
`diloco:every_steps=8,outer_momentum=0`. What each does to a training is in [strategies.md](strategies.md).
"""
_COLUMNS = ("Argument", "Default", "Variable, flag", "Meaning", "Followed by")
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
    names = ", ".join([f"`{variable(name)}`", *flags])
    return [f"`{name}`", _default(row), names, row.help, asked_by + scopes if scopes else ""]


def _strategy_cells(cls: type[Strategy]) -> list[list[str]]:
    first = [f'`ump.{cls.__name__}`, `"{cls.name}"`', "", "", cls.exchanges]
    return [first, *(["", f"`{name}`", _default(row), row.help] for name, row in options_of(cls).items())]


def _default(row: Option) -> str:
    return row.otherwise if row.default is None else _code(row.default)


def _code(value: object) -> str:
    if isinstance(value, (str, Strategy)):
        return f'`"{value}"`'
    return f"`{value:g}`" if isinstance(value, float) else f"`{value}`"
