"""Losses that scripts write, on two and three ranks: the training of one process, or a warning that says it is not.

Shapes are rows x batch size x accumulation. With 23x5x1 each micro-batch is shared, the last step's as well; with
26x4x6 whole micro-batches are dealt, of which the last step has too few.
"""

import math
import re
from pathlib import Path

import pytest

from tests.helpers.outcome import distance, outcome
from tests.helpers.run import BARE, run_python

SCRIPT = Path(__file__).parent / "scripts" / "losses.py"
SHARED, WHOLE = "23x5x1", "26x4x6"
# A batch norm cannot do with one row.
OTHER_SHAPES = {"batch_norm": "24x6x1"}
# Parts of a micro-batch make up its loss, by rows, labels or a sum of weights.
WEIGHED = (
    *("classifier", "class_weights", "ignored_rows", "token_class_weights", "weighted_rows", "attended_mean"),
    *("summed_target", "mean_target"),
)
# They do not.
UNSHARED = ("two_means", "contrastive", "reads_padding", "batch_norm", "flooded", "focal", "questions")
JOBS = [
    *(f"{kind}:{OTHER_SHAPES.get(kind, SHARED)}" for kind in (*WEIGHED, *UNSHARED, "later_another")),
    *(f"{kind}:{WHOLE}" for kind in ("class_weights", *UNSHARED, "router")),
    # Half of the parts have no label, and their mean is no number.
    *("masked:22x2x3", "masked:21x3x1"),
    # Rows of several lengths that are never collated together.
    *("classifier:21x1x4", "class_weights:21x1x4"),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("losses")


def train(folder, num_ranks):
    """Does all jobs when a test first asks for that number of ranks."""
    out = folder / str(num_ranks)
    if not out.exists():
        jobs = ON_THREE if num_ranks == 3 else JOBS
        arguments = ["--num-gpus", num_ranks, "--jobs", ",".join(jobs), "--out", out]
        run = run_python([SCRIPT, *map(str, arguments)], folder, BARE)
        assert run.code == 0, run.err
    return out


def differences(folder, num_ranks, job):
    """Largest relative difference of a gradient norm, and that of the weights."""
    (one, weights), (many, of_ranks) = (outcome(train(folder, n), job) for n in (1, num_ranks))
    norms = zip(one["grad_norm"], many["grad_norm"], strict=True)
    return max(abs(a - b) / max(a, 1e-9) for a, b in norms), distance(weights, of_ranks)


def facts(folder, num_ranks, job):
    return outcome(train(folder, num_ranks), job)[0]


def warnings(folder, num_ranks, job):
    # The buffers of a batch norm have a warning of their own.
    said = [text for level, text in facts(folder, num_ranks, job)["said"] if level == "WARNING"]
    return [text for text in said if "changes buffers" not in text]


# Three ranks share by the same code; a part of the jobs is enough.
ON_THREE = [
    *(f"{kind}:{SHARED}" for kind in ("class_weights", "weighted_rows", "contrastive")),
    *(f"{kind}:{WHOLE}" for kind in ("class_weights", "contrastive", "batch_norm")),
    "masked:22x2x3",
]
EXACT = [job for job in JOBS if job.partition(":")[0] in (*WEIGHED, "masked") or not job.endswith("x1")]


THREE = pytest.param(3, marks=pytest.mark.thorough)


@pytest.mark.parametrize(
    ("job", "num_ranks"),
    [*((job, 2) for job in EXACT), *(pytest.param(job, 3, marks=THREE.marks) for job in ON_THREE if job in EXACT)],
)
def test_known_weighing_and_whole_micro_batches_are_exact(folder, job, num_ranks):
    assert max(differences(folder, num_ranks, job)) < 1e-5
    assert not warnings(folder, num_ranks, job)


@pytest.mark.parametrize(
    ("kind", "num_ranks"), [*((kind, 2) for kind in UNSHARED), pytest.param("contrastive", 3, marks=THREE.marks)]
)
def test_loss_that_cannot_be_shared_is_announced_with_its_size(folder, kind, num_ranks):
    job = f"{kind}:{OTHER_SHAPES.get(kind, SHARED)}"
    (warning,) = warnings(folder, num_ranks, job)
    assert "the gradient differs by" in warning
    assert "this is not exactly the training of one process" in warning
    assert f"Set gradient_accumulation_steps={num_ranks} or a multiple of it" in warning
    # Said for a reason: the training is another one.
    assert max(differences(folder, num_ranks, job)) > 1e-5


def test_loss_that_leaves_its_form_while_it_trains_is_announced_then(folder):
    (warning,) = warnings(folder, 2, f"later_another:{SHARED}")
    assert warning.startswith("step ")
    assert "the gradient differs by" in warning


def test_first_step_is_said_to_be_equal_with_its_time(folder):
    said = [text for _, text in facts(folder, 2, f"class_weights:{SHARED}")["said"]]
    # A line for how samples are dealt, one for the comparison, and one at the end.
    dealt, line, ended = said
    assert re.match(r"samples per step: 5 = .*, dealt in order: the loss is not known as a sum over the tokens", dealt)
    assert ended.startswith("trained ")
    assert re.fullmatch(r"first step: \S+ s as one process, \S+ s on 2 ranks \(\S+ times as fast\), .*", line)
    assert float(line.rpartition("equal gradient, differs by ")[2]) < 1e-5


@pytest.mark.parametrize("num_ranks", [2, THREE])
def test_logged_losses_are_finite_and_those_of_one_process(folder, num_ranks):
    assert all(map(math.isfinite, facts(folder, num_ranks, "masked:22x2x3")["loss"]))
    for job in (f"class_weights:{SHARED}", f"contrastive:{WHOLE}"):
        one, many = (facts(folder, n, job)["loss"] for n in (1, num_ranks))
        assert many == pytest.approx(one, rel=2e-4)
