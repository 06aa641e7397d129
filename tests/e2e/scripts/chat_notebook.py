"""Chat tuning on FineTome-like conversations, then DPO: a notebook exported as a script. `--plain` leaves the line out.

Reads tiny_llama/, chats.json and preferences.json in the current folder.
"""

import sys

if "--plain" not in sys.argv:
    import unsloth_multigpu as ump

    ump.enable_multi_gpu(num_gpus=2)

from unsloth import FastLanguageModel  # isort: skip

import json

import torch
from datasets import load_dataset
from transformers import DataCollatorForSeq2Seq
from trl import DPOConfig, DPOTrainer, SFTConfig, SFTTrainer
from unsloth.chat_templates import get_chat_template, standardize_sharegpt, train_on_responses_only

settings = {"max_seq_length": 512, "dtype": torch.float32, "load_in_4bit": False}


def save_history(trainer, name):
    if trainer.is_world_process_zero():
        steps = [row for row in trainer.state.log_history if "loss" in row]
        with open(name, "w") as file:
            json.dump([{"loss": row["loss"], "grad_norm": row["grad_norm"]} for row in steps], file)


# %% Conversations in ShareGPT's form become texts in Llama 3.1's
model, tokenizer = FastLanguageModel.from_pretrained("tiny_llama", **settings)
model = FastLanguageModel.get_peft_model(model, r=16, lora_alpha=16, lora_dropout=0, random_state=3407)
tokenizer = get_chat_template(tokenizer, chat_template="llama-3.1")

dataset = load_dataset("json", data_files="chats.json", split="train")
dataset = standardize_sharegpt(dataset)
dataset = dataset.map(
    lambda rows: {
        "text": [
            tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=False)
            for chat in rows["conversations"]
        ]
    },
    batched=True,
)
dataset = dataset.filter(lambda row: len(row["text"]) > 100)
print("First conversation:", repr(dataset[0]["text"][:60]))

# %% Train on the answers only
trainer = SFTTrainer(
    model=model,
    tokenizer=tokenizer,
    train_dataset=dataset,
    dataset_text_field="text",
    data_collator=DataCollatorForSeq2Seq(tokenizer=tokenizer),
    args=SFTConfig(
        per_device_train_batch_size=3,
        gradient_accumulation_steps=2,
        warmup_steps=1,
        max_steps=6,
        learning_rate=2e-3,
        logging_steps=1,
        optim="adamw_8bit",
        weight_decay=0.01,
        seed=3407,
        output_dir="outputs",
        bf16=False,
        report_to="none",
    ),
)
trainer = train_on_responses_only(
    trainer,
    instruction_part="<|start_header_id|>user<|end_header_id|>\n\n",
    response_part="<|start_header_id|>assistant<|end_header_id|>\n\n",
)
labels = trainer.train_dataset[5]["labels"]
print("Tokens that count in row 5:", sum(label != -100 for label in labels), "of", len(labels))
trainer.train()
save_history(trainer, "history_sft.json")

# %% Chat with it
FastLanguageModel.for_inference(model)
chat = [{"role": "user", "content": "What comes after: the if statement"}]
inputs = tokenizer.apply_chat_template(
    chat, tokenize=True, add_generation_prompt=True, return_tensors="pt", return_dict=True
).to(model.device)
outputs = model.generate(**inputs, max_new_tokens=12, do_sample=False)
print("Answer after SFT:", repr(tokenizer.decode(outputs[0][inputs["input_ids"].shape[1] :])))

# %% Save, and go on from the saved adapter
model.save_pretrained("chat_model")
tokenizer.save_pretrained("chat_model")
model, tokenizer = FastLanguageModel.from_pretrained("chat_model", **settings)
FastLanguageModel.for_training(model)

# %% DPO
pairs = load_dataset("json", data_files="preferences.json", split="train")
dpo_trainer = DPOTrainer(
    model=model,
    ref_model=None,
    processing_class=tokenizer,
    train_dataset=pairs,
    args=DPOConfig(
        per_device_train_batch_size=4,
        gradient_accumulation_steps=1,
        num_train_epochs=1,
        learning_rate=1e-3,
        beta=0.1,
        max_length=256,
        logging_steps=1,
        seed=42,
        output_dir="outputs_dpo",
        bf16=False,
        report_to="none",
    ),
)
dpo_trainer.train()
save_history(dpo_trainer, "history_dpo.json")

FastLanguageModel.for_inference(model)
outputs = model.generate(**inputs, max_new_tokens=12, do_sample=False)
print("Answer after DPO:", repr(tokenizer.decode(outputs[0][inputs["input_ids"].shape[1] :])))
dpo_trainer.save_model("dpo_model")
with open("dpo_model/adapter_config.json") as file:
    print("Base model of the saved adapter:", json.load(file)["base_model_name_or_path"])
