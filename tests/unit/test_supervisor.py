"""What the supervisor does behind an attempt: start again, follow other nodes, tell the user why."""

import os
import signal
import sys
from types import SimpleNamespace

import pytest

from tests.helpers.refused import refused
from unsloth_multigpu.errors import ConfigError, LaunchError, ResumeError
from unsloth_multigpu.launch import launcher, watch
from unsloth_multigpu.launch.cause import find_cause
from unsloth_multigpu.launch.generation_server import GenerationServer
from unsloth_multigpu.launch.launcher import DDPLauncher
from unsloth_multigpu.options import MultiGPUConfig
from unsloth_multigpu.wire.event import Event


def event(kind, rank=0, **facts):
    return Event(kind, rank, 0, 1.0, 4, facts)


ERROR = event("exception", 1, error="ValueError: bad row", traceback="Traceback\n", exit_code=1)


class Stopped:
    """In the place of `Stop`, after the signal `number`, 0 = none."""

    def __init__(self, number=0, how="saved"):
        self.signal_number, self.how = number, how

    def is_asked(self):
        return self.signal_number != 0


class Watched:
    """In the place of `Watch`, of ranks that have ended."""

    def __init__(self, *events, **exit_codes):
        self._events, self._codes = list(events), {int(rank[1:]): code for rank, code in exit_codes.items()}
        self.has_failed = any(self._codes.values())

    def events(self):
        return self._events

    def cause(self):
        return find_cause(self._events, self._codes)


class Met:
    """In the place of a rendezvous of nodes."""

    def __init__(self, becomes="", is_over=False):
        self.becomes, self.told = becomes, ""
        self.is_over = lambda: is_over

    def finish(self, is_stopped):
        return self.becomes

    def fail(self, message):
        self.told = message


def launcher_of(folder, stop=None, met=None):
    made = DDPLauncher(["true"], 2, MultiGPUConfig(max_restarts=1))
    made.run_dir = made.log_dir = folder
    made.server = GenerationServer(made.config, {}, folder, folder, 0)
    made.stop, made.rendezvous = stop or Stopped(), met or Met()
    return made


def judge(folder, watch, stop=None, met=None, trouble="", attempt=0):
    return launcher_of(folder, stop, met)._conclude(attempt, watch, trouble)


def test_failure_starts_all_ranks_again_as_often_as_asked(tmp_path, capfd):
    met = Met()
    assert judge(tmp_path, Watched(ERROR, r1=1), met=met) is None
    again = "rank 1 failed after step 4: ValueError: bad row. Starting all ranks again (1)."
    assert capfd.readouterr().err == f"\nTraceback\nunsloth_multigpu: {again}\n"
    assert met.told == "rank 1 failed after step 4: ValueError: bad row"
    assert judge(tmp_path, Watched(ERROR, r1=1), attempt=1) == 1
    assert "ValueError: bad row. The other ranks were stopped.\n" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("kind", "code", "is_refused"),
    [
        ("exception", ConfigError.exit_code, True),
        ("exception", ResumeError.exit_code, False),
        ("exception", 1, False),
        ("left_training", ConfigError.exit_code, False),
    ],
)
def test_what_a_restart_cannot_cure_is_not_tried_again(tmp_path, capfd, kind, code, is_refused):
    failed = event(kind, 1, error="Error: x", traceback="", exit_code=code)
    assert judge(tmp_path, Watched(failed, r1=code)) == (code if is_refused else None)
    assert ("no restart: the ranks would fail the same way" in capfd.readouterr().err) is is_refused


@pytest.mark.parametrize("is_first", [True, False])
def test_ranks_that_cannot_share_a_step_are_fewer_next_unless_they_have_trained(tmp_path, capfd, is_first):
    trained = [] if is_first else [event("training"), event("trained")]
    facts = {"error": "ConfigError: A step of 1.\nHint: x", "traceback": "Traceback\n", "exit_code": 64}
    made = launcher_of(tmp_path)
    watch = Watched(*trained, event("exception", 1, **facts, most_ranks=1), r1=64)
    assert made._conclude(0, watch, "") == 64
    assert made.most_ranks == (1 if is_first else None)
    told = capfd.readouterr().err
    assert ("A step of 1. Starting again with 1 of 2 devices" in told) is is_first
    assert ("Traceback" in told) is not is_first


def test_failure_after_a_signal_is_told_and_not_tried_again(tmp_path, capfd):
    assert judge(tmp_path, Watched(ERROR, r1=1), Stopped(signal.SIGTERM)) == 1
    told = capfd.readouterr().err
    assert "no restart after SIGTERM" in told
    assert "ValueError: bad row" in told


@pytest.mark.parametrize(("kind", "code"), [("stopped", -signal.SIGTERM), ("training", 0)])
def test_ranks_that_saved_end_by_the_signal_unless_the_script_goes_on(tmp_path, capfd, kind, code):
    stop = Stopped(signal.SIGTERM)
    codes = dict.fromkeys(("r0", "r1"), 143 if code else 0)
    assert judge(tmp_path, Watched(event(kind), **codes), stop) == code
    assert "stopped by SIGTERM" in capfd.readouterr().err


def test_other_nodes_that_fail_restart_this_one(tmp_path, capfd):
    lost = Watched(event("training"), r0=-signal.SIGTERM)
    assert judge(tmp_path, lost, trouble="node 1 has ended: ValueError") is None
    # All ranks of this node may have ended well before.
    assert judge(tmp_path, Watched(r0=0), met=Met("node 1 has ended: ValueError")) is None
    again = "unsloth_multigpu: node 1 has ended: ValueError. Starting all ranks again (1).\n"
    assert capfd.readouterr().err.count(again) == 2
    with pytest.raises(LaunchError, match="The run has ended: node 1 has ended: ValueError"):
        judge(tmp_path, lost, trouble="node 1 has ended: ValueError", attempt=1)
    with pytest.raises(LaunchError, match="The run has ended"):
        judge(tmp_path, lost, met=Met(is_over=True), trouble="node 1 has ended: ValueError")


def test_run_folder_that_is_gone_ends_the_ranks(tmp_path):
    class Blind(Watched):
        def look(self):
            raise FileNotFoundError(2, "No such file", str(tmp_path))

    with refused(LaunchError, "can no longer watch its ranks, so it ended them", str(tmp_path)):
        launcher_of(tmp_path)._watch_ranks(SimpleNamespace(living=lambda: {0: 1}), Blind())


def test_signal_before_the_first_start_starts_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(launcher, "start_ranks", lambda *_: pytest.fail("started"))
    monkeypatch.setattr(launcher, "write_run", lambda *_: os.kill(os.getpid(), signal.SIGINT))
    config = MultiGPUConfig(log_dir=str(tmp_path / "logs"))
    assert DDPLauncher(["true"], 1, config).run() == -signal.SIGINT


def test_signal_while_ranks_are_started_ends_them_all(tmp_path, monkeypatch):
    started = []
    start = watch.start_process

    def start_and_interrupt(*given):
        started.append(start(*given))
        if len(started) == 1:
            os.kill(os.getpid(), signal.SIGINT)
        return started[-1]

    monkeypatch.setattr(watch, "start_process", start_and_interrupt)
    sleeps = [sys.executable, "-c", "import time; time.sleep(100)"]
    assert DDPLauncher(sleeps, 2, MultiGPUConfig(log_dir=str(tmp_path / "logs"))).run() == -signal.SIGINT
    assert [process.returncode for process in started] == [-signal.SIGTERM] * 2
