"""GRPO and RLOO on ranks that neither the batch nor the accumulation divides by: the training of one process.

Their draws are replaced by completions that depend on the prompt and the place in its group alone. Four ranks share
steps of 6 x 2 and 2 x 6 completions.
"""

import re
from pathlib import Path

import pytest

from tests.helpers.outcome import distance, outcome
from tests.helpers.run import light, run_python
from tests.helpers.tiny import build_tiny

SCRIPT = Path(__file__).parent / "scripts" / "generation.py"
JOBS = ["grpo:6x2:grpo", "grpo:6x2:dapo", "rloo:2x6:"]
SHAPED = "grpo:6x2:bnpo"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("generation")
    build_tiny(path / "model")
    for num_ranks, jobs in ((1, JOBS), (4, [*JOBS, SHAPED])):
        arguments = map(str, [num_ranks, path / "model", path / str(num_ranks), *jobs])
        # TRL's Triton kernel is left out.
        run = run_python([SCRIPT, *arguments], path, light("rich", "triton"))
        assert run.code == 0, run.err
        (path / f"{num_ranks}.txt").write_text(run.err)
    return path


@pytest.mark.parametrize("job", JOBS)
def test_steps_are_those_of_one_process(folder, job):
    (one, weights), (many, of_ranks) = outcome(folder / "1", job), outcome(folder / "4", job)
    assert len(one["grad_norm"]) == 2
    assert many["grad_norm"] == pytest.approx(one["grad_norm"], rel=1e-5)
    assert many["reward"] == pytest.approx(one["reward"], rel=1e-5)
    assert distance(weights, of_ranks) < 1e-6
    assert distance(of_ranks, outcome(folder / "4", job, rank=3)[1]) == 0


def test_shape_and_a_loss_that_depends_on_it_are_said(folder):
    text = (folder / "4.txt").read_text()
    assert "completions per step: 12 = 4 ranks x 3 completions x 1 accumulation" in text
    assert "completions per step: 12 = 4 ranks x 1 completions x 3 accumulation" in text
    assert len(re.findall(r"trained 2 steps in [\d.]+ s, set-up ", text)) == len([*JOBS, SHAPED])
    assert text.count("Grpo: each rank draws completions of its own, so this is another run than on one GPU") == 3
    assert text.count("loss_type='bnpo': it is a mean over the micro-batches") == 1
