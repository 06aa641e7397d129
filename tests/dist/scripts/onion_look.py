"""Looks from inside a training at what of ours stands on the Trainer, and how often it is called."""

import functools
import sys
from collections import Counter
from operator import attrgetter

import torch
from tiny_llama import RaggedRows, collate, tiny_llama
from transformers import Trainer, TrainerCallback, TrainingArguments

from unsloth_multigpu.part import Part

OWNERS = ("accelerator", "callback_handler")


def train(folder):
    """Two steps, each logged, evaluated and saved.

    Returns:
        "seams": attribute -> our functions on it, from the outside in; "calls": how often each of them was called;
        "callbacks": classes, in their order; "events": event -> classes of ours that answer it, in their order;
        "left": attributes that are still ours behind the training.
    """
    torch.manual_seed(0)
    look = Look()
    trainer = Trainer(
        model=tiny_llama(),
        args=TrainingArguments(
            folder,
            per_device_train_batch_size=2,
            gradient_accumulation_steps=2,
            max_steps=2,
            logging_steps=1,
            save_strategy="steps",
            save_steps=1,
            eval_strategy="steps",
            eval_steps=1,
            load_best_model_at_end=True,
            report_to=[],
            disable_tqdm=True,
        ),
        train_dataset=RaggedRows(8),
        eval_dataset=RaggedRows(3, seed=1),
        data_collator=collate,
        callbacks=[look],
    )
    look.trainer = trainer
    sys.setprofile(look.count)
    try:
        trainer.train()
    finally:
        sys.setprofile(None)
    functions = {layer for layers in look.seams.values() for layer in layers}
    return {
        "seams": look.seams,
        "calls": {name: look.calls[name] for name in sorted(functions)},
        "callbacks": look.callbacks,
        "events": dict(sorted(look.events.items())),
        "left": sorted(look.ours()),
    }


class Look(TrainerCallback):
    """Notes all of it when the first step begins."""

    def __init__(self):
        self.seams, self.calls, self.callbacks, self.events = {}, Counter(), [], {}
        self.trainer = None

    def on_step_begin(self, args, state, control, **kwargs):
        if state.global_step == 0:
            self.seams = dict(sorted(self.ours().items()))
            self.callbacks = [type(callback).__name__ for callback in self.trainer.callback_handler.callbacks]

    def ours(self):
        owners = {"trainer": self.trainer, **{name: attrgetter(name)(self.trainer) for name in OWNERS}}
        of_each = {
            f"{o}.{n}": layers_of(v) for o, owner in owners.items() for n, v in vars(owner).items() if callable(v)
        }
        return {name: layers for name, layers in of_each.items() if layers}

    def count(self, frame, event, _):
        if event == "call" and "unsloth_multigpu" in frame.f_code.co_filename:
            instance = frame.f_locals.get("self")
            prefix = "" if instance is None else f"{type(instance).__name__}."
            name = frame.f_code.co_name
            self.calls[prefix + name] += 1
            caller = frame.f_back
            if isinstance(instance, Part) and caller.f_code.co_name == "answer":  # Of the callback of all parts.
                answering = self.events.setdefault(caller.f_back.f_locals["event"], [])
                if type(instance).__name__ not in answering:
                    answering.append(type(instance).__name__)


def layers_of(value):
    """Our functions in it, each as class and name, from the outside in."""
    if isinstance(value, functools.partial):
        parts = [value.func, *value.args]
        return [layer for part in parts if not isinstance(part, type) for layer in layers_of(part)]
    instance = getattr(value, "__self__", None)
    module, name = getattr(value, "__module__", None) or "", getattr(value, "__qualname__", None)
    if not module.startswith("unsloth_multigpu.") or name is None:
        return []
    return [name if instance is None else f"{type(instance).__name__}.{value.__name__}"]
