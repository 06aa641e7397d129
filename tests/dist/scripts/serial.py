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


def enable(**options):
    ump.disable_multi_gpu()
    ump.enable_multi_gpu(enable_ddp=False, num_gpus=2, **options)


enable()  # First, as in a user's script.

import torch
import unsloth  # noqa: F401
from common import QUIET, Calls, Said, logged
from texts import Texts

from tests.helpers.outcome import distance
from tests.helpers.tiny import topics

said = Said()
logging.getLogger("unsloth_multigpu").setLevel("INFO")
logging.getLogger("unsloth_multigpu").addHandler(said)
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


def alternate(_, state, __, model, **___):
    model.score.requires_grad_(state.global_step % 2 == 0)


def classifier():
    """It is evaluated in between, and its head is frozen in every second step."""
    trainer = texts.classifier(TEXTS, COMMON)
    trainer.add_callback(Calls(on_step_begin=alternate))
    trainer.args.eval_strategy, trainer.args.eval_steps = "steps", 1
    trainer.eval_dataset = trainer.train_dataset.select(range(2))
    return trainer


def bound():
    """Its forward is bound to this very model."""
    model = texts.causal_lm()
    forward = model.forward
    model.forward = functools.partial(lambda *args, **inputs: forward(*args, **inputs))
    # Its signature is hidden.
    return texts.plain(model, TEXTS, {**COMMON, "remove_unused_columns": False})


def hooked():
    model = texts.causal_lm()
    next(model.parameters()).register_hook(print)
    return texts.plain(model, TEXTS, COMMON)


KINDS = {
    "lora": lambda: texts.plain(texts.lora(), TEXTS, COMMON),
    "sft_lora": lambda: texts.sft(texts.fast_lora(), TEXTS, COMMON),
    "classifier": classifier,
    "bound": bound,
}
REFUSED = {
    "dpo": lambda: texts.dpo(texts.lora(), TEXTS, COMMON),
    "schedule_free": lambda: texts.plain(texts.causal_lm(), TEXTS, {**COMMON, "optim": "schedule_free_adamw"}),
    "hooked": hooked,
}


def train(trainer):
    """Loss and gradient norm of each step, and the weights at the end."""
    own = set(vars(trainer))
    trainer.train()
    return {
        **logged(trainer, "loss", "grad_norm"),
        "weights": {n: p.detach() for n, p in trainer.model.named_parameters() if p.requires_grad},
        "left": sorted({"training_step", "compute_loss"} & (set(vars(trainer)) - own)),
        "callbacks": sorted(type(c).__name__ for c in trainer.callback_handler.callbacks),
    }


def built(build):
    torch.manual_seed(3)
    random.seed(3)
    return build()


def compare(build):
    """The same training on two replicas, and without the line."""
    enable()
    legacy = train(built(build))
    report = ump.get_multi_gpu_status().report
    ump.disable_multi_gpu()
    one = train(built(build))
    apart = distance(one.pop("weights"), legacy.pop("weights"))
    return {"one": one, "legacy": legacy, "apart": apart, "report": vars(report.ranks[0])}


def refusal(build):
    enable()
    return str(Said().train(built(build)))


results = {kind: compare(build) for kind, build in KINDS.items()}
results["refused"] = {kind: refusal(build) for kind, build in REFUSED.items()}
results["log"] = [text for _, text in said.records]
(out / "results.json").write_text(json.dumps(results))
