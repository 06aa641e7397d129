"""Environments of other versions: `nox -s "matrix(oldest)"` tests one row of tests/matrix/rows.toml, `make matrix` all.

Whatever a row is called, it is installed from package names alone, tested with its tests (tests/matrix/core.txt, unless
it names others), and deleted again, since a build of torch for CUDA takes 5 GB. With KEEP=1 it stays, and `nox -r` uses
it again.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import nox

MATRIX = nox.project.load_toml(Path(__file__).parent / "tests" / "matrix" / "rows.toml")
ROWS = [nox.param(row["python"], row, id=row["id"]) for row in MATRIX["row"]]
RECORDED_ROWS = [param for param in ROWS if param.args[1].get("signatures")]

nox.needs_version = ">=2025.2.9"
nox.options.default_venv_backend = "uv"
nox.options.sessions = ["matrix"]


@nox.session
@nox.parametrize(("python", "row"), ROWS)
def matrix(session: nox.Session, row: dict[str, Any]) -> None:
    """Tests one row and writes what came of it into docs/compatibility.md."""
    with environment(session, row):
        report = Path(session.create_tmp()) / "junit.xml"
        tests = [*row.get("tests", ["@tests/matrix/core.txt"]), f"--junitxml={report}", *session.posargs]
        spread = ["-n", "2", "--dist", "loadfile", "--no-loadscope-reorder"]
        session.run("python", "-m", "pytest", "-q", *tests, *spread, success_codes=[0, 1])
        if row.get("signatures"):
            session.run("python", "-m", "tests.contract.signatures", row["id"])
        # The last, because its exit code says whether a test failed.
        session.run("python", "-m", "tests.matrix.record", row["id"], str(report))


@nox.session
@nox.parametrize(("python", "row"), RECORDED_ROWS)
def signatures(session: nox.Session, row: dict[str, Any]) -> None:
    """Records what this package calls in one row, without testing the row."""
    with environment(session, row):
        session.run("python", "-m", "tests.contract.signatures", row["id"])


@contextmanager
def environment(session: nox.Session, row: dict[str, Any]) -> Iterator[None]:
    """This package and the row's, resolved together: a row that contradicts what the package asks for cannot be."""
    overrides = Path(session.create_tmp()) / "overrides.txt"
    overrides.write_text("\n".join([*MATRIX["overrides"], *row.get("overrides", [])]))
    try:
        session.install("--overrides", str(overrides), "-e", ".", *row["requires"], *MATRIX["tests"])
        yield
    finally:
        if not os.environ.get("KEEP"):
            shutil.rmtree(session.virtualenv.location)
