"""The Trainer of transformers with PEFT, no Unsloth: every GPU, or 2 CPU ranks where there is none.

python examples/plain_transformers.py
"""

import torch

import unsloth_multigpu as ump

ump.enable_multi_gpu(num_gpus=torch.accelerator.device_count() or 2)

from datasets import Dataset
from peft import LoraConfig, get_peft_model
from tiny_model import build_tiny, topics
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    DataCollatorForLanguageModeling,
    Trainer,
    TrainingArguments,
)

name = build_tiny("outputs/plain_transformers/tiny_model")
tokenizer = AutoTokenizer.from_pretrained(name)
model = AutoModelForCausalLM.from_pretrained(name)
model = get_peft_model(model, LoraConfig(r=8, target_modules="all-linear", task_type="CAUSAL_LM"))

# 60 texts are 7 whole batches and half of one. Its 4 samples are shared out too; none is repeated.
texts = Dataset.from_dict({"text": topics(60)})
tokens = texts.map(lambda rows: tokenizer(rows["text"], truncation=True, max_length=256), batched=True)

trainer = Trainer(
    model=model,
    train_dataset=tokens.remove_columns("text"),
    data_collator=DataCollatorForLanguageModeling(tokenizer, mlm=False),
    args=TrainingArguments(
        output_dir="outputs/plain_transformers",
        per_device_train_batch_size=8,
        num_train_epochs=1,
        learning_rate=5e-3,
        logging_steps=2,
        save_strategy="no",
        report_to="none",
    ),
)
trainer.train()
trainer.save_model("outputs/plain_transformers/adapter")
print(f"{trainer.args.world_size} ranks took {trainer.state.global_step} steps; outputs/plain_transformers/adapter")
