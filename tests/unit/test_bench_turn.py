"""Arms that take turns: one computes at a time, and nobody waits for one that is gone."""

from __future__ import annotations

import itertools
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.helpers.run import orphans
from unsloth_multigpu.cli import main
from unsloth_multigpu.errors import LaunchError
from unsloth_multigpu.tools.bench.arm import ARMS, Arm
from unsloth_multigpu.tools.bench.turn import Turn, run_together

NUM_STEPS = 3
RANKS = {"one": 1, "two": 2}


def train(folder, arm, rank, did, meet):
    turn = Turn(str(folder), arm, rank)
    turn.wait()
    for step in range(NUM_STEPS):
        did.append((arm, step, "begin"))
        meet.wait(10)  # Both ranks of an arm compute at once.
        did.append((arm, step, "end"))
        turn.wait()


def in_threads(num_ranks, rank):
    """Runs `rank` as often as there are ranks; the first error of one is raised."""
    with ThreadPoolExecutor(num_ranks) as pool:
        for one in [pool.submit(rank, number) for number in range(num_ranks)]:
            one.result()


def test_one_arm_computes_at_a_time_and_another_is_first_in_each_step(tmp_path) -> None:
    did: list[tuple[str, int, str]] = []

    def run(arm, check):
        meet = threading.Barrier(RANKS[arm])
        in_threads(RANKS[arm], lambda rank: train(tmp_path, arm, rank, did, meet))
        check()
        return arm.upper()

    assert run_together(RANKS, NUM_STEPS, tmp_path, 10.0, run) == {"one": "ONE", "two": "TWO"}
    assert len(did) == 2 * NUM_STEPS * sum(RANKS.values())
    turns = [turn for turn, _ in itertools.groupby(did, key=lambda what: what[:2])]
    assert turns == [("one", 0), ("two", 0), ("two", 1), ("one", 1), ("one", 2), ("two", 2)]


def test_ranks_hear_that_another_arm_has_failed(tmp_path) -> None:
    heard = []

    def run(arm, check):
        if arm == "one":
            Turn(str(tmp_path), arm, 0)  # Its only rank ends in its first step.
            raise LaunchError("its reason", hint="Look.")
        with pytest.raises(LaunchError, match="benchmark has ended"):
            in_threads(2, lambda rank: train(tmp_path, arm, rank, [], threading.Barrier(2)))
        heard.append(arm)

    with pytest.raises(LaunchError, match="its reason"):
        run_together(RANKS, NUM_STEPS, tmp_path, 10.0, run)
    assert heard == ["two"]
    with pytest.raises(LaunchError, match="benchmark has ended"):
        Turn(str(tmp_path), "two", 0)


def test_arm_that_fails_ends_the_others(monkeypatch, tmp_path, capsys) -> None:
    for name, code in (("ours", "import time; time.sleep(600)"), ("torchrun", "raise SystemExit('its reason')")):
        command = [sys.executable, "-c", code]
        monkeypatch.setitem(ARMS, name, Arm(name, "planted", launcher=lambda _, command=command: command))
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
