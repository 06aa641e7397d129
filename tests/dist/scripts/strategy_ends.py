"""Trainings that end or begin in an unusual way under a gradient strategy, in one process group of two ranks.

Writes ends_RANK.json.
"""

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

rank = int(os.environ["RANK"])
DILOCO = {"strategy": ump.DiLoCo(every_steps=4)}
EVALUATED = {"eval_strategy": "steps", "eval_steps": 2, "save_strategy": "steps", "save_steps": 2}


class EpochEndsEarly(TrainerCallback):
    def on_step_end(self, args, state, control, **kwargs):
        control.should_epoch_stop = state.global_step == 7


def tiny():
    torch.manual_seed(0)
    return tiny_llama(num_layers=1)


def trainer_of(model, line, num_rows, callbacks=(), **given):
    ump.disable_multi_gpu()
    ump.enable_multi_gpu(num_gpus=2, **line)
    args = arguments("checkpoints", 4, **{"logging_steps": 100, **given})
    data = {"train_dataset": RaggedRows(num_rows), "eval_dataset": RaggedRows(8), "data_collator": collate}
    return InOrder(model=model, args=args, callbacks=list(callbacks), **data)


def difference_from_best(line):
    """The epoch ends two steps after the last save, and no step says that the training ends with it."""
    given = {"num_train_epochs": 1, "learning_rate": 5e-2, "load_best_model_at_end": True, **EVALUATED}
    trainer = trainer_of(tiny(), line, 40, [EpochEndsEarly()], **given)
    trainer.train()
    best = load_file(Path(trainer.state.best_model_checkpoint, "model.safetensors"))
    own = dict(trainer.model.named_parameters())
    return max(float((own[name].detach() - saved).abs().max()) for name, saved in best.items() if name in own)


def error_of(train):
    try:
        train()
    except ump.SetupError as error:
        return str(error)
    return ""


facts = {"best": difference_from_best(DILOCO)}

model = tiny()
trainer_of(model, DILOCO, 16, max_steps=1).train()
facts["ddp_after_diloco"] = error_of(trainer_of(model, {}, 16, max_steps=1).train)
again = trainer_of(tiny(), {}, 16, max_steps=1)
again.train()
ump.disable_multi_gpu()
ump.enable_multi_gpu(num_gpus=2, **DILOCO)
facts["diloco_after_ddp"] = error_of(again.train)
Path(f"ends_{rank}.json").write_text(json.dumps(facts))
