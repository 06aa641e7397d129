"""What does the supervisor do with a signal? Its ranks are pages and events here."""

import os
import signal
import time

import pytest

from unsloth_multigpu.launch.stop import Stop, describe_stop, signals_queued
from unsloth_multigpu.wire.event import Event, StopRequest, ask_to_stop, read_request
from unsloth_multigpu.wire.heartbeat import HeartbeatPage, Phase


def end_time(run_dir):
    """The time of the ranks that were asked is over."""
    asked = read_request(run_dir)
    (run_dir / "stop").unlink()
    ask_to_stop(run_dir, StopRequest(asked.signal_number, time.monotonic() - 1.0))


def event(kind, rank=0):
    return Event(kind, rank, 0, 1.0, 3, {})


BOTH = [event("started", 0), event("started", 1)]


@pytest.fixture
def beat(tmp_path):
    page = HeartbeatPage(tmp_path, 0)
    page.mark(Phase.COMPUTE, step=3)
    return page


@pytest.fixture
def signals():
    # What is ignored, as under nohup, is left alone.
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    with signals_queued() as signals:
        yield signals
    signal.signal(signal.SIGHUP, before)


@pytest.fixture
def stop(signals, tmp_path):
    return Stop(signals, tmp_path, 2, 5.0)


def send(*numbers):
    for number in numbers:
        os.kill(os.getpid(), number)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2])
def test_first_signal_asks_ranks_that_train_and_the_second_ends_them(stop, beat, tmp_path, capfd, number):
    send(number, number)  # At once: the same again.
    before_s = time.monotonic()
    assert stop.poll(BOTH) is None
    asked = read_request(tmp_path)
    assert (asked.signal_number, stop.signal_number, stop.how) == (number, number, "saved")
    assert abs(asked.deadline_s - before_s - 5.0) < 1.0
    assert f"{number.name}: the ranks finish their step, save and stop, within 5 s" in capfd.readouterr().err
    stop._first_s -= 1.0
    send(signal.SIGTERM)
    assert stop.poll(BOTH) == signal.SIGKILL
    assert (stop.signal_number, stop.how) == (number, "at once")


def test_script_that_caught_ctrl_c_may_take_its_time(stop, beat, tmp_path):
    send(signal.SIGINT)
    assert stop.poll(BOTH) is None
    end_time(tmp_path)
    assert stop.poll([*BOTH, event("stopped", 0), event("stopped", 1)]) is None
    assert stop.how == "saved"
    assert stop.poll([*BOTH, event("stopped", 0)]) == signal.SIGKILL
    assert stop.how == "late"


@pytest.mark.parametrize(
    ("phase", "number", "num_started", "sent"),
    [
        (Phase.SCRIPT, signal.SIGINT, 2, signal.SIGINT),
        (Phase.SCRIPT, signal.SIGINT, 1, signal.SIGTERM),  # The other one would print where its imports were.
        (Phase.SCRIPT, signal.SIGINT, 0, signal.SIGTERM),
        (Phase.SCRIPT, signal.SIGUSR1, 2, signal.SIGTERM),
        (Phase.COMPUTE, signal.SIGHUP, 2, signal.SIGTERM),
    ],
)
def test_signal_while_nobody_trains_and_a_lost_terminal_end_all(stop, beat, tmp_path, phase, number, num_started, sent):
    beat.mark(phase)
    send(number)
    assert stop.poll(BOTH[:num_started]) == sent
    assert (stop.signal_number, stop.how, read_request(tmp_path)) == (number, "at once", None)
    assert stop.poll(BOTH) is None
    stop._first_s -= 31.0  # A rank that does not end is killed.
    assert stop.poll(BOTH) == signal.SIGKILL
    assert stop.how == "at once"


def test_signal_that_ranks_heard_of_from_another_node_is_the_supervisors_too(stop, tmp_path):
    ask_to_stop(tmp_path, StopRequest(signal.SIGUSR1, time.monotonic() + 5.0))
    assert stop.poll(BOTH) is None
    assert (stop.is_asked(), stop.signal_number) == (True, signal.SIGUSR1)


def test_handlers_come_back_and_ignored_signals_stay_so():
    before = {n: signal.getsignal(n) for n in (signal.SIGTERM, signal.SIGHUP)}
    try:
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        with signals_queued() as signals:
            assert signal.getsignal(signal.SIGTERM) not in (before[signal.SIGTERM], signal.SIG_IGN)
            assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
            send(signal.SIGTERM, signal.SIGHUP)
            assert [number for number, _ in signals] == [signal.SIGTERM]
        assert signal.getsignal(signal.SIGTERM) == before[signal.SIGTERM]
        assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


AGAIN = "put UNSLOTH_MULTIGPU_RESUME=auto before the same command."
LATE = "the ranks did not stop within grace_s=5 s and were ended."


@pytest.mark.parametrize(
    ("kind", "checkpoint", "how", "resume", "text"),
    [
        ("stopped", "/c-4", "saved", "auto", " after step 4. The same command resumes from /c-4."),
        ("stopped", "/c-4", "saved", "off", f" after step 4. To resume from /c-4, {AGAIN}"),
        ("stopped", "", "saved", "off", " after step 4. Nothing was saved."),
        ("training", "/c-2", "late", "auto", f" after step 4: {LATE} The same command resumes from /c-2."),
        ("training", "", "at once", "off", " after step 4: all ranks were ended at once."),
    ],
)
def test_text_says_where_it_stopped_and_how_to_go_on(stop, kind, checkpoint, how, resume, text):
    stop.signal_number, stop.how = signal.SIGTERM, how
    events = [Event("started", 0, 0, 1.0, -1, {"pid": 1}), Event(kind, 0, 0, 2.0, 4, {"checkpoint": checkpoint})]
    assert describe_stop(stop, events, 4, 5.0, resume) == f"stopped by SIGTERM{text}"
