"""Trains several kinds of Trainers in one process group and writes what each saw and did, for comparison.

Usage: parity.py RANKS MODEL OUT JOB...
A job is a kind with rows x batch size x accumulation.
"""

import hashlib
import importlib.util
import random
import sys
from collections import Counter
from importlib.metadata import version
from pathlib import Path

from packaging.version import Version

import unsloth_multigpu as ump

num_ranks, model_folder, out, jobs = int(sys.argv[1]), sys.argv[2], Path(sys.argv[3]), sys.argv[4:]
ump.enable_multi_gpu(num_gpus=num_ranks)

if importlib.util.find_spec("unsloth") is not None and Version(version("unsloth")) >= Version("2026.10.9"):
    import unsloth  # noqa: F401  (first, as in a user's script; older ones ask for a GPU)
import torch
from common import QUIET, Record, logged, rows_in, write_outcome
from texts import HAS_UNSLOTH, Texts

from tests.helpers.log_probs import LogProbs
from tests.helpers.tiny import topics
from unsloth_multigpu.step.feed import StepFeed

if not HAS_UNSLOTH:
    LogProbs.use()

texts = Texts(model_folder)
COMMON = {
    **QUIET,
    "output_dir": str(out / "checkpoints"),
    "num_train_epochs": 2,
    "learning_rate": 2e-3,
    "seed": 7,
    "bf16": False,
    "fp16": False,
    "optim": "adamw_torch",
    # Else one weight whose gradient is rounding alone differs by more than all others together.
    "adam_epsilon": 1e-6,
}
KINDS = {
    "trainer_peft": lambda rows, args: texts.plain(texts.lora(), rows, args),
    "sft_lora": lambda rows, args: texts.sft(texts.fast_lora(), rows, args),
    "sft_full": lambda rows, args: texts.sft(
        texts.unsloth_lm(full_finetuning=True) if HAS_UNSLOTH else texts.causal_lm(), rows, args
    ),
    # TRL's default loss is a Triton kernel.
    "sft_padding_free": lambda rows, args: texts.sft(
        texts.causal_lm(), rows, {"padding_free": True, "max_length": None, "loss_type": "nll", **args}
    ),
    "sft_packing": lambda rows, args: texts.sft(
        texts.causal_lm(), rows, {"packing": True, "max_length": 96, "loss_type": "nll", **args}
    ),
    "dpo": lambda rows, args: texts.dpo(texts.fast_lora(), rows, args),
    "classifier": texts.classifier,
}


def fingerprints(inputs):
    """The rows, as hashes of their tokens."""
    rows = [] if has_filler else rows_in(inputs)
    return [hashlib.md5(str(row.tolist()).encode()).hexdigest()[:12] for row in rows]


def look_at_step(self, *arguments):
    global has_filler
    step, num_items = batch_samples(self, *arguments)
    # A rank with a filler has nothing else. In DPO its rows look like those of another rank.
    has_filler = bool(step) and step[0].micro_batches[0].piece.is_filler
    return step, num_items


def run(job):
    kind, _, shape = job.partition(":")
    rows, batch_size, accumulation = map(int, shape.split("x"))
    common = {**COMMON, "per_device_train_batch_size": batch_size, "gradient_accumulation_steps": accumulation}
    torch.manual_seed(3)
    trainer = KINDS[kind](topics(rows, max_words=40), common)
    record = Record(trainer, fingerprints)
    trainer.train()
    facts = {
        **logged(trainer, "loss", "grad_norm"),
        "seen": {step: Counter(rows) for step, rows in record.steps.items()},
        "find_unused_parameters": getattr(trainer.model_wrapped, "find_unused_parameters", "no DDP"),
        "random_after": [random.random(), float(torch.rand(()))],
    }
    write_outcome(out, job, facts, ((n, p) for n, p in trainer.model.named_parameters() if p.requires_grad))


has_filler = False
batch_samples, StepFeed._batch_samples = StepFeed._batch_samples, look_at_step
out.mkdir(parents=True, exist_ok=True)
for job in jobs:
    run(job)
