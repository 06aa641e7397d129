"""Wrappers over `Trainer.train`, what callbacks read, change and decide, loaders of a script's own.

What callbacks decide on one rank, or on ranks at different steps, counts on all of them, or it is said.
"""

from pathlib import Path

import pytest

from tests.helpers.outcome import facts_of
from tests.helpers.run import BARE, finish, run_well, start
from unsloth_multigpu.errors import DivergenceError

SCRIPT = Path(__file__).parent / "scripts" / "ways.py"
TWO_RANKS = {"UNSLOTH_MULTIGPU_NUM_GPUS": "2", **BARE}
OVERRULED = "[rank 1] a callback of rank 1 has set control.should_save, and none of rank 0 did"


def found(folder, rank=0):
    return facts_of(folder / "found")[rank]


def events(of):
    cases = {name: case for name, case in of.items() if isinstance(case, dict) and "events" in case}
    return {name: [*case["events"], case["steps"]] for name, case in cases.items()}


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """The folders of one process and of two ranks, and what these said."""
    one, two = (tmp_path_factory.mktemp(name) for name in ("one", "two"))
    alone = start([SCRIPT, "together"], one, {**BARE, "UNSLOTH_MULTIGPU_NUM_GPUS": "1"})
    run = finish(start([SCRIPT, "together"], two, TWO_RANKS))
    assert run.code == DivergenceError.exit_code, run.err
    assert finish(alone).code == 0
    return one, two, run.err


def test_rank_0s_control_counts_on_all_ranks_and_is_that_of_one_process(trained):
    one, two, _ = trained
    (alone,) = facts_of(one / "found", 1)
    for rank in range(2):
        ours = found(two, rank)
        assert {name: ours[name] for name in events(ours)} == {name: alone[name] for name in events(ours)}
    assert events(found(two)) == {
        "clock-stop": [4],
        "clock-save": [["save", 4], ["save", 8], 8],
        "clock-evaluate": [["evaluate", 4], 8],
        "clock-late": [["save", 3], 8],
        "epoch-stop": [3],
        "log": [["log", 3], 8],
        "evaluate": [["evaluate", 3], 8],
        "drawn": [["evaluate", 3, 0], 8],
        "before-the-end": [["save", 3], 8],
        "chain": [["log", 2], ["evaluate", 2], ["save", 2], 2],
        "epoch-end": [["save", 8], 10],
        "added": [["evaluate", 3], 8],
        "rank-1": [8],
    }
    log = (two / "logs" / "rank_1.log").read_text()
    # The clocks are no reason to warn: rank 0 decided the same, a step later or before.
    assert log.count("none of rank 0 did") == log.count(OVERRULED) == 1


def test_batch_options_change_the_number_of_steps(trained):
    ours = found(trained[1])
    assert (ours["scaled"], ours["by 3"]) == (3, 4)  # Six in one process.


def test_a_training_is_steered_whatever_leads_to_it_or_it_is_said(trained):
    one, two, err = trained
    (line,) = [line for line in err.splitlines() if "train() was ended" in line]
    assert line.startswith("unsloth_multigpu: train() was ended after step 1: DivergenceError: ")
    assert line.endswith("; the script continued without it (exit code 77)")
    ours, (wanted,) = found(two), facts_of(one / "found", 1)
    assert ours == found(two, 1)
    for name in ("plain", "closure"):
        assert ours[name] == wanted[name]
    # Whoever looks sees one process: its data set, its batches, its accumulation.
    for name in ("look", "look at a stream"):
        assert ours[name] == wanted[name]
        assert ours[name]["is the script's"]
        assert ours[name]["behind train()"] == [True, 2]
    assert ours["replaced"]["error"] == "PatchError"
    assert "scripts/ways.py" in ours["replaced"]["text"]
    assert "Let it call the function that it replaces" in ours["replaced"]["text"]
    assert "begins without a call of Trainer.train and is not distributed" in err
    # Such a loop has the batches of one process on each rank.
    assert wanted["own"] == ours["own"] == {"aside": 7, "in its loop": 7}
    changed = "gradient_accumulation_steps was set from 2 to 1 by a callback in on_epoch_end"
    assert changed in ours["changed"]["text"]
    assert "prepared 2 data loaders; expected one.\nHint: Return one DataLoader" in ours["two loaders"]["text"]
    assert ours["past DDP"]["error"] == "DivergenceError"
    assert "The ranks' replicas differ after step 1" in ours["past DDP"]["text"]


@pytest.mark.thorough
def test_ranks_that_step_by_themselves_act_on_rank_0s_decision_when_they_synchronize(tmp_path):
    options = {"UNSLOTH_MULTIGPU_STRATEGY": "local_sgd:every_steps=4"}
    run = run_well([SCRIPT, "apart"], tmp_path, {**TWO_RANKS, **options})
    assert found(tmp_path, 0) == found(tmp_path, 1)
    assert events(found(tmp_path)) == {
        # What callbacks decide counts at the next synchronization; the schedule of the arguments is not moved.
        "alike": [["evaluate", 4], ["save", 4], ["save", 8], 8],
        "rank-1": [8],
        "clock": [8],
        "behind": [["save", 4], 8],
    }
    assert "should_save after step 2 waits for the next synchronization of the ranks" in run.err
    assert OVERRULED in (tmp_path / "logs" / "rank_1.log").read_text()


@pytest.mark.thorough
def test_ranks_wait_for_rank_0s_upload_longer_than_for_a_collective(tmp_path):
    # Nor does the watchdog take the others for hung.
    run_well([SCRIPT, "uploads"], tmp_path, TWO_RANKS)
    assert [facts["uploads"]["steps"] for facts in facts_of(tmp_path / "found")] == [1, 1]
