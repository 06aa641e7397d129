"""LoRA on a model in 4 bit: gradient norms, and where the weights lie.

Usage: quantized.py NUM_RANKS MODEL OUT.json
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

model = AutoModelForCausalLM.from_pretrained(
    sys.argv[2],
    quantization_config=BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.float32
    ),
    dtype=torch.float32,
)
model = prepare_model_for_kbit_training(model, use_gradient_checkpointing=False)
torch.manual_seed(0)
model = get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False))
trainer = Trainer(
    model=model,
    args=arguments("checkpoints", 4, max_steps=3, optim="adamw_bnb_8bit"),
    train_dataset=RaggedRows(26),
    data_collator=collate,
)
trainer.train()
facts = {
    "norms": [line["grad_norm"] for line in trainer.state.log_history if "grad_norm" in line],
    "dtypes": sorted({str(p.dtype) for p in model.parameters()}),
    "devices": sorted({str(p.device) for p in model.parameters()}),
}
Path(f"{sys.argv[3]}.{os.environ.get('RANK', '0')}").write_text(json.dumps(facts))
