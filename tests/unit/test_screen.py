"""What commands show: plain lines in a pipe, colour and a line that changes on a terminal, and figures in words."""

import io
import re

import pytest

from unsloth_multigpu.cli.screen import Progress, Screen
from unsloth_multigpu.words import duration, gib, how_ended, shown_lines


class Terminal(io.StringIO):
    """What a terminal of 60 columns is sent."""

    def isatty(self):
        return True

    @property
    def text(self):
        """Without colours and movements of the cursor."""
        return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", self.getvalue())


@pytest.fixture
def terminal(monkeypatch):
    for name in ("NO_COLOR", "FORCE_COLOR", "CI"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "60")
    return Terminal()


ROWS = [("ours", "[bold] 10", "a long text that does not fit into the sixty columns of it"), ("group", "9", "OTHER")]


def test_pipe_is_sent_plain_lines():
    stream = io.StringIO()
    screen = Screen(stream)
    screen.line("all is well", "bold green")
    screen.table(("arm", "s", "what"), ROWS, num_left=1)
    assert stream.getvalue().splitlines() == [
        "all is well",
        "arm            s                                                        what",
        "ours   [bold] 10  a long text that does not fit into the sixty columns of it",
        "group          9                                                       OTHER",
    ]


@pytest.mark.parametrize("name", ["NO_COLOR", "TERM"])
def test_colour_is_left_out_where_it_is_not_wanted(terminal, monkeypatch, name):
    monkeypatch.setenv(name, "dumb")
    Screen(terminal).line("all is well", "green")
    assert "32m" not in terminal.getvalue()


def test_progress_is_one_line_on_a_terminal_and_lines_elsewhere(terminal):
    for stream in (terminal, io.StringIO()):
        with Progress("chaos", stream) as progress:
            progress.begin(1, 3, "kill@0:4")
            progress.begin(2, 3, "kill@1:4")
            progress.show("kill@1:4, step 3")
            progress.say("NOT AS EXPECTED: [x]", "red")
    assert stream.getvalue() == "chaos: 1 of 3: kill@0:4\nchaos: 2 of 3: kill@1:4\nchaos: NOT AS EXPECTED: [x]\n"
    assert "chaos: kill@1:4, step 3" in terminal.text
    assert "chaos: NOT AS EXPECTED: [x]\n" in terminal.text
    # The line is taken away and the cursor is back.
    assert terminal.getvalue().rstrip().endswith(("\x1b[2K", "\x1b[?25h"))


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0 s"),
        (0.43, "0.43 s"),
        (12.34, "12 s"),
        (59.4, "59 s"),
        (59.9, "1 min 00 s"),
        (185, "3 min 05 s"),
        (840, "14 min"),
        (3590, "1 h 00 min"),
        (7260, "2 h 01 min"),
        (273600, "3 d 4 h"),
    ],
)
def test_duration_is_told_in_two_units_at_most(seconds, text):
    assert duration(seconds) == text


@pytest.mark.parametrize(
    ("code", "text"),
    [
        (0, "ended with exit code 0"),
        (3, "ended with exit code 3"),
        (-9, "was ended by SIGKILL, as the system does when the machine has no memory left"),
        (-11, "was ended by SIGSEGV"),
        (-40, "was ended by signal 40"),
    ],
)
def test_end_of_a_process_names_its_signal(code, text):
    assert how_ended(code) == text


def test_size_is_in_gib_and_lines_are_those_of_a_terminal():
    assert (gib(3 * 2**29), gib(15783677952, 1)) == ("1.50 GiB", "14.7 GiB")
    assert shown_lines("a \n\n10%\r 50%\r100%\nb\r\n") == ["a", "100%", "b"]
