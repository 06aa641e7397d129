"""GRPO and RLOO on ranks that neither the batch nor the accumulation divides by: the training of one process.

Their draws are replaced by completions that depend on the prompt and the place in its group alone. Two ranks deal
2 x 6 completions by length among micro-batches; thorough: four share steps of 6 x 2 and 2 x 6.
"""

import re
from pathlib import Path

import pytest

from tests.helpers.outcome import assert_trained_as_one, distance, each, outcome
from tests.helpers.run import light, run_well
from tests.helpers.tiny import build_tiny

SCRIPT = Path(__file__).parent / "scripts" / "generation.py"
JOBS = ["grpo:6x2:grpo", "grpo:6x2:dapo", "rloo:2x6:"]
SHAPED = "grpo:6x2:bnpo"
DEALT = ["grpo:2x6:grpo", "grpo:2x6:dapo", "grpo:2x6:dr_grpo", "rloo:2x6:"]
# One process shuffles such a generation otherwise than ranks do: it is compared with ranks that keep TRL's order.
OLD = "grpo:2x6:dapo:old"
# Losses that cannot be dealt, with the first step that shows it.
IN_ORDER = {"grpo:2x6:bnpo": 1, "drift:2x6:grpo:old": 2, "third:2x6:grpo:old": 4}
TOOLS = "tools:2x6:grpo"
MISTAKE = "lost:2x6:grpo"
SHARDED = [f"{DEALT[0]}@shard", f"{DEALT[3]}@shard"]
DRAWN = "drawn:2x6:grpo@shard"
# Ranks have other micro-batches than one process, which such a loss depends on.
REFUSED = "grpo:4x3:bnpo@tokens"
# Further losses, in starts of their own.
MORE = [*DEALT[1:3], "drift:2x6:grpo:old"]


def start_ranks(path, name, num_ranks, jobs):
    # TRL's Triton kernel is left out.
    run = run_well([SCRIPT, num_ranks, path / "model", path / name, *jobs], path, light("rich", "triton"))
    (path / f"{name}.txt").write_text(run.err)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("generation")
    build_tiny(path / "model", hidden_size=32, num_layers=1)
    start_ranks(path, "1", 1, without_more(DEALT))
    in_order = without_more(IN_ORDER)
    off, blind = [DEALT[0], OLD, TOOLS, *in_order], [MISTAKE, f"{MISTAKE}@blind"]
    jobs = [*without_more(DEALT), OLD, TOOLS, *in_order, *(f"{job}@off" for job in off), *blind]
    start_ranks(path, "2", 2, [*jobs, REFUSED, *SHARDED, DRAWN])
    return path


def without_more(jobs):
    return [job for job in jobs if job not in MORE]


def places(folder, job):
    """Where one process has trained a job, and where two ranks have."""
    prefix = "more_" if job in MORE else ""
    if prefix and not (folder / "more_1").exists():
        start_ranks(folder, "more_1", 1, [*MORE[:2], *JOBS])
        start_ranks(folder, "more_2", 2, [*MORE, f"{MORE[2]}@off"])
    return folder / f"{prefix}1", folder / f"{prefix}2"


@pytest.mark.thorough
def test_four_ranks_train_as_one_process_and_say_their_shape(folder):
    start_ranks(folder, "4", 4, [*JOBS, SHAPED])
    for job in JOBS:
        one, many, *_ = assert_trained_as_one(places(folder, MORE[0])[0], folder / "4", job, 4)
        assert len(one["grad_norm"]) == 2
        assert many["reward"] == pytest.approx(one["reward"], rel=1e-5)
    text = (folder / "4.txt").read_text()
    assert "completions per step: 12 = 4 ranks x 3 completions x 1 accumulation" in text
    assert "completions per step: 12 = 4 ranks x 1 completions x 3 accumulation" in text
    assert len(re.findall(r"trained 2 steps in [\d.]+ s, of which ", text)) == len([*JOBS, SHAPED])
    assert len(re.findall(r"completions dealt by length: gradient differs by \de-0[678]\n", text)) == len(JOBS)
    assert len(re.findall(r"completions dealt by length: \d+ % of the tokens", text)) == len(JOBS)


def test_shape_and_a_loss_that_depends_on_it_are_said(folder):
    text = (folder / "2.txt").read_text()
    assert "completions per step: 12 = 2 ranks x 2 completions x 3 accumulation" in text
    assert "completions per step: 12 = 2 ranks x 3 completions x 2 accumulation" in text
    assert "Grpo: each rank generates completions, so the run differs from that on one GPU" in text
    assert text.count("loss_type='bnpo': the mean is over the micro-batches") == 1
    assert re.search(r"completions dealt by length: gradient differs by \de-0[678]\n", text)
    assert re.search(r"completions dealt by length: \d+ % of the tokens", text)


@pytest.mark.parametrize("job", each(IN_ORDER, MORE))
def test_loss_of_other_gradient_keeps_the_order_from_the_step_that_shows_it(folder, job):
    out = places(folder, job)[1]
    (found, weights), (in_order, before) = outcome(out, job), outcome(out, f"{job}@off")
    first = IN_ORDER[job]
    text = out.with_suffix(".txt").read_text()
    assert len(re.findall(rf"dealt in order: dealt by length, the gradient of step {first} differs by \d", text)) >= 1
    if first < 4:
        assert found["grad_norm"] == pytest.approx(in_order["grad_norm"], rel=1e-5)
        assert distance(weights, before) < 1e-6
    else:  # Step 3 was dealt before step 4 has shown what it does, and that is said.
        assert found["grad_norm"][:2] == pytest.approx(in_order["grad_norm"][:2], rel=1e-5)
        assert "; steps that were dealt since the last comparison: 1. Set balance='off'." in text
        assert text.count("; not exactly the training of one process: completions dealt by length") == 1


def test_mistake_in_dealing_is_seen_before_the_first_update(folder):
    (found, weights), (in_order, before) = outcome(folder / "2", MISTAKE), outcome(folder / "2", f"{DEALT[0]}@off")
    assert found["grad_norm"] == pytest.approx(in_order["grad_norm"], rel=1e-5)
    assert distance(weights, before) < 1e-6
    assert distance(outcome(folder / "2", f"{MISTAKE}@blind")[1], before) > 1e-4


def test_tokens_asked_for_is_refused_with_the_size(folder):
    refused = "balance='tokens' is not possible: completions are dealt in order: dealt by length, the gradient of"
    for rank in range(2):
        assert refused in (folder / "2" / f"{REFUSED}_{rank}.txt").read_text()


@pytest.mark.parametrize("job", each(DEALT, MORE))
def test_completions_dealt_by_length_have_the_gradient_of_one_process(folder, job):
    one, many, _ = assert_trained_as_one(*places(folder, job), job)
    assert many["reward"] == pytest.approx(one["reward"], rel=1e-5)


@pytest.mark.parametrize("job", [OLD, TOOLS])
def test_log_probabilities_and_masks_move_with_their_completion(folder, job):
    (dealt, weights), (in_order, before) = outcome(folder / "2", job), outcome(folder / "2", f"{job}@off")
    assert len(dealt["grad_norm"]) == (5 if job == OLD else 2)
    assert dealt["grad_norm"] == pytest.approx(in_order["grad_norm"], rel=1e-5)
    assert distance(weights, before) < 1e-6


@pytest.mark.parametrize("job", [DEALT[0], OLD, TOOLS])
def test_dealt_micro_batches_have_the_same_tokens_and_less_padding(folder, job):
    computed, of_tokens = [], []
    for name in (job, f"{job}@off"):
        ranks = [outcome(folder / "2", name, rank=rank)[0]["shapes"] for rank in range(2)]
        assert len({rows for rank in ranks for rows, _, _ in rank}) == 1
        computed.append(sum(rows * width for rank in ranks for rows, width, _ in rank))
        of_tokens.append(sum(tokens for rank in ranks for *_, tokens in rank))
    assert of_tokens[0] == of_tokens[1]
    assert computed[0] - of_tokens[0] < (computed[1] - of_tokens[1]) / 2


@pytest.mark.parametrize("job", SHARDED)
def test_sharded_model_has_the_gradient_of_one_process(folder, job):
    assert_trained_as_one(folder / "1", folder / "2", job, of_one=job.removesuffix("@shard"))
    _, *sharded = (folder / "2.txt").read_text().split("sharded by FSDP2 of accelerate")
    assert len(sharded) == len([*SHARDED, DRAWN])
    assert all(text.count("completions dealt by length: gradient differs by") == 1 for text in sharded)


def test_sharded_ranks_draw_completions_of_other_lengths(folder):
    ranks = [outcome(folder / "2", DRAWN, rank=rank) for rank in range(2)]
    assert len(ranks[0][0]["grad_norm"]) == 2
    assert min(ranks[0][0]["grad_norm"]) > 0
    assert distance(ranks[0][1], ranks[1][1]) == 0
