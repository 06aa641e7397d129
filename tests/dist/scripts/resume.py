"""Trains configurations one after the other in one process, and writes what each saw and ended with.

Usage: resume.py NUM_GPUS OPTIONS NAME=JSON ... ; OPTIONS are of enable_multi_gpu. In JSON, "args" are of
TrainingArguments, "folder" is the output folder, "from" is given to train(), "options" stand in the place of OPTIONS.
"stop" saves and ends the training after that step. In the first attempt alone, "pause" does so too, and
"kill" = [rank, step] lets that rank kill itself; in the second, "tear" is a file of the newest checkpoint that is
emptied.
"""

import json
import os
import random
import signal
import sys
from functools import partial
from pathlib import Path

import unsloth_multigpu as ump

num_gpus, options = int(sys.argv[1]), json.loads(sys.argv[2])
ump.enable_multi_gpu(num_gpus=num_gpus, **options)

import numpy
import torch
from common import RANK, Calls, Comparing, OwnOrder, arguments, logged
from safetensors.torch import save_file
from tiny_llama import tiny_llama
from transformers import Trainer

attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")


class Rows(torch.utils.data.Dataset):
    """Ragged rows, with a random token in each."""

    def __len__(self):
        return 40

    def __getitem__(self, index):
        ids = [1 + (index * 7 + i * i) % 63 for i in range(6 + index * 5 % 17)]
        return {"sample": index, "input_ids": [*ids, 1 + int(numpy.random.randint(60)) * self.is_random]}

    is_random = True


class Stream(torch.utils.data.IterableDataset):
    def __iter__(self):
        rows = Rows()
        return (rows[i] for i in range(len(rows)))


class Collator:
    """Masks a token of each row, drawn from Python's generator, and some by torch's."""

    def __init__(self, is_random):
        self.is_random = is_random

    def __call__(self, rows):
        longest = max(len(row["input_ids"]) for row in rows)
        ids = torch.tensor([row["input_ids"] + [0] * (longest - len(row["input_ids"])) for row in rows])
        labels = ids.masked_fill(ids == 0, -100)
        if self.is_random:
            ids[:, random.randrange(5)] = 1
            ids = torch.where(torch.rand(ids.shape) < 0.1, 2, ids)
        samples = torch.tensor([row["sample"] for row in rows])
        return {"input_ids": ids, "attention_mask": (ids > 0).long(), "labels": labels, "sample": samples}


def after_step(line, _, state, control, **__):
    if attempt == "0" and line.get("kill") == [RANK, state.global_step]:
        os.kill(os.getpid(), signal.SIGKILL)
    pause = line.get("pause") if attempt == "0" else None
    if state.global_step in (pause, line.get("stop")):
        control.should_save = control.should_training_stop = True


def recorded(trainer, seen):
    """Keeps the samples of each step of this rank."""
    original = trainer.training_step

    def training_step(model, inputs, *args, **kwargs):
        parts = (
            [inputs] if isinstance(inputs, dict) else [m.inputs for m in inputs.micro_batches if not m.piece.is_filler]
        )
        samples = [int(i) for part in parts for i in part.pop("sample")]
        if not Comparing.is_on:
            seen.append(samples)
        return original(model, inputs, *args, **kwargs)

    trainer.training_step = training_step


def train(name, line):
    if "options" in line:
        ump.disable_multi_gpu()
        ump.enable_multi_gpu(num_gpus=num_gpus, **line["options"])
    torch.manual_seed(0)
    dropout = line.get("dropout", 0.0)
    model = tiny_llama(attention_dropout=dropout)
    if line.get("lora"):
        from peft import LoraConfig, get_peft_model

        model = get_peft_model(model, LoraConfig(r=4, lora_dropout=dropout, target_modules=["q_proj", "v_proj"]))
    Rows.is_random = line.get("random", True)
    folder = line.get("folder", f"checkpoints_{name}")
    if "tear" in line and attempt == "1" and RANK == 0:
        newest = max(Path(folder).iterdir(), key=lambda path: int(path.name.split("-")[1]))
        (newest / line["tear"]).write_bytes(b"")
    given = {
        "num_train_epochs": 2,
        "save_strategy": "steps",
        "save_steps": 3,
        "learning_rate": 5e-3,
        "optim": "adamw_torch",
        "remove_unused_columns": False,
        "label_names": ["labels"],
        **line.get("args", {}),
    }
    kind = OwnOrder if line.get("own_order") else Trainer
    trainer = kind(
        model=model,
        args=arguments(folder, 4, **given),
        train_dataset=Stream() if line.get("stream") else Rows(),
        eval_dataset=[Rows()[0]],
        data_collator=Collator(Rows.is_random),
        callbacks=[Calls(on_step_end=partial(after_step, line))],
    )
    seen = []
    recorded(trainer, seen)
    trainer.train(resume_from_checkpoint=line.get("from"))
    facts = {
        "seen": seen,
        "steps": trainer.state.global_step,
        "best": trainer.state.best_model_checkpoint,
        "folders": sorted(p.name for p in Path(folder).glob("*")),
        "wrapper": type(trainer.model_wrapped).__name__,
        **logged(trainer, "grad_norm", "learning_rate"),
    }
    Path(f"{name}_{RANK}_{attempt}.json").write_text(json.dumps(facts))
    if RANK == 0:
        trained = {n: p.detach().clone() for n, p in model.named_parameters() if p.requires_grad}
        save_file(trained, f"{name}.safetensors")


for pair in sys.argv[3:]:
    name, _, text = pair.partition("=")
    train(name, json.loads(text))
