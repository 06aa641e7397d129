"""The supported ranges, and the comparison with what is installed."""

import sys
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from unsloth_multigpu import versions

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).parents[2]


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
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = project["optional-dependencies"]
    lines = [*project["dependencies"], *extras["unsloth"], *extras["notebook"], *extras["federated"]]
    wanted = {canonicalize_name(r.name): r.specifier for r in map(Requirement, lines)}
    # An upper bound is where tests end, and no reason for an installer to take a newer release back.
    lower = {name: range_.partition(",")[0] for name, range_ in versions.SUPPORTED.items()}
    ranges = {**lower, **versions.SUPPORTED_IN_NOTEBOOKS, **versions.SUPPORTED_FOR_FEDERATED}
    table = {canonicalize_name(name): Requirement(name + s).specifier for name, s in ranges.items()}
    assert {name: str(wanted.get(name)) for name in table} == {name: str(s) for name, s in table.items()}
