"""A plain loop in two ranks of torchrun trains as one process does."""

import json
from pathlib import Path

import pytest
import torch

from tests.dist.scripts.plain import BATCH_SIZE, NUM_EPOCHS, NUM_SAMPLES, train
from tests.helpers.run import BARE, run_python, run_well

SCRIPT = Path(__file__).parent / "scripts" / "plain.py"


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    out = tmp_path_factory.mktemp("plain")
    run = run_well(["-m", "torch.distributed.run", "--nproc-per-node", "2", SCRIPT, out], cwd=out)
    assert "destroy_process_group" not in run.err
    return [json.loads((out / f"plain_{rank}.json").read_text()) for rank in range(2)]


@pytest.fixture(scope="module")
def alone():
    return train(seed=0)


def flat(lists):
    return torch.cat([torch.tensor(values).flatten() for values in lists])


def test_every_rank_is_one_of_a_group_and_begins_with_the_weights_of_rank_0(ranks, alone):
    assert [(r["kind"], r["world_size"]) for r in ranks] == [("DistributedDataParallel", 2)] * 2
    assert ranks[0]["start"] == ranks[1]["start"] == alone[1]


def test_samples_of_each_step_are_those_of_one_process(ranks, alone):
    assert [len(epoch) for epoch in alone[2]] == [-(-NUM_SAMPLES // BATCH_SIZE)] * NUM_EPOCHS
    for left, right, whole in zip(ranks[0]["epochs"], ranks[1]["epochs"], alone[2], strict=True):
        assert [a + b for a, b in zip(left, right, strict=True)] == whole
        assert sorted(i for step in whole for i in step) == list(range(NUM_SAMPLES))
    assert len({str(epoch) for epoch in alone[2]}) == NUM_EPOCHS


def test_weights_are_those_of_one_process(ranks, alone):
    moved = (flat(p.tolist() for p in alone[0].parameters()) - flat(alone[1])).abs().max()
    assert moved > 0.1
    for rank in ranks:
        difference = flat(rank["end"]) - flat(p.tolist() for p in alone[0].parameters())
        assert difference.abs().max() < 1e-5


LEAVES = """
import os, sys
import unsloth_multigpu as ump
ump.enable_multi_gpu(num_gpus=2)
if ump.is_main_process():
    import torch
    if sys.argv[1] == "plain":
        ump.wrap_model_multi_gpu(torch.nn.Linear(2, 2))
    else:
        from accelerate import Accelerator
        Accelerator()
"""


@pytest.mark.parametrize("how", ["plain", pytest.param("accelerate", marks=pytest.mark.thorough)])
def test_rank_that_ends_instead_of_training_ends_the_run(tmp_path, how):
    """The other one would wait for it as long as timeout_s."""
    (tmp_path / "leaves.py").write_text(LEAVES)
    run = run_python(["leaves.py", how], tmp_path, BARE)
    assert run.code == 1
    assert "rank 1 left with exit code 0, while other ranks were waiting for it to begin a training." in run.err
    assert run.seconds < 60
