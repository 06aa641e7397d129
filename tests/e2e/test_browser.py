"""The notebook as a user sees it: JupyterLab in a real browser.

PICTURES=docs/pictures keeps the screenshots that the documentation shows.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from tests.helpers.browser import find_browser, open_browser, prompt_of, serve_lab
from tests.helpers.run import LIGHT, ROOT

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

# They stand before the end of the ranks in the example.
OWN_CELLS = {
    "raise": """\
import torch.distributed as dist

if dist.get_rank() == 1:
    raise ValueError("this text is too long")
dist.barrier()""",
    # After a cell that failed on one rank: the Trainer of before belongs to ranks that are gone.
    "train_long": """\
arguments = SFTConfig("outputs/long", max_steps=100_000, bf16=False, save_strategy="no", report_to="none")
trainer = SFTTrainer(model=model, processing_class=tokenizer, train_dataset=dataset, args=arguments)
trainer.train()""",
    "compare": """\
mine = torch.cat([p.detach().flatten() for p in model.parameters() if p.requires_grad])
rank_0s = mine.clone()
dist.broadcast(rank_0s, 0)
is_equal = torch.tensor(float(torch.equal(mine, rank_0s)))
dist.all_reduce(is_equal)
print(f"{is_equal:g} of {dist.get_world_size()} ranks have rank 0's weights")""",
}


@pytest.mark.thorough
def test_notebook_trains_fails_stops_and_goes_on_in_a_browser(tmp_path: Path) -> None:
    pytest.importorskip("jupyterlab", reason="no JupyterLab: `make browser`")
    browser = find_browser()
    if browser is None:
        pytest.skip("no browser: `make browser` or `apt-get install chromium`, or set CHROMIUM to the path of one")
    pictures = Path(os.environ.get("PICTURES", tmp_path))
    cells = write_notebook(tmp_path)
    env = {"PYTHONPATH": str(ROOT), "PIP_NO_INDEX": "1", "UNSLOTH_MULTIGPU_NUM_GPUS": "2", **LIGHT}
    with open_browser(browser, tmp_path) as notebook, serve_lab(tmp_path, env) as address:
        notebook.open(address.format("notebook.ipynb"))

        notebook.choose("run-all-cells")
        trained = notebook.wait_for(cells["train"], 120.0)
        assert "[20/20" in trained
        assert "20 steps, mean loss " in trained
        # What rank 1 displays and prints as well is shown once.
        assert notebook.output(cells["train"], "querySelectorAll('progress').length") == 1
        assert notebook.output(cells["train"], "querySelectorAll('tbody tr').length") == 10
        assert trained.count("samples per step: 8 = 2 ranks x 4 samples x 1 accumulation") == 1

        error = notebook.wait_for(cells["raise"], 20.0)
        assert "rank 1 raised ValueError: this text is too long" in error
        assert "site-packages" not in error  # Where rank 0 waited for rank 1 explains nothing.
        # As on one GPU, an error ends Run All.
        notebook.wait(f"{prompt_of(cells['train_long'])} == '[ ]:'", 10.0)
        before = [notebook.output(cells[name]) for name in ("enable", "model", "train", "save")]
        assert "Traceback" not in "".join(before)
        notebook.take_picture(cells["train"], pictures / "notebook_training.png")
        notebook.take_picture(cells["raise"], pictures / "notebook_error.png")

        notebook.choose("run-cell", cells["train_long"])
        notebook.wait("[...document.querySelectorAll('progress')].some(bar => bar.max > 1000 && bar.value > 1)", 30.0)
        notebook.choose("interrupt-kernel")
        assert "KeyboardInterrupt" in notebook.wait_for(cells["train_long"], 20.0)

        notebook.choose("run-cell", cells["compare"])
        assert "2 of 2 ranks have rank 0's weights" in notebook.wait_for(cells["compare"], 20.0)

        notebook.choose("run-all-below", cells["disable"])
        assert "reloaded: " in notebook.wait_for(cells["generate"], 60.0)


def write_notebook(folder: Path) -> dict[str, int]:
    """Writes the example with the cells of this test, and returns where each cell is."""
    notebook = json.loads((ROOT / "examples" / "notebook.ipynb").read_text())
    (end,) = [number for number, cell in enumerate(notebook["cells"]) if cell["id"] == "disable"]
    own = [{**notebook["cells"][end], "id": name, "source": source} for name, source in OWN_CELLS.items()]
    notebook["cells"][end:end] = own
    (folder / "notebook.ipynb").write_text(json.dumps(notebook))
    return {cell["id"]: number for number, cell in enumerate(notebook["cells"])}
