"""The notebooks of examples/, run whole in empty folders by the tools that run notebooks, and beside torchrun."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path

import nbformat
import pytest
import torch
from nbclient import NotebookClient
from nbformat import NotebookNode
from nbformat.v4 import new_code_cell

from tests.helpers.notebook import kernel_environment, oldest_ipython
from tests.helpers.run import LIGHT, ROOT, Finished, run_python, run_well
from tests.helpers.tiny import build_tiny, topics

EXAMPLES = ROOT / "examples"
NOTEBOOKS = ("notebook", "notebook_kaggle")
# The cell that installs has nothing to do here. If it had, pip should not change the environment of the tests.
NO_PIP = {"PIP_NO_INDEX": "1"}
# Costs are measured, and two runs would group the samples of a step in different ways.
TWO_RANKS = {
    **NO_PIP,
    "UNSLOTH_MULTIGPU_NUM_GPUS": "2",
    "UNSLOTH_MULTIGPU_BALANCE": "off",
}
# Stands after the training, in the notebook and in the script that is made of it.
LOOK = """
import json, pathlib, torch
import torch.distributed as dist

def trained_weights():
    return torch.cat([p.detach().float().flatten().cpu() for p in model.parameters() if p.requires_grad])

weights = trained_weights()
of_ranks = [torch.empty_like(weights) for _ in range(dist.get_world_size())]
dist.all_gather(of_ranks, weights)
assert len(of_ranks) == 2
assert torch.equal(of_ranks[0], of_ranks[1])
if dist.get_rank() == 0:
    torch.save(weights, "weights.pt")
    pathlib.Path("history.json").write_text(json.dumps(trainer.state.log_history))
"""
# Stands at the end of the notebook, where the kernel is alone.
ALONE = """
assert not dist.is_initialized()
assert not ump.is_multi_gpu_enabled()
assert torch.equal(trained_weights(), weights)
import IPython
IPython.__version__
"""


# Runs a cell in the shell of a kernel, for which the package is not installed.
RUN_WITHOUT_THE_PACKAGE = """
import sys
from pathlib import Path
from IPython.core.interactiveshell import InteractiveShell

sys.path[:] = [place for place in sys.path if not (Path(place) / "unsloth_multigpu").is_dir()]
InteractiveShell.instance().run_cell(Path(sys.argv[1]).read_text()).raise_error()
"""


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_notebook_is_kept_without_what_a_run_leaves(name: str) -> None:
    notebook = nbformat.read(EXAMPLES / f"{name}.ipynb", as_version=4)
    nbformat.validate(notebook)
    assert notebook.metadata == {
        "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
        "language_info": {"name": "python"},
    }
    for cell in notebook.cells:
        assert set(cell.metadata) <= {"tags"}
        assert cell.cell_type == "markdown" or (cell.outputs == [] and cell.execution_count is None)


def test_notebooks_begin_with_the_same_cell_that_installs() -> None:
    cells = [[c for c in example(name).cells if c.cell_type == "code"] for name in NOTEBOOKS]
    assert {of_one[0].id for of_one in cells} == {"install"}
    assert len({of_one[0].source for of_one in cells}) == 1


def run_install_cell(folder: Path, cwd: Path, env: Mapping[str, str]) -> Finished:
    (cell,) = [cell for cell in example("notebook").cells if cell.id == "install"]
    (folder / "cell.py").write_text(cell.source)
    (folder / "run.py").write_text(RUN_WITHOUT_THE_PACKAGE)
    return run_python([folder / "run.py", folder / "cell.py"], cwd, {"IPYTHONDIR": str(folder), **NO_PIP, **env})


def test_install_cell_calls_pip_where_the_package_is_missing(tmp_path: Path) -> None:
    stand_in = tmp_path / "stand_in"
    stand_in.mkdir()
    (stand_in / "pip.py").write_text("import os, sys\nprint('asked:', os.getcwd(), sys.argv[1:])")
    run = run_install_cell(tmp_path, EXAMPLES, {"PYTHONPATH": str(stand_in)})
    assert run.code == 0, run.err
    # What follows "unsloth" is the business of tests/unit/test_package.py.
    assert f"asked: {EXAMPLES} ['install', '-q', 'unsloth', " in run.out


def test_install_cell_shows_why_pip_has_failed(tmp_path: Path) -> None:
    folder = tmp_path / "empty"
    folder.mkdir()
    run = run_install_cell(tmp_path, folder, {})
    assert "ERROR: " in run.out + run.err


def example(name: str) -> NotebookNode:
    return nbformat.read(EXAMPLES / f"{name}.ipynb", as_version=4)


def add_after(notebook: NotebookNode, cell_id: str, source: str) -> None:
    place = [cell.id for cell in notebook.cells].index(cell_id)
    notebook.cells.insert(place + 1, new_code_cell(source))


def output_of(notebook: NotebookNode, cell_id: str) -> str:
    """What a cell printed and displayed as text."""
    (cell,) = [cell for cell in notebook.cells if cell.id == cell_id]
    return "".join(o.get("text") or o.get("data", {}).get("text/plain", "") for o in cell.outputs)


def history_of(folder: Path) -> list[dict[str, float]]:
    rows = json.loads((folder / "history.json").read_text())
    return [
        {name: row[name] for name in ("step", "loss", "grad_norm", "learning_rate")} for row in rows if "loss" in row
    ]


@pytest.mark.thorough
@pytest.mark.slow
@pytest.mark.timeout(400)
def test_notebook_on_the_oldest_ipython_trains_as_torchrun_does(tmp_path: Path) -> None:
    folder, beside = tmp_path / "notebook", tmp_path / "torchrun"
    folder.mkdir()
    beside.mkdir()
    notebook = example("notebook")
    add_after(notebook, "train", LOOK)
    script = "\n".join(c.source for c in notebook.cells if c.cell_type == "code" and c.id != "install")
    notebook.cells.append(new_code_cell(ALONE, id="alone"))

    environment = kernel_environment(folder, {**TWO_RANKS, **LIGHT, **oldest_ipython()})
    client = NotebookClient(notebook, timeout=200, kernel_name="python3", resources={"metadata": {"path": str(folder)}})
    client.execute(env=environment)
    assert output_of(notebook, "alone") == "'7.34.0'"
    trained, reloaded, _ = output_of(notebook, "generate").splitlines()
    assert trained.partition(":")[2].split() == reloaded.partition(":")[2].split()

    (beside / "train.py").write_text(script)
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    run_well([*torchrun, "train.py"], beside, {**TWO_RANKS, **LIGHT})
    steps, steps_beside = history_of(folder), history_of(beside)
    assert len(steps) == 10
    for step, step_beside in zip(steps, steps_beside, strict=True):
        assert step == pytest.approx(step_beside, rel=1e-5)
    weights, weights_beside = (torch.load(path / "weights.pt", weights_only=True) for path in (folder, beside))
    assert float((weights - weights_beside).norm() / weights_beside.norm()) < 1e-5


@pytest.mark.thorough
@pytest.mark.slow
@pytest.mark.timeout(300)
def test_notebook_runs_whole_under_nbconvert(tmp_path: Path) -> None:
    nbformat.write(example("notebook"), tmp_path / "notebook.ipynb")
    command = ["-m", "nbconvert", "--to", "notebook", "--execute", "--output", "done", "notebook.ipynb"]
    run_well(command, tmp_path, TWO_RANKS)
    done = nbformat.read(tmp_path / "done.ipynb", as_version=4)
    assert output_of(done, "install") == ""
    assert "samples per step: 8 = 2 ranks x" in output_of(done, "train")
    # The table below the cell has the last line of rank 1's log, within a line.
    assert output_of(done, "train").count("\n20 steps, mean loss") == 1
    assert "\n0 of 10 counts are right" in output_of(done, "before")
    assert "reloaded: Count: 37 38 39 40 41 42" in output_of(done, "generate")
    (right,) = re.findall(r"\n(\d+) of 10 counts are right", output_of(done, "generate"))
    assert int(right) >= 8
    assert (tmp_path / "outputs/notebook/adapter/adapter_model.safetensors").exists()


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("num_ranks", [2, pytest.param(1, marks=pytest.mark.thorough)])
def test_kaggle_notebook_runs_whole_under_papermill(num_ranks: int, tmp_path: Path) -> None:
    folder, hub = tmp_path / "empty", tmp_path / "hub"
    folder.mkdir()
    hub.mkdir()
    rows = [{"conversations": [{"from": "human", "value": t[:40]}, {"from": "gpt", "value": t}]} for t in topics(48)]
    (hub / "train.jsonl").write_text("\n".join(map(json.dumps, rows)))
    parameters = {
        "MODEL": build_tiny(tmp_path / "model"),
        "LOAD_IN_4BIT": False,
        "DATASET": str(hub),
        "NUM_ROWS": 40,
        "MAX_LENGTH": 256,
        "MAX_STEPS": 2,
        "OPTIM": "adamw_torch",
    }
    (tmp_path / "parameters.yaml").write_text(json.dumps(parameters))  # JSON is YAML.
    files = ["-f", tmp_path / "parameters.yaml", EXAMPLES / "notebook_kaggle.ipynb", tmp_path / "done.ipynb"]
    run_well(["-m", "papermill", *files], folder, {**(TWO_RANKS if num_ranks == 2 else NO_PIP), **LIGHT})
    done = nbformat.read(tmp_path / "done.ipynb", as_version=4)
    assert output_of(done, "install") == ""
    if num_ranks == 2:
        assert "samples per step: 16 = 2 ranks x" in output_of(done, "train")
    else:
        # As on Colab's one GPU: the line says so, and the cells hold.
        assert "this process trains alone" in output_of(done, "enable")
    assert "2 steps in " in output_of(done, "train")
    assert (folder / "llama_lora" / "adapter_model.safetensors").exists()
