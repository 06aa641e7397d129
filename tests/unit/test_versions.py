"""The supported ranges, what is installed beside them, and the tested stacks of which they are the promise."""

import json
import subprocess
import sys

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

from tests.matrix.record import PAGE, RESULTS, ROOT, known_rows, outcome_of, page, read_toml
from unsloth_multigpu import versions


@pytest.mark.parametrize(
    ("installed", "ok", "is_newer"),
    [
        ("2.6.0", True, False),
        ("2.5.9", False, False),
        ("2.13.0+cpu", True, False),
        ("2.14.0a0+git1234", True, False),
        ("2.15.0.dev1", True, True),
        ("2.15.0", True, True),
        ("3.1+cu140", True, True),
        ("built by hand", False, False),
    ],
)
def test_check_version_counts_local_and_prerelease_versions(monkeypatch, installed, ok, is_newer):
    monkeypatch.setattr(versions, "installed_version", {"torch": installed}.get)
    row = versions.check_version("torch>=2.6,<2.15")
    assert (row.name, row.installed, row.ok, row.is_newer) == ("torch", installed, ok, is_newer)


def test_version_rows_let_only_optional_libraries_be_absent(monkeypatch):
    monkeypatch.setattr(versions, "installed_version", {}.get)
    rows = versions.version_rows()
    tables = (versions.SUPPORTED, versions.SUPPORTED_IN_NOTEBOOKS, versions.SUPPORTED_FOR_FEDERATED)
    assert [row.name for row in rows] == [name for table in tables for name in table]
    assert {row.name for row in rows if row.ok} == versions.OPTIONAL


def test_pyproject_names_the_lower_bounds_of_the_table():
    project = read_toml(ROOT / "pyproject.toml")["project"]
    extras = project["optional-dependencies"]
    lines = [*project["dependencies"], *extras["unsloth"], *extras["notebook"], *extras["federated"]]
    wanted = {canonicalize_name(r.name): r.specifier for r in map(Requirement, lines)}
    # An upper bound is where tests end, and no reason for an installer to take a newer release back.
    lower = {name: range_.partition(",")[0] for name, range_ in versions.SUPPORTED.items()}
    ranges = {**lower, **versions.SUPPORTED_IN_NOTEBOOKS, **versions.SUPPORTED_FOR_FEDERATED}
    table = {canonicalize_name(name): Requirement(name + s).specifier for name, s in ranges.items()}
    assert {name: str(wanted.get(name)) for name in table} == {name: str(s) for name, s in table.items()}


ROWS = json.loads(RESULTS.read_text(encoding="utf-8"))


def test_file_of_rows_belongs_to_the_page():
    has_run = {row["id"] for row in ROWS}
    assert {"oldest", "newest"} <= has_run
    assert [row["id"] for row in ROWS] == [known["id"] for known in known_rows() if known["id"] in has_run]
    assert PAGE.read_text(encoding="utf-8") == page(ROWS)


@pytest.mark.thorough
def test_tests_of_the_rows_are_there():
    """Beside `-n` pytest runs nothing, and does not say why, where one name is wrong."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--collect-only", "-m", ""]
    others = [test for row in known_rows() for test in row.get("tests", [])]
    run = subprocess.run([*command, "@tests/matrix/core.txt", *others], cwd=ROOT, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr


def test_ranges_promise_what_was_run_and_nothing_wider():
    for name, range_ in versions.SUPPORTED.items():
        run = [Version(row["versions"][name]) for row in ROWS if name in row["versions"]]
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
