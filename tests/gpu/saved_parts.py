"""LoRA on 4-bit weights with checkpoints: gradient norms, where the weights lie, and files that are saved once.

Usage: saved_parts.py NUM_RANKS MODEL OUT [CHECKPOINT] [adamw_bnb_8bit]. Other options by variables.
"""

import json
import os
import sys
from pathlib import Path

import unsloth_multigpu as ump

ump.enable_multi_gpu(num_gpus=int(sys.argv[1]))

import torch
from peft import LoraConfig, get_peft_model, prepare_model_for_kbit_training
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, Trainer

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "dist" / "scripts"))
from common import arguments
from tiny_llama import RaggedRows, collate

out, more = Path(sys.argv[3]), sys.argv[4:]
optim = {"optim": more.pop()} if "adamw_bnb_8bit" in more else {}
bits = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.float32)
model = AutoModelForCausalLM.from_pretrained(sys.argv[2], dtype=torch.float32, quantization_config=bits)
model = prepare_model_for_kbit_training(model, use_gradient_checkpointing=False)
torch.manual_seed(0)
lora = LoraConfig(task_type="CAUSAL_LM", r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
model = get_peft_model(model, lora)
trainer = Trainer(
    model=model,
    args=arguments(
        out / "checkpoints",
        6,
        max_steps=8,
        learning_rate=1e-2,
        adam_epsilon=1e-3,  # Adam with a small one makes the rounding of small gradients visible.
        save_strategy="steps" if int(sys.argv[1]) > 1 else "no",
        save_steps=3,
        **optim,
    ),
    train_dataset=RaggedRows(26),
    data_collator=collate,
)
trainer.train(resume_from_checkpoint=more[0] if more else None)
model.save_pretrained(out / "adapter")
facts = {
    "norms": [line["grad_norm"] for line in trainer.state.log_history if "grad_norm" in line],
    "dtypes": sorted({str(p.dtype) for p in model.parameters()}),
    "devices": sorted({str(p.device) for p in model.parameters()}),
}
(out / f"facts_{os.environ.get('RANK', '0')}.json").write_text(json.dumps(facts))
