"""Buffers that change while two ranks train: rank 0's count, all ranks have them in the end, and a warning says so."""

from pathlib import Path

import pytest
import torch

from tests.helpers.outcome import outcome
from tests.helpers.run import BARE, run_python

pytestmark = pytest.mark.thorough  # No language model has such buffers.
SCRIPT = Path(__file__).parent / "scripts" / "buffers.py"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("buffers")
    for num_ranks in (1, 2):
        run = run_python([SCRIPT, str(num_ranks), path / str(num_ranks), "whole", "counting"], path, BARE)
        assert run.code == 0, run.err
        (path / f"{num_ranks}.txt").write_text(run.err)
    return path


@pytest.mark.parametrize("job", ["whole", "counting"])
def test_gradients_of_whole_micro_batches_are_those_of_one_process_and_statistics_those_of_rank_0(folder, job):
    (one, before), (two, after) = outcome(folder / "1", job), outcome(folder / "2", job)
    assert two["grad_norm"] == pytest.approx(one["grad_norm"], rel=1e-4)
    # Rank 0 has half of the micro-batches.
    assert before["norm.num_batches_tracked"] == 40
    assert after["norm.num_batches_tracked"] == 20


@pytest.mark.parametrize("job", ["whole", "counting"])
def test_buffers_end_equal_on_all_ranks(folder, job):
    (_, first), (_, second) = (outcome(folder / "2", job, rank) for rank in range(2))
    assert first.keys() == second.keys()
    differ = [name for name in first if not torch.equal(first[name], second[name])]
    assert differ == (["seen"] if job == "counting" else [])  # That of another length on each rank.


def test_buffers_that_change_are_named_once_for_a_training(folder):
    text = (folder / "2.txt").read_text()
    said = [line.partition("as with DDP: ")[2] for line in text.splitlines() if "changes buffers of the model" in line]
    norm = "norm.running_mean"
    assert said == [f"{norm}, norm.running_var, norm.num_batches_tracked, outer.running_mean and 2 more", said[1]]
    assert said[1].startswith("mean, passes, seen, norm.running_mean")
