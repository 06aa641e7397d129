"""The tested stacks, the page of all of them, and the ranges that they promise."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from packaging.version import Version

from tests.matrix.record import PAGE, RESULTS, known_rows, outcome_of, page
from unsloth_multigpu.versions import SUPPORTED

ROOT = Path(__file__).parents[2]


def read_rows():
    return json.loads(RESULTS.read_text(encoding="utf-8"))


def test_file_of_rows_belongs_to_the_page():
    rows = read_rows()
    has_run = {row["id"] for row in rows}
    assert {"oldest", "newest"} <= has_run
    assert [row["id"] for row in rows] == [known["id"] for known in known_rows() if known["id"] in has_run]
    assert PAGE.read_text(encoding="utf-8") == page(rows)


@pytest.mark.thorough
def test_tests_of_the_rows_are_there():
    """Beside `-n` pytest runs nothing, and does not say why, where one name is wrong."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--collect-only", "-m", ""]
    others = [test for row in known_rows() for test in row.get("tests", [])]
    run = subprocess.run([*command, "@tests/matrix/core.txt", *others], cwd=ROOT, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr


def test_ranges_promise_what_was_run_and_nothing_wider():
    for name, range_ in SUPPORTED.items():
        run = [Version(row["versions"][name]) for row in read_rows() if name in row["versions"]]
        lower, upper = range_.removeprefix(">=").split(",<")
        newest = max(run)
        assert Version(lower) == min(run), name
        assert upper == f"{newest.major}.{newest.minor + 1}", name


def test_outcome_of_a_report_counts_and_names():
    report = """<testsuites><testsuite time="12.4">
    <testcase classname="tests.unit.test_plan" name="test_one"/>
    <testcase classname="tests.unit.test_plan" name="test_two[a]"><failure message="no"/></testcase>
    <testcase classname="tests.dist.test_once" name="test_three"><error message="no"/></testcase>
    <testcase classname="tests.e2e.test_gpu" name="test_four"><skipped message="Unsloth is not installed"/></testcase>
    </testsuite></testsuites>"""
    assert outcome_of(report) == {
        "passed": 1,
        "failed": ["tests/unit/test_plan.py::test_two[a]", "tests/dist/test_once.py::test_three"],
        "skipped": {"Unsloth is not installed": 1},
        "seconds": 12,
    }
