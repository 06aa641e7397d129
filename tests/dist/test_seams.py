"""A Trainer that has changed below us: an error that names the seam, never a training that nothing steers."""

from pathlib import Path

import pytest

from tests.helpers.outcome import each
from tests.helpers.run import BARE, run_python

SCRIPT = Path(__file__).parent / "scripts" / "other_transformers.py"


# name -> ranks, what stands in the source, what stands in its place, and what the error says of it
SEAMS = {
    "_maybe_log_save_evaluate": (1, "_maybe_log_save_evaluate", "_log_save_and_evaluate", "no such method"),
    "clip_grad_norm_": (1, "self.accelerator.clip_grad_norm_(", "nn.utils.clip_grad_norm_(", "was not called"),
    "compute_loss": (2, "self.compute_loss(model, inputs", "Trainer.compute_loss(self, model, inputs", "not called"),
    "epoch_iterator": (1, "epoch_iterator: Iterator, num", "iterator: Iterator, num", "no parameter epoch_iterator"),
}


@pytest.mark.parametrize("name", each(SEAMS, ["compute_loss", "epoch_iterator"]))
def test_seam_that_has_moved_is_an_error_that_names_it(tmp_path, name):
    num_ranks, old, new, told = SEAMS[name]
    run = run_python([SCRIPT, num_ranks, old, new], tmp_path, BARE)
    assert run.code != 0, run.err
    assert "PatchError: " in run.err
    message = run.err.partition("PatchError: ")[2]
    for text in (name, told, "(transformers 5." if "clip" not in old else "(accelerate 1.", "docs/compatibility.md"):
        assert text in message, message
