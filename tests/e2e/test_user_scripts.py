"""A notebook as users export it: with the plugin's line it does, on two ranks, what it does without it."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest

from tests.helpers.run import LIGHT, ROOT, Finished, finish, start
from tests.helpers.tiny import build_tiny, topics

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

SCRIPT = Path(__file__).parent / "scripts" / "alpaca_notebook.py"
TOLERANCE = 1e-4  # Measured: 4e-7.
HAS_MATPLOTLIB = importlib.util.find_spec("matplotlib") is not None

PRINTED = (
    "Rows to train on: 43",
    "Training took ",
    "Answer of the trained model: ",
    "Saved with rank 16 in 6 files",
    "The reloaded model says the same",
    "Checkpoints: ['checkpoint-4', 'checkpoint-6']",
    "Plotted True" if HAS_MATPLOTLIB else "No matplotlib, no plot",
)
SAVED = ("lora_model/adapter_model", "outputs/final/adapter_model", "merged_model/model")
NUM_STEPS = 6  # 43 rows are 5 whole steps of 8 and one of 3.


Ended = tuple[Path, Finished]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Ended, Ended]:
    """The same script as one process and on two ranks, each in a folder of its own."""
    folders = [tmp_path_factory.mktemp(name) for name in ("one", "two")]
    for folder in folders:
        put_model_and_data(folder)
    # Without a GPU on every machine: Unsloth would train in bf16 there, and one GPU cannot hold two ranks.
    env = {"PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""}
    # The ranks have all libraries that are installed.
    one = start([SCRIPT, "--plain"], cwd=folders[0], env={**env, **LIGHT})
    two = start([SCRIPT], cwd=folders[1], env=env)
    ended = [finish(process) for process in (one, two)]
    for run in ended:
        assert run.code == 0, f"{run.out[-2000:]}\n{run.err[-4000:]}"
    return (folders[0], ended[0]), (folders[1], ended[1])


def put_model_and_data(folder: Path) -> None:
    build_tiny(folder / "tiny_llama")
    texts = [text.split() for text in topics(43, max_words=40)]
    halves = [(" ".join(words[:4]), " ".join(words[4:])) for words in texts]
    rows = [{"instruction": "Continue the text.", "input": start, "output": rest} for start, rest in halves]
    (folder / "alpaca.json").write_text(json.dumps(rows))


def test_notebook_has_the_gradient_norms_of_one_process(runs: tuple[Ended, Ended]) -> None:
    one, two = (json.loads((folder / "history.json").read_text()) for folder, _ in runs)
    assert len(one) == len(two) == NUM_STEPS
    for what in ("grad_norm", "loss"):
        assert [row[what] for row in two] == pytest.approx([row[what] for row in one], rel=TOLERANCE), what


def test_notebook_prints_once(runs: tuple[Ended, Ended]) -> None:
    # The other rank came as far, and said so in its log.
    said = [*(run.out for _, run in runs), (runs[1][0] / "logs" / "rank_1.log").read_text(errors="replace")]
    for text in PRINTED:
        assert [each.count(text) for each in said] == [1, 1, 1], text


def test_notebook_leaves_the_files_of_one_process(runs: tuple[Ended, Ended]) -> None:
    folders = [folder for folder, _ in runs]
    for file in SAVED:
        one, two = ((folder / f"{file}.safetensors").stat().st_size for folder in folders)
        assert one == two > 0, file
    assert (folders[1] / "loss.png").exists() == HAS_MATPLOTLIB
    left = [sorted(path.name for path in folder.iterdir() if path.name != "logs") for folder in folders]
    assert left[0] == left[1]
