"""Trains the same model under several gradient strategies in one process group, and writes what each did.

Usage: strategies.py NUM_GPUS NAME=JSON ... ; JSON holds options of enable_multi_gpu, and under "args" some of
TrainingArguments. "resume" resumes from a checkpoint. The name "ends": trainings that end or begin in an unusual way.
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
from common import InOrder, arguments, logged
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from tiny_llama import RaggedRows, collate, tiny_llama
from transformers import Trainer, TrainerCallback

from unsloth_multigpu.group.replicas import tensor_hashes

rank = int(os.environ.get("RANK", "0"))
DILOCO = {"strategy": ump.DiLoCo(every_steps=4)}
EVALUATED = {"eval_strategy": "steps", "eval_steps": 2, "save_strategy": "steps", "save_steps": 2}


class Watch(TrainerCallback):
    """Hashes of this rank's trainable weights after each step."""

    def __init__(self):
        self.hashes = []

    def on_step_end(self, args, state, control, model=None, **kwargs):
        self.hashes.append(hash(tuple(tensor_hashes([p for p in model.parameters() if p.requires_grad]))))


def enable(**line):
    ump.disable_multi_gpu()
    ump.enable_multi_gpu(num_gpus=num_gpus, **line)


def train(name, line):
    args, resume = {"max_steps": 20, "optim": "adamw_torch", **line.pop("args", {})}, line.pop("resume", None)
    enable(**line)
    torch.manual_seed(0)
    base = tiny_llama()
    # Each rank's own, until the strategy gives it rank 0's; the script's random numbers are equal.
    torch.manual_seed(rank)
    adapters = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights="gaussian")
    model = get_peft_model(base, adapters)
    random.seed(0)
    torch.manual_seed(0)
    rows = RaggedRows(40)
    rows.lengths = [len(row) for row in rows.rows]  # The planner reads them.
    watch, usual = Watch(), {"max_grad_norm": 0.5, "learning_rate": 5e-3, "lr_scheduler_type": "cosine"}
    args = arguments(f"checkpoints_{name}", 2, 4, **{**usual, **args})
    trainer = Trainer(model=model, args=args, train_dataset=rows, data_collator=collate, callbacks=[watch])
    trainer.train(resume_from_checkpoint=resume)
    facts = {
        **logged(trainer, "grad_norm", "learning_rate"),
        "hashes": watch.hashes,
        "wrapper": type(trainer.model_wrapped).__name__,
    }
    Path(f"{name}_{rank}.json").write_text(json.dumps(facts))
    if rank == 0:
        trained = {n: p.detach().clone() for n, p in trainer.model.named_parameters() if p.requires_grad}
        save_file(trained, f"{name}.safetensors")


class EpochEndsEarly(TrainerCallback):
    def on_step_end(self, args, state, control, **kwargs):
        control.should_epoch_stop = state.global_step == 7


def trainer_of(model, line, num_rows=16, **given):
    enable(**line)
    args = arguments("checkpoints", 4, **{"logging_steps": 100, "max_steps": 1, **given})
    data = {"train_dataset": RaggedRows(num_rows), "eval_dataset": RaggedRows(8), "data_collator": collate}
    return InOrder(model=model, args=args, callbacks=[EpochEndsEarly()], **data)


def error_of(train):
    try:
        train()
    except ump.SetupError as error:
        return str(error)
    return ""


def write_ends():
    torch.manual_seed(0)
    # The epoch ends two steps after the last save, and no step says that the training ends with it.
    given = {"num_train_epochs": 1, "max_steps": -1, "learning_rate": 5e-2, "load_best_model_at_end": True}
    trainer = trainer_of(tiny_llama(num_layers=1), DILOCO, 40, **given, **EVALUATED)
    trainer.train()
    best, own = load_file(Path(trainer.state.best_model_checkpoint, "model.safetensors")), trainer.model.state_dict()
    facts = {"best": max(float((own[name].cpu() - saved).abs().max()) for name, saved in best.items())}

    model = tiny_llama(num_layers=1)
    trainer_of(model, DILOCO).train()
    facts["ddp_after_diloco"] = error_of(trainer_of(model, {}).train)
    again = trainer_of(tiny_llama(num_layers=1), {})
    again.train()
    enable(**DILOCO)
    facts["diloco_after_ddp"] = error_of(again.train)
    Path(f"ends_{rank}.json").write_text(json.dumps(facts))


for pair in sys.argv[2:]:
    name, _, text = pair.partition("=")
    if name == "ends":
        write_ends()
    else:
        train(name, json.loads(text))
