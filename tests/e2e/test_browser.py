"""The notebook as a user sees it: JupyterLab in a real browser.

PICTURES=docs/pictures keeps the screenshots that the documentation shows.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.browser import LabNotebook, find_browser, open_browser, serve_lab
from tests.helpers.run import LIGHT, ROOT

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

RAISE_ON_RANK_1 = """\
import torch.distributed as dist

if dist.get_rank() == 1:
    raise ValueError("this text is too long")
dist.barrier()"""
# After a cell that failed on one rank: the Trainer of before belongs to ranks that are gone.
TRAIN_LONG = """\
arguments = SFTConfig("outputs/long", max_steps=100_000, bf16=False, save_strategy="no", report_to="none")
trainer = SFTTrainer(model=model, processing_class=tokenizer, train_dataset=dataset, args=arguments)
trainer.train()"""
COMPARE = """\
mine = torch.cat([p.detach().flatten() for p in model.parameters() if p.requires_grad])
rank_0s = mine.clone()
dist.broadcast(rank_0s, 0)
is_equal = torch.tensor(float(torch.equal(mine, rank_0s)))
dist.all_reduce(is_equal)
print(f"{is_equal:g} of {dist.get_world_size()} ranks have rank 0's weights")"""


@pytest.mark.thorough
def test_notebook_trains_fails_stops_and_goes_on_in_a_browser(tmp_path: Path) -> None:
    browser = find_browser()
    if browser is None:
        pytest.skip("no browser: `make browser` or `apt-get install chromium`, or set CHROMIUM to the path of one")
    pictures = Path(os.environ.get("PICTURES", tmp_path))
    cells = write_notebook(tmp_path)
    env = {"PYTHONPATH": str(ROOT), "PIP_NO_INDEX": "1", "UNSLOTH_MULTIGPU_NUM_GPUS": "2", **LIGHT}
    with open_browser(browser, tmp_path) as page, serve_lab(tmp_path, env) as address:
        notebook = LabNotebook(page, address("notebook.ipynb"))

        notebook.run_all()
        trained = notebook.wait_for(cells["train"], 120.0)
        assert "[20/20" in trained
        assert "20 steps, mean loss " in trained
        # What rank 1 displays and prints as well is shown once.
        assert notebook.count(cells["train"], "progress") == 1
        assert notebook.count(cells["train"], "tbody tr") == 10
        assert trained.count("samples per step: 8 = 2 ranks x 4 samples x 1 accumulation") == 1

        error = notebook.wait_for(cells["raise"], 20.0)
        assert "rank 1 raised ValueError: this text is too long" in error
        assert "site-packages" not in error  # Where rank 0 waited for rank 1 explains nothing.
        assert not notebook.is_run(cells["train long"])  # As on one GPU, an error ends Run All.
        before = [notebook.output(cells[name]) for name in ("enable", "model", "train", "save")]
        assert "Traceback" not in "".join(before)
        notebook.take_picture(cells["train"], pictures / "notebook_training.png")
        notebook.take_picture(cells["raise"], pictures / "notebook_error.png")

        notebook.run(cells["train long"])
        notebook.wait_for_element(cells["train long"], "progress", ".value > 1", 30.0)
        notebook.stop()
        assert "KeyboardInterrupt" in notebook.wait_for(cells["train long"], 20.0)

        notebook.run(cells["compare"])
        assert "2 of 2 ranks have rank 0's weights" in notebook.wait_for(cells["compare"], 20.0)

        notebook.run(cells["disable"], and_all_below=True)
        assert "reloaded: " in notebook.wait_for(cells["generate"], 60.0)


def write_notebook(folder: Path) -> dict[str, int]:
    """Writes the example, with cells of this test before the end of its ranks, and returns where the cells are."""
    notebook = json.loads((ROOT / "examples" / "notebook.ipynb").read_text())
    disable = find_cell(notebook, "ump.disable_multi_gpu(")
    notebook["cells"][disable:disable] = [
        {**notebook["cells"][disable], "id": f"own-{number}", "source": source}
        for number, source in enumerate((RAISE_ON_RANK_1, TRAIN_LONG, COMPARE))
    ]
    (folder / "notebook.ipynb").write_text(json.dumps(notebook))
    texts = {
        "enable": "ump.enable_multi_gpu(",
        "model": "get_peft_model(",
        "train": "result = trainer.train()",
        "save": "model.save_pretrained(",
        "raise": RAISE_ON_RANK_1,
        "train long": TRAIN_LONG,
        "compare": COMPARE,
        "disable": "ump.disable_multi_gpu(",
        "generate": 'print("reloaded:"',
    }
    return {name: find_cell(notebook, text) for name, text in texts.items()}


def find_cell(notebook: dict[str, Any], text: str) -> int:
    sources = ("".join(cell["source"]) if cell["cell_type"] == "code" else "" for cell in notebook["cells"])
    return next(number for number, source in enumerate(sources) if text in source)
