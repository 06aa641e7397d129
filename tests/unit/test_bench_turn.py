"""Arms that take turns: one computes at a time, and nobody waits for one that is gone."""

from __future__ import annotations

import itertools
import os
import sys
import threading
import time

import pytest

from tests.helpers.run import orphans
from unsloth_multigpu.cli import main
from unsloth_multigpu.errors import LaunchError
from unsloth_multigpu.tools.bench.arm import ARMS, Arm
from unsloth_multigpu.tools.bench.turn import Conductor, Turn, run_together

NUM_STEPS = 3
RANKS = {"one": 1, "two": 2}


def train(folder, arm, rank, did, meet):
    turn = Turn(folder, arm, rank)
    turn.wait()
    for step in range(NUM_STEPS):
        did.append((arm, step, "begin"))
        meet.wait(10)  # Both ranks of an arm compute at once.
        did.append((arm, step, "end"))
        turn.wait()
    turn.close()


def test_one_arm_computes_at_a_time_and_another_is_first_in_each_step(tmp_path) -> None:
    did: list[tuple[str, int, str]] = []

    def run(arm, check):
        meet = threading.Barrier(RANKS[arm])
        ranks = [threading.Thread(target=train, args=(tmp_path, arm, r, did, meet)) for r in range(RANKS[arm])]
        for rank in ranks:
            rank.start()
        for rank in ranks:
            rank.join()
        check()
        return arm.upper()

    assert run_together(RANKS, NUM_STEPS, tmp_path, 10.0, run) == {"one": "ONE", "two": "TWO"}
    assert len(did) == 2 * NUM_STEPS * sum(RANKS.values())
    turns = [turn for turn, _ in itertools.groupby(did, key=lambda what: what[:2])]
    assert turns == [("one", 0), ("two", 0), ("two", 1), ("one", 1), ("one", 2), ("two", 2)]


def test_rank_hears_that_the_benchmark_has_ended(tmp_path) -> None:
    conductor = Conductor(tmp_path, {"two": 2}, 10.0)
    early, late = (Turn(tmp_path, "two", rank) for rank in range(2))
    ended: list[BaseException] = []

    def wait(turn: Turn) -> None:
        try:
            turn.wait()
        except LaunchError as error:
            ended.append(error)

    waiting = threading.Thread(target=wait, args=(early,))
    waiting.start()

    def fail() -> None:
        raise TimeoutError

    with pytest.raises(TimeoutError):
        conductor.conduct(NUM_STEPS, fail)
    assert not ended
    conductor.close()
    waiting.join(10)
    wait(late)
    assert [str(error).split("\n")[0] for error in ended] == ["The benchmark has ended."] * 2
    early.close()
    late.close()
    with pytest.raises(LaunchError, match="benchmark has ended"):
        Turn(tmp_path, "two", 0)


def test_rank_that_does_not_end_its_step_is_named(tmp_path) -> None:
    conductor = Conductor(tmp_path, {"two": 2}, 0.1)
    turn = Turn(tmp_path, "two", 1)
    os.write(turn._done, b"two.1\n")
    with pytest.raises(LaunchError, match=r"No end of a step within 0.1 s: two\.0 \(arm\.rank\)"):
        conductor.conduct(NUM_STEPS, lambda: None)
    turn.close()
    conductor.close()


@pytest.mark.parametrize("ends", ["raise SystemExit(3)", ""])
def test_arm_that_fails_ends_the_others(monkeypatch, tmp_path, capsys, ends) -> None:
    for name, code in (("ours", "import time; time.sleep(600)"), ("torchrun", f"print('its reason'); {ends}")):
        command = [sys.executable, "-c", code]
        monkeypatch.setitem(ARMS, name, Arm(name, "planted", lambda _, command=command: command))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    begin_s = time.monotonic()
    code = main.main(["bench", "--device", "cpu", "--arms", "ours,torchrun", "--interleave", "steps"])
    assert time.monotonic() - begin_s < 20
    captured = capsys.readouterr()
    assert (code, captured.out) == (1, "")
    assert "The arm torchrun (planted) " in captured.err
    assert "| its reason" in captured.err
    assert list(tmp_path.iterdir()) == []
    assert orphans(str(tmp_path)) == []
