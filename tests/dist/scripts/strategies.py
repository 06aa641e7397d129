"""Trainings by a gradient strategy that end or begin in an unusual way, on two ranks."""

from pathlib import Path

import unsloth_multigpu as ump

ump.enable_multi_gpu(num_gpus=2)

import torch
from common import Calls, InOrder, Said, Stream, arguments, write_facts
from safetensors.torch import load_file
from tiny_llama import RaggedRows, collate, tiny_llama

DILOCO = {"strategy": ump.DiLoCo(every_steps=4)}
EVALUATED = {"eval_strategy": "steps", "eval_steps": 2, "save_strategy": "steps", "save_steps": 2}


def enable(**line):
    ump.disable_multi_gpu()
    ump.enable_multi_gpu(num_gpus=2, **line)


def evaluate(args, state, control, model, **kwargs):
    if state.global_step == 5:
        trainer.evaluate()
        facts["evaluated"] = [float(p.sum()) for p in model.parameters()]


def trainer_of(model, line, rows=None, **given):
    enable(**line)
    args = arguments("checkpoints", 4, **{"logging_steps": 100, "max_steps": 1, **given})
    data = {"train_dataset": rows or RaggedRows(16), "eval_dataset": RaggedRows(8), "data_collator": collate}
    return InOrder(model=model, args=args, callbacks=[Calls(on_step_end=evaluate)], **data)


torch.manual_seed(0)
# A stream that is read once ends a step after the last save, and no step says that the training ends with it.
given = {"max_steps": 20, "learning_rate": 5e-2, "load_best_model_at_end": True}
trainer, facts = trainer_of(tiny_llama(), DILOCO, Stream(iter([*RaggedRows(26)])), **given, **EVALUATED), {}
trainer.train()
best, own = load_file(Path(trainer.state.best_model_checkpoint, "model.safetensors")), trainer.model.state_dict()
facts["best"] = max(float((own[name].cpu() - saved).abs().max()) for name, saved in best.items())

again = trainer_of(trainer.model, {})
facts["ddp_after_diloco"] = str(Said().train(again))
enable(**DILOCO)
facts["diloco_after_ddp"] = str(Said().train(again))
write_facts("ends", facts)
