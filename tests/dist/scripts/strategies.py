"""Trains the same model under several gradient strategies in one process group, and writes what each did.

Usage: strategies.py NUM_GPUS NAME=JSON ... ; JSON holds options of enable_multi_gpu, and under "args" some of
TrainingArguments. "begin" tells what the strategy begins with: "nothing" leaves every rank its own weights. "resume"
resumes from a checkpoint.
"""

import json
import os
import random
import sys
from pathlib import Path

import unsloth_multigpu as ump

num_gpus = int(sys.argv[1])
ump.enable_multi_gpu(num_gpus=num_gpus)

import torch
from common import arguments, logged
from peft import LoraConfig, get_peft_model
from safetensors.torch import save_file
from tiny_llama import collate, tiny_llama
from transformers import Trainer, TrainerCallback

from unsloth_multigpu.group.replicas import tensor_hashes
from unsloth_multigpu.strategies.sync import GradientSync

rank = int(os.environ.get("RANK", "0"))


class Rows(torch.utils.data.Dataset):
    """Ragged, unless `length` is given."""

    def __init__(self, length):
        self.length = length
        # The planner reads them.
        self.lengths = [len(self[i]["input_ids"]) for i in range(len(self))]

    def __len__(self):
        return 40

    def __getitem__(self, index):
        length = self.length or 6 + index * 5 % 17
        return {"input_ids": [1 + (index * 7 + i * i) % 63 for i in range(length)]}


class Watch(TrainerCallback):
    """Hashes of this rank's trainable weights after each step."""

    def __init__(self):
        self.hashes = []

    def on_step_end(self, args, state, control, model=None, **kwargs):
        self.hashes.append(hash(tuple(tensor_hashes([p for p in model.parameters() if p.requires_grad]))))


def train(name, line):
    args = {"max_steps": 20, "optim": "adamw_torch", **line.pop("args", {})}
    begin, resume = line.pop("begin", None), line.pop("resume", None)
    is_full, length = args.pop("full", False), args.pop("length", None)
    ump.disable_multi_gpu()
    ump.enable_multi_gpu(num_gpus=num_gpus, **line)
    # Each rank's own, until the strategy gives it rank 0's; the script's random numbers are equal.
    torch.manual_seed(0 if begin is None else rank)
    base = tiny_llama()
    torch.manual_seed(rank)
    adapters = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights="gaussian")
    model = base if is_full else get_peft_model(base, adapters)
    random.seed(0)
    torch.manual_seed(0)
    watch = Watch()
    trainer = Trainer(
        model=model,
        args=arguments(
            f"checkpoints_{name}",
            2,
            4,
            lr_scheduler_type="cosine",
            **{"max_grad_norm": 0.5, "learning_rate": 5e-3, **args},
        ),
        train_dataset=Rows(length),
        data_collator=collate,
        callbacks=[watch],
    )
    original = GradientSync.begin
    if begin == "nothing":
        GradientSync.begin = lambda self: None
    facts = {}
    try:
        trainer.train(resume_from_checkpoint=resume)
    except ump.MultiGPUError as error:
        facts["error"] = f"{type(error).__name__}: {error}"
    GradientSync.begin = original
    report = ump.get_multi_gpu_status().report
    facts |= {
        "norms": logged(trainer, "grad_norm")["grad_norm"],
        "hashes": watch.hashes,
        "rates": [h["learning_rate"] for h in trainer.state.log_history if "learning_rate" in h],
        "sent_bytes": report and report.ranks[rank].sent_bytes,
        "wrapper": type(trainer.model_wrapped).__name__,
    }
    Path(f"{name}_{rank}.json").write_text(json.dumps(facts))
    if rank == 0:
        trained = {n: p.detach().clone() for n, p in trainer.model.named_parameters() if p.requires_grad}
        save_file(trained, f"{name}.safetensors")


for pair in sys.argv[2:]:
    name, _, text = pair.partition("=")
    train(name, json.loads(text))
