"""Writes what `tests.gpu.kit` measured into docs/benchmarks.md: `python -m tests.gpu.page RESULT.json...`.

Between two marks, one section for each file, under the name of its card. What did not pass is named, and a rehearsal is
refused.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.gpu.step import PARTS
from tests.helpers.pages import markdown_table, with_generated
from unsloth_multigpu.tools.bench.bench_result import ArmResult, Spread, result_row

PAGE = Path(__file__).resolve().parents[2] / "docs" / "benchmarks.md"
# What of the planner's measurements a reader can use.
PLANNED = ("overhead_tokens", "floor_tokens", "speeds")


def main(paths: Sequence[str]) -> None:
    records = [json.loads(Path(path).read_text(encoding="utf-8")) for path in paths]
    for path, record in zip(paths, records, strict=True):
        if record["machine"]["is_tiny"]:
            sys.exit(f"{path} is of a rehearsal, whose figures say nothing.")
    text = "\n\n".join(map(card_section, records))
    PAGE.write_text(with_generated(PAGE.read_text(encoding="utf-8"), "gpu", text), encoding="utf-8")


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
    main(sys.argv[1:])
