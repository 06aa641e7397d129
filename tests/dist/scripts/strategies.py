"""Trainings by a gradient strategy that end or begin in an unusual way, on two ranks."""

from pathlib import Path

import unsloth_multigpu as ump

ump.enable_multi_gpu(num_gpus=2)

import torch
from common import Calls, InOrder, Said, arguments, write_facts
from safetensors.torch import load_file
from tiny_llama import RaggedRows, collate, tiny_llama

DILOCO = {"strategy": ump.DiLoCo(every_steps=4)}
EVALUATED = {"eval_strategy": "steps", "eval_steps": 2, "save_strategy": "steps", "save_steps": 2}


def enable(**line):
    ump.disable_multi_gpu()
    ump.enable_multi_gpu(num_gpus=2, **line)


def end_epoch_early(args, state, control, **kwargs):
    control.should_epoch_stop = state.global_step == 7


def trainer_of(model, line, num_rows=16, **given):
    enable(**line)
    args = arguments("checkpoints", 4, **{"logging_steps": 100, "max_steps": 1, **given})
    data = {"train_dataset": RaggedRows(num_rows), "eval_dataset": RaggedRows(8), "data_collator": collate}
    return InOrder(model=model, args=args, callbacks=[Calls(on_step_end=end_epoch_early)], **data)


torch.manual_seed(0)
# The epoch ends two steps after the last save, and no step says that the training ends with it.
given = {"num_train_epochs": 1, "max_steps": -1, "learning_rate": 5e-2, "load_best_model_at_end": True}
trainer = trainer_of(tiny_llama(num_layers=1), DILOCO, 40, **given, **EVALUATED)
trainer.train()
best, own = load_file(Path(trainer.state.best_model_checkpoint, "model.safetensors")), trainer.model.state_dict()
facts = {"best": max(float((own[name].cpu() - saved).abs().max()) for name, saved in best.items())}

model = tiny_llama(num_layers=1)
trainer_of(model, DILOCO).train()
facts["ddp_after_diloco"] = str(Said().train(trainer_of(model, {})))
again = trainer_of(tiny_llama(num_layers=1), {})
again.train()
enable(**DILOCO)
facts["diloco_after_ddp"] = str(Said().train(again))
write_facts("ends", facts)
