"""Folders that nothing imports can be deleted: the package is imported and trains on two ranks without each of them."""

import shutil
from pathlib import Path

import pytest

from tests.helpers.run import BARE, ROOT, finish, start

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


@pytest.fixture(scope="module")
def without(tmp_path_factory):
    """What a script prints in a copy of the package without one folder; all of them run at the same time."""
    running = {}
    for name in OUTSIDE:
        folder = tmp_path_factory.mktemp(name)
        left_out = shutil.ignore_patterns("__pycache__", name)
        shutil.copytree(ROOT / "unsloth_multigpu", folder / "unsloth_multigpu", ignore=left_out)
        (folder / "train.py").write_text(TRAIN)
        running[name] = folder, start(["train.py"], folder, {**BARE, "PYTHONPATH": str(folder)})
    return {name: (folder, finish(process)) for name, (folder, process) in running.items()}


@pytest.mark.parametrize("name", OUTSIDE)
def test_package_trains_without_a_folder_that_lies_outside(without, name):
    folder, run = without[name]
    assert run.code == 0, run.err
    assert f"from {folder}/unsloth_multigpu/__init__.py trained 2 on 2" in run.out
    assert not (folder / "unsloth_multigpu" / name).exists()
