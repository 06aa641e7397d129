"""Trainings in which parameters become trainable or frozen while they run.

Usage: trainable.py RANKS OUT JOB...; 1 rank is the Trainer by itself. A job that fails leaves its error's text.
"""

import sys
from pathlib import Path

import unsloth_multigpu as ump

num_ranks, out, jobs = int(sys.argv[1]), Path(sys.argv[2]), sys.argv[3:]
if num_ranks > 1:
    ump.enable_multi_gpu(num_gpus=num_ranks, timeout_s=20.0, verify_every=100)

import torch
from common import RANK, SGD, Calls, Said, arguments, logged, write_outcome
from tiny_llama import RaggedRows, collate, tiny_llama
from transformers import Trainer


def train_layer(model, number, is_trained=True):
    for parameter in model.model.layers[number].parameters():
        parameter.requires_grad_(is_trained)


def one_more(_, state, __, model, optimizer, **___):
    """Of four layers one more in each epoch, which the optimizer learns of only then."""
    layer = 3 - round(state.epoch or 0)
    if layer < 3:
        train_layer(model, layer)
        # A further group would be one more than the scheduler knows.
        optimizer.param_groups[0]["params"].extend(model.model.layers[layer].parameters())


def after_two_steps(_, state, __, model, **___):
    """The optimizer never learns of them; their gradients count in the norm that others are clipped by."""
    if state.global_step == 2:
        train_layer(model, 0)


def in_turn(_, state, __, model, **___):
    train_layer(model, 0, state.global_step >= 2)
    train_layer(model, 2, state.global_step < 4)


def with_new_numbers(_, state, __, model, **___):
    """Each rank draws others for the layer that it unfreezes."""
    if state.global_step == 2:
        train_layer(model, 0)
        torch.nn.init.normal_(model.model.layers[0].mlp.up_proj.weight, std=0.02)


def on_one_rank(*event, **more):
    if RANK == 1:
        after_two_steps(*event, **more)


class WithinStep(Trainer):
    def compute_loss(self, model, inputs, *args, **kwargs):
        if self.state.global_step == 2 and model.training:
            train_layer(self.model, 0)
        return super().compute_loss(model, inputs, *args, **kwargs)


class BesideTheModel(Trainer):
    """A loss with a parameter of its own, which no model has."""

    def create_optimizer(self, *args, **kwargs):
        optimizer = super().create_optimizer(*args, **kwargs)
        self.scale = torch.nn.Parameter(torch.ones(()))
        optimizer.add_param_group({"params": [self.scale]})
        return optimizer

    def compute_loss(self, model, inputs, *args, **kwargs):
        loss = super().compute_loss(model, inputs, *args, **kwargs)
        return loss * self.scale if model.training and hasattr(self, "scale") else loss


# Trainer, callbacks, layers that are frozen before, further arguments.
JOBS = {
    "unfreezing": (Trainer, {"on_epoch_begin": one_more}, (0, 1, 2), {}),
    "forgetting": (Trainer, {"on_step_end": after_two_steps}, (0,), {"max_grad_norm": 0.1}),
    "freezing": (Trainer, {"on_train_begin": in_turn, "on_step_end": in_turn}, (), {}),
    "renewing": (Trainer, {"on_step_end": with_new_numbers}, (0,), {}),
    "within": (WithinStep, {}, (0,), {"save_strategy": "steps", "save_steps": 1}),
    "beside": (BesideTheModel, {}, (), {"save_strategy": "steps", "save_steps": 1}),
    "one_rank": (Trainer, {"on_step_end": on_one_rank}, (0,), {}),
}


def run(job):
    trainer_class, events, frozen, given = JOBS[job]
    torch.manual_seed(1)
    model = tiny_llama(num_layers=4)
    for layer in frozen:
        train_layer(model, layer, False)
    args = arguments(out / f"checkpoints_{job}", 3, 2, num_train_epochs=3, use_cpu=True, **{**SGD, **given})
    callbacks, rows = [Calls(**events)], RaggedRows(20)
    trainer = trainer_class(model=model, args=args, train_dataset=rows, data_collator=collate, callbacks=callbacks)
    error = Said().train(trainer)
    if job == "one_rank":
        raise error
    facts = {
        "error": error and str(error),
        **logged(trainer, "grad_norm"),
        "saved": sorted(p.name for p in (out / f"checkpoints_{job}").glob("checkpoint-*")),
    }
    write_outcome(out, job, facts, trainer.model.named_parameters())


out.mkdir(parents=True, exist_ok=True)
for job in jobs:
    run(job)
