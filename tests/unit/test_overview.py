"""Events and figures of a job, as a table and at its end: what the ranks have written, and only what one may see."""

import dataclasses
import json
import os
import re
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from tests.helpers.run import wait_until
from unsloth_multigpu import overview
from unsloth_multigpu.__main__ import main
from unsloth_multigpu.errors import SetupError
from unsloth_multigpu.notebook import display
from unsloth_multigpu.notebook.display import Panel
from unsloth_multigpu.overview import Overview, columns_of, headline
from unsloth_multigpu.report import Figures, RankReport, RunReport
from unsloth_multigpu.step.comparison import Comparison, Difference
from unsloth_multigpu.tools.top.top_command import choose_run
from unsloth_multigpu.wire.event import EventWriter, read_events
from unsloth_multigpu.wire.heartbeat import HeartbeatPage, Phase, read_beats
from unsloth_multigpu.wire.run import find_runs, pid_scope, read_run, write_run

TEN_STEPS = Figures(
    max_steps=40,
    num_steps=10,
    num_samples=80,
    num_tokens=900,
    num_padding_tokens=100,
    waiting_s=1.0,
    peak_bytes=3 * 2**30,
    held_bytes=2**30,
    step_s=0.4,
    loop_s=5.0,
    setup_s=2.0,
)


@pytest.fixture
def run(tmp_path, monkeypatch):
    """A run of two ranks whose supervisor is this process."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    folder = tmp_path / f"unsloth_multigpu_{os.getpid()}_{pid_scope()}_x"
    folder.mkdir(mode=0o700)
    (tmp_path / "logs").mkdir()
    return write_run(folder, "train.py", "python train.py", 2, tmp_path / "logs")


def pages(run, *figures):
    made = [HeartbeatPage(run.folder, rank) for rank in range(len(figures))]
    for page, found in zip(made, figures, strict=True):
        page.note(device="cpu")
        page.note(found)
        page.mark(Phase.COMPUTE, step=10)
    return made


def test_result_of_the_first_step_stands_in_the_first_line(run):
    made = pages(run, TEN_STEPS, TEN_STEPS)
    look = Overview(run).look()
    assert look["first_step"] is None
    assert "first step" not in headline(look)
    base = Comparison(1, 2, 4, 4, bound=1e-5, one_s=3.8, dealt_s=2.0)
    for off, told in (
        (8e-8, "first step: equal, 1.90 times as fast"),
        (3.1e-2, "first step: differs by 3.1e-02, 1.90"),
    ):
        found = dataclasses.replace(base, difference=Difference(1.0, 1.0, off, "w", off))
        made[0].note(first_step=found.in_short())
        look = Overview(run).look()
        assert f", {told}" in headline(look)
        assert look["first_step"] == found.in_short()
    made[0].note(first_step=dataclasses.replace(base, unproven="it draws").in_short())
    assert headline(Overview(run).look()).endswith("first step: not compared")
    # Another training begins.
    made[0].note(first_step="")
    assert read_beats(run.folder)[0].first_step == ""


def test_look_adds_up_the_ranks(run):
    slow = dataclasses.replace(TEN_STEPS, num_tokens=600, num_padding_tokens=400, waiting_s=0.0)
    pages(run, TEN_STEPS, slow)
    Path(run.folder, "beat_rank_2").symlink_to("gone")  # As where the run's folder is removed meanwhile.
    look = Overview(run).look()
    assert (look["step"], look["max_steps"], look["eta_s"]) == (10, 40, 15.0)
    rates = ("steps_per_s", "samples_per_s", "tokens_per_s", "waiting", "padding")
    assert [look[name] for name in rates] == [2.0, 32.0, 300.0, 0.1, 0.25]
    first = look["ranks"][0]
    assert (first["waiting"], first["padding"], first["tokens_per_s"]) == (0.2, 0.1, 180.0)
    assert first["memory_bytes"] == 2**30
    table = columns_of(look)
    assert table["step"] == ["10 / 40", "10 / 40"]
    assert table["waiting"] == ["20.0 %", "0.0 %"]
    assert table["peak"] == ["3.00 GiB", "3.00 GiB"]
    assert not {"GPU", "temp.", "log"} & table.keys()
    assert "step 10 of 40, 15 s left, 32 samples/s, 300 tokens/s" in headline(look)
    json.dumps(look)


def test_rank_that_is_stuck_is_marked(run, monkeypatch):
    first, second = pages(run, TEN_STEPS, TEN_STEPS)
    first.pulse(7)
    now_s = time.monotonic()
    monkeypatch.setattr(overview.time, "monotonic", lambda: now_s + 30.0)
    second.mark(Phase.SAVE)
    look = Overview(run).look()
    assert [row["is_stuck"] for row in look["ranks"]] == [True, False]
    stuck, saves = columns_of(look)["doing"]
    assert re.fullmatch(r"compute, no progress for 3\d s", stuck)
    assert saves == "save"
    assert look["eta_s"] is None


def test_process_that_is_gone_is_told(run):
    child = subprocess.Popen([sys.executable, "-c", "pass"])
    child.wait()
    pages(run, TEN_STEPS)
    own, gone = (pid.to_bytes(8, sys.byteorder) for pid in (os.getpid(), child.pid))
    page = Path(run.folder, "beat_rank_0")
    page.write_bytes(page.read_bytes().replace(own, gone))
    look = Overview(run).look()
    assert columns_of(look)["doing"] == ["its process is gone"]


def test_only_living_runs_of_this_user_are_found(run, tmp_path):
    assert find_runs() == [run]
    folder = Path(run.folder)
    folder.chmod(0o755)  # Others could have written in it.
    assert read_run(folder) is None
    folder.chmod(0o700)
    (tmp_path / f"unsloth_multigpu_{os.getpid()}_{pid_scope()}_link").symlink_to(folder)
    assert find_runs() == [run]
    (folder / "run.json").write_text("[")
    assert find_runs() == []


def test_run_of_another_container_is_neither_alive_nor_over(run, monkeypatch):
    # The same process id, but of a process that cannot be seen.
    monkeypatch.setattr(os, "readlink", lambda path: "pid:[1]")
    assert find_runs() == []
    with pytest.raises(SetupError, match="is a run of another machine or container"):
        choose_run(run.folder)


def test_supervisor_that_was_killed_or_stopped_is_not_running(run):
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    process = psutil.Process(child.pid)
    other = dataclasses.replace(run, pid=child.pid)
    assert other.state() == "running"
    process.suspend()
    os.waitid(os.P_PID, child.pid, os.WSTOPPED | os.WNOWAIT)
    assert other.state() == "stopped"
    assert "its supervisor was stopped by a signal" in headline(Overview(other).look())
    child.kill()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert other.state() == "over"  # A zombie.
    child.communicate()
    assert other.state() == "over"


def test_top_names_what_there_is(run, tmp_path, monkeypatch, capsys):
    with monkeypatch.context() as alone:
        alone.setattr("unsloth_multigpu.tools.top.top_command.find_runs", list)
        assert main(["top", "--once"]) == SetupError.exit_code
        assert "No job of yours runs on this machine." in capsys.readouterr().err
    pages(run, TEN_STEPS, TEN_STEPS)
    assert main(["top", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["run"]["job"] == "train.py"
    assert main(["top", "--once", str(run.pid)]) == 0
    assert "10 / 40" in capsys.readouterr().out
    assert main(["top", run.folder]) == 0  # Without a terminal it looks once.
    assert main(["top", "--once", "1"]) == SetupError.exit_code
    said = capsys.readouterr().err
    assert "No job 1 of yours runs on this machine." in said
    assert f"{run.pid}  2 ranks, for " in said
    assert " s: python train.py" in said
    assert main(["top", "--once", str(tmp_path)]) == SetupError.exit_code
    other = tmp_path / f"unsloth_multigpu_{os.getppid()}_{pid_scope()}_y"
    other.mkdir(mode=0o700)
    parent = os.getppid()
    second = dataclasses.replace(run, pid=parent, folder=str(other))
    (other / "run.json").write_text(json.dumps(dataclasses.asdict(second)))
    assert main(["top", "--once"]) == 0
    listed = capsys.readouterr().out
    assert listed.startswith("2 jobs run here:\n")
    assert {str(run.pid), str(parent)} <= set(listed.split())
    assert main(["top", "--once", "--json"]) == SetupError.exit_code  # One object, and it is not clear which.


def test_panel_is_updated_while_it_trains_and_stays(run, monkeypatch):
    monkeypatch.setattr(display, "_EVERY_S", 0.02)
    (page, _) = pages(run, TEN_STEPS, TEN_STEPS)
    (Path(run.log_dir) / "rank_1.log").write_text("<b>1 < 2</b>\n")
    shown, updates = [], []

    def show(bundle, *, raw, display_id):
        shown.append(bundle)
        return SimpleNamespace(update=lambda bundle, *, raw: updates.append(bundle))

    monkeypatch.setattr(display, "display", show)
    table = Panel(run)
    table.begin(lambda: True)
    wait_until(lambda: len(updates) > 1, 60, "three tables")
    page.mark(Phase.SCRIPT, step=40)
    table.end()
    assert not [thread for thread in threading.enumerate() if "panel" in thread.name]
    assert "40 / 40" in updates[-1]["text/plain"]
    assert "&lt;b&gt;1 &lt; 2&lt;/b&gt;" in updates[-1]["text/html"]
    (first,) = shown
    assert "10 / 40" in first["text/plain"]


def test_events_of_all_ranks_are_read_in_order_of_time(tmp_path):
    beats = [HeartbeatPage(None, rank) for rank in range(2)]
    writers = [EventWriter(tmp_path, rank, 0, beats[rank]) for rank in range(2)]
    writers[1].write("started", pid=11)
    writers[0].write("started", pid=10)
    beats[1].mark(step=4)
    writers[1].write("exception", error="ValueError: \ud800 \u00e9", traceback="a\nb\n", exit_code=1)
    events = read_events(tmp_path, attempt=0)
    found = [(e.kind, e.rank, e.attempt, e.step) for e in events]
    assert found == [("started", 1, 0, -1), ("started", 0, 0, -1), ("exception", 1, 0, 4)]
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
