"""What a front end does to a kernel before the line, in a process of its own. All else is in test_notebook_shell.py."""

from __future__ import annotations

from pathlib import Path

from tests.helpers.notebook import NotebookRun
from tests.helpers.run import LIGHT, run_python

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


def test_kernel_of_a_group_of_one_starts_workers_as_any(tmp_path: Path) -> None:
    # As jupyter-distributed starts it. No rank listens where the variables say.
    alone = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "192.0.2.1", "MASTER_PORT": "1"}
    told = f"{{name: __import__('os').environ[name] for name in {sorted(alone)}}}"
    with NotebookRun(tmp_path, {**LIGHT, **alone}) as notebook:
        assert notebook.run("import unsloth_multigpu as ump\nump.enable_multi_gpu(num_gpus=2)", 120).error == ""
        result = notebook.run(f"%%rank 1\nprint({told})")
        ours = {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
        assert str(dict(sorted(ours.items()))) in result.text, result
        assert notebook.run("ump.disable_multi_gpu()").error == ""
        assert str(dict(sorted(alone.items()))) in notebook.run(f"print({told})").text
