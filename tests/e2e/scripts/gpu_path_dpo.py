"""A user's DPO script over Unsloth's GPU code (see tests/helpers/gpu_path.py).

Without the plugin two ranks fail at the first backward pass, "Expected to mark a variable ready only once": TRL adds a
second adapter, Unsloth's own choice of `find_unused_parameters` is undone, and it checkpoints reentrantly.

    python gpu_path_dpo.py MODEL OUT                                      two ranks, started by the plugin
    python gpu_path_dpo.py MODEL OUT --plain                              one process
    torchrun --nproc-per-node 2 -- gpu_path_dpo.py MODEL OUT --plain      fails

Each rank leaves what it saw in OUT/rank_N.json.
"""

import sys

if "--plain" not in sys.argv:
    import unsloth_multigpu as ump

    ump.enable_multi_gpu(num_gpus=2, device="cpu")

from tests.helpers.gpu_path import activate

activate()

import argparse
import hashlib
import json
import os
from pathlib import Path

from unsloth import FastLanguageModel  # isort: skip  Unsloth wants to come first.
import torch
from datasets import Dataset
from peft import get_peft_model_state_dict
from trl import DPOConfig, DPOTrainer

parser = argparse.ArgumentParser()
parser.add_argument("model")
parser.add_argument("out", type=Path)
parser.add_argument("--plain", action="store_true", help="without the plugin")
parser.add_argument("--batch-size", type=int, default=2)
options = parser.parse_args()

model, tokenizer = FastLanguageModel.from_pretrained(
    options.model, max_seq_length=64, dtype=torch.float32, load_in_4bit=False, device_map="cpu"
)
model = FastLanguageModel.get_peft_model(
    model,
    r=4,
    lora_alpha=8,
    lora_dropout=0,
    target_modules=["q_proj", "v_proj"],
    use_gradient_checkpointing="unsloth",
    random_state=3407,
)
rows = [{"prompt": f"{i}+1=", "chosen": f"{i + 1}", "rejected": "no"} for i in range(4)]
trainer = DPOTrainer(
    model=model,
    processing_class=tokenizer,
    train_dataset=Dataset.from_list(rows),
    args=DPOConfig(
        output_dir=str(options.out / "checkpoints"),
        max_length=32,
        dataset_num_proc=1,
        per_device_train_batch_size=options.batch_size,
        gradient_accumulation_steps=1,
        max_steps=2,
        learning_rate=1e-2,
        warmup_steps=0,
        optim="adamw_torch",
        bf16=False,
        fp16=False,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        seed=11,
    ),
)
trainer.train()

weights = {name: tensor.detach().float() for name, tensor in get_peft_model_state_dict(model).items()}
logs = [entry for entry in trainer.state.log_history if "grad_norm" in entry]
digest = hashlib.sha256(b"".join(weights[name].numpy().tobytes() for name in sorted(weights)))
(options.out / f"rank_{os.environ.get('RANK', '0')}.json").write_text(
    json.dumps(
        {
            "losses": [entry["loss"] for entry in logs],
            "grad_norms": [entry["grad_norm"] for entry in logs],
            "adapter_sum": sum(tensor.double().sum().item() for tensor in weights.values()),
            "adapter_hash": digest.hexdigest(),
            "trainer": type(trainer).__module__,
            "find_unused_parameters": getattr(trainer.model_wrapped, "find_unused_parameters", "no DDP"),
        },
        indent=1,
    )
)
