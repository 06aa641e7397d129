"""A search for hyperparameters. Writes what was trained, or why not."""

import json
import os

import unsloth_multigpu as ump

ump.enable_multi_gpu()

import torch
from common import points
from transformers import Trainer, TrainerCallback, TrainingArguments

ROWS = points(24)


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(2, 1)

    def forward(self, x, labels):
        return {"loss": (self.layer(x) - labels).square().mean(), "logits": self.layer(x)}


class Notes(TrainerCallback):
    def __init__(self):
        self.trials = []

    def on_train_end(self, args, state, control, **kwargs):
        chosen = [args.learning_rate, args.per_device_train_batch_size, args.gradient_accumulation_steps]
        self.trials.append([*chosen, state.global_step])


def space(trial):
    return {
        n: trial.suggest(n) for n in ("learning_rate", "per_device_train_batch_size", "gradient_accumulation_steps")
    }


args = TrainingArguments(
    "out", max_steps=4, optim="sgd", eval_strategy="steps", eval_steps=2, report_to=[], disable_tqdm=True
)
notes = Notes()
trainer = Trainer(model_init=Model, args=args, train_dataset=ROWS, eval_dataset=ROWS[:16], callbacks=[notes])
try:
    best = trainer.hyperparameter_search(space, n_trials=2, direction="minimize", backend="optuna")
    found = {"best": best.run_id, "trials": notes.trials}
except ump.SetupError as error:
    found = str(error)
with open(f"found_{os.environ.get('RANK', '0')}.json", "w") as file:
    json.dump(found, file, indent=1)
