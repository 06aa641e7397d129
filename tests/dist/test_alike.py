"""What ranks draw, remove and map is as if one process did it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.helpers.outcome import facts_of
from tests.helpers.run import BARE, Finished, run_python, run_well

SCRIPTS = Path(__file__).parent / "scripts"


def test_draws_without_a_seed_are_alike_under_torchrun_and_strings_that_hash_differently_are_told(
    tmp_path: Path,
) -> None:
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    run = run_well([*torchrun, SCRIPTS / "draws.py"], tmp_path, BARE)
    first, second = ({k: v for k, v in rank.items() if k != "set"} for rank in facts_of(tmp_path / "drawn"))
    assert first == second
    assert run.err.count("the ranks hash strings differently") == 1
    assert "PYTHONHASHSEED=0" in run.err


def remove(folder: Path, case: str) -> Finished:
    return run_python([SCRIPTS / "removal.py", case], folder, BARE)


def test_model_that_all_ranks_replace_is_there_whichever_rank_is_late(tmp_path: Path) -> None:
    run = remove(tmp_path, "works")
    assert run.code == 0, run.err
    first, second = facts_of(tmp_path / "facts")
    assert first == second
    assert first["kept"] == [["config.json"]] * 8


@pytest.mark.thorough
def test_model_that_a_rank_has_removed_that_came_too_late_is_an_error(tmp_path: Path) -> None:
    run = remove(tmp_path, "too late")
    assert run.code == 76
    assert "final is gone. Rank 1 came to this save after rank 0 had stopped waiting for it" in run.err
    assert "Hint: Remove old files on rank 0 alone" in run.err
