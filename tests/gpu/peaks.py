"""QLoRA by TRL on a model in 4 bit: what memory of the device loading and a step take, and of the host loading.

Usage: peaks.py NUM_RANKS MODEL OUT [--unsloth]
MODEL is quantised already, or is when it is loaded; one process then leaves it in OUT_packed. Facts of a rank are in
OUT.RANK. shard by a variable.
"""

import ctypes
import gc
import json
import os
import sys
import threading
from pathlib import Path

import unsloth_multigpu as ump

ump.enable_multi_gpu(num_gpus=int(sys.argv[1]))

IS_UNSLOTH = "--unsloth" in sys.argv
if IS_UNSLOTH:
    from unsloth import FastLanguageModel
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
    total = pss = 0
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if line.startswith("Pss:"):
            pss = int(line.split()[1]) * 1024
        elif line.startswith("VmFlags:") and " hg" not in line:
            total += pss
    return total


def watch_host():
    while not is_loaded.wait(0.03):
        facts["host_peak_loaded"] = max(facts["host_peak_loaded"], host_bytes() - before)


class Peaks(TrainerCallback):
    def on_step_begin(self, args, state, control, **kwargs):
        facts["prepared"], facts["peak_prepared"] = torch.cuda.memory_allocated(), torch.cuda.max_memory_allocated()
        torch.cuda.reset_peak_memory_stats()


# It leaves 1.2 GiB of a card free, which this one does not have.
transformers.modeling_utils.caching_allocator_warmup = lambda *_: None
torch.zeros(1, device="cuda")
is_packed = hasattr(AutoConfig.from_pretrained(sys.argv[2]), "quantization_config")
gc.collect()
ctypes.CDLL(None).malloc_trim(0)
before, is_loaded, facts["host_peak_loaded"] = host_bytes(), threading.Event(), 0
watcher = threading.Thread(target=watch_host)
watcher.start()
if IS_UNSLOTH:
    model, tokenizer = FastLanguageModel.from_pretrained(
        sys.argv[2], max_seq_length=64, load_in_4bit=True, dtype=torch.float32
    )
else:
    bits = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=torch.float32,
    )
    told = {} if is_packed else {"quantization_config": bits}
    model = AutoModelForCausalLM.from_pretrained(sys.argv[2], dtype=torch.float32, **told)
    tokenizer = AutoTokenizer.from_pretrained(sys.argv[2])
is_loaded.set()
watcher.join()
facts["loaded"], facts["peak_loaded"] = torch.cuda.memory_allocated(), torch.cuda.max_memory_allocated()
if int(sys.argv[1]) == 1 and not is_packed:
    model.save_pretrained(f"{sys.argv[3]}_packed")
    tokenizer.save_pretrained(f"{sys.argv[3]}_packed")
lora = {"r": 4, "target_modules": ["q_proj", "v_proj"]}
if IS_UNSLOTH:
    model = FastLanguageModel.get_peft_model(model, lora_dropout=0.0, use_gradient_checkpointing=True, **lora)
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
    fp16=False,
    gradient_checkpointing=not IS_UNSLOTH,
    optim="adamw_torch",
)
trainer = SFTTrainer(
    model,
    arguments,
    train_dataset=rows,
    processing_class=tokenizer,
    peft_config=None if IS_UNSLOTH else LoraConfig(task_type="CAUSAL_LM", **lora),
    callbacks=[Peaks()],
)
trainer.train()
facts["peak_trained"] = torch.cuda.max_memory_allocated()
Path(f"{sys.argv[3]}.{os.environ.get('RANK', '0')}").write_text(json.dumps(facts))
