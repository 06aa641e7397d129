"""How much of the package a rank of an ordinary training loads, and that it needs none of the folders outside."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from tests.helpers.run import PLAIN, ROOT, run_well

SCRIPT = f"""
import json, os, sys
import unsloth_multigpu as ump
ump.enable_multi_gpu(num_gpus=2)
sys.path.insert(0, {str(ROOT / "tests" / "dist" / "scripts")!r})
from peft import LoraConfig, get_peft_model
from tiny_llama import RaggedRows, collate, tiny_llama
from transformers import Trainer, TrainingArguments

model = get_peft_model(tiny_llama(), LoraConfig(r=4, target_modules=["q_proj"]))
arguments = TrainingArguments("out", per_device_train_batch_size=2, max_steps=4, save_steps=2, eval_strategy="steps",
    eval_steps=2, logging_steps=1, report_to=[], disable_tqdm=True)
trainer = Trainer(model=model, args=arguments, train_dataset=RaggedRows(16), eval_dataset=RaggedRows(6),
    data_collator=collate)
trainer.train()
model.save_pretrained("adapter")
trainer.save_model("last")
if os.environ["RANK"] == "0":
    found = {{n: m.__file__ for n, m in sys.modules.items() if n.partition(".")[0] == "unsloth_multigpu"}}
    print(json.dumps(found))
"""
# As measured, rounded up. More of either is a reason to look what is loaded for whom.
MOST_MODULES, MOST_LINES = 85, 14_000
NOT_ASKED_FOR = {"notebook", "shard", "plain"}
# Imported inside functions or by commands only: a plain training needs none of them.
OUTSIDE = ("tools", "recorders", "strategies", "legacy", "federated")


def test_a_rank_of_a_plain_training_loads_what_it_runs(tmp_path: Path) -> None:
    package, ignored = tmp_path / "unsloth_multigpu", shutil.ignore_patterns("__pycache__", *OUTSIDE)
    shutil.copytree(ROOT / "unsloth_multigpu", package, ignore=ignored)
    (tmp_path / "train.py").write_text(SCRIPT)
    run = run_well(["train.py"], tmp_path, {**PLAIN, "PYTHONPATH": str(tmp_path)})
    loaded = json.loads(run.out.strip().splitlines()[-1])
    assert all(Path(file).is_relative_to(package) for file in loaded.values())
    folders = {name.split(".")[1] for name in loaded if "." in name}
    assert folders & NOT_ASKED_FOR == set()
    num_lines = sum(Path(file).read_text(encoding="utf-8").count("\n") for file in loaded.values())
    assert (len(loaded) <= MOST_MODULES, num_lines <= MOST_LINES) == (True, True), (len(loaded), num_lines)
