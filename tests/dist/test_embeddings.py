"""sentence-transformers on two ranks: the steps of one process, also where a row is compared with all of a batch."""

from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.helpers.outcome import assert_near, facts_of
from tests.helpers.run import hide, run_well
from tests.helpers.tiny import SMALLEST, build_tiny

pytestmark = pytest.mark.skipif(
    find_spec("sentence_transformers") is None, reason="sentence-transformers is not installed"
)
SCRIPT = Path(__file__).parent / "scripts" / "embeddings.py"
HIDDEN = hide("bitsandbytes", "torchao", "triton")
LOSSES = ["cosine", "ranking", "ranking_whole", "nested", "cached", "softmax", "cross_encoder"]


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """What one process has logged of each loss, what rank 0 of two has, and what the ranks have printed."""
    folder, logs = tmp_path_factory.mktemp("embeddings"), []
    model = build_tiny(folder / "model", **SMALLEST)
    for num_ranks in (1, 2):
        variables = {**HIDDEN, "UNSLOTH_MULTIGPU_NUM_GPUS": str(num_ranks)}
        run = run_well([SCRIPT, model, folder / str(num_ranks), *LOSSES], folder, variables)
        logs.append(facts_of(folder / str(num_ranks), num_ranks)[0])
    return *logs, run.err


@pytest.mark.parametrize("loss", LOSSES)
def test_steps_are_those_of_one_process(trained, loss):
    one, two = (logs[loss] for logs in trained[:2])
    assert len(one["grad_norm"]) == 4
    # SoftmaxLoss has a classifier of its own, which is trained with the model.
    assert [len(rows) for rows in one["own"]] == ([3, 3] if loss == "softmax" else [])
    assert_near(two["own"], one["own"], rel=1e-4)
    assert two["learning_rate"] == one["learning_rate"]
    assert_near([two["grad_norm"], two["eval_loss"]], [one["grad_norm"], one["eval_loss"]], most=1e-12)


def test_only_an_uneven_step_is_not_shared(trained):
    said = trained[2]
    assert said.count("each compared with the rows of all ranks") == 3
    assert "12 + 15" in said
    assert said.count("equal gradient") == len(LOSSES)
    assert "not exactly the training of one process" not in said
