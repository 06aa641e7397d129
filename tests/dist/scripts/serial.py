"""Trains several models on one device and by the legacy serial path, in one process, and writes what each did.

Usage: serial.py MODEL OUT
"""

import functools
import json
import logging
import random
import sys
from pathlib import Path

import unsloth_multigpu as ump

model_folder, out = sys.argv[1], Path(sys.argv[2])
log = []
keep = logging.Handler()
keep.emit = lambda record: log.append(record.getMessage())
logging.getLogger("unsloth_multigpu").setLevel("INFO")
logging.getLogger("unsloth_multigpu").addHandler(keep)


def enable(**options):
    ump.disable_multi_gpu()
    ump.enable_multi_gpu(enable_ddp=False, num_gpus=2, **options)


enable()  # First, as in a user's script.

import torch
import unsloth  # noqa: F401
from common import QUIET, logged
from texts import Texts
from transformers import TrainerCallback

from unsloth_multigpu.errors import SetupError

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "examples"))
from tiny_model import topics

texts = Texts(model_folder)
TEXTS = topics(13, max_words=30)  # Micro-batches of 5, 5 and 3 rows: steps of two and of one.
COMMON = {
    **QUIET,
    "output_dir": str(out / "checkpoints"),
    "num_train_epochs": 2,
    "per_device_train_batch_size": 5,
    "gradient_accumulation_steps": 2,
    "max_grad_norm": 0.5,
    "learning_rate": 2e-3,
    "seed": 7,
    "optim": "adamw_torch",
    "adam_epsilon": 1e-5,  # Adam makes a step of the rounding of gradients that are almost zero.
    "bf16": False,
    "fp16": False,
    "use_cpu": True,
}


def full(model=None, **options):
    return texts.plain(model or texts.causal_lm(), TEXTS, {**COMMON, **options})


def lora():
    return full(texts.lora())


def sft_lora():
    return texts.sft(texts.fast_lora(), TEXTS, COMMON)


class Alternating(TrainerCallback):
    def on_step_begin(self, args, state, control, model=None, **kwargs):
        model.score.requires_grad_(state.global_step % 2 == 0)


def classifier():
    """It is evaluated in between, and its head is frozen in every second step."""
    trainer = texts.classifier(TEXTS, COMMON)
    trainer.add_callback(Alternating())
    trainer.args.eval_strategy, trainer.args.eval_steps = "steps", 1
    trainer.eval_dataset = trainer.train_dataset.select(range(2))
    return trainer


def dpo():
    return texts.dpo(texts.lora(), TEXTS, COMMON)


def bound():
    """Its forward is bound to this very model."""
    model = texts.causal_lm()
    forward = model.forward
    model.forward = functools.partial(lambda *args, **inputs: forward(*args, **inputs))
    return full(model, remove_unused_columns=False)  # Its signature is hidden.


def schedule_free():
    return full(optim="schedule_free_adamw")


def train(trainer):
    """Loss and gradient norm of each step, and the weights at the end."""
    own = set(vars(trainer))
    trainer.train()
    return {
        **logged(trainer, "loss", "grad_norm"),
        "weights": {n: p.detach().double() for n, p in trainer.model.named_parameters() if p.requires_grad},
        "left": sorted({"training_step", "compute_loss"} & (set(vars(trainer)) - own)),
        "callbacks": sorted(type(c).__name__ for c in trainer.callback_handler.callbacks),
    }


def built(build):
    torch.manual_seed(3)
    random.seed(3)
    return build()


def norm(weights):
    return float(sum((w**2).sum() for w in weights)) ** 0.5


def compare(build):
    """The same training on two replicas, and without the line."""
    enable()
    legacy = train(built(build))
    report = ump.get_multi_gpu_status().report
    ump.disable_multi_gpu()
    one = train(built(build))
    weights, others = one.pop("weights"), legacy.pop("weights")
    apart = norm(w - others[n] for n, w in weights.items()) / norm(weights.values())
    return {"one": one, "legacy": legacy, "apart": apart, "report": vars(report.ranks[0])}


def refusal(build):
    enable()
    trainer = built(build)
    try:
        trainer.train()
    except SetupError as error:
        return str(error)


def hooked():
    trainer = full()
    next(trainer.model.parameters()).register_hook(print)
    return trainer


results = {build.__name__: compare(build) for build in (lora, sft_lora, classifier, bound)}
results["refused"] = {build.__name__: refusal(build) for build in (dpo, schedule_free, hooked)}
out.mkdir(parents=True, exist_ok=True)
(out / "results.json").write_text(json.dumps({**results, "log": log}))
