"""Events and figures of a run: what a rank writes is what the supervisor reads."""

import dataclasses

from unsloth_multigpu.report import RankReport, RunReport
from unsloth_multigpu.wire.event import EventWriter, read_events
from unsloth_multigpu.wire.heartbeat import HeartbeatPage


def test_events_of_all_ranks_are_read_in_order_of_time(tmp_path):
    beats = [HeartbeatPage(None, rank) for rank in range(2)]
    writers = [EventWriter(tmp_path, rank, 0, beats[rank]) for rank in range(2)]
    writers[1].write("started", pid=11)
    writers[0].write("started", pid=10)
    beats[1].mark(step=4)
    writers[1].write("exception", error="ValueError: \ud800 \u00e9", traceback="a\nb\n", exit_code=1)
    events = read_events(tmp_path, attempt=0)
    assert [(e.kind, e.rank, e.attempt, e.step) for e in events] == [
        ("started", 1, 0, -1),
        ("started", 0, 0, -1),
        ("exception", 1, 0, 4),
    ]
    assert events[2].facts == {"error": "ValueError: \ud800 \u00e9", "traceback": "a\nb\n", "exit_code": 1}
    assert events[0].time_s <= events[1].time_s <= events[2].time_s


def test_line_that_is_not_whole_takes_no_other_with_it(tmp_path):
    """It is still being written, or a full disk has cut it."""
    writer = EventWriter(tmp_path, 0, 0, HeartbeatPage(None, 0))
    writer.write("started", pid=1)
    path = tmp_path / "events_rank_0.jsonl"
    line = path.read_text()
    path.write_text(line + line[:10])
    assert [e.kind for e in read_events(tmp_path, attempt=0)] == ["started"]
    writer.write("exception", exit_code=1)
    writer.write("exiting")
    assert [e.kind for e in read_events(tmp_path, attempt=0)] == ["started", "exception", "exiting"]


def test_run_report_says_the_training_in_a_sentence():
    first = RankReport(rank=0, num_steps=15, num_samples=109, num_micro_batches=10, train_s=4.34)
    ranks = (first, dataclasses.replace(first, rank=1, num_samples=131, train_s=5.0))
    report = RunReport(ranks)
    assert report.num_samples == 240
    assert report.summary() == "trained 15 steps, 240 samples (109 + 131) in 5.0 s (48 samples/s)"
    timed = tuple(dataclasses.replace(rank, runtime_s=2.5, setup_s=0.86) for rank in ranks)
    text = "trained 15 steps, 240 samples (109 + 131) in 2.5 s (96 samples/s), set-up 0.9 s"
    assert RunReport(timed).summary() == text
    spent = {"steps": 1.0, "saves": 3.0, "evaluations": 0.9, "the first step": 0.1}
    found = RunReport((dataclasses.replace(timed[0], phases_s=spent), timed[1])).summary()
    assert found == text.replace(", set-up", ", of which 60% saves and 18% evaluations, set-up")
    moved = dataclasses.replace(timed[0], num_steps=1, num_samples=1, sent_bytes=2_500_000)
    line = RunReport((moved,)).summary("moved {:.1f} MB")
    unknown = dataclasses.replace(timed[0], num_samples=0)
    assert RunReport((unknown,)).summary() == "trained 15 steps in 2.5 s, set-up 0.9 s"
    assert line == "trained 1 step, 1 sample in 2.5 s (0.4 samples/s), set-up 0.9 s, moved 2.5 MB"
