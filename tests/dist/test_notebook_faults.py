"""Ranks of a notebook that do not end a cell together: what the user reads, how soon, and that the next cell works.

One kernel for all of them: starting one, and importing what it needs, costs more than most faults. It has the oldest
IPython, and is started as jupyter-distributed starts one of a group of one. In the end it is restarted, goes on with
its training, and is killed.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path

import psutil
import pytest

from tests.helpers.notebook import CellResult, NotebookRun, oldest_ipython
from tests.helpers.run import BARE, free_port, run_well, wait_until

# The variables of a group of one.
ALONE = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": str(free_port())}
OURS = {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
# What a loaded machine may take beside the time that is waited on purpose.
SLACK_S = 30.0
ENVIRONMENT = f"{{name: os.environ.get(name) for name in {list(ALONE)}}}"
# The first call fails on rank 0 alone.
ENABLE = """
import asyncio, os, signal, time
import unsloth_multigpu as ump
try:
    ump.enable_multi_gpu(num_gpus=2, max_restarts=1)
except ump.ConfigError:
    ump.enable_multi_gpu(num_gpus=2, hang_timeout_s=3.0, resume="auto")
import torch, torch.distributed as dist
rank = dist.get_rank()
def everyone():
    x = torch.ones(1)
    dist.all_reduce(x)
    return int(x)
everyone()
"""
TRAIN = f"""
import sys
sys.path.append({str(Path(__file__).parent / "scripts")!r})
from common import Line, arguments, points
from transformers import Trainer, TrainerCallback
class Fault(TrainerCallback):
    source = ""
    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == 4:
            exec(self.source, {{**globals(), "control": control}})
model, fault = Line(), Fault()
def make(max_steps, folder="out"):
    args = arguments(folder, 2, max_steps=max_steps)
    return Trainer(model=model, args=args, train_dataset=points(8), callbacks=[fault])
"""
# It resumes from the training that was as many calls of train() behind the line.
STOPPED = "fault.source = 'control.should_save = control.should_training_stop = True'"
TRAIN_FIRST = """
trainer = make(6, "resumed")
trainer.train().global_step
"""
FLIP = "if rank == 1: model.layer.weight.data.view(torch.int32)[0, 0] ^= 1"
# A Trainer of before is refused, a new one trains, and the ranks have the same weights.
TRAINS_ON = """
fault.source = ""
try:
    trainer.train()
except ump.SetupError as error:
    refused = "Make a new Trainer" in str(error)
trainer = make(6)
steps = trainer.train().global_step
weights = [torch.zeros(1, 2) for _ in range(2)]
dist.all_gather(weights, model.layer.weight.detach())
print("refused", refused, "steps", steps, "equal", bool((weights[0] == weights[1]).all()))
"""


def check(run: NotebookRun, source: str, error: str, value: str, limit_s: float) -> None:
    """One cell fails as it should, is shown once, and the next one works on both ranks."""
    result = run.run(source)
    assert (result.error, len(result.traceback)) == (error, 1), result
    assert value in result.value
    assert value in result.traceback[0]
    check_next(run, result, limit_s)


def check_stop(run: NotebookRun, source: str, error: str, limit_s: float) -> None:
    """Stop ends one cell, and the next one works on both ranks."""
    result = run.stop(source)
    assert result.error == error, result
    check_next(run, result, limit_s)


def check_next(run: NotebookRun, result: CellResult, limit_s: float) -> None:
    assert result.seconds < limit_s + SLACK_S, result
    assert run.well("everyone()") == "2"


def check_line_that_failed(run: NotebookRun) -> None:
    """Ranks above 0 do again what rank 0 did before the line, and nothing that stands behind a failed call."""
    failing = "import unsloth_multigpu as ump\nump.enable_multi_gpu(num_gpus=2, max_restarts=1)\nopen('behind', 'w')"
    assert run.run(failing).error == "ConfigError"
    caught = "try:\n    ump.enable_multi_gpu(num_gpus=2, nnodes=2)\nexcept ump.ConfigError:\n    caught = 'caught'"
    assert run.run(caught).error == ""
    # The ranks are there, and their group is open.
    offload = "import os, threading\nos.environ['UNSLOTH_FSDP2_CPU_OFFLOAD'] = '0'\n"
    assert run.run(offload + "ump.enable_multi_gpu(num_gpus=2, shard='on', shard_offload=True)").error == "SetupError"
    left = run.well("del os.environ['UNSLOTH_FSDP2_CPU_OFFLOAD']\nprint(threading.enumerate(), *os.environ)")
    assert not [name for name in ("unsloth_multigpu", "UNSLOTH_FSDP2") if name in left]
    assert run.run(ENABLE).text.splitlines()[-1] == "2"
    assert run.run("%%rank 1\nprint(caught, os.path.exists('behind'))").text == "[rank1] caught False\n"
    assert run.run(f"%%rank 1\nprint({ENVIRONMENT})").text == f"[rank1] {OURS}\n"
    log = (run.folder / "logs" / "rank_1.log").read_text()
    assert "Rank 0 has left this cell here." in log
    assert "Traceback" not in log


def check_faults_of_cells(run: NotebookRun, *, is_thorough: bool) -> None:
    raise_one = "if rank == 1: raise ValueError('one')\n"
    cause = "rank 1 raised ValueError: one"
    check(run, "raise ValueError('both')", "ValueError", "both", 0.5)
    check(run, f"{raise_one}everyone()", "DistributedError", cause, 2.0)
    check(run, raise_one, "DistributedError", cause, 0.1)
    check(run, "if rank == 0: raise ValueError('zero')\neveryone()", "ValueError", "zero", 1.2)
    never = "will never join"
    check(run, "if rank == 1: everyone()", "DivergenceError", f"number 3, which rank 0 {never}", 3.1)
    if is_thorough:
        check(run, f"{raise_one}time.sleep(60)", "DistributedError", cause, 1.5)
        check(run, f"{raise_one}await asyncio.sleep(60)", "DistributedError", cause, 1.5)
        check(run, "if rank == 0: everyone()", "DivergenceError", f"number 3, which rank 1 {never}", 2.0)
        check(run, "%%rank 0\neveryone()", "DivergenceError", f"number 3, which rank 1 {never}", 3.2)

    check_stop(run, "print('go', flush=True)\nwhile True: pass", "KeyboardInterrupt", 0.5)
    check_stop(run, "print('go', flush=True)\nawait asyncio.sleep(60)", "CancelledError", 0.5)
    stuck = "print('go', flush=True)\nif rank == 0: everyone()\ntime.sleep(60)"
    check_stop(run, stuck, "KeyboardInterrupt", 1.5)


def check_faults_of_trainings(run: NotebookRun) -> None:
    assert run.run(TRAIN + STOPPED + TRAIN_FIRST).text.splitlines()[-1] == "4"
    for source, error, value, limit_s in (
        ("if rank == 1: raise ValueError('one')", "DistributedError", "rank 1 raised ValueError: one", 2.0),
        ("if rank == 0: raise ValueError('zero')", "ValueError", "zero", 1.2),
        ("if rank == 1: time.sleep(60)", "RankTimeoutError", "rank 1 hangs: no progress for ", 6.0),
        (FLIP, "DivergenceError", "after step 4: rank 1 differs from rank 0", 0.5),
    ):
        check(run, f"fault.source = {source!r}\nmake(6).train()", error, value, limit_s)
    assert "refused True steps 6 equal True" in run.run(TRAINS_ON).text
    check_stop(run, "fault.source = \"print('go', flush=True)\"\nmake(10**6).train()", "KeyboardInterrupt", 1.5)
    assert "refused True steps 6 equal True" in run.run(TRAINS_ON).text


def check_privacy(run: NotebookRun, run_dir: Path) -> None:
    files = [run_dir, *run_dir.iterdir(), *(run.folder / "logs").iterdir()]
    assert {oct(path.stat().st_mode & 0o777) for path in files} == {"0o700", "0o600"}
    for process in (psutil.Process(run.pid), *run.children()):
        listening = [c.laddr for c in process.net_connections() if c.status == psutil.CONN_LISTEN]
        assert {address.ip for address in listening} <= {"127.0.0.1", "::1"}


def check_death_of_a_worker(run: NotebookRun, run_dir: Path) -> None:
    (worker,) = run.children()
    message = run.begin("print('go', flush=True)\nwhile True: everyone()")
    run.wait_for_text("go")
    worker.kill()
    result = run.finish(message)
    assert (result.error, len(result.traceback)) == ("DistributedError", 1), result
    assert f"rank 1 (pid {worker.pid}) was ended by SIGKILL" in result.value
    assert "This kernel continues alone" in result.value
    assert f"this kernel continues alone: rank 1 (pid {worker.pid}) was ended by SIGKILL" in result.text
    assert result.text.count("The end of its log") == 0
    assert not run_dir.exists()
    left = f"import threading; print(ump.is_multi_gpu_enabled(), {ENVIRONMENT}, dist.is_initialized())"
    alone = run.run(f"{left}; print(threading.enumerate())")
    assert alone.text.startswith(f"False {ALONE} False\n")
    assert "unsloth_multigpu" not in alone.text
    again = run.run("ump.enable_multi_gpu(num_gpus=2)")
    assert (again.error, "its workers have ended" in again.value) == ("SetupError", True)
    assert run.run("trainer.args.max_steps = 1; make(1).train().global_step").text.splitlines()[-1] == "1"


def check_resume_and_death_of_the_kernel(run: NotebookRun) -> None:
    """No worker outlives the kernel, not even one that is stopped while a child of the kernel holds its open files."""
    assert run.run(ENABLE).text.splitlines()[-1] == "2"
    noted = "begun = []\nFault.on_step_begin = lambda self, *_, **__: begun.append(1)"
    resumed = run.run(TRAIN + noted + TRAIN_FIRST)
    assert "resumes from resumed/checkpoint-4" in resumed.text
    assert resumed.text.splitlines()[-1] == "6"
    assert run.run("len(begun)").text == "2\n"
    whole = (
        "first, model = model.layer, Line()\nmake(6, 'whole').train()\nprint(first.weight.equal(model.layer.weight))"
    )
    assert run.run(whole).text.splitlines()[-1] == "True"
    (worker,) = run.children()
    run.run("child = 0\nif rank == 0:\n    child = os.fork() or time.sleep(600)")  # Python 3.12 warns of the fork.
    child = int(run.run("print(child)").text)
    worker.send_signal(signal.SIGSTOP)
    os.kill(run.pid, signal.SIGKILL)
    wait_until(lambda: not worker.is_running(), 30, "the worker's end after its kernel's")
    os.kill(child, signal.SIGKILL)


@pytest.mark.parametrize("is_thorough", [False, pytest.param(True, marks=pytest.mark.thorough)])
def test_kernel_outlives_each_fault(tmp_path, is_thorough):
    with NotebookRun(tmp_path, {**BARE, **ALONE, **oldest_ipython(or_any=True)}) as run:
        check_line_that_failed(run)
        check_faults_of_cells(run, is_thorough=is_thorough)
        check_faults_of_trainings(run)
        run_dir = Path(run.run("if rank == 0: print(os.environ['UNSLOTH_MULTIGPU_RUN_DIR'])").text.strip())
        check_privacy(run, run_dir)
        check_death_of_a_worker(run, run_dir)
        run.restart()
        check_resume_and_death_of_the_kernel(run)


# What the debugger of VS Code and JupyterLab does first.
DEBUGGED = """
import os, pathlib, debugpy
from unsloth_multigpu.wire.child import Child

debugpy.listen(("127.0.0.1", 0))
child = Child("rank 1", "import sys; print('pydevd' in sys.modules)", pathlib.Path("log"), os.environ)
assert child.has_ended(30)
child.close()
"""


def test_the_debugger_of_a_kernel_stays_out_of_its_workers(tmp_path: Path) -> None:
    # A worker with it would wait for a client of its own, and the line for the worker.
    run_well(["-c", DEBUGGED], tmp_path)
    assert (tmp_path / "log").read_text().split()[-1] == "False"
