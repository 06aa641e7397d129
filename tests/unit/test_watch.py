"""What the supervisor's watch does to ranks that stand still or do not listen. Pages and events are made by hand."""

import signal
import time
from types import SimpleNamespace

import pytest

from unsloth_multigpu.launch import watch as module
from unsloth_multigpu.launch.rank import TEARDOWN_LIMIT_S
from unsloth_multigpu.launch.watch import Watch
from unsloth_multigpu.options import MultiGPUConfig
from unsloth_multigpu.wire.event import Event
from unsloth_multigpu.wire.heartbeat import Heartbeat, Phase

# Of no process.
PIDS = {0: 2**30, 1: 2**30 + 1}


class Clock:
    """A watch over ranks 0 and 1 that stand still. `sent` are the signals to each, which neither of them hears."""

    def __init__(self, monkeypatch, tmp_path):
        self.now_s = time.monotonic()
        self.sent = {rank: [] for rank in PIDS}
        self.pages = [self.page(self.now_s)]
        self.events = [Event("started", rank, 0, 1.0, -1, {}) for rank in PIDS]
        monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: self.now_s, sleep=self.sleep))
        monkeypatch.setattr(
            module, "read_beats", lambda _: self.pages[0] if len(self.pages) == 1 else self.pages.pop(0)
        )
        monkeypatch.setattr(module, "read_events", lambda *_: self.events)
        (tmp_path / "logs").mkdir()
        self.living = dict(PIDS)
        ranks = SimpleNamespace(living=lambda: self.living, exit_codes={}, processes=PIDS, send=self.send)
        self.watch = Watch(ranks, tmp_path, tmp_path / "logs", MultiGPUConfig(hang_timeout_s=2.0), 0)

    def page(self, progress_s):
        return {rank: Heartbeat(2, Phase.COMPUTE, 0, progress_s, self.now_s + 1000) for rank in PIDS}

    def send(self, number, ranks=None):
        for rank in self.living if ranks is None else self.living.keys() & ranks:
            self.sent[rank].append(number)

    def sleep(self, s):
        self.now_s += s

    def end(self, rank, code):
        """It has ended."""
        del self.living[rank]
        self.watch.ranks.exit_codes[rank] = code

    def killed(self, *steps_s):
        """Ranks that were killed until so many seconds later."""
        for step_s in steps_s:
            self.sleep(step_s)
            self.watch.look()
        return [rank for rank, sent in self.sent.items() if signal.SIGKILL in sent]


@pytest.fixture
def clock(monkeypatch, tmp_path):
    return Clock(monkeypatch, tmp_path)


def test_time_in_which_the_machine_stood_still_is_no_hang(clock):
    assert clock.killed(1.0, 100.0, 1.9) == []
    assert clock.killed(1.0) == [0, 1]


def test_survivor_that_does_not_listen_is_killed(clock):
    clock.end(1, -signal.SIGKILL)
    assert clock.killed(0.1, TEARDOWN_LIMIT_S - 0.1) == []
    assert clock.sent[0] == [signal.SIGTERM]
    assert clock.killed(0.2) == [0]
    message = clock.watch.cause().message
    assert message.startswith("rank 1 was killed by SIGKILL after step 2; the usual cause is that the machine")


@pytest.mark.parametrize("why", ["no limit", "it saves", "its page was read while it was written", "another is dead"])
def test_rank_that_is_not_to_be_judged_is_left_alone(clock, why):
    if why == "no limit":
        clock.watch.config = MultiGPUConfig(hang_timeout_s=0.0)
    elif why == "it saves":
        clock.events.append(Event("stopping", 0, 0, 1.0, 2, {}))
    elif why == "another is dead":
        clock.end(1, 0)
    else:
        clock.pages.append(clock.page(clock.now_s + 3.0))
    assert clock.killed(3.0) == []


@pytest.mark.parametrize(("kind", "killed"), [("stopping", []), ("training", [1])])
def test_rank_that_is_to_save_is_not_ended_with_one_that_failed(clock, kind, killed):
    clock.events += [Event(kind, 1, 0, 1.0, 2, {}), Event("exception", 0, 0, 2.0, 2, {"error": "ValueError: no"})]
    clock.end(0, 1)
    assert clock.killed(0.0, TEARDOWN_LIMIT_S + 1) == killed
