"""What commands show: plain lines in a pipe, colour and a line that changes on a terminal."""

import io
import re

import pytest

from unsloth_multigpu.cli.screen import Progress, Screen


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
