"""A user's script: a tiny Llama on ragged rows. Usage: forecast_me.py list|stream|nothing"""

import sys

import unsloth_multigpu as ump

mode = sys.argv[1]
ump.enable_multi_gpu()

import torch
from tiny_llama import collate, tiny_llama
from torch.utils.data import IterableDataset
from transformers import Trainer, TrainingArguments


def row(seed):
    ids = torch.randint(1, 64, (8 + 37 * seed % 101,), generator=torch.Generator().manual_seed(seed))
    return {"input_ids": ids.tolist()}


class Stream(IterableDataset):
    def __iter__(self):
        return map(row, range(40))


trainer = Trainer(
    model=tiny_llama(hidden_size=16),
    train_dataset=Stream() if mode == "stream" else [row(seed) for seed in range(40)],
    data_collator=collate,
    args=TrainingArguments(
        "out",
        per_device_train_batch_size=3,
        gradient_accumulation_steps=2,
        max_steps=50,
        save_strategy="steps",
        save_steps=1,
        report_to="none",
        disable_tqdm=True,
        use_cpu=True,
    ),
)
if mode != "nothing":
    trainer.train()
print("the script has gone on after", trainer.state.global_step)
trainer.save_model("saved")
