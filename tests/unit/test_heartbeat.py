"""A rank's page: what it writes is what its supervisor reads, whoever dies in between."""

import os
import time

from unsloth_multigpu.wire.heartbeat import Heartbeat, HeartbeatPage, Phase, read_beats


def test_page_says_where_each_rank_is(tmp_path):
    pages = [HeartbeatPage(tmp_path, rank) for rank in (0, 11)]
    pages[0].mark(Phase.COMPUTE, step=7, micro_batch=3)
    begin = time.monotonic()
    pages[1].mark(step=2**40)
    pages[1].pulse(12)
    beats = read_beats(tmp_path)
    assert (beats[0].step, beats[0].phase, beats[0].micro_batch, beats[0].collective) == (7, Phase.COMPUTE, 3, -1)
    assert (beats[11].step, beats[11].phase, beats[11].collective) == (2**40, Phase.SCRIPT, 12)
    assert begin <= beats[11].progress_s <= beats[11].alive_s <= time.monotonic()


def test_longest_work_is_told_and_callbacks_are_none(tmp_path, monkeypatch):
    """A device may have all of a step still to do where the main thread reads its first number of it."""
    clock = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    page = HeartbeatPage(tmp_path, 0)

    def after(seconds, *phase, **place):
        clock[0] += seconds
        page.mark(*phase, **place)
        return read_beats(tmp_path)[0].longest_s

    def step(*works_s, callbacks_s=50.0):
        after(0, Phase.DATA)
        after(callbacks_s, Phase.COMPUTE)
        for i, work_s in enumerate(works_s):
            after(0, micro_batch=i)
            after(work_s)
        after(0, Phase.UPDATE, micro_batch=len(works_s))
        after(2.0, is_done=True)
        return after(callbacks_s, Phase.UPDATE, step=page.step + 1, micro_batch=0)

    assert after(30.0, Phase.SETUP) == 0.0
    assert step(40.0, 3.0) == 40.0  # Kernels are compiled.
    assert [step(1.0, 5.0) for _ in range(4)] == [40.0, 40.0, 40.0, 5.0]
    assert step(1.0) == 5.0
    assert step(0.1, 0.1, callbacks_s=90.0) == 5.0
    after(0, Phase.COMPUTE)
    after(0.5, Phase.COMPILE)
    after(70.0, Phase.COMPUTE)  # torch.compile has a limit of its own.
    assert after(6.0, Phase.UPDATE, micro_batch=1) == 6.0
    assert after(7.0) == 7.0


def test_restarted_rank_begins_before_the_first_step(tmp_path):
    first = HeartbeatPage(tmp_path, 0)
    first.mark(Phase.COMPUTE, step=7)
    first.pulse(9)
    HeartbeatPage(tmp_path, 0)
    beat = read_beats(tmp_path)[0]
    assert beat == Heartbeat(progress_s=beat.progress_s, pid=os.getpid())
