"""Trains a tiny model several times in one process group, with a fault in each, and writes what came of it.

Usage: messages.py JOB ...
"""

import contextlib
import math
import os
import resource
import sys
from pathlib import Path

import unsloth_multigpu as ump

ump.enable_multi_gpu(num_gpus=2)

import torch
from accelerate.utils import DDPCommunicationHookType, DistributedDataParallelKwargs
from common import RANK, InOrder, Stream, arguments, logged, write_facts
from tiny_llama import collate, tiny_llama
from transformers import TrainerCallback

from unsloth_multigpu.group import facts

num_ranks = int(os.environ["WORLD_SIZE"])
NUM_TOKENS, NUM_STEPS = 8, 6
LONG_TOKENS, LARGE_VOCABULARY = 2048, 4096


def row(index, num_tokens=NUM_TOKENS):
    return {"input_ids": [1 + (index * 7 + i * i) % 63 for i in range(num_tokens)]}


def rows_of(numbers):
    return Stream([row(i) for i in numbers])


class OwnShare(InOrder):
    def _get_train_sampler(self, *args):
        return torch.utils.data.DistributedSampler(self.train_dataset)


class Plant(TrainerCallback):
    """Spoils steps, and keeps the weights after each."""

    def __init__(self, model, spoil, steps, ranks):
        self.model, self.spoil, self.steps, self.ranks, self.is_on = model, spoil, steps, ranks, False
        self.sums = []
        model.register_forward_hook(self.after_forward)
        model.model.embed_tokens.weight.register_hook(self.after_backward)

    def after_forward(self, model, inputs, output):
        if self.is_on and self.spoil == "loss":
            output["loss"] = output["loss"] * math.nan
        if self.spoil == "caught":
            loss = output["loss"].detach()
            torch.distributed.all_gather([torch.zeros_like(loss) for _ in range(num_ranks)], loss)
            if self.is_on:
                raise ValueError("planted")

    def after_backward(self, gradient):
        if self.spoil == "clamp":
            return gradient.clamp(-1e-3, 1e-3)
        return gradient * math.inf if self.is_on and self.spoil == "gradient" else gradient

    def on_train_begin(self, args, state, control, **kwargs):
        # DDP has wrapped and sent rank 0's weights by now.
        for name, parameter in self.model.named_parameters():
            if self.spoil == "start" and RANK in self.ranks and "self_attn" in name:
                parameter.data.add_(0.01)

    def on_step_begin(self, args, state, control, **kwargs):
        self.is_on = RANK in self.ranks and state.global_step + 1 in self.steps
        if self.is_on and self.spoil == "memory":
            pages = int(Path("/proc/self/statm").read_text().split()[0])
            limit = pages * resource.getpagesize() + 32 * 2**20
            resource.setrlimit(resource.RLIMIT_AS, (limit, limit))

    def on_pre_optimizer_step(self, args, state, control, **kwargs):
        if self.is_on and self.spoil == "scale":
            self.model.lm_head.weight.grad.mul_(1.5)

    def on_step_end(self, args, state, control, **kwargs):
        if self.is_on and self.spoil == "flip":
            self.model.model.norm.weight.data.view(torch.int32)[5] ^= 1
        self.sums.append(weights(self.model))


def weights(model):
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()])


def train(name, *, kind=InOrder, spoil="", steps=(), ranks=(1,), rows, args=None, goes_on=False, hook=None, **options):
    if not goes_on:
        ump.disable_multi_gpu()
        ump.enable_multi_gpu(num_gpus=2, **options)
    torch.manual_seed(0)
    vocab_size = LARGE_VOCABULARY if spoil == "memory" else 64
    model = tiny_llama(vocab_size=vocab_size, hidden_size=16, num_layers=1)
    plant = Plant(model, spoil, steps, ranks)
    given = {"num_train_epochs": 1, "optim": "sgd", "lr_scheduler_type": "constant", "learning_rate": 0.1}
    trainer = kind(
        model=model,
        args=arguments(f"checkpoints_{name}", 4, **{**given, **(args or {})}),
        train_dataset=rows,
        data_collator=collate,
        callbacks=[plant],
    )
    if hook is not None:
        trainer.accelerator.ddp_handler = DistributedDataParallelKwargs(comm_hook=DDPCommunicationHookType[hook])
    seen = {}
    try:
        trainer.train()
    except (ump.NonFiniteGradientError, ump.DivergenceError, ump.SetupError) as error:
        if name == "stream":
            raise
        seen["error"] = f"{type(error).__name__}: {error}"
    seen |= {
        "checkpoints": sorted(p.name for p in Path(f"checkpoints_{name}").glob("checkpoint-*")),
        "num_steps": trainer.state.global_step,
        **logged(trainer, "grad_norm"),
        "find_unused_parameters": getattr(trainer.model_wrapped, "find_unused_parameters", None),
        "bucket_view": getattr(trainer.model_wrapped, "gradient_as_bucket_view", None),
    }
    write_facts(name, seen)
    torch.save({"steps": plant.sums, "now": weights(model)}, f"{name}_{RANK}.pt")


def train_on_behind_an_error():
    """Rank 1 catches its own error. Rank 0 is in the training that has failed there, and waits for a gradient."""
    with contextlib.suppress(ValueError):
        train("caught", rows=ROWS, spoil="caught", steps=[2], timeout_s=5)
    train("again", rows=ROWS, goes_on=True)


def train_with_another_peft():
    original = facts.installed_version
    facts.installed_version = lambda name: "9.9" if RANK == 1 and name == "peft" else original(name)
    train("version", rows=ROWS)
    facts.installed_version = original


ROWS = [row(i) for i in range(NUM_STEPS * 4)]
LONG_ROWS = [row(i) if i < 4 else row(i, LONG_TOKENS) for i in range(8)]
SAVES = {"save_strategy": "steps", "save_steps": 1}
SOME = {"max_steps": NUM_STEPS}
EXACT = {"rows": ROWS, "args": {"max_steps": 14}, "verify_every": 1}
JOBS = {
    "raise": lambda: train("raise", rows=ROWS, spoil="loss", steps=[3], args=SAVES),
    "skip": lambda: train("skip", rows=ROWS, spoil="loss", steps=[3], on_nan="skip"),
    "without": lambda: train("without", rows=ROWS[:8] + ROWS[12:]),
    "gradient": lambda: train("gradient", rows=ROWS, spoil="gradient", steps=[2], strategy="allreduce"),
    "version": train_with_another_peft,
    "same_stream": lambda: train("same_stream", rows=rows_of(range(NUM_STEPS * 4)), args={"max_steps": 8}),
    "alone": lambda: train("alone", rows=ROWS, spoil="loss", steps=[2], ranks=(0, 1), strategy="local_sgd"),
    "divided": lambda: train("divided", rows=rows_of(range(RANK, 50 * num_ranks, num_ranks)), args=SOME),
    "drifting": lambda: train("drifting", rows=rows_of([*range(10), *range(40 + RANK, 80)]), args=SOME, verify_every=2),
    "clamped": lambda: train("clamped", rows=ROWS, spoil="clamp"),
    "clamped_refused": lambda: train("clamped_refused", rows=ROWS, spoil="clamp", inexact="raise"),
    "part": lambda: train("part", kind=OwnShare, rows=ROWS),
    "start": lambda: train("start", rows=ROWS, spoil="start", verify_every=2),
    "scale": lambda: train("scale", rows=ROWS, spoil="scale", steps=range(3, 9), verify_every=2),
    "flip": lambda: train("flip", rows=ROWS, spoil="flip", steps=[3], args={**SAVES, "max_steps": 5}, verify_every=2),
    "last_step": lambda: train("last_step", rows=ROWS, spoil="flip", steps=[3], args={"max_steps": 3}),
    "no_hook": lambda: train("no_hook", **EXACT),
    "fp16_hook": lambda: train("fp16_hook", **EXACT, hook="FP16"),
    "caught": train_on_behind_an_error,
    # In these rank 1 alone raises, and the supervisor ends the run.
    "stream": lambda: train("stream", rows=rows_of(range(NUM_STEPS * 4 - 4 * RANK)), args={"max_steps": 20}),
    "memory": lambda: train("memory", rows=LONG_ROWS, spoil="memory", steps=[2]),
}
for job in sys.argv[1:]:
    JOBS[job]()
