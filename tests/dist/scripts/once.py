"""Saves, reads back, maps and plots on every rank, and writes what each rank saw. Usage: once.py MODEL OUT"""

import io
import json
import os
import sys
import time
from pathlib import Path

import unsloth_multigpu as ump

ump.enable_multi_gpu(num_gpus=2)

import datasets
import datasets.io.csv
import datasets.io.json
import datasets.io.parquet
import torch
from common import RANK, Comparing, arguments, write_facts
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer, Trainer

model_dir, out = sys.argv[1:]
facts = {}
os.environ["CALLS"] = f"calls_{RANK}"

# Before there is a process group.
tokenizer = AutoTokenizer.from_pretrained(model_dir)
facts["tokenizer_files"] = [Path(f).name for f in tokenizer.save_pretrained("early")]
facts["tokenizer_reads_back"] = AutoTokenizer.from_pretrained("early").vocab_size


def num_calls():
    path = Path(os.environ["CALLS"])
    count = path.stat().st_size if path.exists() else 0
    path.unlink(missing_ok=True)
    return count


def slow_length(row):
    # Counted where the function does not hold it: a list of its own every rank would fill.
    with open(os.environ["CALLS"], "a") as file:
        file.write("x")
    return {"length": len(row["text"])}


memory = datasets.Dataset.from_dict({"text": ["a" * i for i in range(50)]}).map(slow_length)
facts["in_memory_calls"] = num_calls()
facts["in_memory_lengths"] = memory["length"][:5]
datasets.Dataset.from_dict({"text": ["b" * i for i in range(40)]}).save_to_disk("on_disk")
stored = datasets.load_from_disk("on_disk").map(slow_length)
facts["on_disk_calls"] = num_calls()
facts["filtered"] = len(stored.filter(lambda row: row["length"] % 2 == 0))
facts["writes"] = []
for writer in (
    datasets.io.csv.CsvDatasetWriter,
    datasets.io.json.JsonDatasetWriter,
    datasets.io.parquet.ParquetDatasetWriter,
):
    own_write = writer.write
    writer.write = lambda self, own_write=own_write: facts["writes"].append(type(self).__name__) or own_write(self)
facts["written_bytes"] = [
    memory.to_json("rows.jsonl"),
    memory.to_csv("rows.csv"),
    memory.to_parquet("rows.parquet"),
    memory.to_json(path_or_buf="rows2.jsonl", lines=False),
]
facts["written_rows"] = [
    len(Path("rows.jsonl").read_text().splitlines()),
    len(datasets.Dataset.from_parquet("rows.parquet")),
]
buffer = io.BytesIO()
facts["buffer_bytes"] = [memory.to_csv(buffer), len(buffer.getvalue())]
# A call that only rank 0 makes, and then one that all make.
if RANK == 0:
    memory.map(lambda row: {"only": 0})
facts["after_lonely_call"] = memory.map(lambda row: {"twice": row["length"] * 2})["twice"][:4]

torch.manual_seed(100 + RANK)  # New LoRA weights that differ per rank.
model = get_peft_model(AutoModelForCausalLM.from_pretrained(model_dir), LoraConfig(r=4, target_modules=["q_proj"]))
rows = [{"input_ids": torch.arange(3, 12), "labels": torch.arange(3, 12)} for _ in range(8)]
args = arguments("checkpoints", 4, max_steps=2, save_strategy="steps", save_steps=1)
trainer = Trainer(model=model, args=args, train_dataset=rows)
facts["drawn_while_training"] = []


def draw(*_):
    if not Comparing.is_on:
        facts["drawn_while_training"].append(float(torch.rand(())))


model.register_forward_hook(draw)
trainer.train()
facts["weights"] = sum(float(p.double().sum()) for p in model.parameters() if p.requires_grad)

model.save_pretrained("adapter")
facts["adapter_files"] = sorted(os.listdir("adapter"))
facts["adapter_config"] = json.loads(Path("adapter/adapter_config.json").read_text())["r"]
trainer.save_model("final")
facts["final_files"] = sorted(os.listdir("final"))
again = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(model_dir), "final")
facts["reloaded"] = sum(float(p.double().sum()) for n, p in again.named_parameters() if "lora_" in n)
model.merge_and_unload().save_pretrained("merged")
facts["merged_parameters"] = AutoModelForCausalLM.from_pretrained("merged").num_parameters()
facts["checkpoint_files"] = sorted(os.listdir("checkpoints/checkpoint-2"))

import tempfile

with tempfile.TemporaryDirectory() as own:
    tokenizer.save_pretrained(own)
    facts["own_folder_files"] = sorted(os.listdir(own))

# What fails on rank 0 is caught on all ranks as on one GPU.
Path("a_file").touch()
facts["caught"] = []
for save in (
    lambda: model.save_pretrained("a_file/x"),
    lambda: tokenizer.save_pretrained("a_file/x"),
    lambda: trainer.push_to_hub(),
    lambda: model.push_to_hub("nobody/nothing"),
):
    begin = time.monotonic()
    try:
        save()
    except OSError as error:
        facts["caught"].append([error.errno, time.monotonic() - begin < 8])
    except Exception as error:
        facts["caught"].append(repr(error))

import matplotlib.pyplot as plt

facts["is_drawn"] = False
plt.plot([1, 2])
plt.gcf().canvas.mpl_connect("draw_event", lambda _: facts.update(is_drawn=True))
plt.gcf().savefig("loss.png")
facts["plot_bytes"] = Path("loss.png").stat().st_size > 0
facts["status"] = [ump.get_multi_gpu_status().rank, ump.get_multi_gpu_status().report.num_samples]
facts["wandb_mode"] = os.environ.get("WANDB_MODE")
facts["breakpoint"] = os.environ.get("PYTHONBREAKPOINT")

patched = (vars(Trainer)["train"], vars(PeftModel)["save_pretrained"])
ump.disable_multi_gpu()
facts["disabled"] = [
    vars(Trainer)["train"] is patched[0].__wrapped__,
    vars(PeftModel)["save_pretrained"] is patched[1].__wrapped__,
]
write_facts(out, facts)
