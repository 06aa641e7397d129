"""The tested stack that is nearest to the installed one, and the page of all of them."""

from __future__ import annotations

import platform
import re
from pathlib import Path

import pytest
from packaging.version import Version

from tests.matrix.record import PAGE, RESULTS, known_rows, merged, outcome_of, page
from unsloth_multigpu.tools.doctor import nearest
from unsloth_multigpu.tools.doctor.nearest import nearest_row, nearest_text, read_rows
from unsloth_multigpu.versions import SUPPORTED

ROOT = Path(__file__).parents[2]
OLD = {"python": "3.10.1", "torch": "2.6.0", "transformers": "4.57.0", "trl": "0.24.0", "datasets": "3.4.1"}
COLAB = {"python": "3.12.1", "torch": "2.11.0", "transformers": "5.17.0", "trl": "1.15.0", "datasets": "4.8.5"}
NEW = {"python": "3.13.0", "torch": "2.15.0", "transformers": "5.23.0", "trl": "1.16.0", "datasets": "5.2.0"}


def row(name, versions, **more):
    return {"id": name, "name": name, "versions": versions, "failed": [], "date": "2026-11-22", **more}


ROWS = [
    row("oldest", OLD),
    row("Colab, Kaggle", {**COLAB, "unsloth": "2026.10.9"}),
    row("newest", NEW, failed=["a", "b"]),
]


@pytest.mark.parametrize(
    ("installed", "name", "differs"),
    [
        ({**COLAB, "unsloth": "2026.10.9"}, "Colab, Kaggle", []),
        # Patches of a release are no difference, nor is a local version.
        ({**OLD, "torch": "2.6.1+cu124", "transformers": "4.57.6"}, "oldest", []),
        ({**COLAB, "unsloth": "2026.10.9", "datasets": "5.2.0"}, "Colab, Kaggle", ["datasets"]),
        (COLAB, "Colab, Kaggle", ["unsloth"]),
        # As many differences to each: the newest.
        (dict.fromkeys(OLD, "9.9"), "newest", ["torch", "transformers", "trl", "datasets", "python"]),
    ],
)
def test_row_with_the_fewest_differences_is_nearest(installed, name, differs) -> None:
    row, found = nearest_row(ROWS, installed)
    assert (row["name"], found) == (name, differs)


def test_running_python_belongs_to_the_installed_stack() -> None:
    assert nearest.installed_stack()["python"] == platform.python_version()


def test_text_names_the_row_and_what_differs() -> None:
    installed = {**COLAB, "datasets": "5.2.0"}
    assert nearest_text(*nearest_row(ROWS, installed), installed) == (
        '"Colab, Kaggle" (torch 2.11.0, transformers 5.17.0, trl 1.15.0); differs in: unsloth not installed '
        "(row: 2026.10.9), datasets 5.2.0 (row: 4.8.5)"
    )
    text = nearest_text(*nearest_row(ROWS, NEW), NEW)
    assert text.endswith("trl 1.16.0, 2 tests failed there); no difference")


def test_file_of_rows_belongs_to_the_package_and_to_the_page() -> None:
    rows = read_rows()
    assert nearest.MATRIX == RESULTS
    has_run = {row["id"] for row in rows}
    assert {"oldest", "newest"} <= has_run
    assert [row["id"] for row in rows] == [known["id"] for known in known_rows() if known["id"] in has_run]
    assert PAGE.read_text(encoding="utf-8") == page(rows)


def test_ranges_promise_what_was_run_and_nothing_wider() -> None:
    for name, range_ in SUPPORTED.items():
        run = [Version(row["versions"][name]) for row in read_rows() if name in row["versions"]]
        lower, upper = range_.removeprefix(">=").split(",<")
        newest = max(run)
        assert Version(lower) == min(run), name
        assert upper == f"{newest.major}.{newest.minor + 1}", name


def test_outcome_of_a_report_counts_and_names() -> None:
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


def test_result_replaces_the_older_one_of_its_row_in_the_order_of_rows() -> None:
    first, second, *_ = (known["id"] for known in known_rows())
    results = [{"id": second, "date": "old"}, {"id": "gone"}]
    assert merged(results, {"id": first}) == [{"id": first}, {"id": second, "date": "old"}]
    assert merged(results, {"id": second, "date": "new"}) == [{"id": second, "date": "new"}]


def test_every_test_of_the_core_is_there() -> None:
    for line in (ROOT / "tests" / "matrix" / "core.txt").read_text(encoding="utf-8").split():
        file, _, name = line.partition("::")
        text = (ROOT / file).read_text(encoding="utf-8")
        assert not name or re.search(rf"^def {re.escape(name.partition('[')[0])}\(", text, re.MULTILINE), line
