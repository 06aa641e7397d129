"""Trains a tiny Llama several times in one process group, makes the ranks differ, and writes what came of it.

Usage: replicas.py NUM_GPUS NAME=JSON ... ; JSON holds options of enable_multi_gpu, "max_steps", and "plant": "start"
(rank 1 begins with weights of its own); "scale" (rank 1's gradient after the all-reduce, from the third step on);
"flip" (one bit of one weight on the last rank after step 3); "hook": a communication hook of DDP. An error of the last
training ends the run.
"""

import json
import os
import sys
from pathlib import Path

import unsloth_multigpu as ump

num_gpus = int(sys.argv[1])
ump.enable_multi_gpu(num_gpus=num_gpus)

import torch
from accelerate.utils import DDPCommunicationHookType, DistributedDataParallelKwargs
from common import arguments, logged
from tiny_llama import RaggedRows, collate, tiny_llama
from transformers import Trainer, TrainerCallback

rank = int(os.environ["RANK"])
NORM = "model.layers.0.input_layernorm.weight"


class Plant(TrainerCallback):
    def __init__(self, kind):
        self.kind = kind

    def on_train_begin(self, args, state, control, model=None, **kwargs):
        # DDP has wrapped and sent rank 0's weights by now.
        if self.kind == "start" and rank == 1:
            with torch.no_grad():
                for name, parameter in model.named_parameters():
                    if "self_attn" in name:
                        parameter.add_(0.01)

    def on_pre_optimizer_step(self, args, state, control, model=None, **kwargs):
        if self.kind == "scale" and rank == 1 and state.global_step >= 2:
            model.lm_head.weight.grad.mul_(1.5)

    def on_step_end(self, args, state, control, model=None, **kwargs):
        if self.kind == "flip" and rank == num_gpus - 1 and state.global_step == 3:
            weight = dict(model.named_parameters())[NORM]
            weight.data.view(torch.int32)[5] ^= 1


def train(name, line, is_last):
    plant, max_steps, hook = line.pop("plant", ""), line.pop("max_steps", 5), line.pop("hook", None)
    ump.disable_multi_gpu()
    ump.enable_multi_gpu(num_gpus=num_gpus, **{"verify_every": 2, **line})
    if rank == 0:
        print(f"[training {name}]", file=sys.stderr, flush=True)
    torch.manual_seed(0)
    trainer = Trainer(
        model=tiny_llama(),
        args=arguments(
            f"checkpoints_{name}",
            6,
            max_steps=max_steps,
            learning_rate=1e-3,
            save_strategy="steps" if plant == "flip" else "no",
            save_steps=1,
        ),
        train_dataset=RaggedRows(24),
        data_collator=collate,
        callbacks=[Plant(plant)],
    )
    if hook is not None:
        settings = DistributedDataParallelKwargs(comm_hook=DDPCommunicationHookType[hook])
        trainer.accelerator.ddp_handler = settings
    facts = {}
    try:
        trainer.train()
    except ump.MultiGPUError as error:
        if is_last:
            raise
        facts = {"error": f"{type(error).__name__}: {error}", "exit_code": error.exit_code}
    facts["norms"] = logged(trainer, "grad_norm")["grad_norm"]
    ddp = trainer.model_wrapped
    if isinstance(ddp, torch.nn.parallel.DistributedDataParallel):
        facts["ddp"] = {
            "find_unused_parameters": ddp.find_unused_parameters,
            "bucket_view": ddp.gradient_as_bucket_view,
        }
    Path(f"facts_{name}_{rank}.json").write_text(json.dumps(facts))


for number, pair in enumerate(sys.argv[2:], 3):
    name, _, text = pair.partition("=")
    train(name, json.loads(text), is_last=number == len(sys.argv))
