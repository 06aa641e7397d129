"""A training in fp16 whose scale begins so high that steps are skipped: which, with which norms, and at which scale.

Usage: scaled.py NUM_RANKS OUT.json [CHECKPOINT]
"""

import json
import os
import sys
from pathlib import Path

import unsloth_multigpu as ump

num_ranks, out, checkpoint = int(sys.argv[1]), Path(sys.argv[2]), sys.argv[3] if len(sys.argv) > 3 else None
# What overflows is a sum over the rows of a micro-batch: ranks are to compute those of one process.
ump.enable_multi_gpu(num_gpus=num_ranks, balance="off")

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "dist" / "scripts"))
from common import arguments
from tiny_llama import RaggedRows, collate, tiny_llama
from transformers import Trainer, TrainerCallback

scales = []


class Scale(TrainerCallback):
    def on_step_end(self, args, state, control, **kwargs):
        # Without a device there is none.
        scales.append(trainer.accelerator.scaler.get_scale() if torch.cuda.is_available() else 1.0)


torch.manual_seed(0)
trainer = Trainer(
    model=tiny_llama(),
    args=arguments(
        out.stem,
        2,
        6,  # Whole micro-batches for 2 and 3 ranks.
        max_steps=6,
        save_strategy="steps",
        save_steps=3,
        learning_rate=1e-3,
        fp16=torch.cuda.is_available(),
    ),
    train_dataset=RaggedRows(72),
    data_collator=collate,
    callbacks=[Scale()],
)
if torch.cuda.is_available():
    trainer.accelerator.scaler = torch.amp.GradScaler("cuda", init_scale=2.0**24)
trainer.train(resume_from_checkpoint=checkpoint)
if os.environ.get("RANK", "0") == "0":
    norms = [line["grad_norm"] for line in trainer.state.log_history if "grad_norm" in line]
    out.write_text(json.dumps({"scales": scales, "norms": list(map(str, norms[-len(scales) :]))}))
