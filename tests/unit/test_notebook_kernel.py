"""Channel, worker process, the end of a cell, when a kernel does what, and what it may not hold; without IPython."""

import asyncio
import functools
import json
import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from multiprocessing import Pipe
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.helpers.refused import refused
from tests.helpers.run import wait_until
from unsloth_multigpu.errors import ConfigError, DistributedError, LaunchError, SetupError
from unsloth_multigpu.notebook import kernel as kernel_module
from unsloth_multigpu.notebook.judge import Action, find_divergence, next_actions
from unsloth_multigpu.notebook.kernel import Cell, Channel, Kernel, WorkerProcess
from unsloth_multigpu.notebook.kernel_share import Receiver
from unsloth_multigpu.notebook.kernel_start import check_kernel, open_notebook
from unsloth_multigpu.notebook.monitor import RAISE_SIGNAL, Monitor
from unsloth_multigpu.notebook.worker import Worker
from unsloth_multigpu.options import ENV_NOTEBOOK, MultiGPUConfig

PROGRAM = """
import os, json, sys, time
from multiprocessing.connection import Connection
sys.path[:0] = [{root!r}]
from unsloth_multigpu.notebook.kernel import Channel
channel = Channel(Connection(int(sys.argv[1])))
channel.send("ready", stdin=os.readlink("/proc/self/fd/0"), leader=os.getsid(0) == os.getpid())
print("hello from the worker", flush=True)
while True:
    for message in channel.receive() or sys.exit(3):
        if message["kind"] == "exit":
            sys.exit(0)
        if message["kind"] == "cell":
            {cell}
"""


@pytest.fixture
def start_worker(tmp_path, monkeypatch):
    started = []

    def start(cell="pass"):
        source = PROGRAM.format(root=str(Path(__file__).parents[2]), cell=cell)
        monkeypatch.setattr(kernel_module, "_PROGRAM", source)
        started.append(WorkerProcess(len(started) + 1, tmp_path / f"rank_{len(started) + 1}.log", dict(os.environ)))
        return started[-1]

    yield start
    for worker in started:
        worker.close(1.0)


@pytest.fixture
def kernel(start_worker, tmp_path):
    """A kernel with a worker that does nothing in a cell, and its monitor."""
    kernel = Kernel([start_worker()], lambda: -1)
    monitor = Monitor(kernel, tmp_path, 0.0)
    kernel.wait_for(lambda worker: worker.is_ready, "starting", 30.0)
    yield kernel
    monitor.close()


def test_worker_has_no_terminal_and_a_session_of_its_own(start_worker):
    worker = start_worker()
    (message,) = worker.channel.receive()
    assert (message["stdin"], message["leader"]) == ("/dev/null", True)
    assert not os.get_inheritable(worker.channel.fileno())
    worker.channel.send("exit")
    assert worker.has_ended(5.0)
    worker.collect()
    assert worker.exit_code == 0
    assert "hello from the worker" in worker.describe_death()


def test_worker_finds_this_package_where_the_kernel_has_found_it(tmp_path):
    here = tmp_path / "added in a cell" / "unsloth_multigpu" / "notebook"
    here.mkdir(parents=True)
    (here / "worker.py").write_text("def main():\n    print('found')\n")
    (tmp_path / "unsloth_multigpu.py").write_text("raise SystemExit('a file of the current folder')\n")
    environment = {**os.environ, ENV_NOTEBOOK: json.dumps({"path": [str(tmp_path / "added in a cell")]})}
    command = [sys.executable, "-c", kernel_module._PROGRAM]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (0, "found\n"), done.stderr


def test_worker_that_reads_nothing_is_killed(start_worker, monkeypatch):
    monkeypatch.setattr(kernel_module, "_SEND_LIMIT_S", 1.0)
    worker = start_worker("time.sleep(60)")
    for _ in range(2):
        worker.send("cell", source="x" * 2**22)
    assert worker.has_ended(20.0)
    worker.collect()
    assert worker.describe_end().endswith("was killed, because it has read nothing for 1 seconds")


def test_wait_for_a_worker_has_a_limit(kernel):
    with pytest.raises(LaunchError, match=r"running an earlier cell again took rank\(s\) \[1\] longer than 0.1 s"):
        kernel.replay("x = 1", 0.1)


def test_a_call_that_a_replayed_cell_does_not_reach_is_asked_for_in_a_cell():
    ended = {1: {"error": "", "traceback": ""}}
    worker = SimpleNamespace(rank=1, exit_code=None, ended=ended, send=lambda *_, **__: None)
    hint = "Call enable_multi_gpu() in a cell, not in a callback or behind a condition."
    with refused(DistributedError, "it has not reached that call.\nx = 1\n", hint):
        Kernel([worker], lambda: -1).replay("x = 1", 1.0, has_line=True)


def test_a_forked_child_does_not_send_its_signals_to_the_kernel(kernel):
    if (pid := os.fork()) == 0:
        os._exit(signal.set_wakeup_fd(-1) != -1)
    assert os.waitpid(pid, 0)[1] == 0


def test_stop_while_nothing_may_be_raised_comes_afterwards(kernel):
    reached = []

    def run():
        with kernel.uninterruptible():
            kernel.begin("x = 1", {})
            os.kill(os.getpid(), signal.SIGINT)
            wait_until(lambda: kernel.cell.stop_s is not None, 20.0, "Stop")
            reached.append("the end")
        signal.sigtimedwait([signal.SIGUSR2], 20.0)

    with pytest.raises(KeyboardInterrupt):
        run()
    assert reached == ["the end"]
    kernel.workers[0].kill()
    kernel.finish(KeyboardInterrupt())


def test_error_that_came_too_late_for_its_cell_ends_no_other(kernel):
    with kernel.uninterruptible():
        kernel.cell = late = Cell(1)
        late.fail("hung", DistributedError("late", hint=""))
        kernel.wake_monitor()
        wait_until(lambda: Action.RAISE in late.done, 20.0, "the time of the error")
        kernel.cell = Cell(2)
    time.sleep(0.3)
    kernel.cell = None


def outcome(error, message, **fields):
    """What the user is told of a cell that rank 0 left by `error`, and rank 1 by `message`."""
    cell = Cell(1, **fields)
    cell.error = error
    ended = {"error": message, "is_left_alone": False, "collective": 4}
    return Kernel([SimpleNamespace(exit_code=None, ended={1: ended})], lambda: 4)._outcome(cell)


def test_outcome_names_the_cause_and_not_its_echo():
    failure = DistributedError("rank 1 raised ValueError: one", hint="")
    failed = {"failure": "raised", "failure_error": failure, "failure_s": 5.0}
    echo = RuntimeError("[gloo/transport/tcp/pair.cc:553] Connection closed by peer")
    assert outcome(None, "") is None
    assert outcome(ValueError("zero"), "LeftCell: ") is None
    assert outcome(None, "ValueError: one", **failed) is failure
    assert outcome(echo, "ValueError: one", main_state_since_s=9.0, **failed) is failure
    assert outcome(echo, "ValueError: one", main_state_since_s=1.0, **failed) is failure
    assert outcome(KeyError("x"), "ValueError: one", main_state_since_s=9.0, **failed) is failure
    assert outcome(KeyError("x"), "ValueError: one", main_state_since_s=1.0, **failed) is None  # Rank 0 was first.
    assert outcome(ValueError("one"), "ValueError: one", main_state_since_s=9.0, **failed) is None
    assert outcome(failure, "ValueError: one", **failed) is None
    assert outcome(asyncio.CancelledError(), "ValueError: one", **failed) is failure


class OneDevice(SimpleNamespace):
    """What is loaded in a kernel that has opened one card."""

    is_initialized = staticmethod(lambda: True)
    device_count = staticmethod(lambda: 1)


def partial_state(**shared):
    return SimpleNamespace(PartialState=SimpleNamespace(_shared_state=shared))


Model = type("Model", (), {})  # Stands for PreTrainedModel.
OPEN_GROUP = SimpleNamespace(is_available=lambda: True, is_initialized=lambda: True)
LOADED = {
    "torch": SimpleNamespace(),
    "torch.distributed": None,
    "accelerate.state": partial_state(),
    "transformers.modeling_utils": SimpleNamespace(PreTrainedModel=Model),
}


@pytest.mark.parametrize(
    ("loaded", "given", "reason"),
    [
        ({}, {"had_workers": True}, "called before in this kernel"),
        ({"torch.distributed": OPEN_GROUP}, {}, "already has a process group"),
        ({"accelerate.state": partial_state(device=0)}, {}, "made in this kernel for one process"),
        ({"torch": SimpleNamespace(cuda=OneDevice())}, {}, "num_gpus=2, but this kernel has opened 1 device"),
        ({"torch": SimpleNamespace(xpu=OneDevice())}, {}, "num_gpus=2, but this kernel has opened 1 device"),
        ({}, {"max_restarts": 1}, "max_restarts=1 is not supported in notebooks"),
        ({}, {"generators": 1}, "generators=1 is not supported in notebooks"),
        ({}, {"nnodes": 2, "rdzv_endpoint": "h:1", "rdzv_id": "x"}, "nnodes=2 is not supported in notebooks"),
        ({}, {"shard": "auto"}, "shard='auto' is not supported in notebooks"),
    ],
)
def test_kernel_that_cannot_become_rank_0_is_refused(monkeypatch, loaded, given, reason):
    for name, module in {**LOADED, **loaded}.items():
        monkeypatch.setitem(sys.modules, name, module)
    options = {name: value for name, value in given.items() if name != "had_workers"}
    with refused(ConfigError if options else SetupError, reason):
        check_kernel(MultiGPUConfig(**options), 2, replay=False, had_workers="had_workers" in given)


def test_kernel_with_a_model_and_a_call_from_a_thread_are_refused(monkeypatch):
    for name, module in LOADED.items():
        monkeypatch.setitem(sys.modules, name, module)
    check = functools.partial(check_kernel, MultiGPUConfig(), 2, had_workers=False)
    check(replay=False)
    with ThreadPoolExecutor(1) as pool, pytest.raises(SetupError, match="from a thread"):
        pool.submit(check, replay=False).result()
    model = Model()
    with pytest.raises(SetupError, match="but not on the other ranks"):
        check(replay=False)
    check(replay=True)
    del model
    shell = SimpleNamespace(history_manager=SimpleNamespace(input_hist_parsed=[""]))
    with pytest.raises(SetupError, match=r"before the first cell.*\n.*Call it in a cell"):
        open_notebook(MultiGPUConfig(), 2, shell, replay=True, had_workers=False)


def test_interrupt_that_comes_late_ends_no_other_cell():
    """The worker has ended cell 4 and makes a new group as number 5: an interrupt there would let rank 0 wait alone."""
    ours, theirs = Pipe()
    with theirs:
        channel = Channel(ours)
        worker = Worker(channel, Receiver(channel.send), program=None, shell=None)
        worker.receiver.cell_number = 4
        handler = signal.signal(RAISE_SIGNAL, lambda *_: None)
        try:
            worker._handle({"kind": "interrupt", "cell_number": 4, "is_stop": True})
        finally:
            signal.signal(RAISE_SIGNAL, handler)
        worker.receiver.cell_number = 5
        worker._raise_pending(RAISE_SIGNAL, None)
        worker._handle({"kind": "interrupt", "cell_number": 4, "is_stop": True})  # Not of this cell: no signal at all.
        worker._pending = 5, KeyboardInterrupt()
        with pytest.raises(KeyboardInterrupt):
            worker._raise_pending(RAISE_SIGNAL, None)
        ours.close()


NEVER = 10_000.0


def first_time(action, limit_s=60.0, *, pending=frozenset({1}), **fields):
    """When an action is due, in tenths of a second from the start; those before it are taken when they are due."""
    cell = Cell(1, **{"main_state_since_s": 0.0, **fields})
    for tick in range(int(limit_s * 20) + 1):
        now_s = tick / 20
        due = next_actions(cell, now_s, pending)
        if action in due:
            return now_s
        cell.done.update(dict.fromkeys(due, now_s))
    return NEVER


ERROR = {"main_state": "left", "error": ValueError()}


@pytest.mark.parametrize("main", ["runs", "unwinds", "left"])
def test_cell_that_goes_well_is_left_alone(main):
    assert all(first_time(action, main_state=main) == NEVER for action in Action)


@pytest.mark.parametrize(
    ("action", "time_s", "fields"),
    [
        # A failure of another rank ends the kernel's part.
        (Action.RAISE, 1.4, {"failure": "raised"}),
        (Action.ABORT, 1.9, {"failure": "raised"}),
        (Action.RAISE, 0.25, {"failure": "died"}),
        (Action.RAISE, 0.0, {"failure": "hung"}),
        (Action.RAISE, 0.0, {"failure": "diverged"}),
        (Action.ASK, NEVER, {"failure": "raised"}),
        # Stop reaches the workers at once, a cell that awaits soon, and a stuck main thread after a second.
        (Action.PASS_STOP, 0.0, {"stop_s": 0.0}),
        (Action.PASS_STOP, 0.0, {"stop_s": 0.0, "main_state": "left"}),
        (Action.PASS_STOP, NEVER, {"stop_s": 0.0, "pending": frozenset()}),
        (Action.RAISE, NEVER, {"stop_s": 0.0}),
        (Action.RAISE, 0.2, {"stop_s": 0.0, "task": object()}),
        (Action.RAISE, 0.05, {"stop_s": 0.0, "is_stop_missed": True}),
        (Action.ABORT, 1.0, {"stop_s": 0.0}),
        # A second Stop leaves the ranks time to become equal.
        (Action.PASS_STOP, NEVER, {"stop_s": 0.0, "makes_group": True}),
        (Action.ABORT, 10.0, {"stop_s": 0.0, "makes_group": True}),
        # Workers are asked to leave when rank 0 leaves by an error.
        (Action.ASK, 0.5, {**ERROR, "main_state": "unwinds"}),
        (Action.ASK, 0.5, ERROR),
        (Action.ASK_ABORT, 1.0, ERROR),
        (Action.KILL, 11.0, ERROR),
        (Action.ASK, NEVER, {**ERROR, "pending": frozenset()}),
        (Action.RAISE, NEVER, {**ERROR, "failure": "raised"}),
        # Those that Stop has interrupted are not interrupted again at once.
        (Action.ASK, 0.9, {**ERROR, "stop_s": 0.4}),
        # Others are not waited for when a worker has died.
        (Action.KILL, 0.0, {"main_state": "left", "failure": "died"}),
        # Those in a collective that rank 0 never joins are freed.
        (Action.ASK_ABORT, 1.0, {"main_state": "left", "failure": "diverged"}),
    ],
)
def test_action_is_due(action, time_s, fields):
    assert first_time(action, **fields) == pytest.approx(time_s, abs=0.101)


@pytest.mark.parametrize(
    ("main", "own", "ended", "running", "named"),
    [
        ("runs", 5, {1: 4}, {}, "rank 0 is in collective number 5, which rank 1 will never join"),
        ("runs", 5, {1: 4, 2: 3}, {}, "which ranks 1, 2 will never join: they have ended the cell"),
        ("left", 4, {}, {1: 5}, "rank 1 waits in collective number 5, which rank 0 will never join"),
        ("left", 4, {1: 4}, {2: 6}, "rank 2 waits in collective number 6"),
        ("left", 4, {}, {1: 5, 2: 5}, "ranks 1, 2 wait in collective number 5"),
        # They may still meet.
        ("runs", 5, {1: 5}, {}, None),  # It has joined, and has ended.
        ("runs", 5, {1: 6}, {}, None),  # Rank 0 may still come.
        ("runs", 5, {1: 4}, {2: 4}, None),  # Rank 2 goes on, and may join.
        ("runs", 5, {}, {1: 4}, None),
        ("left", 4, {}, {1: 4}, None),
        ("runs", 4, {}, {1: 5}, None),
        ("unwinds", 4, {}, {1: 5}, None),
        ("runs", -1, {1: -1}, {}, None),  # There is no group.
        ("runs", 0, {1: -1}, {}, None),
        ("left", -1, {}, {1: 0}, None),
    ],
)
def test_ranks_that_never_meet_are_named_and_others_are_not(main, own, ended, running, named):
    told = find_divergence(main, own, ended, running, len(ended) + len(running))
    assert (told is None) is (named is None)
    assert (named or "") in (told or "")
