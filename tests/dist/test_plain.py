"""A plain loop in two ranks of torchrun trains as one process does."""

from pathlib import Path

import pytest
import torch

from tests.dist.scripts.plain import BATCH_SIZE, NUM_EPOCHS, NUM_SAMPLES, train
from tests.helpers.outcome import facts_of
from tests.helpers.run import BARE, run_python, run_well

SCRIPT = Path(__file__).parent / "scripts" / "plain.py"


def flat(lists):
    return torch.cat([torch.tensor(values).flatten() for values in lists])


def test_weights_and_samples_are_those_of_one_process(tmp_path):
    run = run_well(["-m", "torch.distributed.run", "--nproc-per-node", "2", SCRIPT, tmp_path], cwd=tmp_path)
    assert "destroy_process_group" not in run.err
    ranks = facts_of(tmp_path / "plain")
    model, start, epochs = train(seed=0)
    assert [(r["kind"], r["world_size"], r["launcher"]) for r in ranks] == [
        ("DistributedDataParallel", 2, "torchrun")
    ] * 2
    assert ranks[0]["start"] == ranks[1]["start"] == start

    assert [len(epoch) for epoch in epochs] == [-(-NUM_SAMPLES // BATCH_SIZE)] * NUM_EPOCHS
    assert len({str(epoch) for epoch in epochs}) == NUM_EPOCHS
    for left, right, whole in zip(ranks[0]["epochs"], ranks[1]["epochs"], epochs, strict=True):
        assert [a + b for a, b in zip(left, right, strict=True)] == whole
        assert sorted(i for step in whole for i in step) == list(range(NUM_SAMPLES))

    end = flat(p.tolist() for p in model.parameters())
    assert (end - flat(start)).abs().max() > 0.1
    for rank in ranks:
        assert (flat(rank["end"]) - end).abs().max() < 1e-5


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
