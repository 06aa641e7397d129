"""What the user's scripts over Unsloth's GPU code have in common. They import it once that code is in place."""

import argparse
import hashlib
import json
import os
from pathlib import Path

from unsloth import FastLanguageModel  # isort: skip  Unsloth wants to come first.
import torch
import torch.distributed as dist
from peft import get_peft_model_state_dict

parser = argparse.ArgumentParser()
parser.add_argument("model")
parser.add_argument("out", type=Path)
parser.add_argument("--plain", action="store_true", help="without the plugin")
parser.add_argument("--shapes", nargs="+", default=[])
options = parser.parse_args()
rank = int(os.environ.get("RANK", "0"))

# Of both trainers' settings.
SETTINGS = {
    "output_dir": str(options.out / "checkpoints"),
    "dataset_num_proc": 1,
    "gradient_accumulation_steps": 1,
    "learning_rate": 1e-2,
    "warmup_steps": 0,
    "optim": "adamw_torch",
    "bf16": False,
    "fp16": False,
    "logging_steps": 1,
    "save_strategy": "no",
    "report_to": "none",
    "seed": 11,
}


def load(folder):
    """Model and tokenizer."""
    return FastLanguageModel.from_pretrained(str(folder), max_seq_length=64, dtype=torch.float32, load_in_4bit=False)


def with_lora(model, *target_modules):
    return FastLanguageModel.get_peft_model(
        model,
        r=4,
        lora_alpha=8,
        lora_dropout=0,
        target_modules=list(target_modules),
        use_gradient_checkpointing="unsloth",
        random_state=3407,
    )


def adapter_weights(model):
    """In float32 on the CPU, and whole: of a sharded model a rank has parts."""
    state = {name: tensor.detach() for name, tensor in get_peft_model_state_dict(model).items()}
    return {name: (t.full_tensor() if hasattr(t, "full_tensor") else t).float().cpu() for name, t in state.items()}


def write_facts(trainer, weights, **more):
    logs = [entry for entry in trainer.state.log_history if "grad_norm" in entry]
    facts = {
        "losses": [entry["loss"] for entry in logs],
        "grad_norms": [entry["grad_norm"] for entry in logs],
        "learning_rates": [entry["learning_rate"] for entry in logs],
        "adapter_hash": hashlib.sha256(
            b"".join(weights[name].numpy().tobytes() for name in sorted(weights))
        ).hexdigest(),
        "trainer": type(trainer).__module__,
        "devices": sorted({str(p.device) for p in trainer.model.parameters()}),
        "backend": str(dist.get_backend()) if dist.is_initialized() else "",
        "find_unused_parameters": getattr(trainer.model_wrapped, "find_unused_parameters", "no DDP"),
        **more,
    }
    (options.out / f"rank_{rank}.json").write_text(json.dumps(facts, indent=1))
