"""What goes wrong inside a step, or between the ranks: what the user reads, and what the weights are then.

Ranks whose weights differ are stopped at the next check.
"""

from importlib.metadata import version
from pathlib import Path

import pytest
import torch

from tests.helpers.outcome import facts_of
from tests.helpers.run import BARE, PLAIN, finish, free_port, run_python, start

NUM_STEPS = 6
SCRIPT = Path(__file__).parent / "scripts" / "messages.py"


@pytest.fixture(scope="module")
def trainings(tmp_path_factory):
    """Several in one process group. The last one ends the run."""
    folder = tmp_path_factory.mktemp("messages")
    jobs = "raise skip without gradient version same_stream alone divided drifting clamped clamped_refused part"
    jobs = f"{jobs} start scale flip last_step no_hook fp16_hook memory"
    run = run_python([SCRIPT, *jobs.split()], folder, PLAIN)
    return folder, run


def seen(folder, name):
    """Both ranks' facts and weights."""
    return facts_of(folder / name), [torch.load(folder / f"{name}_{rank}.pt", weights_only=True) for rank in range(2)]


def test_loss_that_is_no_number_ends_all_ranks_with_the_weights_of_the_step_before(trainings):
    folder, _ = trainings
    facts, weights = seen(folder, "raise")
    for fact, weight in zip(facts, weights, strict=True):
        assert fact["error"].startswith(
            "NonFiniteGradientError: step 3: gradient norm is nan; loss of rank 1, micro-batch 0, was nan.\nHint: "
        )
        assert fact["checkpoints"] == ["checkpoint-1", "checkpoint-2"]
        assert fact["num_steps"] == 2
        assert torch.equal(weight["now"], weights[0]["steps"][1])


def test_skipped_step_is_as_if_its_samples_were_not_there(trainings):
    folder, run = trainings
    (facts, _), skipped = seen(folder, "skip")
    _, without = seen(folder, "without")
    assert facts["num_steps"] == 6
    for weight in skipped:
        assert torch.equal(weight["now"], without[0]["now"])
        assert torch.equal(weight["steps"][2], weight["steps"][1])
        assert not torch.equal(weight["steps"][3], weight["steps"][2])
    line = "step 3: gradient norm is nan; loss of rank 1, micro-batch 0, was nan: left out on all ranks (1 so far)"
    assert run.err.count(line) == 1
    assert line not in (folder / "logs" / "rank_1.log").read_text()


def test_streams_of_one_length_go_on_in_the_next_epoch(trainings):
    folder, _ = trainings
    assert [facts["num_steps"] for facts in seen(folder, "same_stream")[0]] == [8, 8]


NOT_A_NUMBER = "NonFiniteGradientError: step 2: gradient norm is nan; "
OTHER_ROWS = "DivergenceError: The ranks' replicas differ after step {}: rows of the stream: rank 0 has "


@pytest.mark.parametrize(
    ("name", "begin", "also", "num_steps"),
    [
        (
            "gradient",
            f"{NOT_A_NUMBER}all losses were finite, but not the gradient of model.embed_tokens.weight.\n",
            "",
            1,
        ),
        # Ranks that step by themselves judge their own gradient.
        ("alone", f"{NOT_A_NUMBER}loss of rank {{rank}}, micro-batch 0, was nan.\n", "", 1),
        ("version", "DivergenceError: ", f'version of peft: rank 0 has "{version("peft")}", rank 1 has "9.9".', 0),
        ("divided", OTHER_ROWS.format(1), "split_dataset_by_node", 1),
        ("drifting", OTHER_ROWS.format(4), "split_dataset_by_node", 4),
        (
            "part",
            "SetupError: The data loader has a DistributedSampler with num_replicas=2: it gives each rank a",
            "",
            0,
        ),
        ("clamped_refused", "SetupError: first step: ", "this is not exactly the training of one process", 0),
    ],
)
def test_training_that_is_not_that_of_one_process_ends_on_all_ranks(trainings, name, begin, also, num_steps):
    folder, _ = trainings
    for rank, facts in enumerate(seen(folder, name)[0]):
        assert facts["error"].startswith(begin.format(rank=rank))
        assert also in facts["error"]
        assert facts["num_steps"] == num_steps


ATTENTION = [f"model.layers.0.self_attn.{name}_proj.weight" for name in "qkvo"]


@pytest.mark.parametrize(
    ("plant", "step", "tensors", "since", "num_saved"),
    [
        ("start", 1, ATTENTION, "It is the first check.", 0),
        ("scale", 4, ["lm_head.weight"], "All ranks were equal after step 2.", 0),
        ("flip", 4, ["model.norm.weight"], "All ranks were equal after step 2.", 3),
        # None is due: it is compared when the training ends, behind the log.
        ("last_step", 3, ["model.norm.weight"], "All ranks were equal after step 2.", 0),
    ],
)
def test_rank_with_other_weights_is_named_at_the_next_check(trainings, plant, step, tensors, since, num_saved):
    folder, _ = trainings
    named = f"{len(tensors)} of 12 trainable tensors: {', '.join(tensors)}. {since}"
    for facts in seen(folder, plant)[0]:
        assert facts["error"].startswith(
            f"DivergenceError: The ranks' replicas differ after step {step}: rank 1 differs from rank 0 in {named}"
        )
        assert "Or look for code that changes weights or gradients on one rank only" in facts["error"]
        # Neither its gradient norm is logged nor the state saved that was found to be different.
        assert len(facts["grad_norm"]) == (step if plant == "last_step" else step - 1)
        assert facts["checkpoints"] == [f"checkpoint-{n}" for n in range(1, num_saved + 1)]


def test_gradients_that_a_hook_rounds_are_near_and_not_equal(trainings):
    folder, _ = trainings
    norms = []
    for name in ("no_hook", "fp16_hook"):
        (facts, _), _ = seen(folder, name)
        assert "error" not in facts
        # What DDP was told of the model, in a real training.
        assert (facts["find_unused_parameters"], facts["bucket_view"]) == (False, True)
        assert len(facts["grad_norm"]) == 14
        norms.append(facts["grad_norm"])
    assert norms[1] == pytest.approx(norms[0], rel=2e-3)
    assert norms[1] != norms[0]


def test_hook_that_is_not_linear_is_told(trainings):
    folder, run = trainings
    what = "this is not exactly the training of one process. The step has code of the script's own: "
    assert [facts["num_steps"] for facts in seen(folder, "clamped")[0]] == [NUM_STEPS] * 2
    said = [line for line in run.err.splitlines() if what in line and "a hook on model.embed_tokens.weight" in line]
    assert any("warning: first step: " in line for line in said)


def test_out_of_memory_on_a_rank_says_how_much_and_what_to_set(trainings):
    folder, run = trainings
    assert (
        "unsloth_multigpu: rank 1 failed after step 1: RuntimeError: rank 1 ran out of memory on cpu in micro-batch 0 "
        "of step 2 (2 rows x 2048 tokens): "
    ) in run.err
    assert "Hint: Set max_tokens_per_micro_batch; lower per_device_train_batch_size (now 4)" in run.err
    assert run.code == 1
    assert not (folder / "memory_0.json").exists()


@pytest.mark.thorough
def test_stream_that_ends_earlier_on_a_rank_is_named(tmp_path):
    run = run_python([SCRIPT, "stream"], tmp_path, PLAIN)
    assert (
        "unsloth_multigpu: rank 1 failed after step 5: DivergenceError: rank 1 has no more batches in step 6, but "
        "rank 0 has."
    ) in run.err
    assert run.code == 77


@pytest.mark.thorough
def test_rank_that_trains_on_behind_an_error_waits_for_those_in_the_training_that_has_failed(tmp_path):
    """Without our supervisor. What it sends in the next training, the others would take for gradients of that one."""
    told = {**BARE, "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
    told["MASTER_PORT"] = str(free_port())
    ranks = [start([SCRIPT, "caught"], tmp_path, {**told, "RANK": r, "LOCAL_RANK": r}) for r in "01"]
    first, second = (finish(process) for process in ranks)
    what = "rank 0 to leave the training that has failed on this rank"
    assert f"RankTimeoutError: rank 1 waited 5 seconds for {what}." in second.err, second.err
    assert first.code != 0
    assert second.code == 1
