"""Folders that nothing imports can be deleted: two ranks train without them, and a tool needs no other."""

import shutil
from pathlib import Path

import pytest

from tests.helpers.run import BARE, ROOT, run_python

SCRIPTS = Path(__file__).parent / "scripts"
OUTSIDE = ("tools", "strategies", "legacy", "federated")
TRAIN = f"""
import sys
import unsloth_multigpu as ump
ump.enable_multi_gpu(num_gpus=2)
sys.path.insert(0, {str(SCRIPTS)!r})
from tiny_llama import RaggedRows, collate, tiny_llama
from transformers import Trainer, TrainingArguments
args = TrainingArguments("out", max_steps=2, report_to=[], disable_tqdm=True, save_strategy="no")
trainer = Trainer(tiny_llama(), args, train_dataset=RaggedRows(8), data_collator=collate)
trainer.train()
print("from", ump.__file__, "trained", trainer.state.global_step, "on", args.world_size)
"""


def copied(folder, *left_out):
    """A copy of the package without folders of these names."""
    ignored = shutil.ignore_patterns("__pycache__", *left_out)
    shutil.copytree(ROOT / "unsloth_multigpu", folder / "unsloth_multigpu", ignore=ignored)
    return {**BARE, "PYTHONPATH": str(folder)}


def test_package_trains_without_the_folders_that_lie_outside(tmp_path):
    env = copied(tmp_path, *OUTSIDE)
    (tmp_path / "train.py").write_text(TRAIN)
    run = run_python(["train.py"], tmp_path, env)
    assert run.code == 0, run.err
    assert f"from {tmp_path}/unsloth_multigpu/__init__.py trained 2 on 2" in run.out
    assert not [name for name in OUTSIDE if (tmp_path / "unsloth_multigpu" / name).exists()]


# Every module that is left is imported. Matplotlib, Flower and nvidia-ml-py are there where the tests run.
IMPORT_ALL = """
import importlib, pkgutil, sys
import unsloth_multigpu.tools as tools
from unsloth_multigpu.cli.main import find_commands
print(*find_commands())
for module in pkgutil.walk_packages(tools.__path__, "unsloth_multigpu.tools."):
    importlib.import_module(module.name)
"""
TOOLS = sorted(path.parent.name for path in (ROOT / "unsloth_multigpu" / "tools").glob("*/__init__.py"))


@pytest.mark.thorough
@pytest.mark.parametrize("name", TOOLS)
def test_tool_can_be_deleted_alone(tmp_path, name):
    env = copied(tmp_path)
    shutil.rmtree(tmp_path / "unsloth_multigpu" / "tools" / name)
    run = run_python(["-c", IMPORT_ALL], tmp_path, env)
    assert run.code == 0, run.err
    assert sorted(run.out.split()) == sorted({"run", *TOOLS} - {name})


@pytest.mark.thorough
def test_forecast_needs_no_other_tool(tmp_path):
    env = copied(tmp_path)
    for name in set(TOOLS) - {"forecast"}:
        shutil.rmtree(tmp_path / "unsloth_multigpu" / "tools" / name)
    command = ["-m", "unsloth_multigpu.cli.main", "forecast", "--steps", "6", "--gpus", "2", "--link", "measure"]
    run = run_python([*command, "--", SCRIPTS / "forecast_me.py", "list"], tmp_path, env)
    assert run.code == 0, run.err
    assert "link: this machine's (" in run.out
