"""A user's LoRA SFT script over Unsloth's GPU code (see tests/helpers/gpu_path.py): train, save, merge, load again.

    python gpu_path_sft.py MODEL OUT                                      two ranks, started by the plugin
    python gpu_path_sft.py MODEL OUT --plain                              one process
    torchrun --nproc-per-node 2 -- gpu_path_sft.py MODEL OUT --plain      two ranks, without the plugin

Each rank leaves what it saw in OUT/rank_N.json.
"""

import sys

if "--plain" not in sys.argv:
    import unsloth_multigpu as ump

    ump.enable_multi_gpu(num_gpus=2, device="cpu")

from tests.helpers.gpu_path import activate

activate()

import argparse
import hashlib
import json
import os
import re
import time
from pathlib import Path

started_at = time.perf_counter()
from unsloth import FastLanguageModel  # isort: skip  Unsloth wants to come first.
import torch
from datasets import Dataset
from peft import get_peft_model_state_dict
from transformers import TrainerCallback
from trl import SFTConfig, SFTTrainer

parser = argparse.ArgumentParser()
parser.add_argument("model")
parser.add_argument("out", type=Path)
parser.add_argument("--plain", action="store_true", help="without the plugin")
parser.add_argument("--batch-size", type=int, default=3)
options = parser.parse_args()

rank = int(os.environ.get("RANK", "0"))
merged, adapter = options.out / "merged", options.out / "adapter"
written: list[str] = []


def note_writes(event: str, arguments: tuple) -> None:
    """Which files below OUT did this rank open for writing, copy or create?"""
    if event == "open" and isinstance(arguments[2], int) and arguments[2] & (os.O_WRONLY | os.O_RDWR):
        target = arguments[0]
    elif event in ("os.rename", "shutil.copyfile", "shutil.move"):
        target = arguments[1]
    else:
        return
    if isinstance(target, (str, os.PathLike)) and Path(target).is_relative_to(options.out):
        written.append(str(Path(target).relative_to(options.out)))


# Five samples in steps of three, which two ranks cannot share evenly; the second step of each epoch has two.
texts = [f"#{i}" + "lora"[: 2 * (i % 3)] for i in range(5)]
model, tokenizer = FastLanguageModel.from_pretrained(
    options.model, max_seq_length=64, dtype=torch.float32, load_in_4bit=False, device_map="cpu"
)
model = FastLanguageModel.get_peft_model(
    model,
    r=4,
    lora_alpha=8,
    lora_dropout=0,
    target_modules=["q_proj", "v_proj", "down_proj"],
    use_gradient_checkpointing="unsloth",
    random_state=3407,
)

samples: list[list[str]] = []  # For each optimizer step, the samples this rank trained on.


class NewStep(TrainerCallback):
    def on_step_begin(self, args, state, control, **kwargs):
        samples.append([])


def note_samples(module, args, kwargs):
    if samples and torch.is_grad_enabled():
        samples[-1] += re.findall(r"#(\d)", tokenizer.decode(kwargs["input_ids"].flatten()))


model.register_forward_pre_hook(note_samples, with_kwargs=True)
trainer = SFTTrainer(
    model=model,
    processing_class=tokenizer,
    train_dataset=Dataset.from_dict({"text": texts}),
    callbacks=[NewStep()],
    args=SFTConfig(
        output_dir=str(options.out / "checkpoints"),
        dataset_text_field="text",
        max_length=64,
        dataset_num_proc=1,
        per_device_train_batch_size=options.batch_size,
        gradient_accumulation_steps=1,
        num_train_epochs=2,
        learning_rate=1e-2,
        warmup_steps=0,
        optim="adamw_torch",
        bf16=False,
        fp16=False,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        seed=11,
    ),
)
trainer.train()
trained_at = time.perf_counter()

# What Unsloth does to embeddings that are trained: the file is read as memory, and copied.
from unsloth.models import _utils as unsloth_utils

mine = torch.full((20_000, 32), float(rank + 1))
offloaded = [unsloth_utils.offload_to_disk(mine, model, "side", str(options.out / "buffers")) for _ in range(20)]
offloaded_is_mine = all(torch.equal(copy, mine) for copy in offloaded)

sys.addaudithook(note_writes)
model.save_pretrained_merged(str(merged), tokenizer, save_method="merged_16bit")
model.save_pretrained(str(adapter))
tokenizer.save_pretrained(str(adapter))

state = {name: tensor.detach() for name, tensor in get_peft_model_state_dict(model).items()}
# Of a sharded model a rank has parts.
weights = {name: (t.full_tensor() if hasattr(t, "full_tensor") else t).float() for name, t in state.items()}
again, _ = FastLanguageModel.from_pretrained(
    str(adapter), max_seq_length=64, dtype=torch.float32, load_in_4bit=False, device_map="cpu"
)
reloaded = get_peft_model_state_dict(again)
logs = [entry for entry in trainer.state.log_history if "grad_norm" in entry]
(options.out / f"rank_{rank}.json").write_text(
    json.dumps(
        {
            "losses": [entry["loss"] for entry in logs],
            "grad_norms": [entry["grad_norm"] for entry in logs],
            "learning_rates": [entry["learning_rate"] for entry in logs],
            "samples": samples,
            "adapter_sum": sum(tensor.double().sum().item() for tensor in weights.values()),
            "adapter_hash": hashlib.sha256(
                b"".join(weights[name].numpy().tobytes() for name in sorted(weights))
            ).hexdigest(),
            "reload_is_equal": reloaded.keys() == weights.keys()
            and all(torch.equal(reloaded[name].float(), weights[name]) for name in weights),
            "written": written,
            "offloaded_is_mine": offloaded_is_mine,
            "trainer": type(trainer).__module__,
            "find_unused_parameters": getattr(trainer.model_wrapped, "find_unused_parameters", "no DDP"),
            "train_s": trained_at - started_at,
            "total_s": time.perf_counter() - started_at,
        },
        indent=1,
    )
)
