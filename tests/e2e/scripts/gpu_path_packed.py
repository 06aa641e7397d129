"""LoRA on a model that Unsloth loads in 4 bit: gradient norms, bytes of weights on a card, merged and GGUF files.

llama.cpp, which Unsloth would download and build, has a stand-in: the weights that it is given.

Usage: gpu_path_packed.py MODEL OUT [--plain] [--no-export]
"""

import sys

if "--plain" not in sys.argv:
    import unsloth_multigpu as ump

    ump.enable_multi_gpu(num_gpus=2)

import json
import os
import shutil
from pathlib import Path

from unsloth import FastLanguageModel  # isort: skip  Before the libraries that it patches.
import torch
import unsloth.save
from datasets import Dataset
from trl import SFTConfig, SFTTrainer

model, tokenizer = FastLanguageModel.from_pretrained(
    sys.argv[1], max_seq_length=64, load_in_4bit=True, dtype=torch.float32
)
if "--plain" in sys.argv:
    for part in (model, tokenizer):
        part.save_pretrained(Path(sys.argv[2], "quantized"))
model = FastLanguageModel.get_peft_model(
    model, r=4, lora_dropout=0.0, target_modules=["q_proj", "v_proj"], random_state=7, use_gradient_checkpointing=False
)
settings = {"bf16": False, "fp16": False, "optim": "adamw_torch", "save_strategy": "no", "report_to": []}
trainer = SFTTrainer(
    model=model,
    processing_class=tokenizer,
    train_dataset=Dataset.from_dict({"text": [f"#{i}" + "lora"[: 2 * (i % 3)] for i in range(5)]}),
    args=SFTConfig(
        per_device_train_batch_size=4,
        dataset_text_field="text",
        max_length=64,
        max_steps=2,
        learning_rate=1e-2,
        warmup_steps=0,
        logging_steps=1,
        **settings,
    ),
)
weights = [p.to_local() if hasattr(p, "to_local") else p for p in model.parameters()]
on_card = sum(weight.nbytes for weight in weights if weight.is_cuda)
trainer.train()


def convert(*, model_directory, gguf_directory, **_):
    if Path(model_directory).name == "aborted":
        raise OSError("No space left on device")
    os.makedirs(gguf_directory, exist_ok=True)
    written.append(str(shutil.copy(Path(model_directory, "model.safetensors"), Path(gguf_directory, "model.gguf"))))
    return [written[-1]], True, False


unsloth.save.save_to_gguf = convert
out, written, errors, exported = Path(sys.argv[2]), [], [], []
names = () if "--no-export" in sys.argv else ("aborted", "first", "second")
if names:
    model.save_pretrained_merged(str(out / "merged"), tokenizer, save_method="merged_16bit")
for name in names:
    try:
        exported += model.save_pretrained_gguf(str(out / name), tokenizer)["gguf_files"]
    except Exception as error:  # Also where another rank has aborted.
        errors.append(f"{type(error).__name__}: {error}")
facts = {
    "written": written,
    "exported": exported,
    "errors": errors,
    "weights": on_card,
    "num_packed": sum(getattr(module, "quant_state", None) is not None for module in model.modules()),
    "norms": [line["grad_norm"] for line in trainer.state.log_history if "grad_norm" in line],
}
Path(sys.argv[2], f"rank_{os.environ.get('RANK', '0')}.json").write_text(json.dumps(facts))
