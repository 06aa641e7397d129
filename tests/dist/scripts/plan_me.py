"""A user's script with the line, whose model has a configuration and no weights. The argument chooses what it does.

Usage: plan_me.py MODEL lora|reads|killed|no_training
"""

import os
import signal
import sys

import unsloth_multigpu as ump

ump.enable_multi_gpu(num_gpus=2)

import torch
from tiny_llama import collate
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments

path, what = sys.argv[1:]
model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16).to("cpu")
if what == "killed":
    os.kill(os.getpid(), signal.SIGKILL)
if what == "reads":
    print(float(model.lm_head.weight.sum()))
if what == "lora":
    from peft import LoraConfig, get_peft_model

    model = get_peft_model(model, LoraConfig(r=8, target_modules="all-linear", task_type="CAUSAL_LM"))


rows = [{"input_ids": [1] * (20 + i)} for i in range(8)]
arguments = TrainingArguments("out", per_device_train_batch_size=2, gradient_accumulation_steps=4, bf16=True)
trainer = Trainer(model, arguments, train_dataset=rows, data_collator=collate)
if what != "no_training":
    trainer.train()
print("the script has gone on")
