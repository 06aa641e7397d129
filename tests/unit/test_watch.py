"""What the supervisor's watch does to ranks that stand still, or do not listen: real processes without torch."""

import signal
import subprocess
import sys
import time
from contextlib import ExitStack
from types import SimpleNamespace

import pytest

from unsloth_multigpu.launch import watch as module
from unsloth_multigpu.launch.engine import Ranks
from unsloth_multigpu.launch.rank import TEARDOWN_LIMIT_S
from unsloth_multigpu.launch.watch import Watch
from unsloth_multigpu.options import MultiGPUConfig
from unsloth_multigpu.wire.event import Event
from unsloth_multigpu.wire.heartbeat import Heartbeat, Phase

RANK = """
import os, signal, sys, time
from unsloth_multigpu.wire.heartbeat import HeartbeatPage, Phase
from unsloth_multigpu.launch.rank import start_pulse
from unsloth_multigpu.wire.event import EventWriter
folder, rank, kind = sys.argv[1], int(sys.argv[2]), sys.argv[3]
page = HeartbeatPage(folder, rank)
start_pulse(page, folder, rank)
events = EventWriter(folder, rank, 0, page)
events.write("started", pid=os.getpid())
events.write("training")
page.mark(Phase.COMPUTE, step=2)
if kind == "stopping":
    events.write("stopping")
if kind == "deaf":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    open(folder + "/is_deaf", "w").close()
if kind == "die":
    while not os.path.exists(folder + "/is_deaf"):
        time.sleep(0.05)
    os.kill(os.getpid(), signal.SIGKILL)
def work():
    while kind == "wait":
        page.mark(Phase.COMPUTE, step=3)
        time.sleep(0.1)
    time.sleep(3600)
work()
"""


@pytest.fixture
def ranks(tmp_path):
    script = tmp_path / "rank.py"
    script.write_text(RANK)
    (tmp_path / "logs").mkdir()
    with ExitStack() as stack:

        def begin(*kinds, hang_timeout_s=2.0):
            started = [
                subprocess.Popen([sys.executable, script, tmp_path, str(rank), kind], start_new_session=True)
                for rank, kind in enumerate(kinds)
            ]
            given = Ranks(dict(enumerate(started)))
            stack.enter_context(given)
            config = MultiGPUConfig(hang_timeout_s=hang_timeout_s)
            return Watch(given, tmp_path, tmp_path / "logs", config, 0), started

        yield begin


def follow(watch, condition, limit_s=60.0):
    end_s = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < end_s
        watch.look()
        time.sleep(0.05)


def test_survivor_that_does_not_listen_is_killed(ranks):
    begin_s = time.monotonic()
    watch, (deaf, dies) = ranks("deaf", "die", hang_timeout_s=0.0)
    follow(watch, lambda: None not in (deaf.poll(), dies.poll()))
    assert time.monotonic() - begin_s >= TEARDOWN_LIMIT_S
    message = watch.cause().message
    assert message.startswith("rank 1 was killed by SIGKILL after step 2; the usual cause is that the machine")


@pytest.mark.parametrize(("kind", "hang_timeout_s"), [("sleep", 0.0), ("stopping", 2.0)])
def test_rank_that_is_not_to_be_judged_is_left_alone(ranks, kind, hang_timeout_s):
    watch, (still, _) = ranks(kind, "wait", hang_timeout_s=hang_timeout_s)
    follow(watch, lambda: len(watch.events()) >= 4)
    end_s = time.monotonic() + 2.5
    follow(watch, lambda: time.monotonic() > end_s)
    assert still.poll() is None


# Of no process.
PIDS = {0: 2**30, 1: 2**30 + 1}


class Clock:
    """A watch over ranks 0 and 1 that stand still; `ended` are the processes that it kills."""

    def __init__(self, monkeypatch, tmp_path):
        self.now_s = time.monotonic()
        self.ended = []
        self.beats = {r: Heartbeat(2, Phase.COMPUTE, 0, self.now_s, self.now_s + 1000) for r in range(2)}
        monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: self.now_s, sleep=self.sleep))
        monkeypatch.setattr(module, "read_beats", lambda _: self.beats)
        (tmp_path / "logs").mkdir()
        self.living = dict(PIDS)
        ranks = SimpleNamespace(living=lambda: self.living, exit_codes={}, processes=PIDS, send=self.send)
        config = MultiGPUConfig(hang_timeout_s=2.0)
        self.watch = Watch(ranks, tmp_path, tmp_path / "logs", config, 0)
        self.watch._beats = self.beats

    def send(self, number, ranks=None):
        if number == signal.SIGKILL:
            self.ended += [pid for rank, pid in self.living.items() if ranks is None or rank in ranks]

    def sleep(self, s):
        self.now_s += s

    def look(self, *steps_s):
        for step_s in steps_s:
            self.sleep(step_s)
            self.watch._end_hang([Event("started", rank, 0, 1.0, -1, {}) for rank in PIDS], self.living)
        return self.ended


@pytest.fixture
def clock(monkeypatch, tmp_path):
    return Clock(monkeypatch, tmp_path)


def test_time_in_which_the_machine_stood_still_is_no_hang(clock):
    assert clock.look(1.0, 100.0, 1.9) == []
    assert clock.look(1.0) == list(PIDS.values())


@pytest.mark.parametrize("is_alive", [True, False])
def test_page_that_was_read_while_it_was_written_and_survivors_of_a_dead_rank_are_not_judged(clock, is_alive):
    if is_alive:
        clock.beats = {r: Heartbeat(3, Phase.COMPUTE, 0, clock.now_s + 3.0, clock.now_s + 1000) for r in range(2)}
    else:
        del clock.living[1]
    assert clock.look(3.0) == []


@pytest.mark.parametrize(("kind", "ended"), [("stopping", []), ("training", [PIDS[1]])])
def test_rank_that_is_to_save_is_not_ended_with_one_that_failed(clock, kind, ended):
    events = [Event(kind, 1, 0, 1.0, 2, {}), Event("exception", 0, 0, 2.0, 2, {"error": "ValueError: no"})]
    del clock.living[0]
    clock.watch.ranks.exit_codes[0] = 1
    for _ in range(2):
        clock.watch._end_waiting(events)
        clock.sleep(TEARDOWN_LIMIT_S + 1)
    assert clock.ended == ended
