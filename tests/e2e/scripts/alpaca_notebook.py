"""Instruction tuning on Alpaca-like rows: a notebook exported as a script. `--plain` leaves the plugin's line out.

Reads tiny_llama/ and alpaca.json in the current folder.
"""

import sys

if "--plain" not in sys.argv:
    import unsloth_multigpu as ump

    ump.enable_multi_gpu(num_gpus=2)

from unsloth import FastLanguageModel  # isort: skip

import json
import os

import torch
from datasets import load_dataset
from transformers import TextStreamer
from trl import SFTConfig, SFTTrainer

max_seq_length = 512
load_in_4bit = False

# %% The model, and LoRA on all of its projections
model, tokenizer = FastLanguageModel.from_pretrained(
    model_name="tiny_llama", max_seq_length=max_seq_length, dtype=torch.float32, load_in_4bit=load_in_4bit
)
model = FastLanguageModel.get_peft_model(
    model,
    r=16,
    target_modules=["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"],
    lora_alpha=16,
    lora_dropout=0,
    bias="none",
    use_gradient_checkpointing="unsloth",
    random_state=3407,
    use_rslora=False,
    loftq_config=None,
)

# %% The data
PROMPT = """Someone asks for something and adds what is needed for it. Write the answer.

### Instruction:
{}

### Input:
{}

### Response:
{}"""


def to_text(rows):
    columns = zip(rows["instruction"], rows["input"], rows["output"], strict=True)
    return {"text": [PROMPT.format(*row) + tokenizer.eos_token for row in columns]}


dataset = load_dataset("json", data_files="alpaca.json", split="train")
dataset = dataset.map(to_text, batched=True)
print("Rows to train on:", len(dataset))

# %% Training: 2 samples x 4 accumulated; the last step of the epoch is not full
trainer = SFTTrainer(
    model=model,
    tokenizer=tokenizer,
    train_dataset=dataset,
    dataset_text_field="text",
    max_seq_length=max_seq_length,
    packing=False,
    args=SFTConfig(
        per_device_train_batch_size=2,
        gradient_accumulation_steps=4,
        warmup_steps=2,
        num_train_epochs=1,
        learning_rate=2e-3,
        logging_steps=1,
        optim="adamw_8bit",
        weight_decay=0.001,
        lr_scheduler_type="linear",
        seed=3407,
        output_dir="outputs",
        save_steps=4,
        bf16=False,
        report_to="none",
    ),
)
if torch.cuda.is_available():
    memory = torch.cuda.get_device_properties(0).total_memory / 2**30
    print(f"GPU memory: {memory:.1f} GiB")
stats = trainer.train()
print(f"Training took {stats.metrics['train_runtime']:.1f} seconds")

# %% What it says now
FastLanguageModel.for_inference(model)
question = PROMPT.format("Continue the text.", "The if statement", "")
inputs = tokenizer([question], return_tensors="pt").to(model.device)
outputs = model.generate(**inputs, max_new_tokens=12, use_cache=True, do_sample=False)
answer = tokenizer.batch_decode(outputs)[0]
print("Answer of the trained model:", repr(answer.rpartition("### Response:\n")[2]))
model.generate(**inputs, streamer=TextStreamer(tokenizer, skip_prompt=True), max_new_tokens=4, do_sample=False)

# %% Save the adapter, and look at what is there
model.save_pretrained("lora_model")
tokenizer.save_pretrained("lora_model")
with open("lora_model/adapter_config.json") as file:
    print("Saved with rank", json.load(file)["r"], "in", len(os.listdir("lora_model")), "files")

# %% Load it again
again, tokenizer = FastLanguageModel.from_pretrained(
    model_name="lora_model", max_seq_length=max_seq_length, dtype=torch.float32, load_in_4bit=load_in_4bit
)
FastLanguageModel.for_inference(again)
outputs = again.generate(**inputs, max_new_tokens=12, use_cache=True, do_sample=False)
assert tokenizer.batch_decode(outputs)[0] == answer, "the reloaded model says something else"
print("The reloaded model says the same")

# %% Other ways to save
trainer.save_model("outputs/final")
assert "adapter_model.safetensors" in os.listdir("outputs/final")
model.save_pretrained_merged("merged_model", tokenizer, save_method="merged_16bit")
assert "model.safetensors" in os.listdir("merged_model")
print("Checkpoints:", sorted(name for name in os.listdir("outputs") if name.startswith("checkpoint")))

# %% The loss curve
steps = [row for row in trainer.state.log_history if "loss" in row]
try:
    import matplotlib.pyplot as plt
except ImportError:
    print("No matplotlib, no plot")
else:
    plt.plot([row["step"] for row in steps], [row["loss"] for row in steps])
    plt.savefig("loss.png")
    print("Plotted", os.path.getsize("loss.png") > 0)
if trainer.is_world_process_zero():
    with open("history.json", "w") as file:
        json.dump([{"loss": row["loss"], "grad_norm": row["grad_norm"]} for row in steps], file)
