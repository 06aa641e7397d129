"""Trainings by a gradient strategy that end or begin in an unusual way, on two ranks."""

import json
import os
from pathlib import Path

import unsloth_multigpu as ump

ump.enable_multi_gpu(num_gpus=2)

import torch
from common import InOrder, arguments
from safetensors.torch import load_file
from tiny_llama import RaggedRows, collate, tiny_llama
from transformers import TrainerCallback

DILOCO = {"strategy": ump.DiLoCo(every_steps=4)}
EVALUATED = {"eval_strategy": "steps", "eval_steps": 2, "save_strategy": "steps", "save_steps": 2}


def enable(**line):
    ump.disable_multi_gpu()
    ump.enable_multi_gpu(num_gpus=2, **line)


class EpochEndsEarly(TrainerCallback):
    def on_step_end(self, args, state, control, **kwargs):
        control.should_epoch_stop = state.global_step == 7


def trainer_of(model, line, num_rows=16, **given):
    enable(**line)
    args = arguments("checkpoints", 4, **{"logging_steps": 100, "max_steps": 1, **given})
    data = {"train_dataset": RaggedRows(num_rows), "eval_dataset": RaggedRows(8), "data_collator": collate}
    return InOrder(model=model, args=args, callbacks=[EpochEndsEarly()], **data)


def error_of(train):
    try:
        train()
    except ump.SetupError as error:
        return str(error)
    return ""


torch.manual_seed(0)
# The epoch ends two steps after the last save, and no step says that the training ends with it.
given = {"num_train_epochs": 1, "max_steps": -1, "learning_rate": 5e-2, "load_best_model_at_end": True}
trainer = trainer_of(tiny_llama(num_layers=1), DILOCO, 40, **given, **EVALUATED)
trainer.train()
best, own = load_file(Path(trainer.state.best_model_checkpoint, "model.safetensors")), trainer.model.state_dict()
facts = {"best": max(float((own[name].cpu() - saved).abs().max()) for name, saved in best.items())}

model = tiny_llama(num_layers=1)
trainer_of(model, DILOCO).train()
facts["ddp_after_diloco"] = error_of(trainer_of(model, {}).train)
again = trainer_of(tiny_llama(num_layers=1), {})
again.train()
enable(**DILOCO)
facts["diloco_after_ddp"] = error_of(again.train)
Path(f"ends_{os.environ['RANK']}.json").write_text(json.dumps(facts))
