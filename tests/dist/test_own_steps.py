"""Methods of a Trainer that scripts override, on two ranks: the training of one process, or a warning that says why.

Gradient norms and final weights are compared, of one start of ranks for all jobs.
"""

import json
from pathlib import Path

import pytest
from safetensors.torch import load_file

from tests.helpers.run import BARE, run_python

SCRIPT = Path(__file__).parent / "scripts" / "own_steps.py"
AT_ONCE = "do it once a step, in a callback's on_pre_optimizer_step; gradient_accumulation_steps=1 makes it the same"
WHOLE = "Set gradient_accumulation_steps=2 or a multiple of it"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Of both runs."""
    folder = tmp_path_factory.mktemp("own_steps")
    for num_ranks in (1, 2):
        run = run_python([SCRIPT, "--num-gpus", str(num_ranks), "--out", str(folder / str(num_ranks))], folder, BARE)
        # The last training of two ranks is refused, which the script catches.
        assert run.code == (0 if num_ranks == 1 else 69), run.err
    return folder


def facts_of(folder, num_ranks, job):
    return json.loads((folder / str(num_ranks) / f"{job}.json").read_text())


def difference(folder, job):
    """The larger one of the relative differences of gradient norms and of weights."""
    one, two = (facts_of(folder, n, job)["grad_norm"] for n in (1, 2))
    assert one
    norms = max(abs(a - b) / a for a, b in zip(one, two, strict=True))
    one, two = (load_file(folder / str(n) / f"{job}.safetensors") for n in (1, 2))
    distance = sum(float(((one[n].double() - two[n].double()) ** 2).sum()) for n in one)
    return max(norms, (distance / sum(float((w.double() ** 2).sum()) for w in one.values())) ** 0.5)


@pytest.mark.parametrize(
    "job",
    [
        *("divided_mean_4", "divided_mean_3", "divided_tokens_4", "auxiliary_4", "auxiliary_3"),
        *("prepares_tokens", "prepares_labels", "batches", "grows"),
        *("hands_on", "hands_on_tokens", "clips_1", "adversarial_1", "mixes_whole", "mixes_in_last"),
    ],
)
def test_overridden_method_acts_as_in_one_process(folder, job):
    assert difference(folder, job) < 1e-5
    one, two = (facts_of(folder, n, job) for n in (1, 2))
    assert two["loss"] == pytest.approx(one["loss"], rel=3e-4)
    assert two["warnings"] == []


@pytest.mark.parametrize(
    ("job", "way"),
    [
        *((job, AT_ONCE) for job in ("clips_2", "clips_data_2", "adversarial_2")),
        *((job, WHOLE) for job in ("mixes", "mixes_in_place", "selects")),
    ],
)
def test_step_that_ranks_cannot_share_is_announced(folder, job, way):
    (warning,) = facts_of(folder, 2, job)["warnings"]
    assert "this is not exactly the training of one process" in warning
    assert ".training_step" in warning
    assert way in warning
    # Said for a reason: the training is another one.
    assert difference(folder, job) > 1e-5


def test_batches_of_a_script_that_are_not_as_many_are_refused(folder):
    error = facts_of(folder, 2, "fewer_batches")["error"]
    assert "FewerBatches.get_batch_samples() returned 0 batches, and was given 1" in error
    assert "use global_batch='scale'" in error


def test_data_set_that_grows_is_dealt_in_order_from_then_on(folder):
    said = [text for text in facts_of(folder, 2, "grows")["said"] if "the data set has grown" in text]
    assert said == [
        "balance: samples are dealt in order from here on, where one of them is new: the data set has grown: it had 22 "
        "rows when their lengths were read"
    ]
