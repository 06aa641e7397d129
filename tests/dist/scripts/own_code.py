"""Trains with code that scripts write, job by job, and writes gradient norms, weights and what was said of each.

Usage: own_code.py RANKS OUT NUM_RANDOM JOB...
A job is a kind with rows x batch size x accumulation. Losses that are put together at random go to random.json.
"""

import json
import random
import sys
import warnings
from pathlib import Path

import unsloth_multigpu as ump

out, num_random, jobs = Path(sys.argv[2]), int(sys.argv[3]), sys.argv[4:]
ump.enable_multi_gpu(num_gpus=int(sys.argv[1]))

import own_losses
import own_steps
import random_losses
import torch
from common import RANK, SGD, Calls, Said, arguments, logged, write_outcome
from transformers import TrainerCallback

KINDS = {**own_losses.KINDS, **own_steps.KINDS}
# What these do shows in a later epoch. Most steps of a script's own code are compared, which takes as long as five.
IN_TWO_EPOCHS = {"late", "hard_first", "changes_form", "gathers_by_torch", "counter", "counting"}


def make_rows(count, seed=7):
    rng = random.Random(seed)
    rows = []
    for i in range(count):
        size = rng.randrange(3, 12)
        tokens = [rng.randrange(1, 64) for _ in range(size)]
        rows.append(
            {
                "number": i,
                "input_ids": tokens,
                "class": rng.randrange(3),
                "tags": [token % 3 if rng.random() < 0.6 else -100 for token in tokens[:-1]] + [1],
                # Every second row has no label.
                "masked": [token if i % 2 and k == 0 else -100 for k, token in enumerate(tokens)],
                "weight": rng.uniform(0.2, 4.0),
            }
        )
    return rows


class Counts(TrainerCallback):
    """It would hear of micro-batches."""

    def on_substep_end(self, args, state, control, **kwargs): ...


def run(job):
    name, _, shape = job.partition(":")
    count, batch_size, accumulation = map(int, shape.split("x"))
    kind, rows = KINDS[name], make_rows(count)
    torch.manual_seed(3)
    model = kind.model()
    for parameter_name, parameter in model.named_parameters():
        if any(part in parameter_name for part in ("classifier", "head")):
            torch.nn.init.normal_(parameter, std=0.5)
    settings = {"num_train_epochs": 2 if name in IN_TWO_EPOCHS else 1, **SGD, **kind.settings}
    config = arguments(
        out / "checkpoints", batch_size, accumulation, max_grad_norm=1e9, remove_unused_columns=False, **settings
    )
    grow = Calls(on_epoch_end=lambda _, state, *__, **___: rows.extend(make_rows(5, seed=int(state.epoch) + 20)))
    callbacks = {"grows": [grow], "hears": [Counts()]}.get(name, [])
    collate = kind.collate()
    trainer = kind.trainer(
        model=model, args=config, train_dataset=kind.dataset(rows), data_collator=collate, callbacks=callbacks
    )
    said = Said()
    error = said.train(trainer)
    report = ump.get_multi_gpu_status().report if not error else None
    facts = {
        **logged(trainer, "grad_norm", "loss"),
        "said": said.records,
        "error": f"{error} {error.hint}" if error else "",
        "first_step": dict(report.first_step) if report else {},
        "inexact": report.inexact if report else "",
        "buffers": {name: float(buffer.double().sum()) for name, buffer in model.named_buffers()},
        "num_calls": getattr(trainer, "num_calls", 0) + getattr(collate, "num_calls", 0),
    }
    write_outcome(out, job, facts, model.named_parameters())


warnings.simplefilter("ignore")
out.mkdir(parents=True, exist_ok=True)
found = [random_losses.run(seed) for seed in range(num_random)]
if found and RANK == 0:
    (out / "random.json").write_text(json.dumps(found))
for job in jobs:
    run(job)
