"""What the comparison of the first step costs on a device: memory above what is there before, waits in later steps.

Usage: compared.py NUM_RANKS OUT.json
Rank 0 writes `step_bytes`, the most memory of the first step without its update; `compared_bytes`, that of the
comparison; `left_bytes`, what it leaves; `gradient_bytes`; and `waits`, how often the host waits for the device in each
step after the second.
"""

import json
import os
import sys
from pathlib import Path

import unsloth_multigpu as ump

num_ranks, out = int(sys.argv[1]), Path(sys.argv[2])
# Whole micro-batches, two for each process and one for each rank.
ump.enable_multi_gpu(num_gpus=num_ranks, balance="off", loss_reduction="whole")

import torch
from fake_cuda import trace_waits, waits

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "dist" / "scripts"))
from common import arguments
from tiny_llama import tiny_llama
from transformers import Trainer, TrainerCallback

from unsloth_multigpu.step.proof import StepProof

trace_waits()
facts = {"waits": []}
compared = StepProof._compared


def begin():
    torch.cuda.reset_peak_memory_stats()
    return torch.cuda.memory_allocated()


def measured(self, *args, **kwargs):
    before = begin()
    found = compared(self, *args, **kwargs)
    facts["compared_bytes"] = torch.cuda.max_memory_allocated() - before
    facts["left_bytes"] = torch.cuda.memory_allocated() - before
    facts["is_exact"] = found.is_exact
    return found


StepProof._compared = measured


class Watch(TrainerCallback):
    def on_step_begin(self, args, state, control, **kwargs):
        self.before, self.waits = begin(), waits.total()

    def on_pre_optimizer_step(self, args, state, control, **kwargs):
        facts.setdefault("step_bytes", torch.cuda.max_memory_allocated() - self.before)

    def on_step_end(self, args, state, control, **kwargs):
        # In the last step the report waits for what is not known yet.
        if 2 < state.global_step < state.max_steps:
            facts["waits"].append(waits.total() - self.waits)


torch.manual_seed(0)
model = tiny_llama(hidden_size=512, num_layers=3)
facts["gradient_bytes"] = sum(p.nbytes for p in model.parameters())
trainer = Trainer(
    model=model,
    args=arguments(out.stem, 2, 2, max_steps=6, logging_steps=100),
    # Nothing of a step is the script's own code, which would be compared again in step 4.
    train_dataset=[{"input_ids": row, "labels": row} for row in torch.randint(64, (20, 24)).tolist()],
    callbacks=[Watch()],
)
trainer.train()
if os.environ.get("RANK", "0") == "0":
    out.write_text(json.dumps(facts))
