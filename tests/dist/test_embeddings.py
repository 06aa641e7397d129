"""sentence-transformers on two ranks: the steps of one process, also where a row is compared with all of a batch."""

import json
from pathlib import Path

import numpy as np
import pytest

from tests.helpers.run import hide, run_well
from tests.helpers.tiny import build_tiny

pytest.importorskip("sentence_transformers", reason="sentence-transformers is not installed")
SCRIPT = Path(__file__).parent / "scripts" / "embeddings.py"
HIDDEN = hide("bitsandbytes", "torchao", "triton")


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """What one process and two ranks have logged, and what the ranks have printed."""
    folder, logs = tmp_path_factory.mktemp("embeddings"), []
    model = build_tiny(folder / "model")
    for num_ranks in ("1", "2"):
        out = folder / f"{num_ranks}.json"
        run = run_well([SCRIPT, model, out], folder, {**HIDDEN, "UNSLOTH_MULTIGPU_NUM_GPUS": num_ranks})
        logs.append(json.loads(out.read_text()))
    return *logs, run.err


@pytest.mark.parametrize(
    "loss", ["cosine", "told_late", "ranking", "ranking_whole", "nested", "cached", "softmax", "cross_encoder"]
)
def test_steps_are_those_of_one_process(trained, loss):
    one, two = (logs[loss] for logs in trained[:2])
    assert len(one["steps"]) == 4
    assert [row[1] for row in two["steps"]] == [row[1] for row in one["steps"]]
    assert [row[0] for row in two["steps"]] == pytest.approx([row[0] for row in one["steps"]], rel=1e-5)
    assert two["eval_loss"] == pytest.approx(one["eval_loss"], rel=1e-5)


def test_weights_of_a_loss_are_trained_as_in_one_process(trained):
    one, two = (logs["softmax"]["own"] for logs in trained[:2])
    assert [len(rows) for rows in one] == [3, 3]
    for ours, theirs in zip(two, one, strict=True):
        assert np.array(ours) == pytest.approx(np.array(theirs), rel=1e-4, abs=1e-6)


def test_only_an_uneven_step_is_not_shared(trained):
    said = trained[2]
    assert said.count("each compared with the rows of all ranks") == 3
    assert "12 + 15" in said
    assert said.count("equal gradient") == 8
    assert "not exactly the training of one process" not in said
