"""Ranks that share samples, `sequence_parallel`: gradient norms, losses, metrics and weights against one process.

Rows have 5 to 39 tokens, and lengths are no multiple of the ranks. Packed rows begin anew within a sample.
"""

from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.helpers.outcome import assert_trained_as_one, facts_of, outcome
from tests.helpers.run import LIGHT, PLAIN, run_python
from tests.helpers.tiny import build_tiny
from unsloth_multigpu.errors import SetupError

SCRIPT = Path(__file__).parent / "scripts" / "sequence_parallel.py"
JOBS = ["full", "one_kv_head", "packed", "window", *(["lora"] if find_spec("peft") else [])]
REFUSED = {
    "eager": "attn_implementation='eager' is not among the functions of transformers' attention interface",
    "row_mean": "sequence_parallel shares losses that are sums over tokens, but it is not known whether",
}
NEEDS_TRL = pytest.mark.skipif(find_spec("trl") is None, reason="needs trl")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("sequence_parallel")
    build_tiny(path / "model")
    return path


def train(folder, out, jobs, *options, env=PLAIN, code=0):
    """Trains when a test first asks for it; returns what was said."""
    if not (folder / out).exists():
        run = run_python([SCRIPT, folder / "model", folder / out, ",".join(jobs), *options], folder, env)
        assert run.code == code, run.err
        (folder / f"{out}.txt").write_text(run.err)
    return (folder / f"{out}.txt").read_text()


def train_two(folder):
    """Two ranks share each sample. Trainings that are refused come last."""
    jobs = [*JOBS, *REFUSED]
    return train(folder, "two", jobs, "num_gpus=2", "sequence_parallel=2", code=SetupError.exit_code)


def check_alike(folder, one, many, num_ranks, jobs):
    for job in jobs:
        expected, *ranks = assert_trained_as_one(folder / one, folder / many, job, num_ranks, weights=1e-5)
        assert all(found["loss"] == pytest.approx(expected["loss"], rel=1e-5) for found in ranks), job


def test_two_ranks_share_each_sample_and_train_as_one_process(folder):
    train(folder, "one", JOBS, "num_gpus=1")
    told = train_two(folder)
    check_alike(folder, "one", "two", 2, JOBS)
    assert told.count("equal gradient") == len(JOBS)
    assert "samples per step: 4 = 2 samples x 2 accumulation, each on 2 ranks" in told
    assert "20 samples (20 + 0)" in told  # Each counts once.


@pytest.mark.thorough
def test_two_groups_of_two_ranks_and_one_of_four_train_as_one_process(folder):
    train(folder, "one", JOBS, "num_gpus=1")
    told = train(folder, "groups", JOBS, "num_gpus=4", "sequence_parallel=2")
    check_alike(folder, "one", "groups", 4, JOBS)
    assert "samples per step: 4 = 2 ranks x 2 samples x 1 accumulation, each on 2 ranks" in told
    train(folder, "four", JOBS, "num_gpus=4", "sequence_parallel=4")
    check_alike(folder, "one", "four", 4, JOBS)


@NEEDS_TRL
@pytest.mark.thorough
def test_sft_trains_and_logs_as_one_process(folder):
    train(folder, "sft_one", ["sft"], "num_gpus=1", env=LIGHT)
    # The micro-batches of one process: their metrics are means of means.
    train(folder, "sft_two", ["sft"], "num_gpus=2", "sequence_parallel=2", "balance=off", env=LIGHT)
    check_alike(folder, "sft_one", "sft_two", 2, ["sft"])
    one, two = (outcome(folder / out, "sft")[0] for out in ("sft_one", "sft_two"))
    assert two["total_tokens"] == one["total_tokens"] > 0
    for name in ("entropy", "mean_token_accuracy", "num_tokens"):
        expected, found = ([line[name] for line in each["log"] if name in line] for each in (one, two))
        assert found == pytest.approx(expected, rel=1e-5), name
        assert expected, name


@pytest.mark.parametrize("job", REFUSED)
def test_what_cannot_be_shared_is_refused_before_the_first_step(folder, job):
    told = train_two(folder)
    for error, num_steps in facts_of(folder / "two" / job):
        assert REFUSED[job] in error
        assert "Hint: " in error
        assert num_steps == 0
    assert told.count("samples per step") == len(JOBS)
