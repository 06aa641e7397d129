"""Full training of a model that the script asks to be spread over all cards.

Usage: balanced.py MODEL OUT.json. shard by a variable.
"""

import json
import os
import sys
from pathlib import Path

import unsloth_multigpu as ump

ump.enable_multi_gpu(num_gpus=2)

import torch
from transformers import AutoModelForCausalLM, Trainer

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "dist" / "scripts"))
from common import arguments
from tiny_llama import RaggedRows, collate

model = AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=torch.float32, device_map="balanced")
trainer = Trainer(
    model=model,
    args=arguments("checkpoints", 2, max_steps=2, optim="adamw_torch_fused"),
    train_dataset=RaggedRows(8),
    data_collator=collate,
)
trainer.train()
facts = {
    "devices": sorted({str(p.device) for p in model.parameters()}),
    "is_sharded": any(hasattr(p, "_local_tensor") for p in model.parameters()),
    "peak": torch.cuda.max_memory_allocated(),
}
Path(f"{sys.argv[2]}.{os.environ['RANK']}").write_text(json.dumps(facts))
