"""A training for the facts of `fact.py`: something is counted in it, or one of its ranks meets a fault.

Usage: training.py NUM_RANKS KIND OUT.json
0 ranks: without the line. KIND is waits, beyond_vocabulary or out_of_memory.
"""

import json
import os
import sys
import warnings
from collections import Counter
from pathlib import Path

import unsloth_multigpu as ump

num_ranks, kind, out = int(sys.argv[1]), sys.argv[2], Path(sys.argv[3])
if num_ranks:
    ump.enable_multi_gpu(num_gpus=num_ranks)

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "dist" / "scripts"))
from common import arguments
from tiny_llama import RaggedRows, collate, tiny_llama
from transformers import Trainer, TrainerCallback

VOCABULARY = 64
# Counted in these steps: planner and stopwatch are through with what they do at first.
FIRST, LAST = 20, 30
FAULTY_STEP = 3
TOO_MANY_BYTES = 2**50
SKIPPED = (os.path.dirname(torch.__file__) + os.sep, warnings.__file__)
if "fake_cuda" in sys.modules:
    SKIPPED += (sys.modules["fake_cuda"].__file__,)
rank = int(os.environ.get("RANK", "0"))


class Waits(TrainerCallback):
    """Counts where the host waits for the device, by the innermost line that is not torch's."""

    def __init__(self):
        self.counts, self.is_counted = Counter(), hasattr(torch._C, "_cuda_set_sync_debug_mode")

    def on_step_begin(self, args, state, control, **kwargs):
        if state.global_step == FIRST and self.is_counted:
            warnings.simplefilter("always")
            warnings.showwarning = self.note
            torch.cuda.set_sync_debug_mode("warn")

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == LAST and self.is_counted:
            torch.cuda.set_sync_debug_mode("default")

    def note(self, message, *_args, **_kwargs):
        if "synchronizing CUDA operation" in str(message):
            self.counts[calling_line(sys._getframe(1))] += 1

    def found(self, trainer):
        per_step = {place: count / (LAST - FIRST) for place, count in self.counts.most_common()}
        return {"is_counted": self.is_counted, "per_step": per_step}


def calling_line(frame):
    """Like "transformers/trainer.py:1844"."""
    while frame is not None:
        file = frame.f_code.co_filename
        if not file.startswith(SKIPPED):
            return f"{'/'.join(Path(file).parts[-3:])}:{frame.f_lineno}"
        frame = frame.f_back
    return "torch"


class Fault(TrainerCallback):
    """In one micro-batch of rank 1."""

    def __init__(self, model):
        self.is_on = False
        model.get_input_embeddings().register_forward_pre_hook(self.before_embedding)

    def on_step_begin(self, args, state, control, **kwargs):
        self.is_on = rank == 1 and state.global_step + 1 == FAULTY_STEP

    def before_embedding(self, _module, inputs):
        if self.is_on and kind == "out_of_memory":
            torch.empty(TOO_MANY_BYTES, dtype=torch.uint8, device=inputs[0].device)
        return (torch.full_like(inputs[0], VOCABULARY),) if self.is_on else None

    def found(self, trainer):
        return {}


torch.manual_seed(0)
model = tiny_llama(vocab_size=VOCABULARY)
if kind == "waits":
    from peft import LoraConfig, get_peft_model

    model = get_peft_model(model, LoraConfig(target_modules=["q_proj", "v_proj"]))
watch = Waits() if kind == "waits" else Fault(model)
rows = RaggedRows(512, vocab_size=VOCABULARY)
rows.lengths = [len(row) for row in rows.rows]  # For the planner.
trainer = Trainer(
    model=model,
    args=arguments(
        "checkpoints",
        4,
        4 if kind == "waits" else 1,
        max_steps=LAST + 2 if kind == "waits" else 16,
        logging_steps=100,
    ),
    train_dataset=rows,
    data_collator=collate,
    callbacks=[watch],
)
trainer.train()
if rank == 0:
    out.write_text(json.dumps(watch.found(trainer)))
