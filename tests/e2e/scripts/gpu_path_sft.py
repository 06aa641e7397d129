"""A user's LoRA SFT script over Unsloth's GPU code on two devices: train, save, merge, load again.

    python gpu_path_sft.py MODEL OUT                                      two ranks, started by the plugin
    python gpu_path_sft.py MODEL OUT --plain                              one process
    torchrun --nproc-per-node 2 -- gpu_path_sft.py MODEL OUT --plain      two ranks, without the plugin

Each rank leaves what it saw in OUT/rank_N.json.
"""

import sys

if "--plain" not in sys.argv:
    import unsloth_multigpu as ump

    ump.enable_multi_gpu(num_gpus=2)

import os
import re
from pathlib import Path

from gpu_path_user import SETTINGS, adapter_weights, load, options, rank, with_lora, write_facts  # isort: skip  By Unsloth.
import torch
from datasets import Dataset
from peft import get_peft_model_state_dict
from transformers import TrainerCallback
from trl import SFTConfig, SFTTrainer

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
model, tokenizer = load(options.model)
model = with_lora(model, "q_proj", "v_proj", "down_proj")

comparing: list[bool] = []  # While a step is computed to be compared with one process, and not yet trained.
if "--plain" not in sys.argv:
    from unsloth_multigpu.step.proof import StepProof

    compare = StepProof.before

    def before(*arguments) -> None:
        comparing.append(True)
        compare(*arguments)
        comparing.clear()

    StepProof.before = before

samples: list[list[str]] = []  # For each optimizer step, the samples this rank trained on.


class NewStep(TrainerCallback):
    def on_step_begin(self, args, state, control, **kwargs):
        samples.append([])


def note_samples(module, args, kwargs):
    if samples and not comparing:
        samples[-1] += re.findall(r"#(\d)", tokenizer.decode(kwargs["input_ids"].flatten()))


model.register_forward_pre_hook(note_samples, with_kwargs=True)
trainer = SFTTrainer(
    model=model,
    processing_class=tokenizer,
    train_dataset=Dataset.from_dict({"text": texts}),
    callbacks=[NewStep()],
    args=SFTConfig(
        per_device_train_batch_size=3, dataset_text_field="text", max_length=64, num_train_epochs=2, **SETTINGS
    ),
)
trainer.train()

# What Unsloth does to embeddings that are trained: the file is read as memory, and copied.
from unsloth.models import _utils as unsloth_utils

mine = torch.full((20_000, 32), float(rank + 1))
offloaded = [unsloth_utils.offload_to_disk(mine, model, "side", str(options.out / "buffers")) for _ in range(20)]
offloaded_is_mine = all(torch.equal(copy, mine) for copy in offloaded)

sys.addaudithook(note_writes)
model.save_pretrained_merged(str(merged), tokenizer, save_method="merged_16bit")
model.save_pretrained(str(adapter))
tokenizer.save_pretrained(str(adapter))

weights = adapter_weights(model)
reloaded = get_peft_model_state_dict(load(adapter)[0])
write_facts(
    trainer,
    weights,
    samples=samples,
    reload_is_equal=reloaded.keys() == weights.keys()
    and all(torch.equal(reloaded[name].float().cpu(), weights[name]) for name in weights),
    written=written,
    offloaded_is_mine=offloaded_is_mine,
)
