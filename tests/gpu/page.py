"""Writes what `tests.gpu.kit` measured into docs/benchmarks.md: `python -m tests.gpu.page RESULT.json...`.

Between two markers, one section for each file, under the name of its card. Without a file it says that nothing was
measured. What did not pass is named, and a rehearsal is refused.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.gpu.step import PARTS
from tests.helpers.pages import markdown_table
from unsloth_multigpu.tools.bench.bench_result import ArmResult, Spread, result_row

PAGE = Path(__file__).resolve().parents[2] / "docs" / "benchmarks.md"
BEGIN, END = "<!-- gpu: begin; written by python -m tests.gpu.page -->", "<!-- gpu: end -->"
NOTHING = (
    "No card was measured yet: the maintainers had none. `make gpu` measures one, or several, and writes its figures\n"
    "here; [CONTRIBUTING.md](../CONTRIBUTING.md#on-a-gpu) says how."
)
# What of the planner's measurements a reader can use.
PLANNED = ("overhead_tokens", "floor_tokens", "speeds")


def main(paths: Sequence[str]) -> int:
    records = [json.loads(Path(path).read_text(encoding="utf-8")) for path in paths]
    for path, record in zip(paths, records, strict=True):
        if record["machine"]["is_tiny"]:
            sys.exit(f"{path} is of a rehearsal, whose figures say nothing.")
    PAGE.write_text(with_section(PAGE.read_text(encoding="utf-8"), section(records)), encoding="utf-8")
    return 0


def with_section(page: str, text: str) -> str:
    """The page with `text` between the markers."""
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        sys.exit(f"{PAGE} lacks its markers: {BEGIN} and {END}")
    return f"{before}{BEGIN}\n{text}\n{END}{after}"


def section(records: Sequence[Mapping[str, Any]]) -> str:
    """Markdown of all records."""
    return "\n\n".join(card_section(record) for record in records) or NOTHING


def card_section(record: Mapping[str, Any]) -> str:
    machine, steps = record["machine"], record["steps"]
    cards = machine["cards"]
    memory = machine["memory_bytes"][0] / 2**30
    lines = [
        f"### {cards[0]}",
        "",
        f"{len(cards)} card(s) of {memory:.0f} GiB, torch {machine['torch']}, CUDA {machine['cuda']}, "
        f"NCCL {'.'.join(map(str, machine['nccl'] or ['none']))}, "
        f"commit {record['commit'] or 'unknown'}.",
    ]
    for part, title in PARTS.items():
        mine = {name: step for name, step in steps.items() if step["part"] == part}
        lines += ["", f"**{title}**"] if mine else []
        for name, step in mine.items():
            lines += ["", f"`{name}`: {step['text']}{outcome_text(step)}.", *detail(name, step.get("result"))]
    return "\n".join(lines)


def outcome_text(step: Mapping[str, Any]) -> str:
    if "skipped" in step:
        return f": left out, {step['skipped']}"
    note = f" ({step['note']})" if step["note"] else ""
    if step["problems"]:
        return f"{note}: **not shown: {'; '.join(step['problems'])}**"
    if step["result"] is None:
        return f"{note}: {step['last_line'].strip('= ')}"
    return note


def detail(name: str, result: Mapping[str, Any] | None) -> list[str]:
    """What a step found: the table of a benchmark, or its facts. What the doctor says is too long for a page."""
    if result is None or name == "doctor":
        return []
    if "results" not in result:
        return ["", *(f"- {name}: {fact_text(value)}" for name, value in result.items())]
    rows = [arm_row(arm, result["ratios"][arm["name"]]) for arm in result["results"]]
    planner = [
        f"- planner of {name}: {fact_text({n: v for n, v in found.items() if n in PLANNED})}"
        for name, found in result["planner"].items()
    ]
    return [
        "",
        markdown_table(list(rows[0]), [list(row.values()) for row in rows]),
        *(f"- {line}" for line in result["conditions"] if line.startswith(("options:", "samples:"))),
        *planner,
    ]


def arm_row(arm: Mapping[str, Any], ratio: float) -> dict[str, str]:
    """The row of the benchmark's own table, from its JSON, and how long a step takes of one of one process."""
    norm = arm["norm_difference"]
    values = {name: Spread(**value) for name, value in arm.items() if isinstance(value, Mapping) and name != "times"}
    times = {name: Spread(**value) for name, value in arm["times"].items()}
    # What JSON has no number for is text.
    norm = None if norm is None else float(norm)
    row = result_row(ArmResult(**{**arm, **values, "times": times, "norm_difference": norm}))
    return {**row, "step, of one_process": f"{ratio:.3f}"}


def fact_text(value: Any) -> str:
    """A fact in one line."""
    if isinstance(value, Mapping):
        return ", ".join(f"{name} {fact_text(inner)}" for name, inner in value.items())
    if isinstance(value, list):
        return " ".join(map(fact_text, value))
    return f"{value:g}" if isinstance(value, float) else str(value)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
