"""Steps with code of the script's own, on two ranks: the training of one process, or a warning with its size.

Gradient norms and final weights are compared, of one start of ranks for all jobs. A job is a kind of code with rows x
batch size x accumulation. With 23x5x1 each micro-batch is shared, the last step's as well; with 26x4x6 whole
micro-batches are dealt, of which the last step has too few.
"""

import itertools
import json
import math
import re
from pathlib import Path

import pytest

from tests.helpers.outcome import distance, each, outcome
from tests.helpers.run import BARE, run_python

SCRIPT = Path(__file__).parent / "scripts" / "own_code.py"
SHARED, WHOLE = "23x5x1", "26x4x6"
AT_ONCE = "do it once a step, in a callback's on_pre_optimizer_step. With gradient_accumulation_steps=1 there"
KEEP_WHOLE = "Set gradient_accumulation_steps={} or a multiple of it"


def jobs(accumulation, *kinds, shape="24x4"):
    return [f"{kind}:{shape}x{accumulation}" for kind in kinds]


EXACT = [
    *jobs(1, "chunks", "by_rate", "curriculum", "by_embeddings", "by_names"),
    *jobs(2, "gathers_by_accelerate", "own_step", "counting", "own_backward", "branches", "tuples"),
    # Parts of a micro-batch make up its loss, by rows, labels, class weights or the sum of an input.
    *(f"{kind}:{SHARED}" for kind in ("class_weights", "token_class_weights", "weighted_rows", "summed_target")),
    *(f"{kind}:{WHOLE}" for kind in ("contrastive", "batch_norm", "router")),
    # Which mean it is shows in step 18.
    "row_means:38x2x1",
    # Half of the parts have no label, and their mean is no number.
    "masked:22x2x3",
    # Rows of several lengths that are never collated together.
    *("class_weights:21x1x4", "ready:24x1x2"),
    # Methods that scripts override.
    *("divided_tokens:32x4x4", "auxiliary:24x4x3", "batches:22x4x3", "grows:22x4x1", "clips:22x4x1"),
    *("prepares_tokens:22x4x1", "mixes_in_place:19x4x2"),
]
# With the step in which it shows, and what the warning advises.
SAID = {
    "counter:24x4x2": (1, AT_ONCE),
    **dict.fromkeys(jobs(1, "gathers_by_accelerate", "batch_norm", "steep"), (1, KEEP_WHOLE.format(2))),
    **{f"{kind}:{SHARED}": (1, KEEP_WHOLE.format(2)) for kind in ("contrastive", "reads_padding")},
    "gathers_by_torch:24x4x2": (1, ""),
    # What DDP's wrapper lacks.
    "by_attribute:24x4x2": (1, ""),
    "changes_form:24x4x1": (9, KEEP_WHOLE.format(2)),
}
LATE, HARD_FIRST = "late:24x4x2", "hard_first:24x4x2"
TIGHT, HEARS, REFUSED, OPAQUE = "tight:24x4x1", "hears:24x4x2", "fewer_batches:22x4x2", "opaque:24x4x2"
# What each draws.
DRAWING = {
    "noisy:24x4x2": "the model or its loss",
    "masks_at_random:24x4x1": "the collator",
    "augmented:24x4x1": "the data set",
    # What it counts is another number on each rank.
    "counted_rows:24x4x1": "the data set",
    "dropout:24x4x1": "dropout",
}
NUM_RANDOM = 6
# Further kinds of what others show, in a start of their own.
MORE = [
    *jobs(1, "by_rate", "curriculum", "by_names", "gathers_by_accelerate", "batch_norm", "counted_rows"),
    *(f"{kind}:{SHARED}" for kind in ("token_class_weights", "weighted_rows")),
    *("class_weights:21x1x4", "divided_tokens:32x4x4", "clips:22x4x1"),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("attacks")


def train(folder, num_ranks, names, num_random):
    """Does jobs in one start of ranks, once."""
    out = folder / str(num_ranks)
    if not out.exists():
        folder.mkdir(exist_ok=True)
        run = run_python([SCRIPT, num_ranks, out, num_random, *names], folder, BARE)
        # A training of two ranks is refused, which the script catches.
        assert run.code == (69 if REFUSED in names else 0), run.err
    return out


def done(folder, num_ranks, job=""):
    if job in MORE:
        return train(folder / "more", num_ranks, MORE, 0)
    names = [name for name in (*EXACT, *SAID, *DRAWING) if name not in MORE]
    names += [TIGHT, HEARS, LATE, HARD_FIRST, *([REFUSED, OPAQUE] if num_ranks > 1 else [])]
    return train(folder, num_ranks, names, NUM_RANDOM)


def facts_of(folder, job, num_ranks=2):
    return outcome(done(folder, num_ranks, job), job)[0]


def difference(folder, job):
    """The larger one of the relative differences of gradient norms and of weights."""
    (one, weights), (many, of_ranks) = (outcome(done(folder, n, job), job) for n in (1, 2))
    assert len(one["grad_norm"]) == len(many["grad_norm"]) > 0
    norms = (abs(a - b) / max(a, 1e-9) for a, b in zip(one["grad_norm"], many["grad_norm"], strict=True))
    return max(*norms, distance(weights, of_ranks))


def warnings(folder, job):
    # The buffers of a batch norm have a warning of their own.
    said = [text for level, text in facts_of(folder, job)["said"] if level == "WARNING"]
    return [text for text in said if "changes buffers" not in text]


@pytest.mark.parametrize("job", each(EXACT, MORE))
def test_code_of_a_script_trains_as_in_one_process(folder, job):
    assert difference(folder, job) < 1e-5
    assert warnings(folder, job) == []
    facts, one = facts_of(folder, job), facts_of(folder, job, 1)
    assert facts["first_step"]["is_exact"]
    assert facts["first_step"]["difference"] < 1e-5
    assert facts["inexact"] == ""
    assert all(map(math.isfinite, facts["loss"]))
    if all(map(math.isfinite, one["loss"])):
        assert facts["loss"] == pytest.approx(one["loss"], rel=3e-4)


@pytest.mark.parametrize("job", each(SAID, MORE))
def test_what_ranks_cannot_share_is_said_in_the_step_where_it_shows(folder, job):
    step, advice = SAID[job]
    warning, *worse = warnings(folder, job)
    sizes = [float(re.search(r"the gradient differs by (\S+)", text)[1]) for text in (warning, *worse)]
    # One that grows is said again.
    assert all(later > 9 * before for before, later in itertools.pairwise(sizes))
    assert len(worse) == job.startswith("gathers_by_torch")
    assert warning.startswith("first step: " if step == 1 else f"step {step}: ")
    assert "the gradient differs by" in warning
    assert "this is not exactly the training of one process" in warning
    assert advice in warning
    facts = facts_of(folder, job)
    assert facts["inexact"] in [warning, *worse][-1]
    assert facts["first_step"]["is_exact"] == (step > 1)
    # Said for a reason.
    assert difference(folder, job) > 1e-5


def test_buffers_that_change_are_named_and_are_those_of_rank_0_on_all_ranks(folder):
    job = f"batch_norm:{WHOLE}"
    first, second = (outcome(done(folder, 2), job, rank)[0] for rank in range(2))
    assert first["buffers"] == second["buffers"]
    # Rank 0 has a part of the micro-batches.
    counts = [facts["buffers"]["reader.num_batches_tracked"] for facts in (first, facts_of(folder, job, 1))]
    assert 0 < counts[0] < counts[1]
    (said,) = [text for _, text in first["said"] if "changes buffers of the model" in text]
    names = ("running_mean", "running_var", "num_batches_tracked")
    assert said.endswith("as with DDP: " + ", ".join(f"reader.{name}" for name in names))


@pytest.mark.parametrize("job", jobs(2, "counter", "counting"))
def test_a_comparison_leaves_the_scripts_own_state_as_it_was(folder, job):
    assert [facts_of(folder, job, n)["num_calls"] for n in (1, 2)] == [12, 6]


@pytest.mark.parametrize("job", each(DRAWING, MORE))
def test_random_numbers_are_equal_in_the_comparison_and_said_to_be_others_in_the_training(folder, job):
    (line,) = [text for _, text in facts_of(folder, job)["said"] if text.startswith("first step: ")]
    assert line.endswith(f"; drawn anew on each rank: {DRAWING[job]}")
    assert facts_of(folder, job)["first_step"]["is_exact"]


def test_what_each_rank_counts_for_itself_is_said_before_it_changes_the_loss(folder):
    assert facts_of(folder, LATE)["first_step"]["is_exact"]
    assert warnings(folder, LATE) == []
    (line,) = [text for _, text in facts_of(folder, LATE)["said"] if text.startswith("first step: ")]
    assert line.endswith("; counted by each rank for itself: Late.first_sum, Late.num_calls")
    assert difference(folder, LATE) > 1e-5  # Said for a reason.
    assert facts_of(folder, "counting:24x4x2")["first_step"]["counts"] == []


def test_sampler_that_reads_what_a_rank_has_noted_is_named(folder):
    (warning,) = warnings(folder, HARD_FIRST)
    assert warning.startswith("HardestRows now gives ranks different orders of samples: ")
    assert facts_of(folder, HARD_FIRST)["inexact"] in warning
    assert difference(folder, HARD_FIRST) > 1e-5  # Said for a reason.


def test_micro_batch_that_one_device_cannot_hold_is_not_compared_and_nothing_is_lost(folder):
    why = "the script's own micro-batch does not fit on one device"
    assert facts_of(folder, TIGHT)["first_step"]["not_compared"] == why
    (warning,) = warnings(folder, TIGHT)
    assert f"not compared with one process: {why}; it is not known how Tight" in warning
    assert difference(folder, TIGHT) < 1e-5  # Its rows have equal weights, so that what is taken for it is right.


def test_callback_that_would_hear_of_micro_batches_is_named(folder):
    assert warnings(folder, HEARS) == [
        "Counts.on_substep_end is not called: a step is one item of the loop, with all its micro-batches. Use "
        "on_step_end or on_pre_optimizer_step, or gradient_accumulation_steps=1."
    ]
    assert facts_of(folder, HEARS)["inexact"].startswith("Counts.on_substep_end is not called")


def test_first_step_is_said_to_be_equal_with_its_time(folder):
    # A line for how samples are dealt, one for the comparison, and one at the end.
    dealt, line, ended = [text for _, text in facts_of(folder, f"class_weights:{SHARED}")["said"]]
    assert re.match(r"samples per step: 5 = .*, dealt in order: the loss may not be a sum over the tokens", dealt)
    assert ended.startswith("trained ")
    assert re.fullmatch(
        r"first step: forward and backward \S+ s as one process, \S+ s on 2 ranks \(\S+ times (as fast|slower)\), .*",
        line,
    )
    assert float(line.rpartition("equal gradient, differs by ")[2]) < 1e-5
    said = [text for _, text in facts_of(folder, "counter:24x4x2")["said"] if text.startswith("trained ")]
    assert "; not exactly the training of one process: first step: " in said[0]


def test_batches_of_a_script_that_are_not_as_many_are_refused(folder):
    error = facts_of(folder, REFUSED)["error"]
    assert "FewerBatches.get_batch_samples() returned 0 batches, and was given 1" in error
    assert "use global_batch='scale'" in error


def test_step_that_ddp_alone_cannot_compute_is_refused_with_the_strategy_that_can(folder):
    error = facts_of(folder, OPAQUE)["error"]
    assert "One process can compute the step, but DDP cannot (Expected to mark a variable ready only once" in error
    assert "strategy='allreduce'" in error


@pytest.mark.parametrize("count", [NUM_RANDOM, pytest.param(1000, marks=pytest.mark.thorough)])
def test_loss_that_is_put_together_at_random_is_exact_or_said(folder, tmp_path, count):
    outs = [done(folder, n) if count == NUM_RANDOM else train(tmp_path, n, [], count) for n in (1, 2)]
    ones, twos = (json.loads((out / "random.json").read_text()) for out in outs)
    pairs = list(zip(ones, twos, strict=True))
    assert len(pairs) == count
    silent = [two["what"] for one, two in pairs if not (two["said"] or two["error"]) and random_off(one, two) > 1e-5]
    assert silent == []
    exact = [two["what"] for one, two in pairs if not two["said"] and random_off(one, two) <= 1e-5]
    assert count / 3 < len(exact) < count
    assert [two["error"] for two in twos if two["error"]] == []


def random_off(one, two):
    norms = [abs(a - b) / max(a, 1e-6) for a, b in zip(one["grad_norm"], two["grad_norm"], strict=True)]
    pairs = list(zip(one["weights"], two["weights"], strict=True))
    size = sum(a * a for a, _ in pairs) ** 0.5
    return max(*norms, sum((a - b) ** 2 for a, b in pairs) ** 0.5 / size)
