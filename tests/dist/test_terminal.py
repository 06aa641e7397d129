"""What a user meets at the terminal: questions, an error of all ranks, Ctrl-C in the first second."""

import os
import pty
import select
import signal
import time
from pathlib import Path

from tests.helpers.outcome import facts_of
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


def test_question_is_answered_once_and_an_error_of_all_ranks_is_told_once(tmp_path):
    master, slave = pty.openpty()
    process = start([SCRIPT, "missing.json"], tmp_path, BARE, stdin=slave, stdout=slave, stderr=slave)
    os.close(slave)
    try:
        answers = [("only rank 0? ", "zero"), ("name? ", "my run"), ("token: ", "s3cret")]
        shown = converse(master, process, answers)
    finally:
        os.close(master)
    assert process.wait(_LIMIT_S) == 1
    for rank, told in enumerate(facts_of(tmp_path / "answers")):
        assert told[:2] == ["my run", "s3cret"]
        assert told[2].startswith(f"MultiGPUStatus(rank {rank} of 2; launcher unsloth_multigpu; num_gpus=2; logs ")
    assert shown.count("name? ") == 1
    assert "s3cret" not in shown + (tmp_path / "logs" / "rank_1.log").read_text()
    where = "no accelerator is visible: 2 ranks on the CPU, 1 thread each; ranks above 0 write to "
    assert f"unsloth_multigpu: warning: {where}" in shown
    end = shown.partition("Traceback")[2]
    assert "unsloth_multigpu: rank " in end
    assert " failed: FileNotFoundError: " in end
    assert "Traceback" not in end
    assert "/unsloth_multigpu/" not in end


def test_interrupt_in_the_first_second_is_calm(tmp_path):
    process = start([SCRIPT, "missing.json"], tmp_path, BARE)
    wait_until((tmp_path / "logs" / ".lock").exists, _LIMIT_S, "the folder of logs, which comes before the ranks")
    process.send_signal(signal.SIGINT)
    run = finish(process)
    assert run.code == -signal.SIGINT
    assert "Traceback" not in run.err
    assert run.err.count("stopped by SIGINT") == 1
