"""A training for the facts of `trained.py`: something is counted in it, or one of its ranks meets a fault.

Usage: training.py NUM_RANKS KIND OUT.json
0 ranks: without the line. KIND is waits, fp16, beyond_vocabulary, out_of_memory or processes.
"""

import json
import os
import shutil
import subprocess
import sys
import warnings
from collections import Counter
from pathlib import Path

import unsloth_multigpu as ump

num_ranks, kind, out = int(sys.argv[1]), sys.argv[2], Path(sys.argv[3])
if num_ranks:
    # An fp16 gradient overflows by what is summed in one micro-batch: ranks are to compute those of one process.
    ump.enable_multi_gpu(num_gpus=num_ranks, balance="off" if kind == "fp16" else "auto")

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "dist" / "scripts"))
from tiny_llama import RaggedRows, collate, tiny_llama
from transformers import Trainer, TrainerCallback, TrainingArguments

VOCABULARY = 64
# Counted in these steps: planner and stopwatch are through with what they do at first.
FIRST, LAST = 20, 30
FAULTY_STEP = 3
# Scales begin so high that the first steps overflow, and are skipped.
INIT_SCALE = 2.0**26
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


class LossScale(TrainerCallback):
    """Keeps the scale behind each step, and whether the step was skipped. Without a device there is no scale.

    accelerate does not know of steps that a fused optimizer skips; the scale falls behind each.
    """

    def __init__(self):
        self.before, self.scales, self.skipped = 0.0, [], []

    def scale(self):
        scaler = trainer.accelerator.scaler
        return 1.0 if scaler is None else scaler.get_scale()

    def on_step_begin(self, args, state, control, **kwargs):
        self.before = self.scale()

    def on_step_end(self, args, state, control, **kwargs):
        self.scales.append(self.scale())
        self.skipped.append(self.scales[-1] < self.before)

    def found(self, trainer):
        norms = [str(line["grad_norm"]) for line in trainer.state.log_history if "grad_norm" in line]
        return {"scales": self.scales, "skipped": self.skipped, "norms": norms}


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


class Processes(TrainerCallback):
    """Who is on the cards, by the driver, while all ranks train."""

    def __init__(self):
        self.ranks, self.listed = [None] * num_ranks, None

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == FAULTY_STEP:
            torch.distributed.all_gather_object(self.ranks, os.getpid())
            if rank == 0 and shutil.which("nvidia-smi"):
                query = ["nvidia-smi", "--query-compute-apps=pid", "--format=csv,noheader"]
                self.listed = [int(line) for line in subprocess.check_output(query, text=True).split()]
            torch.distributed.barrier()

    def found(self, trainer):
        return {"supervisor": os.getppid(), "ranks": self.ranks, "listed": self.listed}


torch.manual_seed(0)
model = tiny_llama(vocab_size=VOCABULARY)
if kind == "waits":
    from peft import LoraConfig, get_peft_model

    model = get_peft_model(model, LoraConfig(target_modules=["q_proj", "v_proj"]))
watch = Fault(model) if kind in ("beyond_vocabulary", "out_of_memory") else None
watch = watch or {"waits": Waits, "fp16": LossScale, "processes": Processes}[kind]()
rows = RaggedRows(512, vocab_size=VOCABULARY)
rows.lengths = [len(row) for row in rows.rows]  # For the planner.
trainer = Trainer(
    model=model,
    args=TrainingArguments(
        "checkpoints",
        per_device_train_batch_size=4,
        gradient_accumulation_steps=4 if kind in ("waits", "fp16") else 1,
        max_steps=LAST + 2 if kind == "waits" else 16,
        logging_steps=1 if kind == "fp16" else 100,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        fp16=kind == "fp16" and torch.cuda.is_available(),
    ),
    train_dataset=rows,
    data_collator=collate,
    callbacks=[watch],
)
if trainer.accelerator.scaler is not None:
    trainer.accelerator.scaler = torch.amp.GradScaler("cuda", init_scale=INIT_SCALE)
trainer.train()
if rank == 0:
    out.write_text(json.dumps(watch.found(trainer)))
