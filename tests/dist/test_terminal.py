"""What a user meets at the terminal: a question, an error of all ranks, Ctrl-C in the first second."""

import json
import os
import pty
import select
import signal
import time
from pathlib import Path

import pytest

from tests.helpers.run import BARE, finish, start, wait_until

SCRIPT = Path(__file__).parent / "scripts" / "terminal.py"
_LIMIT_S = 60.0


def converse(master, process, answers):
    """Types each answer when its question is on the terminal; returns all that was shown."""
    shown, place, deadline_s = "", 0, time.monotonic() + _LIMIT_S
    while time.monotonic() < deadline_s:
        if select.select([master], [], [], 0.1)[0]:
            try:
                data = os.read(master, 4096)
            except OSError:  # The other side is closed.
                return shown
            shown += data.decode()
        elif process.poll() is not None:
            return shown
        if answers and answers[0][0] in shown[place:]:
            question, answer = answers.pop(0)
            place = shown.index(question, place) + len(question)
            os.write(master, answer.encode() + b"\n")
    raise TimeoutError(shown)


def test_rank_0_has_the_terminal_and_an_error_of_all_ranks_is_told_once(tmp_path):
    master, slave = pty.openpty()
    process = start([SCRIPT, "missing.json"], tmp_path, BARE, stdin=slave, stdout=slave, stderr=slave)
    os.close(slave)
    try:
        shown = converse(master, process, [("only rank 0? ", "zero")])
    finally:
        os.close(master)
    assert process.wait(_LIMIT_S) == 1
    for rank in range(2):
        told = json.loads((tmp_path / f"status_{rank}.json").read_text())
        assert told.startswith(f"MultiGPUStatus(rank {rank} of 2; launcher unsloth_multigpu; num_gpus=2; logs ")
    assert "alone: zero" in shown
    where = "no accelerator is visible: 2 ranks on the CPU, 1 thread each; ranks above 0 write to "
    assert f"unsloth_multigpu: warning: {where}" in shown
    end = shown.partition("Traceback")[2]
    assert "all 2 ranks failed alike: FileNotFoundError: " in end
    assert "Traceback" not in end
    assert "/unsloth_multigpu/" not in end
    assert "rank_N.log" not in end


def test_question_on_all_ranks_is_refused_with_what_to_do(tmp_path):
    master, slave = pty.openpty()
    process = start([SCRIPT, "ask"], tmp_path, BARE, stdin=slave, stdout=slave, stderr=slave)
    os.close(slave)
    try:
        shown = converse(master, process, [("only rank 0? ", "zero")])
    finally:
        os.close(master)
    assert process.wait(_LIMIT_S) == 1
    assert "rank 1 failed" in shown
    assert "EOFError" in shown
    assert "Hint: Ranks above 0 have no terminal." in shown


@pytest.mark.parametrize("moment", [pytest.param("no rank yet", marks=pytest.mark.thorough), "ranks begin"])
def test_interrupt_in_the_first_second_is_calm(tmp_path, moment):
    process = start([SCRIPT, "missing.json"], tmp_path, BARE)
    if moment == "no rank yet":
        maps = Path(f"/proc/{process.pid}/maps")
        wait_until(lambda: "libtorch" in maps.read_text(), _LIMIT_S, "the import of torch, by the line")
    else:
        wait_until((tmp_path / "logs" / ".lock").exists, _LIMIT_S, "the folder of logs, which comes before the ranks")
    process.send_signal(signal.SIGINT)
    run = finish(process)
    assert run.code == -signal.SIGINT
    assert "Traceback" not in run.err
    assert run.err.count("stopped by SIGINT") == 1
