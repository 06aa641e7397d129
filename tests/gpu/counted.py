"""One of the set-ups whose memory `plan` counts; as a training it writes where it ran, and the peak of its third step.

Usage: counted.py KIND MODEL OUT
KIND has words: full, lora or 4bit; sgd or 8bit; checkpointing; moe; rows=N; balanced: the script asks for a model that
is spread over all cards. shard by a variable. Facts: OUT.RANK.
"""

import json
import os
import sys
from pathlib import Path

import unsloth_multigpu as ump

ump.enable_multi_gpu()

import torch
import transformers.modeling_utils
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, Trainer, TrainerCallback

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "dist" / "scripts"))
from common import arguments

kind, folder, out = sys.argv[1].split(), sys.argv[2], sys.argv[3]
rows = next((int(word[5:]) for word in kind if word.startswith("rows=")), 2)
optimizer = "sgd" if "sgd" in kind else "adamw_8bit" if "8bit" in kind else "adamw_torch_fused"
# It leaves 1.2 GiB of a card free, which this one does not have.
transformers.modeling_utils.caching_allocator_warmup = lambda *_: None


class Peak(TrainerCallback):
    def on_step_begin(self, args, state, control, **kwargs):
        torch.cuda.reset_peak_memory_stats()

    def on_train_end(self, args, state, control, **kwargs):
        facts = {
            "devices": sorted({str(p.device) for p in model.parameters()}),
            "is_sharded": any(hasattr(p, "_local_tensor") for p in model.parameters()),
            "peak": torch.cuda.max_memory_allocated(),
        }
        Path(f"{out}.{os.environ.get('RANK', '0')}").write_text(json.dumps(facts))


told = {}
if "4bit" in kind:
    told["quantization_config"] = BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.float32
    )
if "moe" in kind:
    told["experts_implementation"] = "eager"  # CUDA counts tokens of experts by an operator that the CPU lacks.
if "balanced" in kind:
    told["device_map"] = "balanced"
model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **told)
if "full" not in kind:
    from peft import LoraConfig, get_peft_model

    model = get_peft_model(model, LoraConfig(r=8, target_modules="all-linear", task_type="CAUSAL_LM"))
ids = torch.randint(0, 300, (24, 128), generator=torch.Generator().manual_seed(0)).tolist()
trainer = Trainer(
    model=model,
    args=arguments(
        "checkpoints",
        rows,
        2,
        max_steps=3,
        optim=optimizer,
        gradient_checkpointing="checkpointing" in kind,
        gradient_checkpointing_kwargs={"use_reentrant": False},
    ),
    train_dataset=[{"input_ids": row, "labels": row} for row in ids],
    callbacks=[Peak()],
)
trainer.train()
