"""A Trainer that has changed below us: an error that names the seam, never a training that nothing steers."""

from pathlib import Path

import pytest

from tests.helpers.run import BARE, run_python

SCRIPT = Path(__file__).parent / "scripts" / "other_transformers.py"


@pytest.mark.parametrize(
    ("num_ranks", "old", "new", "named"),
    [
        (1, "_maybe_log_save_evaluate", "_log_save_and_evaluate", ["_maybe_log_save_evaluate", "no such method"]),
        pytest.param(
            1,
            "self.accelerator.clip_grad_norm_(",
            "nn.utils.clip_grad_norm_(",
            ["clip_grad_norm_", "was not called"],
            marks=pytest.mark.thorough,
        ),
        (
            2,
            "self.compute_loss(model, inputs",
            "Trainer.compute_loss(self, model, inputs",
            ["compute_loss", "not called"],
        ),
        pytest.param(
            1,
            "epoch_iterator: Iterator, num_batches",
            "iterator: Iterator, num_batches",
            ["no parameter epoch_iterator"],
            marks=pytest.mark.thorough,
        ),
    ],
)
def test_seam_that_has_moved_is_an_error_that_names_it(tmp_path, num_ranks, old, new, named):
    run = run_python([SCRIPT, num_ranks, old, new], tmp_path, BARE)
    assert run.code != 0, run.err
    assert "PatchError: " in run.err
    message = run.err.partition("PatchError: ")[2]
    for text in (*named, "(transformers 5." if "clip" not in old else "(accelerate 1.", "docs/compatibility.md"):
        assert text in message, message
