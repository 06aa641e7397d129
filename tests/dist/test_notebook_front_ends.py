"""What a front end does to a kernel before the line, in a process of its own. All else is in test_notebook_shell.py."""

from __future__ import annotations

from pathlib import Path

from tests.helpers.run import run_python

# What the debugger of VS Code and JupyterLab does first.
DEBUGGED = """
import os, pathlib, debugpy
from unsloth_multigpu.wire.child import Child

debugpy.listen(("127.0.0.1", 0))
child = Child("rank 1", "import sys; print('pydevd' in sys.modules)", pathlib.Path("log"), os.environ)
assert child.has_ended(30)
child.collect()
child.connection.close()
"""


def test_the_debugger_of_a_kernel_stays_out_of_its_workers(tmp_path: Path) -> None:
    # A worker with it would wait for a client of its own, and the line for the worker.
    done = run_python(["-c", DEBUGGED], tmp_path)
    assert done.code == 0, done.err
    assert (tmp_path / "log").read_text().split()[-1] == "False"
