"""Preference training (DPO) with Unsloth and TRL: every GPU, or 2 CPU ranks where there is none.

python examples/dpo.py
"""

import random

import torch

import unsloth_multigpu as ump

ump.enable_multi_gpu(num_gpus=torch.accelerator.device_count() or 2)

from unsloth import FastLanguageModel  # isort: skip  # Before trl, which it changes.

from datasets import Dataset
from tiny_model import build_tiny, topics
from trl import DPOConfig, DPOTrainer

dtype = None if torch.accelerator.is_available() else torch.float32
model, tokenizer = FastLanguageModel.from_pretrained(
    build_tiny("outputs/dpo/tiny_model"), max_seq_length=512, dtype=dtype, load_in_4bit=False
)
model = FastLanguageModel.get_peft_model(model, r=8, lora_alpha=16, lora_dropout=0.0)


def prefer_order(text: str) -> dict[str, str]:
    """The right continuation is to be preferred to the same words in disorder."""
    words = text.split()
    rest = words[6:]
    return {
        "prompt": " ".join(words[:6]),
        "chosen": " " + " ".join(rest),
        "rejected": " " + " ".join(random.Random(text).sample(rest, len(rest))),
    }


trainer = DPOTrainer(
    model=model,
    processing_class=tokenizer,
    train_dataset=Dataset.from_list([prefer_order(text) for text in topics(64, min_words=12, max_words=60)]),
    args=DPOConfig(
        output_dir="outputs/dpo",
        per_device_train_batch_size=8,
        gradient_accumulation_steps=1,
        num_train_epochs=2,
        learning_rate=2e-2,
        max_length=256,
        logging_steps=2,
        save_strategy="no",
        report_to="none",
    ),
)
trainer.train()
model.save_pretrained("outputs/dpo/adapter")

margins = [row["rewards/margins"] for row in trainer.state.log_history if "rewards/margins" in row]
print(f"{trainer.args.world_size} ranks. Margin of right order: {margins[0]:.3f} at first, {margins[-1]:.3f} at last")
