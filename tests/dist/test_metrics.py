"""What is logged: every number of every line of two ranks against one process.

Jobs are told in scripts/metrics.py. In 17x8x1 the last step has one row, so that a rank computes a filler, in 15x8x1
it has seven; in 26x3x3 ranks share micro-batches and the last step is incomplete.
"""

import math
from pathlib import Path

import pytest

from tests.helpers.outcome import facts_of
from tests.helpers.run import light, run_well
from tests.helpers.tiny import SMALLEST, build_tiny

SCRIPT = Path(__file__).parent / "scripts" / "metrics.py"
# Times, and what is made from them; and what counts padding, of which ranks that share a micro-batch have less.
LEFT_OUT = ("multigpu/", "runtime", "per_second", "preparation_time", "step_time", "total_flos", "tokens_seen")
JOBS = [
    *("sft:17x8x1:end+eval", "kto:26x3x3:1+eval"),
    "sft:17x8x1:1+resume",
    "dpo:15x8x1:1+eval",
    "reward:15x8x1:1+eval",
    "classifier:17x8x1:1+eval",
    "nan:26x3x2:3",
    "grpo:16x8x1:end",
    "own:17x8x1:3",
]
# Means over the tokens, or the rows, of one side are near those of one process where ranks share a micro-batch, see
# docs/your_run.md, and may be so far off here; all lie around zero.
NEAR = {
    "dpo": {"logits/chosen": 1e-3, "logits/rejected": 1e-3, "mean_token_accuracy": 1e-3},
    "kto": {"logits/chosen": 1e-3, "logits/rejected": 1e-3, "rewards/margins": 0.01},
}
PLANNED = "sft:24x4x2:1"
# name -> ranks, jobs
RUNS = {"one": (1, [*JOBS, "sft:24x8x1:1"]), "two": (2, [*JOBS, PLANNED])}


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """What each rank has written of each job, by run and job."""
    folder, found = tmp_path_factory.mktemp("metrics"), {}
    build_tiny(folder / "model", **SMALLEST)
    for name, (num_ranks, jobs) in RUNS.items():
        run_well([SCRIPT, num_ranks, folder / "model", folder / name, *jobs], folder, light("rich", "triton"))
        found[name] = {job: facts_of(folder / name / job.replace(":", "_"), num_ranks) for job in jobs}
    return found


def is_near(first, second, most=5e-6):
    # Rewards are differences of sums of hundreds, and have their rounding.
    if isinstance(first, dict) and isinstance(second, dict):
        return not differences(first, second)
    if not all(isinstance(x, (int, float)) for x in (first, second)):
        return first == second
    near = math.isclose(first, second, rel_tol=1e-4, abs_tol=most)
    return near or (math.isnan(first) and math.isnan(second))


def differences(first, second, but=(), near=None):
    """Keys whose values differ, with both; those of `near` by more than it says."""
    keys = [key for key in {**first, **second} if not any(word in key for word in (*LEFT_OUT, *but))]
    missing = object()
    pairs = {key: (first.get(key, missing), second.get(key, missing)) for key in keys}
    return {key: pair for key, pair in pairs.items() if not is_near(*pair, (near or {}).get(key, 5e-6))}


def assert_same_log(one, many, but=(), near=None):
    lines, others = (facts["state"]["log_history"] for facts in (one, many))
    assert len(lines) == len(others) > 0
    for line, other in zip(lines, others, strict=True):
        assert not differences(line, other, but, near), f"step {line['step']}"
    assert is_near(one["training_loss"], many["training_loss"])
    assert not differences(one["metrics"], many["metrics"], but)
    # Of evaluate() behind the training, which nothing steers.
    assert not differences(one["evaluated"], many["evaluated"], but)


@pytest.mark.parametrize("job", JOBS)
def test_two_ranks_log_what_one_process_logs(runs, job):
    assert_same_log(runs["one"][job][0], runs["two"][job][0], near=NEAR.get(job.partition(":")[0]))


def test_line_of_a_planned_step_has_the_mean_over_its_tokens(runs):
    # As of one process whose step is one micro-batch. The padding of others' micro-batches is not computed.
    # Micro-batches that are not shared, as in the last step, count alike, as in one process.
    near = {"mean_token_accuracy": 5e-4}
    assert_same_log(runs["one"]["sft:24x8x1:1"][0], runs["two"][PLANNED][0], near=near)


def test_ranks_end_with_one_state(runs):
    for job, (first, other) in runs["two"].items():
        assert not differences(first["state"], other["state"], ["process_zero", "log_history"]), job
        assert_same_log(first, other)
        assert first["stateful_callbacks"] == other["stateful_callbacks"], job
        assert first["collected"] == other["collected"], job
