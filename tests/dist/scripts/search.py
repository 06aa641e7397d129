"""A search for hyperparameters. Each rank writes what was trained, and what it was told is best."""

import json
import os

import unsloth_multigpu as ump

ump.enable_multi_gpu()

import torch
from common import points
from transformers import Trainer, TrainerCallback, TrainingArguments

RANK = os.environ.get("RANK", "0")
ROWS = points(24)


class Model(torch.nn.Module):
    def __init__(self, trial):
        super().__init__()
        # The Trainer's constructor has no trial.
        self.layer = torch.nn.Linear(2, 1, bias=trial is None or trial.suggest("bias"))

    def forward(self, x, labels):
        return {"loss": (self.layer(x) - labels).square().mean(), "logits": self.layer(x)}


class Notes(TrainerCallback):
    def __init__(self):
        self.trials = []

    def on_train_end(self, args, state, control, model=None, **kwargs):
        chosen = [args.learning_rate, args.per_device_train_batch_size, args.gradient_accumulation_steps]
        weights = [round(w, 6) for p in model.parameters() for w in p.flatten().tolist()]
        self.trials.append([*chosen, state.global_step, *weights])


def space(trial):
    return {
        n: trial.suggest(n) for n in ("learning_rate", "per_device_train_batch_size", "gradient_accumulation_steps")
    }


args = TrainingArguments(
    "out",
    max_steps=4,
    optim="sgd",
    eval_strategy="steps",
    eval_steps=2,
    save_strategy="steps",
    save_steps=4,
    report_to=[],
    disable_tqdm=True,
)
notes = Notes()
trainer = Trainer(model_init=Model, args=args, train_dataset=ROWS, eval_dataset=ROWS[:16], callbacks=[notes])
refused = []
if int(os.environ.get("WORLD_SIZE", "1")) > 1:
    for options in ({"backend": "ray"}, {"n_jobs": 2, "backend": "optuna"}):
        try:
            trainer.hyperparameter_search(space, n_trials=2, direction="minimize", **options)
        except (ump.SetupError, RuntimeError) as error:
            refused.append(str(error))
best = trainer.hyperparameter_search(space, n_trials=4, direction="minimize", backend="optuna", timeout=1)
found = {
    "best": [best.run_id, round(best.objective, 5), best.hyperparameters],
    "trials": notes.trials,
    "folders": sorted(os.listdir("out")),
}
with open(f"found_{RANK}.json", "w") as file:
    json.dump({"found": found, "refused": refused}, file, indent=1)
