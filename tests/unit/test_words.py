"""Figures in words."""

import pytest

from unsloth_multigpu.words import duration, gib, how_ended, shown_lines


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


def test_size_is_in_gib():
    assert (gib(3 * 2**29), gib(15783677952, 1)) == ("1.50 GiB", "14.7 GiB")


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


def test_lines_are_those_of_a_terminal():
    assert shown_lines("a \n\n10%\r 50%\r100%\nb\r\n") == ["a", "100%", "b"]
