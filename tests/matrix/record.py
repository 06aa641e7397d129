"""Writes what came of a row of the matrix: tests/matrix/results.json, and docs/compatibility.md from all rows.

Usage, in the row's environment: python -m tests.matrix.record ROW JUNIT_XML. Exit code 1 = a test of the row failed.
"""

from __future__ import annotations

import datetime
import json
import platform
import sys
import xml.etree.ElementTree as ElementTree
from collections import Counter
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parents[2]
ROWS = Path(__file__).with_name("rows.toml")
RESULTS = Path(__file__).with_name("results.json")
PAGE = ROOT / "docs" / "compatibility.md"
# In the order in which a reader looks for them.
LIBRARIES = ("torch", "transformers", "trl", "accelerate", "peft", "datasets", "wrapt", "unsloth", "unsloth_zoo")


def outcome_of(report: str) -> dict[str, Any]:
    """Counts of a JUnit report, with the names of failed tests and how often each reason made one skip."""
    failed, reasons, num_tests, seconds = [], Counter(), 0, 0.0
    for suite in ElementTree.fromstring(report).iter("testsuite"):
        seconds += float(suite.get("time", 0))
        for case in suite.iter("testcase"):
            num_tests += 1
            if case.find("failure") is not None or case.find("error") is not None:
                failed.append(f"{case.get('classname', '').replace('.', '/')}.py::{case.get('name')}")
            elif (skipped := case.find("skipped")) is not None:
                reasons[skipped.get("message", "")] += 1
    return {
        "passed": num_tests - len(failed) - sum(reasons.values()),
        "failed": failed,
        "skipped": dict(sorted(reasons.items())),
        "seconds": round(seconds),
    }


def installed() -> dict[str, str]:
    """The versions of this environment, without what an index adds to them (`+cpu`); what is absent is left out."""
    found = {"python": platform.python_version()}
    for name in LIBRARIES:
        try:
            found[name] = version(name).partition("+")[0]
        except PackageNotFoundError:
            continue
    return found


def read_toml(path: Path) -> dict[str, Any]:
    return tomllib.loads(path.read_text(encoding="utf-8"))


def known_rows() -> list[dict[str, Any]]:
    """The rows as they are asked for."""
    return read_toml(ROWS)["row"]


def page(results: Sequence[Mapping[str, Any]]) -> str:
    """docs/compatibility.md: a table of all rows, and below it what failed and what was skipped."""
    columns = ("python", *LIBRARIES[:-1])
    lines = [
        "# Compatibility",
        "",
        "Written by `make matrix`, which installs each row from package names alone and runs the same core of tests in",
        "it (`tests/matrix/core.txt`): launching, parity with one process, saving once, resuming, a killed rank, the",
        "planner, the doctor, a cell of a notebook, and where Unsloth is installed its GPU code. The row of vLLM runs",
        "GRPO with an engine in each rank instead. All rows run on CPU ranks over gloo. Releases between two rows are",
        "expected to work, newer ones than the newest row are tried with one warning.",
        "",
        "| Row | " + " | ".join(columns) + " | passed | failed | skipped | seconds | date |",
        "|---|" + "---|" * (len(columns) + 5),
    ]
    for row in results:
        cells = [row["versions"].get(name, "-") for name in columns]
        counts = [row["passed"], len(row["failed"]), sum(row["skipped"].values()), row["seconds"]]
        lines.append("| " + " | ".join(map(str, [row["name"], *cells, *counts, row["date"]])) + " |")
    has_run = {row["id"] for row in results}
    lines += [f"| {known['name']} | not run yet |" for known in known_rows() if known["id"] not in has_run]
    notes = [f"- {row['name']}: failed `{name}`" for row in results for name in row["failed"]]
    notes += [
        f"- {row['name']}: {number} skipped: {reason}" for row in results for reason, number in row["skipped"].items()
    ]
    return "\n".join([*lines, *(["", *notes] if notes else [])]) + "\n"


def merged(results: Sequence[Mapping[str, Any]], row: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """`results` with `row` in place of its older one, in the order of rows.toml; rows that are gone from there go."""
    by_id = {**{result["id"]: result for result in results}, row["id"]: row}
    return [by_id[known["id"]] for known in known_rows() if known["id"] in by_id]


def main(row_id: str, report: str) -> int:
    (name,) = (known["name"] for known in known_rows() if known["id"] == row_id)
    outcome = outcome_of(Path(report).read_text(encoding="utf-8"))
    date = datetime.datetime.now(datetime.timezone.utc).date().isoformat()
    row = {"id": row_id, "name": name, "versions": installed(), **outcome, "date": date}
    before = json.loads(RESULTS.read_text(encoding="utf-8")) if RESULTS.exists() else []
    results = merged(before, row)
    RESULTS.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    PAGE.write_text(page(results), encoding="utf-8")
    print(f"{name}: {outcome['passed']} passed, {len(outcome['failed'])} failed, {outcome['seconds']} s")
    return 1 if outcome["failed"] else 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
