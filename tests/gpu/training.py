"""Trainings in which something is counted or measured, or one of whose ranks meets a fault, one after the other.

Usage: training.py NUM_RANKS OUT KIND[=CHECKPOINT]...
0 ranks: without the line. KIND is a key of KINDS. Rank 0 writes what `found` of the callback says into OUT/KIND.json.
"""

import json
import os
import sys
import warnings
from collections import Counter
from pathlib import Path

import unsloth_multigpu as ump

num_ranks, out, jobs = int(sys.argv[1]), Path(sys.argv[2]), sys.argv[3:]
# Whole micro-batches, two for each process and one for each rank.
WHOLE = {"balance": "off", "loss_reduction": "whole"}
LINES = {
    # What overflows is a sum over the rows of a micro-batch: ranks are to compute those of one process.
    "fp16": {"balance": "off"},
    "compared": WHOLE,
    "not_compared": {**WHOLE, "check_first_step": "off"},
}


def enable(kind):
    if num_ranks:
        ump.disable_multi_gpu()
        ump.enable_multi_gpu(num_gpus=num_ranks, **LINES.get(kind, {}))


enable(jobs[0].partition("=")[0])

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "dist" / "scripts"))
from common import arguments
from tiny_llama import RaggedRows, collate, tiny_llama
from transformers import Trainer, TrainerCallback

from unsloth_multigpu.step.proof import StepProof

VOCABULARY = 64
# Counted in these steps: planner and stopwatch are through with what they do at first.
FIRST, LAST = 20, 30
FAULTY_STEP = 3
TOO_MANY_BYTES = 2**50
SKIPPED = (os.path.dirname(torch.__file__) + os.sep, warnings.__file__)
if "fake_cuda" in sys.modules:
    SKIPPED += (sys.modules["fake_cuda"].__file__,)
rank = int(os.environ.get("RANK", "0"))
IS_CUDA = torch.cuda.is_available()


class Waits(TrainerCallback):
    """Counts where the host waits for the device, by the innermost line that is not torch's."""

    def __init__(self, model):
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

    def found(self):
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

    def found(self):
        return {}


class Scale(TrainerCallback):
    """In fp16, with a scale that begins so high that steps are skipped: the scales, and the norms of this start."""

    def __init__(self, model):
        self.scales = []

    def on_step_end(self, args, state, control, **kwargs):
        # Without a device there is none.
        self.scales.append(trainer.accelerator.scaler.get_scale() if IS_CUDA else 1.0)

    def found(self):
        norms = [line["grad_norm"] for line in trainer.state.log_history if "grad_norm" in line]
        return {"scales": self.scales, "norms": list(map(str, norms[-len(self.scales) :]))}


class Compared(TrainerCallback):
    """What the comparison of the first step costs: memory above what is there before, waits in later steps.

    `step_bytes` is the most memory of the first step without its update, `compared_bytes` that of the comparison,
    `left_bytes` what it leaves; `waits` is how often the host waits for the device in each step after the second.
    """

    def __init__(self, model):
        from fake_cuda import trace_waits, waits

        trace_waits()
        self.counted = waits
        self.facts = {"waits": [], "gradient_bytes": sum(p.nbytes for p in model.parameters())}
        self.compared = compared = StepProof._compared

        def measured(proof, *args, **kwargs):
            before = self.begin()
            found = compared(proof, *args, **kwargs)
            self.facts["compared_bytes"] = torch.cuda.max_memory_allocated() - before
            self.facts["left_bytes"] = torch.cuda.memory_allocated() - before
            self.facts["is_exact"] = found.is_exact
            return found

        StepProof._compared = measured

    @staticmethod
    def begin():
        torch.cuda.reset_peak_memory_stats()
        return torch.cuda.memory_allocated()

    def on_step_begin(self, args, state, control, **kwargs):
        self.before, self.waits = self.begin(), self.counted.total()

    def on_pre_optimizer_step(self, args, state, control, **kwargs):
        self.facts.setdefault("step_bytes", torch.cuda.max_memory_allocated() - self.before)

    def on_step_end(self, args, state, control, **kwargs):
        # In the last step the report waits for what is not known yet.
        if 2 < state.global_step < state.max_steps:
            self.facts["waits"].append(self.counted.total() - self.waits)

    def found(self):
        StepProof._compared = self.compared
        return self.facts


# Callback, sizes of the model, batch, accumulation, arguments.
SCALED = {"max_steps": 6, "save_strategy": "steps", "save_steps": 3, "learning_rate": 1e-3, "fp16": IS_CUDA}
FAULTY = (Fault, {}, 4, 1, {"max_steps": 16, "logging_steps": 100})
COMPARED = (Compared, {"hidden_size": 512, "num_layers": 3}, 2, 2, {"max_steps": 6, "logging_steps": 100})
KINDS = {
    "waits": (Waits, {}, 4, 4, {"max_steps": LAST + 2, "logging_steps": 100}),
    "beyond_vocabulary": FAULTY,
    "out_of_memory": FAULTY,
    # Whole micro-batches for 2 and 3 ranks.
    "fp16": (Scale, {}, 2, 6, SCALED),
    "compared": COMPARED,
    "not_compared": COMPARED,
}
for job in jobs:
    kind, _, checkpoint = job.partition("=")
    callback_class, sizes, batch, accumulation, given = KINDS[kind]
    enable(kind)
    torch.manual_seed(0)
    model = tiny_llama(vocab_size=VOCABULARY, **sizes)
    if kind == "waits":
        from peft import LoraConfig, get_peft_model

        model = get_peft_model(model, LoraConfig(target_modules=["q_proj", "v_proj"]))
    watch, collator = callback_class(model), collate
    rows = RaggedRows(72 if kind == "fp16" else 512, vocab_size=VOCABULARY)
    rows.lengths = [len(row) for row in rows.rows]  # For the planner.
    if callback_class is Compared:
        # Nothing of a step is the script's own code, which would be compared again in step 4.
        rows = [{"input_ids": row, "labels": row} for row in torch.randint(VOCABULARY, (20, 24)).tolist()]
        collator = None
    args = arguments(out / f"checkpoints_{kind}", batch, accumulation, **given)
    trainer = Trainer(model=model, args=args, train_dataset=rows, data_collator=collator, callbacks=[watch])
    if kind == "fp16" and IS_CUDA:
        trainer.accelerator.scaler = torch.amp.GradScaler("cuda", init_scale=2.0**24)
    trainer.train(resume_from_checkpoint=checkpoint or None)
    if rank == 0:
        (out / f"{kind}.json").write_text(json.dumps(watch.found()))
