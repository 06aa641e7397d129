"""The notebooks of examples/, run whole in empty folders by the tools that run notebooks."""

from __future__ import annotations

import json
import re
from pathlib import Path

import nbformat
import pytest
from nbformat import NotebookNode
from nbformat.v4 import new_code_cell

from tests.helpers.notebook import oldest_ipython
from tests.helpers.run import LIGHT, ROOT, run_well
from tests.helpers.tiny import build_tiny, topics

EXAMPLES = ROOT / "examples"
NOTEBOOKS = ("notebook", "notebook_kaggle")
# The cell that installs has nothing to do here. If it had, pip should not change the environment of the tests.
NO_PIP = {"PIP_NO_INDEX": "1"}
TWO_RANKS = {**NO_PIP, "UNSLOTH_MULTIGPU_NUM_GPUS": "2"}
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


def test_install_cell_calls_pip_where_the_package_is_missing(tmp_path: Path) -> None:
    stand_in = tmp_path / "stand_in"
    stand_in.mkdir()
    (stand_in / "pip.py").write_text("import os, sys\nprint('asked:', os.getcwd(), sys.argv[1:])")
    (cell,) = [cell for cell in example("notebook").cells if cell.id == "install"]
    (tmp_path / "cell.py").write_text(cell.source)
    (tmp_path / "run.py").write_text(RUN_WITHOUT_THE_PACKAGE)
    env = {"IPYTHONDIR": str(tmp_path), **NO_PIP, "PYTHONPATH": str(stand_in)}
    run = run_well([tmp_path / "run.py", tmp_path / "cell.py"], EXAMPLES, env)
    # What follows "unsloth" is the business of tests/unit/test_package.py.
    assert f"asked: {EXAMPLES} ['install', '-q', 'unsloth', " in run.out


def example(name: str) -> NotebookNode:
    return nbformat.read(EXAMPLES / f"{name}.ipynb", as_version=4)


def output_of(notebook: NotebookNode, cell_id: str) -> str:
    """What a cell printed and displayed as text."""
    (cell,) = [cell for cell in notebook.cells if cell.id == cell_id]
    return "".join(o.get("text") or o.get("data", {}).get("text/plain", "") for o in cell.outputs)


@pytest.mark.thorough
@pytest.mark.slow
@pytest.mark.timeout(300)
def test_notebook_runs_whole_under_nbconvert_and_the_oldest_ipython(tmp_path: Path) -> None:
    notebook = example("notebook")
    notebook.cells.append(new_code_cell("import IPython\nIPython.__version__", id="version"))
    nbformat.write(notebook, tmp_path / "notebook.ipynb")
    command = ["-m", "nbconvert", "--to", "notebook", "--execute", "--output", "done", "notebook.ipynb"]
    run_well(command, tmp_path, {**TWO_RANKS, **LIGHT, **oldest_ipython()})
    done = nbformat.read(tmp_path / "done.ipynb", as_version=4)
    assert output_of(done, "version") == "'7.34.0'"
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
