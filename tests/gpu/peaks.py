"""QLoRA by TRL on a model in 4 bit: what memory of the device loading and a step take, and of the host loading.

Usage: peaks.py NUM_RANKS MODEL OUT
MODEL is quantised already, or is when it is loaded; one process then leaves it in OUT_packed. Facts of a rank are in
OUT.RANK. shard by a variable.
"""

import ctypes
import gc
import json
import os
import sys
from pathlib import Path

import unsloth_multigpu as ump

ump.enable_multi_gpu(num_gpus=int(sys.argv[1]))

import bitsandbytes  # noqa: F401
import torch
import transformers.models.llama.modeling_llama
from datasets import Dataset
from peft import LoraConfig
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, BitsAndBytesConfig, TrainerCallback
from trl import SFTConfig, SFTTrainer

facts = {}


def host_bytes():
    """Of this process's pages, a share of those that others map as well. Devices, in huge pages, are left out."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    total = pss = 0
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if line.startswith("Pss:"):
            pss = int(line.split()[1]) * 1024
        elif line.startswith("VmFlags:") and " hg" not in line:
            total += pss
    return total


class Peaks(TrainerCallback):
    def on_step_begin(self, args, state, control, **kwargs):
        facts["prepared"], facts["peak_prepared"] = torch.cuda.memory_allocated(), torch.cuda.max_memory_allocated()
        torch.cuda.reset_peak_memory_stats()


# It leaves 1.2 GiB of a card free, which this one does not have.
transformers.modeling_utils.caching_allocator_warmup = lambda *_: None
torch.zeros(1, device="cuda")
bits = BitsAndBytesConfig(
    load_in_4bit=True,
    bnb_4bit_quant_type="nf4",
    bnb_4bit_use_double_quant=True,
    bnb_4bit_compute_dtype=torch.float32,
)
is_packed = hasattr(AutoConfig.from_pretrained(sys.argv[2]), "quantization_config")
told = {} if is_packed else {"quantization_config": bits}
before = host_bytes()
model = AutoModelForCausalLM.from_pretrained(sys.argv[2], dtype=torch.float32, **told)
facts["host_loaded"] = host_bytes() - before
facts["loaded"], facts["peak_loaded"] = torch.cuda.memory_allocated(), torch.cuda.max_memory_allocated()
if int(sys.argv[1]) == 1 and told:
    model.save_pretrained(f"{sys.argv[3]}_packed")
    AutoTokenizer.from_pretrained(sys.argv[2]).save_pretrained(f"{sys.argv[3]}_packed")
rows = Dataset.from_list([{"input_ids": [5 + (i * i + 3 * k * k) % 290 for k in range(8)]} for i in range(32)])
arguments = SFTConfig(
    "checkpoints",
    per_device_train_batch_size=1,
    # A rank has one micro-batch: Python frees tensors of an earlier one late, which are in cycles.
    gradient_accumulation_steps=int(sys.argv[1]),
    max_steps=1,
    logging_steps=1,
    save_strategy="no",
    report_to=[],
    disable_tqdm=True,
    bf16=False,
    gradient_checkpointing=True,
)
trainer = SFTTrainer(
    model,
    arguments,
    train_dataset=rows,
    processing_class=AutoTokenizer.from_pretrained(sys.argv[2]),
    peft_config=LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"),
    callbacks=[Peaks()],
)
trainer.train()
facts["peak_trained"] = torch.cuda.max_memory_allocated()
Path(f"{sys.argv[3]}.{os.environ.get('RANK', '0')}").write_text(json.dumps(facts))
