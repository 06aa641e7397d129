"""Who is hung, judged from beats made by hand with a limit of 10 s at 1000 s; what the watch does to such ranks."""

import dataclasses
import signal
import time
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from unsloth_multigpu.launch import watch as module
from unsloth_multigpu.launch.rank import TEARDOWN_LIMIT_S
from unsloth_multigpu.launch.watch import Watch
from unsloth_multigpu.launch.watchdog import find_hang
from unsloth_multigpu.options import MultiGPUConfig
from unsloth_multigpu.wire.event import Event
from unsloth_multigpu.wire.heartbeat import Heartbeat, Phase

LIMIT_S = 10.0
NOW_S = 1000.0


def beat(phase=Phase.COMPUTE, step=12, still_s=11.0, collective=-1, micro_batch=0, silent_s=0.1, longest_s=0.5):
    return Heartbeat(step, phase, micro_batch, NOW_S - still_s, NOW_S - silent_s, collective, longest_s)


def judge(*beats, unheard_s=None, since_s=0.0):
    """None = there is no other node."""
    others = {} if unheard_s is None else {"node 1 (ranks 2, 3)": unheard_s, "node 2 (rank 4)": 0.5}
    return find_hang(dict(enumerate(beats)), NOW_S, LIMIT_S, unheard_s=others, since_s=since_s)


def expect(hang, rank, *texts):
    assert hang.rank == rank, hang.message
    for text in texts:
        assert text in hang.message


@pytest.mark.parametrize(
    ("phase", "micro_batch", "factor"),
    [
        (Phase.DATA, 0, 1),
        (Phase.WARM_UP, 0, 10),
        (Phase.UPDATE, 1, 1),
        (Phase.UPDATE, 0, 5),  # Callbacks between two steps.
        (Phase.SAVE, 0, 10),
    ],
)
def test_phase_sets_the_limit(phase, micro_batch, factor):
    limit_s = factor * LIMIT_S
    before, after = (beat(phase, still_s=limit_s + s, micro_batch=micro_batch) for s in (-0.1, 0.1))
    assert judge(before, before) is None
    assert judge(after, after) is not None
    # A stopped process, or one whose interpreter's lock is held, has the same limit.
    before, after = (dataclasses.replace(b, alive_s=b.progress_s) for b in (before, after))
    assert judge(before, beat(still_s=0)) is None
    expect(judge(after, beat(still_s=0)), 0, "no sign of life")


@pytest.mark.parametrize("phase", [Phase.COMPUTE, Phase.UPDATE, Phase.DATA])
def test_long_micro_batch_is_no_hang(phase):
    """What any rank has done before, every rank may do again, and one that is ten times as long."""
    for longest_s, limit_s in ((0.5, LIMIT_S), (2.0, 20.0), (3.0, 30.0)):
        for still_s, is_hang in ((limit_s - 0.1, False), (limit_s + 0.1, True)):
            waits, works = (beat(phase, still_s=still_s, longest_s=s, micro_batch=1) for s in (0.1, longest_s))
            assert (judge(waits, works) is not None) is is_hang
            assert (judge(works, waits) is not None) is is_hang


@pytest.mark.parametrize(
    ("guilty", "waits"),
    [
        # (phase, step, micro-batch), in the same collective or where numbers of collectives are not known.
        ((Phase.COMPUTE, 11, 0), (Phase.DATA, 12, 0)),
        ((Phase.DATA, 12, 0), (Phase.COMPUTE, 12, 0)),
        ((Phase.COMPUTE, 12, 1), (Phase.COMPUTE, 12, 2)),
        ((Phase.COMPUTE, 12, 1), (Phase.UPDATE, 12, 2)),
        ((Phase.UPDATE, 12, 2), (Phase.UPDATE, 13, 0)),
        ((Phase.UPDATE, 12, 0), (Phase.DATA, 12, 0)),
        ((Phase.SETUP, 12, 0), (Phase.DATA, 12, 0)),
    ],
)
def test_rank_behind_in_the_training_is_guilty(guilty, waits):
    (phase, step, micro_batch), (other_phase, other_step, other_micro_batch) = guilty, waits
    slow = beat(phase, step, still_s=120, micro_batch=micro_batch)
    fast = beat(other_phase, other_step, still_s=120, micro_batch=other_micro_batch)
    expect(judge(fast, slow), 1)
    expect(judge(slow, fast), 0)


def test_rank_that_has_begun_fewer_collectives_is_guilty():
    ahead, behind = beat(Phase.DATA, 11, collective=41), beat(collective=40)
    expect(judge(ahead, behind), 1, "rank 1 hangs: no progress for 11 s in step 13, computing")
    expect(judge(ahead, behind, behind), None, "ranks 1 and 2 hang: no progress for 11 s")


def test_all_ranks_in_one_collective_are_no_ranks_fault():
    expect(judge(*[beat(collective=41)] * 3), None, "all ranks hang: no progress for 11 s in step 13, computing: they")


@pytest.mark.parametrize("collective", [-1, 41])
@pytest.mark.parametrize("step", [12, 13])
@pytest.mark.parametrize("phase", [Phase.EVALUATE, Phase.SAVE, Phase.COMPILE])
def test_rank_that_waits_for_a_longer_phase_has_its_limit(phase, step, collective):
    """Rank 0 evaluates or saves alone after step 13, or compiles in it; rank 1 has gone on, or waits by the store."""
    # A rank that gets samples is behind one that compiles in the same step.
    first = [] if phase == Phase.COMPILE and step == 13 else [Phase.DATA]
    before = max(-1, collective - 1)
    for waiting_phase in (*first, Phase.COMPUTE, phase):
        waits = beat(waiting_phase, 13, still_s=49, collective=collective)
        assert judge(beat(phase, step, still_s=49, collective=before), waits) is None
    waits = beat(Phase.COMPUTE, 13, still_s=101, micro_batch=1, collective=collective)
    expect(judge(beat(phase, step, still_s=101, collective=before), waits), 0)


def test_rank_that_has_ended_is_named_beside_the_one_that_waits():
    text = "rank 0 hangs: no progress for 11 s in step 13, computing; rank 1 ended after step 12"
    expect(judge(beat(collective=41), beat(Phase.ENDED, 12, collective=40)), 0, text)


def test_what_nobody_watched_is_forgotten():
    beats = [beat(silent_s=500, still_s=500), beat(silent_s=500, still_s=500)]
    assert judge(*beats, since_s=NOW_S - 9) is None
    assert judge(*beats, since_s=NOW_S - 11) is not None


def waits(still_s=15, collective=41):
    return beat(still_s=still_s, collective=collective)


@pytest.mark.parametrize("unheard_s", [0.5, 9])
def test_rank_of_another_node_may_be_saving(unheard_s):
    # Also for a rank that gets samples, which the ranks may exchange.
    for phase in (Phase.DATA, Phase.COMPUTE, Phase.UPDATE, Phase.EVALUATE, Phase.AGREE):
        assert judge(beat(phase, still_s=99), unheard_s=unheard_s) is None
    assert judge(waits(99), waits(99, collective=42), unheard_s=unheard_s) is None
    expect(judge(waits(101), waits(101), unheard_s=unheard_s), None, "all ranks hang: no progress for 101 s")


def test_node_that_is_not_heard_is_named():
    hang = judge(waits(), waits(12), unheard_s=11)
    text = "all ranks of this node make no progress for 12 s (in step 13, computing); node 1 (ranks 2, 3) has not"
    expect(hang, None, f"{text} reported for 11 s: the connection is gone, or that machine")
    # Logging between two steps and evaluating gather from all ranks, and have their own limits.
    for phase, factor in ((Phase.EVALUATE, 5), (Phase.COMPUTE, 1)):
        assert judge(beat(phase, still_s=factor * LIMIT_S - 0.1), unheard_s=11) is None
        expect(judge(beat(phase, still_s=factor * LIMIT_S + 0.1), unheard_s=11), None, "has not reported for")
    # It is not missed while a rank here is busy, and longer than it may be.
    assert judge(waits(), beat(Phase.SAVE, collective=40), unheard_s=11) is None
    expect(judge(waits(), beat(Phase.DATA, collective=40), unheard_s=11), 1, "rank 1 hangs")
    # What happened before this supervisor went on does not count.
    assert judge(waits(), unheard_s=11, since_s=NOW_S - 9.5) is None


def test_cut_wire_is_named_whatever_the_ranks_of_this_node_do():
    told = "all ranks of this node make no progress for 11 s (after step 12, asking the other ranks what comes next)"
    # One rank looks into the store of the other node, and the other one is in the next collective already.
    asks = beat(Phase.AGREE, collective=41)
    expect(judge(asks, waits(collective=42), unheard_s=11), None, f"{told}; node 1 (ranks 2, 3) has not")
    expect(judge(beat(Phase.UPDATE, still_s=51), waits(51, collective=42), unheard_s=11), None, told[:43])
    # Before the node counts as lost, neither rank is blamed for it.
    assert judge(asks, waits(collective=42), unheard_s=9) is None
    # A rank that is behind by itself is blamed, and the lost node is told as well.
    behind = beat(Phase.DATA, collective=40)
    expect(judge(waits(), behind, unheard_s=11), 1, "rank 1 hangs", "; node 1 (ranks 2, 3) has not reported for 11 s")


def test_hang_timeout_of_zero_judges_nothing():
    assert find_hang({0: beat(still_s=900, silent_s=900)}, NOW_S, 0.0) is None


BEATS = st.builds(
    beat,
    phase=st.sampled_from(list(Phase)),
    step=st.integers(-1, 3),
    still_s=st.sampled_from([0.0, 9.0, 11.0, 21.0, 51.0, 101.0]),
    collective=st.integers(-1, 3),
    micro_batch=st.integers(0, 2),
    silent_s=st.sampled_from([0.0, 11.0, 101.0]),
)
RANKS = st.dictionaries(st.integers(0, 5), BEATS, max_size=4)


@given(st.integers(2, 5), st.data())
def test_one_rank_that_stands_behind_the_others_is_found(num_ranks, data):
    guilty = data.draw(st.integers(0, num_ranks - 1))
    phase = data.draw(st.sampled_from([Phase.DATA, Phase.COMPUTE, Phase.UPDATE]))
    still_s = data.draw(st.sampled_from([11, 15, 51]))
    beats = {r: beat(still_s=12, collective=41) for r in range(num_ranks)}
    place = {"step": data.draw(st.integers(1, 12)), "collective": data.draw(st.integers(-1, 40))}
    beats[guilty] = beat(phase, micro_batch=1, still_s=still_s, **place)
    expect(find_hang(beats, NOW_S, LIMIT_S), guilty)


@given(RANKS, st.integers(0, 5))
def test_a_rank_that_moves_at_the_last_place_keeps_all_alive(beats, rank):
    """Whatever the others do: they wait for the one that is furthest behind."""
    beats = {r: dataclasses.replace(b, alive_s=NOW_S) for r, b in beats.items()}
    beats[rank] = beat(Phase.DATA, -1, still_s=1, collective=-2)
    assert find_hang(beats, NOW_S, LIMIT_S) is None


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
        monkeypatch.setattr(module, "read_beats", lambda _: self.pages.pop(0) if self.pages[1:] else self.pages[0])
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
