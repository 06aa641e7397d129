"""What does the supervisor do with a signal? Its ranks are pages and events here, and a process that sleeps."""

import json
import os
import signal
import subprocess
import time

import pytest

from tests.helpers.run import wait_until
from unsloth_multigpu.errors import ConfigError, ResumeError
from unsloth_multigpu.launch.stop import RestartRefused, Stop, describe_stop, handlers_kept
from unsloth_multigpu.wire.beat import BeatPage, Phase
from unsloth_multigpu.wire.event import Event, EventWriter
from unsloth_multigpu.wire.process import is_alive
from unsloth_multigpu.wire.request import StopRequest, ask_to_stop, read_request


def end_time(run_dir):
    """The time of the ranks that were asked is over."""
    asked = read_request(run_dir, 0)
    (run_dir / "stop_0").unlink()
    ask_to_stop(run_dir, 0, StopRequest(asked.signal_number, time.monotonic() - 1.0))


class Ended(BaseException):
    """In the place of torch's SignalException."""


def end(number):
    raise Ended(number)


@pytest.fixture
def beat(tmp_path):
    page = BeatPage(tmp_path, 0)
    page.mark(Phase.COMPUTE, step=3)
    EventWriter(tmp_path, 0, 0, page).write("started", pid=2**30)
    return page


@pytest.fixture
def stop(tmp_path):
    # What is ignored, as under nohup, is left alone.
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    with handlers_kept(), Stop(tmp_path, 2, 5.0, end) as stop:
        stop.begin_round(0)
        stop.turn()
        yield stop
    signal.signal(signal.SIGHUP, before)


@pytest.fixture
def asked(tmp_path):
    return lambda: read_request(tmp_path, 0)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2])
def test_first_signal_asks_ranks_that_train_and_the_second_ends_them(stop, beat, asked, capfd, number):
    os.kill(os.getpid(), number)
    os.kill(os.getpid(), number)  # At once: the same again.
    before_s = time.monotonic()
    stop.turn()
    assert (asked().signal_number, stop.signal_number, stop.how) == (number, number, "saved")
    assert abs(asked().deadline_s - before_s - 5.0) < 1.0
    assert f"{number.name}: the ranks finish their step, save and stop, within 5 s" in capfd.readouterr().err
    stop._first_s -= 1.0
    os.kill(os.getpid(), signal.SIGTERM)
    with pytest.raises(Ended) as ended:
        stop.turn()
    assert (ended.value.args, stop.signal_number, stop.how) == ((signal.SIGTERM,), number, "at once")


def test_without_grace_the_first_signal_ends_all_at_once(tmp_path, beat):
    with handlers_kept(), Stop(tmp_path, 1, 0.0, end) as stop:
        stop.turn()
        stop._receive(signal.SIGTERM, None)
        with pytest.raises(Ended):
            stop.turn()
    assert stop.how == "at once"


def test_lost_terminal_ends_all_at_once(stop, beat):
    os.kill(os.getpid(), signal.SIGHUP)
    with pytest.raises(Ended):
        stop.turn()
    assert (stop.signal_number, stop.how) == (signal.SIGHUP, "at once")


def test_signal_between_two_starts_of_the_ranks_refuses_the_second(stop):
    os.kill(os.getpid(), signal.SIGTERM)
    with pytest.raises(RestartRefused):
        stop.begin_round(1)
    assert (stop.signal_number, stop.how) == (signal.SIGTERM, "at once")


def test_page_of_a_rank_that_has_ended_asks_nobody(stop, tmp_path, beat):
    # The next attempt's rank is still importing.
    stop.begin_round(1)
    stop.begin_start()
    os.kill(os.getpid(), signal.SIGTERM)
    with pytest.raises(Ended):
        stop.turn()
    assert stop.how == "at once"


def test_signal_while_nodes_meet_ends_the_wait(stop, tmp_path):
    stop.begin_round(1)  # The engine has just asked.
    with pytest.raises(Ended):
        os.kill(os.getpid(), signal.SIGTERM)
    with handlers_kept(), Stop(tmp_path, 1, 5.0, end) as first:
        first.begin()
        with pytest.raises(Ended):
            os.kill(os.getpid(), signal.SIGTERM)
    assert (stop.how, first.how) == ("at once", "at once")


def test_script_that_caught_ctrl_c_may_take_its_time(stop, tmp_path, beat):
    writer = EventWriter(tmp_path, 0, 0, beat)
    writer.write("started", pid=2**30)
    os.kill(os.getpid(), signal.SIGINT)
    stop.turn()
    end_time(tmp_path)
    writer.write("stopped", signal="SIGINT", checkpoint="")
    stop.turn()
    assert stop.how == "saved"


@pytest.mark.parametrize(
    ("number", "num_started", "passed"),
    [
        (signal.SIGINT, 2, signal.SIGINT),
        (signal.SIGINT, 1, signal.SIGTERM),  # The other one would print where its imports were.
        (signal.SIGUSR1, 2, signal.SIGTERM),
    ],
)
def test_signal_while_nobody_trains_ends_all_at_once(stop, beat, asked, tmp_path, number, num_started, passed):
    beat.mark(Phase.SCRIPT)
    if num_started == 2:
        EventWriter(tmp_path, 1, 0, beat).write("started", pid=2**30)
    stop._receive(number, None)
    with pytest.raises(Ended) as ended:
        stop.turn()
    assert (ended.value.args, stop.signal_number, stop.how, asked()) == ((passed,), number, "at once", None)


def test_signal_is_not_lost_while_the_engine_does_something_else(stop, beat):
    stop._turn_s -= 2.0
    with pytest.raises(Ended):
        os.kill(os.getpid(), signal.SIGTERM)
    assert (stop.signal_number, stop.how) == (signal.SIGTERM, "at once")


def test_signal_before_its_exception_is_handled_is_looked_at_there(tmp_path, beat):
    with handlers_kept(), Stop(tmp_path, 1, 5.0, end) as stop:
        os.kill(os.getpid(), signal.SIGINT)
        with pytest.raises(Ended) as ended:
            stop.begin()
    assert (ended.value.args, stop.signal_number, stop.how) == ((signal.SIGINT,), signal.SIGINT, "at once")


def test_signal_while_processes_are_started_waits_for_the_first_turn(stop):
    stop._turn_s -= 2.0
    stop.begin_start()
    os.kill(os.getpid(), signal.SIGINT)
    with pytest.raises(Ended) as ended:
        stop.turn()
    assert (ended.value.args, stop.how) == ((signal.SIGTERM,), "at once")


def test_second_signal_while_the_engine_closes_the_ranks_kills_them(stop, beat, tmp_path):
    beat.mark(Phase.SCRIPT)
    # One has reached the line. The other has not, and is known by its parent and its variables alone.
    ranks = [
        subprocess.Popen(["sleep", "100"], start_new_session=True, env={**os.environ, "RUN_DIR": str(folder)})
        for folder in ("elsewhere", tmp_path, "elsewhere")
    ]
    EventWriter(tmp_path, 0, 0, beat).write("started", pid=ranks[0].pid)
    stop._receive(signal.SIGINT, None)
    with pytest.raises(Ended):
        stop.turn()
    stop._receive(signal.SIGINT, None)  # At once: the same again.
    assert [rank.poll() for rank in ranks] == [None] * 3
    stop._first_s -= 1.0
    stop._receive(signal.SIGINT, None)
    assert [rank.wait(20.0) for rank in ranks[:2]] == [-signal.SIGKILL] * 2
    assert ranks[2].poll() is None
    ranks[2].kill()
    ranks[2].wait()


def test_signal_after_the_ranks_have_ended_changes_nothing(tmp_path):
    before = signal.getsignal(signal.SIGINT)
    with handlers_kept():
        with Stop(tmp_path, 1, 5.0, end) as stop:
            stop.turn()
            stop.rest()
            os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)  # The folders are removed now.
        assert (stop.is_asked(), stop.signal_number) == (False, 0)
    assert signal.getsignal(signal.SIGINT) == before


def test_ranks_that_do_not_stop_in_time_are_killed(stop, beat, tmp_path):
    # A stopped process does not hear SIGTERM. What it has started may hold its device.
    command = ["sh", "-c", "sleep 100 & echo $!; wait"]
    rank = subprocess.Popen(command, start_new_session=True, stdout=subprocess.PIPE, text=True)
    its_child = int(rank.stdout.readline())
    rank.send_signal(signal.SIGSTOP)
    EventWriter(tmp_path, 0, 0, beat).write("started", pid=rank.pid)
    stop._receive(signal.SIGTERM, None)
    stop.turn()
    end_time(tmp_path)
    with pytest.raises(Ended):
        stop.turn()
    assert stop.how == "late"
    assert rank.wait(5.0) == -signal.SIGKILL
    rank.stdout.close()
    wait_until(lambda: not is_alive(its_child), 60, "end of the rank's child")


def test_signal_that_ranks_heard_of_from_another_node_is_the_supervisors_too(stop, tmp_path):
    ask_to_stop(tmp_path, 0, StopRequest(signal.SIGUSR1, time.monotonic() + 5.0))
    stop.turn()
    with pytest.raises(RestartRefused, match="no restart after SIGUSR1"):
        stop.begin_round(1)


def test_handlers_come_back_after_the_engine_has_put_its_own_and_ignored_signals_stay_so(tmp_path):
    before = {n: signal.getsignal(n) for n in (signal.SIGTERM, signal.SIGHUP)}
    try:
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        with handlers_kept(), Stop(tmp_path, 1, 5.0, end) as stop:
            for number in before:
                signal.signal(number, lambda number, frame: None)
            stop.turn()
            assert signal.getsignal(signal.SIGTERM) == stop._receive
            assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
        assert signal.getsignal(signal.SIGTERM) == before[signal.SIGTERM]
        assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@pytest.mark.parametrize(
    ("kind", "code", "is_refused"),
    [
        ("exception", ConfigError.exit_code, True),
        ("exception", ResumeError.exit_code, False),
        ("exception", 1, False),
        ("left_training", ConfigError.exit_code, False),
    ],
)
def test_what_a_restart_cannot_cure_is_not_tried_again(stop, beat, tmp_path, kind, code, is_refused):
    EventWriter(tmp_path, 1, 0, beat).write(kind, exit_code=code)
    if is_refused:
        with pytest.raises(RestartRefused, match="the ranks would fail the same way"):
            stop.begin_round(1)
    else:
        stop.begin_round(1)
        stop.begin_round(2)  # The failure was another attempt's.


def test_ranks_that_are_started_again_are_not_asked_what_those_before_were(stop, beat, tmp_path):
    ask_to_stop(tmp_path, 0, StopRequest(signal.SIGTERM, time.monotonic() - 1.0))
    stop.begin_round(1)
    stop.turn()
    assert stop.signal_number == 0


@pytest.mark.parametrize(
    ("kind", "checkpoint", "how", "resume", "text"),
    [
        (
            "stopped",
            "/out/checkpoint-4",
            "saved",
            "auto",
            "stopped by SIGTERM after step 4. The same command resumes from /out/checkpoint-4.",
        ),
        (
            "stopped",
            "/out/checkpoint-4",
            "saved",
            "off",
            "stopped by SIGTERM after step 4. With resume='auto' the same command resumes from /out/checkpoint-4.",
        ),
        ("stopped", "", "saved", "off", "stopped by SIGTERM after step 4. Nothing was saved."),
        (
            "training",
            "/out/checkpoint-2",
            "late",
            "auto",
            "stopped by SIGTERM: the ranks did not stop within grace_s=5 s and were ended after step 4. "
            "The same command resumes from /out/checkpoint-2.",
        ),
        ("training", "", "at once", "off", "stopped by SIGTERM after step 4: all ranks were ended at once."),
    ],
)
def test_text_says_where_it_stopped_and_how_to_go_on(stop, kind, checkpoint, how, resume, text):
    stop.signal_number, stop.how = signal.SIGTERM, how
    events = [Event("started", 0, 0, 1.0, -1, {"pid": 1}), Event(kind, 0, 0, 2.0, 4, {"checkpoint": checkpoint})]
    assert describe_stop(stop, events, 4, 5.0, resume) == text
    assert json.dumps(text).isascii()


def test_interrupt_before_a_rank_has_reached_the_line_ends_it_without_a_traceback(tmp_path):
    with handlers_kept(), Stop(tmp_path, 1, 5.0, end) as stop:
        stop.turn()
        stop._receive(signal.SIGINT, None)
        with pytest.raises(Ended) as ended:
            stop.turn()
    assert (ended.value.args, stop.signal_number) == ((signal.SIGTERM,), signal.SIGINT)
