"""What the supervisor's watch does to ranks that stand still, or do not listen: real processes without torch."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from unsloth_multigpu.errors import LaunchError
from unsloth_multigpu.launch import watch as module
from unsloth_multigpu.launch import watchdog
from unsloth_multigpu.launch.launcher import _Supervisor, _tell_restart
from unsloth_multigpu.launch.stop import Stop, handlers_kept
from unsloth_multigpu.launch.watch import TEARDOWN_LIMIT_S, Watch
from unsloth_multigpu.options import MultiGPUConfig
from unsloth_multigpu.wire.beat import Beat, BeatPage, Node, Phase
from unsloth_multigpu.wire.event import Event, EventWriter
from unsloth_multigpu.wire.process import read_state

RANK = """
import os, signal, sys, time
from unsloth_multigpu.wire.beat import BeatPage, Phase
from unsloth_multigpu.launch.pulse import start_pulse
from unsloth_multigpu.wire.event import EventWriter
folder, rank, kind = sys.argv[1], int(sys.argv[2]), sys.argv[3]
page = BeatPage(folder, rank)
start_pulse(page, folder, rank, 1.0)
events = EventWriter(folder, rank, 0, page)
events.write("started", pid=os.getpid())
events.write("training")
page.mark(Phase.COMPUTE, step=2)
if kind == "stopping":
    events.write("stopping")
if kind == "catch":
    events.write("left_training", error="ValueError: planted")
if kind == "deaf":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
if kind == "die":
    time.sleep(0.5)  # The other one has made itself deaf by now.
    os.kill(os.getpid(), signal.SIGKILL)
def work():
    while kind == "wait":
        page.mark(Phase.COMPUTE, step=3)
        time.sleep(0.1)
    time.sleep(3600)
work()
"""


RESTARTS: list[tuple[str, int]] = []


@pytest.fixture
def ranks(tmp_path: Path) -> Iterator[Callable[..., tuple[Watch, list[subprocess.Popen]]]]:
    script = tmp_path / "rank.py"
    script.write_text(RANK)
    with ExitStack() as stack:

        def begin(*kinds: str, hang_timeout_s: float = 2.0) -> tuple[Watch, list[subprocess.Popen]]:
            config = MultiGPUConfig(hang_timeout_s=hang_timeout_s)
            watch = Watch(
                tmp_path,
                lambda cause, attempt: RESTARTS.append((cause.message, attempt)),
                log_dir=tmp_path / "logs",
                num_ranks=len(kinds),
                config=config,
            )
            stack.enter_context(watch)
            started = []
            for rank, kind in enumerate(kinds):
                process = subprocess.Popen([sys.executable, script, tmp_path, str(rank), kind])
                started.append(stack.enter_context(process))
                stack.callback(process.kill)
            return watch, started

        RESTARTS.clear()
        (tmp_path / "logs").mkdir()
        yield begin


def wait_until(condition: Callable[[], object], limit_s: float = 20.0) -> float:
    begin_s = time.monotonic()
    while not condition():
        assert time.monotonic() - begin_s < limit_s
        time.sleep(0.01)
    return time.monotonic() - begin_s


def test_hung_rank_is_killed_and_named(ranks: Callable, tmp_path: Path) -> None:
    watch, (hung, other) = ranks("sleep", "wait")
    wait_until(lambda: read_state(hung.pid) == psutil.STATUS_ZOMBIE)
    assert other.poll() is None
    cause = watch.cause({0: -signal.SIGKILL})
    assert (cause.rank, cause.exit_code) == (0, 124)
    hangs = r"rank 0 hangs: no progress for \d+ s in step 3, computing \(rank\.py:26 in work\)"
    assert re.fullmatch(hangs, cause.message)
    assert f"Stacks of all threads: {tmp_path}/logs/stack_rank_N.txt\n" in cause.traceback
    assert "rank.py" in (tmp_path / "logs" / "stack_rank_1.txt").read_text()
    # It does not end by itself, and nobody else ends it here.
    wait_until(lambda: read_state(other.pid) == psutil.STATUS_ZOMBIE)


@pytest.mark.parametrize("is_heard", [True, False])
def test_other_nodes_are_judged_as_well(ranks: Callable, monkeypatch: pytest.MonkeyPatch, is_heard: bool) -> None:
    monkeypatch.setattr(watchdog, "_OTHERS_GRACE_S", 0.5)
    monkeypatch.setattr(watchdog, "_NEWS_S", 0.5)
    watch, processes = ranks("sleep", "sleep")
    there = {2: Beat(1, Phase.DATA, 0, time.monotonic() - 60, time.monotonic() + 60)}
    heard_s = time.monotonic()
    wait_until(lambda: sorted(watch.hear([Node(1, heard_s, there)])) == [0, 1])
    while all(read_state(process.pid) != psutil.STATUS_ZOMBIE for process in processes):
        watch.hear([Node(1, time.monotonic() if is_heard else heard_s, there)])
        time.sleep(0.05)
    cause = watch.cause({0: -signal.SIGKILL, 1: -signal.SIGKILL})
    assert (cause.rank, cause.exit_code) == (-1, 124)
    text = r"all ranks of this node make no progress for \d+ s .*; node 1 \(rank 2\) has not been heard for \d+ s"
    if is_heard:
        text = r"rank 2 hangs: no progress for \d+ s in step 2, getting samples; rank 2 is on node 1"
    assert re.match(text, cause.message)
    assert "Stack of rank 0 " in cause.traceback
    assert "Stack of rank 1 " in cause.traceback
    wait_until(lambda: not watch.hear([]))
    # Told before the nodes meet, and once.
    watch.begin_round(1)
    watch.begin_start()
    EventWriter(watch._run_dir, 0, 1, BeatPage(None, 0)).write("started", pid=processes[0].pid)
    wait_until(lambda: watch._attempt == 1)
    assert [(cause.message, 1)] == RESTARTS


def test_survivor_that_does_not_listen_is_killed(ranks: Callable) -> None:
    begin_s = time.monotonic()
    watch, (deaf, dies) = ranks("deaf", "die", hang_timeout_s=0.0)
    wait_until(lambda: read_state(dies.pid) == psutil.STATUS_ZOMBIE)
    wait_until(lambda: read_state(deaf.pid) == psutil.STATUS_ZOMBIE)
    assert time.monotonic() - begin_s >= TEARDOWN_LIMIT_S
    # Without torch elastic's word, as before a restart.
    message = watch.cause({}).message
    assert message.startswith("rank 1 was killed by SIGKILL after step 2; the usual cause is that the machine")


def test_rank_that_was_told_to_end_has_not_ended_by_itself(ranks: Callable, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_EARLY_EXIT_GRACE_S", 0.5)
    watch, (deaf, caught) = ranks("deaf", "catch", hang_timeout_s=0.0)
    wait_until(lambda: read_state(deaf.pid) == psutil.STATUS_ZOMBIE)
    assert (deaf.wait(), caught.wait()) == (-signal.SIGKILL, -signal.SIGTERM)
    told = "rank 1 left train() by an error after step 2, which its script caught, while other ranks were training: "
    assert watch.cause({}).message == f"{told}ValueError: planted"


@pytest.mark.parametrize(("kind", "hang_timeout_s"), [("sleep", 0.0), ("stopping", 2.0)])
def test_rank_that_is_not_to_be_judged_is_left_alone(ranks: Callable, kind: str, hang_timeout_s: float) -> None:
    watch, (still, _) = ranks(kind, "wait", hang_timeout_s=hang_timeout_s)
    wait_until(lambda: len(watch.events()) >= 4)
    with pytest.raises(subprocess.TimeoutExpired):
        still.wait(2.5)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_error_that_ends_the_watch_ends_the_run(
    ranks: Callable, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def read_beats(_: Path) -> dict[int, Beat]:
        raise LookupError("a page of another kind")

    watch, _ = ranks("wait")
    watch.check()
    assert not watch.has_failed
    monkeypatch.setattr(module, "read_beats", read_beats)
    wait_until(lambda: watch.has_failed)
    message = r"can no longer watch its ranks, so it ended them \(LookupError: a page of another kind\)"
    with pytest.raises(LaunchError, match=message) as error:
        watch.check()
    assert isinstance(error.value.__cause__, LookupError)
    assert str(tmp_path) in error.value.hint
    # The supervisor says it once more for the user and leaves with its exit code, without asking the watch again.
    supervisor = _Supervisor(SimpleNamespace(), "run", tmp_path, tmp_path, watch, SimpleNamespace())
    assert supervisor._tell_apart(error.value) == LaunchError.exit_code
    assert "can no longer watch its ranks" in capsys.readouterr().err


def test_engine_asks_the_watch_at_every_turn(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    asked: list[str] = []
    watch = SimpleNamespace(hear=None, check=lambda: asked.append("watch"))
    stop = SimpleNamespace(turn=lambda: asked.append("stop"), begin=lambda: asked.append("begin"))
    launcher = SimpleNamespace(command=[], num_ranks=1, config=MultiGPUConfig())
    monkeypatch.setattr("unsloth_multigpu.launch.engine.run_elastic", lambda *args: args[-1].num_nodes_waiting())
    _Supervisor(launcher, "run", tmp_path, tmp_path, watch, stop)._start()
    assert asked == ["begin", "watch", "stop"]


def test_rank_that_the_engine_has_forgotten_is_ended(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from torch.distributed.elastic.multiprocessing import SignalException

    forgotten = subprocess.Popen(["sleep", "100"], start_new_session=True, env={**os.environ, "RUN": str(tmp_path)})

    def start(self: _Supervisor) -> None:
        raise SignalException("stopped by SIGTERM", signal.SIGTERM)

    monkeypatch.setattr(_Supervisor, "_start", start)
    (tmp_path / "logs").mkdir()
    config = MultiGPUConfig()
    with (
        Watch(tmp_path, lambda *_: None, log_dir=tmp_path / "logs", num_ranks=1, config=config) as watch,
        handlers_kept(),
        Stop(tmp_path, 1, 5.0, pytest.fail) as stop,
    ):
        code = _Supervisor(SimpleNamespace(config=config), "run", tmp_path, tmp_path, watch, stop).run()
    assert (code, forgotten.wait(20.0)) == (-signal.SIGTERM, -signal.SIGKILL)


def test_attempts_of_which_no_rank_reached_the_line_are_passed_over(tmp_path: Path) -> None:
    told: list[tuple[str, int]] = []
    (tmp_path / "logs").mkdir()
    watch = Watch(
        tmp_path,
        lambda cause, attempt: told.append((cause.message, attempt)),
        log_dir=tmp_path / "logs",
        num_ranks=1,
        config=MultiGPUConfig(),
    )

    def write(attempt: int, kind: str, **facts: object) -> None:
        EventWriter(tmp_path, 0, attempt, page).write(kind, **facts)

    watch.begin_round(0)
    page = BeatPage(tmp_path, 0)
    page.mark(Phase.COMPUTE, step=1)
    write(0, "exception", error="ValueError: one", exit_code=1, traceback="")
    for attempt in (1, 2, 3):  # Of the second and the third nothing is heard.
        watch.begin_round(attempt)
        watch.begin_start()
    write(3, "started", pid=os.getpid())
    assert [event.kind for event in watch.events()] == ["started"]
    assert told == [("rank 0 failed after step 1: ValueError: one", 3)]
    watch.begin_round(4)
    watch.begin_start()
    assert watch.cause({0: 7}).message == "rank 0 exited with code 7"
    assert [attempt for _, attempt in told] == [3, 4]


def test_attempt_that_ended_before_the_watch_looked_is_told_as_itself(tmp_path: Path) -> None:
    told: list[tuple[str, int]] = []
    watch = Watch(
        tmp_path,
        lambda cause, attempt: told.append((cause.message, attempt)),
        log_dir=tmp_path / "logs",
        num_ranks=1,
        config=MultiGPUConfig(max_restarts=2, nnodes="1:2", rdzv_endpoint="127.0.0.1:1", rdzv_id="run"),
    )
    page = BeatPage(tmp_path, 0)
    for attempt in (0, 1):
        watch.begin_round(attempt)
        watch.begin_start()
        facts = {"error": f"ValueError: {attempt}", "exit_code": 1, "traceback": "Traceback\n"}
        EventWriter(tmp_path, 0, attempt, page).write("exception", **facts)
    watch.begin_round(2)
    assert told == [("rank 0 failed: ValueError: 0", 1), ("rank 0 failed: ValueError: 1", 2)]


LOST_NODE = (
    "rank 0 lost its connection to another node after step 1; that node's own message names the cause. "
    "The other ranks were stopped."
)


@pytest.mark.parametrize(
    ("error", "before", "after"),
    [
        ("ValueError: bad row", "rank 0 failed after step 1: ValueError: bad row. Starting all ranks again (1).", ""),
        # Its cause may come to be known yet.
        ("RuntimeError: Connection reset", "", LOST_NODE),
    ],
)
def test_error_is_told_before_the_nodes_meet_again_and_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], error: str, before: str, after: str
) -> None:
    (tmp_path / "logs").mkdir()
    config = MultiGPUConfig(max_restarts=1, nnodes="1:2", rdzv_endpoint="127.0.0.1:1", rdzv_id="run")
    watch = Watch(tmp_path, _tell_restart, log_dir=tmp_path / "logs", num_ranks=1, config=config)
    page = BeatPage(tmp_path, 0)
    page.mark(Phase.COMPUTE, step=1)
    writer = EventWriter(tmp_path, 0, 0, page)
    with watch:
        writer.write("started", pid=2**30)
        writer.write("exception", error=error, exit_code=1, traceback="Traceback\n")
        watch.begin_round(1)
        assert capsys.readouterr().err == (before and f"\nTraceback\nunsloth_multigpu: {before}\n")
        # The other node did not come: no rank of the round was started, and nothing is known of one.
        stop = SimpleNamespace(is_asked=lambda: False)
        supervisor = _Supervisor(SimpleNamespace(num_ranks=1, config=config), "run", tmp_path, tmp_path, watch, stop)
        assert supervisor._tell_apart(LaunchError("Fewer than 2 nodes met.", hint="")) == LaunchError.exit_code
    told, _, rest = capsys.readouterr().err.partition("\nunsloth_multigpu: Fewer than 2 nodes met.\n")
    assert told == (after and f"\nunsloth_multigpu: {after}\n")
    assert rest


# Of no process.
PIDS = {0: 2**30, 1: 2**30 + 1}


class Clock:
    """A watch whose thread does not run, over ranks 0 and 1 that stand still; `ended` are the processes it kills."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        self.now_s = time.monotonic()
        self.ended: list[int] = []
        self.beats = {r: Beat(2, Phase.COMPUTE, 0, self.now_s, self.now_s + 1000) for r in range(2)}
        monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: self.now_s, sleep=self.sleep))
        monkeypatch.setattr(module, "kill_rank", self.ended.append)
        monkeypatch.setattr(module, "read_beats", lambda _: self.beats)
        (tmp_path / "logs").mkdir()
        config = MultiGPUConfig(hang_timeout_s=2.0)
        self.watch = Watch(tmp_path, lambda *_: None, log_dir=tmp_path / "logs", num_ranks=2, config=config)
        self.watch._beats = self.beats

    def sleep(self, s: float) -> None:
        self.now_s += s

    def look(self, *steps_s: float) -> list[int]:
        for step_s in steps_s:
            self.sleep(step_s)
            self.watch._end_hang([], PIDS)
        return self.ended


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Clock:
    return Clock(monkeypatch, tmp_path)


def test_time_in_which_the_machine_stood_still_is_no_hang(clock: Clock) -> None:
    assert clock.look(1.0, 100.0, 1.9) == []
    assert clock.look(1.0) == list(PIDS.values())


def test_hang_is_there_at_the_next_look_too(clock: Clock) -> None:
    # The page was read while it was written.
    clock.beats = {r: Beat(3, Phase.COMPUTE, 0, clock.now_s + 3.0, clock.now_s + 1000) for r in range(2)}
    assert clock.look(3.0) == []


def test_survivors_of_a_dead_rank_are_not_judged(clock: Clock) -> None:
    clock.watch.gone = {1}
    assert clock.look(3.0, 3.0) == []


@pytest.mark.parametrize(("kind", "ended"), [("stopping", []), ("training", [PIDS[1]])])
def test_rank_that_is_to_save_is_not_ended_with_one_that_failed(clock: Clock, kind: str, ended: list[int]) -> None:
    events = [Event(kind, 1, 0, 1.0, 2, {}), Event("exception", 0, 0, 2.0, 2, {"error": "ValueError: no"})]
    for _ in range(2):
        clock.watch._end_waiting(events, PIDS, {1})
        clock.sleep(TEARDOWN_LIMIT_S + 1)
    assert clock.ended == ended
