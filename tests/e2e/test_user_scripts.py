"""Two notebooks as users export them: with the plugin's line they do, on two ranks, what they do without it."""

from __future__ import annotations

import importlib.util
import json
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.helpers.run import LIGHT, ROOT, Finished, finish, start
from tests.helpers.tiny import build_tiny, preference_rows, topics

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

SCRIPTS = Path(__file__).parent / "scripts"
TOLERANCE = 1e-4  # Measured: 4e-7.
HAS_MATPLOTLIB = importlib.util.find_spec("matplotlib") is not None


@dataclass(frozen=True)
class Case:
    """A script, what it prints once, the folders it saves, and the optimizer steps in its histories."""

    script: str
    printed: tuple[str, ...]
    saved: tuple[str, ...]
    histories: dict[str, int]


ALPACA = Case(
    script="alpaca_notebook.py",
    printed=(
        "Rows to train on: 43",
        "Training took ",
        "Answer of the trained model: ",
        "Saved with rank 16 in 6 files",
        "The reloaded model says the same",
        "Checkpoints: ['checkpoint-4', 'checkpoint-6']",
        "Plotted True" if HAS_MATPLOTLIB else "No matplotlib, no plot",
    ),
    saved=("lora_model/adapter_model", "outputs/final/adapter_model", "merged_model/model"),
    histories={"history.json": 6},  # 43 rows are 5 whole steps of 8 and one of 3.
)
CHAT = Case(
    script="chat_notebook.py",
    printed=(
        "First conversation: ",
        "Tokens that count in row 5: ",
        "Answer after SFT: ",
        "Answer after DPO: ",
        "Base model of the saved adapter: tiny_llama",
    ),
    saved=("chat_model/adapter_model", "dpo_model/adapter_model"),
    histories={"history_sft.json": 6, "history_dpo.json": 5},  # 18 pairs are 4 whole steps of 4 and one of 2.
)


@dataclass(frozen=True)
class Runs:
    """The same script as one process and on two ranks, each in a folder of its own."""

    case: Case
    one: Path
    two: Path
    one_process: Finished
    two_ranks: Finished


@pytest.fixture(
    scope="module", params=[ALPACA, pytest.param(CHAT, marks=pytest.mark.thorough)], ids=lambda case: case.script
)
def runs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Runs:
    case = request.param
    folders = [tmp_path_factory.mktemp(name) for name in ("one", "two")]
    for folder in folders:
        put_model_and_data(folder)
    # Without a GPU on every machine: Unsloth would train in bf16 there, and one GPU cannot hold two ranks.
    script, env = SCRIPTS / case.script, {"PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""}
    # Libraries that are only installed are in the ranks of one case.
    one = start([script, "--plain"], cwd=folders[0], env={**env, **LIGHT})
    two = start([script], cwd=folders[1], env={**env, **({} if case is ALPACA else LIGHT)})
    return Runs(case, *folders, finish(one), finish(two))


def put_model_and_data(folder: Path) -> None:
    build_tiny(folder / "tiny_llama")
    texts = [text.split() for text in topics(43, max_words=40)]
    halves = [(" ".join(words[:4]), " ".join(words[4:])) for words in texts]
    data = {
        "alpaca": [{"instruction": "Continue the text.", "input": start, "output": rest} for start, rest in halves],
        "chats": [
            {
                "conversations": [
                    {"from": "human", "value": f"What comes after: {start}"},
                    {"from": "gpt", "value": rest},
                ]
            }
            for start, rest in halves
        ],
        "preferences": preference_rows(18),
    }
    for name, rows in data.items():
        (folder / f"{name}.json").write_text(json.dumps(rows))


def test_notebook_ends_well(runs: Runs) -> None:
    for run in (runs.one_process, runs.two_ranks):
        assert run.code == 0, f"{run.out[-2000:]}\n{run.err[-4000:]}"


def test_notebook_has_the_gradient_norms_of_one_process(runs: Runs) -> None:
    for name, num_steps in runs.case.histories.items():
        one, two = (json.loads((folder / name).read_text()) for folder in (runs.one, runs.two))
        assert len(one) == len(two) == num_steps
        for what in ("grad_norm", "loss"):
            assert [row[what] for row in two] == pytest.approx([row[what] for row in one], rel=TOLERANCE), (name, what)


def test_notebook_prints_once(runs: Runs) -> None:
    for text in runs.case.printed:
        assert runs.one_process.out.count(text) == 1, text
        assert runs.two_ranks.out.count(text) == 1, text
        # The other rank came as far, and said so in its log.
        assert (runs.two / "logs" / "rank_1.log").read_text(errors="replace").count(text) == 1, text


def test_notebook_leaves_the_files_of_one_process(runs: Runs) -> None:
    for file in runs.case.saved:
        one, two = ((folder / f"{file}.safetensors").stat().st_size for folder in (runs.one, runs.two))
        assert one == two > 0, file
    assert (runs.two / "loss.png").exists() == (HAS_MATPLOTLIB and runs.case is ALPACA)
    left = [sorted(path.name for path in folder.iterdir() if path.name != "logs") for folder in (runs.one, runs.two)]
    assert left[0] == left[1]
