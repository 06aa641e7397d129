"""Folders that nothing imports can be deleted: two ranks train without them, and a tool needs no other."""

import shutil
from pathlib import Path

from tests.helpers.run import BARE, ROOT, run_well

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
    run = run_well(["train.py"], tmp_path, env)
    assert f"from {tmp_path}/unsloth_multigpu/__init__.py trained 2 on 2" in run.out
    assert not [name for name in OUTSIDE if (tmp_path / "unsloth_multigpu" / name).exists()]
