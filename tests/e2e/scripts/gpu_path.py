"""Users' scripts over Unsloth's GPU code on two devices, in shapes of Unsloth's notebooks.

    python gpu_path.py MODEL OUT KIND...              two ranks, started by the plugin
    python gpu_path.py MODEL OUT KIND... --plain      one process

KIND is sft, packed, grpo, dpo or vision, one after the other. Each rank leaves what it saw in OUT/KIND/rank_N.json.
"""

import sys

if "--plain" not in sys.argv:
    import unsloth_multigpu as ump

    ump.enable_multi_gpu(num_gpus=2)

from unsloth import FastLanguageModel, FastVisionModel  # isort: skip  Unsloth wants to come first.
import argparse
import hashlib
import json
import os
import re
import shutil
from pathlib import Path

import torch
import torch.distributed as dist
import unsloth.save
from datasets import Dataset
from peft import get_peft_model_state_dict
from transformers import TrainerCallback
from trl import DPOConfig, DPOTrainer, GRPOConfig, GRPOTrainer, RLOOConfig, SFTConfig, SFTTrainer
from unsloth.models import _utils as unsloth_utils

parser = argparse.ArgumentParser()
parser.add_argument("model")
parser.add_argument("root", type=Path)
parser.add_argument("kinds", nargs="+")
parser.add_argument("--plain", action="store_true", help="without the plugin")
parser.add_argument("--shapes", nargs="+", default=[], help="batch, accumulation and completions of a prompt")
parser.add_argument("--no-export", action="store_true")
options = parser.parse_args()
rank = int(os.environ.get("RANK", "0"))

SETTINGS = {
    "output_dir": "checkpoints",
    "dataset_num_proc": 1,
    "gradient_accumulation_steps": 1,
    "learning_rate": 1e-2,
    "warmup_steps": 0,
    "optim": "adamw_torch",
    "bf16": False,
    "fp16": False,
    "logging_steps": 1,
    "save_strategy": "no",
    "report_to": "none",
    "seed": 11,
}
LOADED = {"max_seq_length": 64, "dtype": torch.float32, "load_in_4bit": False}
# Five samples, which two ranks cannot share evenly.
ROWS = Dataset.from_dict({"text": [f"#{i}" + "lora"[: 2 * (i % 3)] for i in range(5)]})


def load(folder, **more):
    """Model and tokenizer."""
    return FastLanguageModel.from_pretrained(str(folder), **{**LOADED, **more})


def with_lora(model, *target_modules, **more):
    lora = {"r": 4, "lora_alpha": 8, "lora_dropout": 0, "use_gradient_checkpointing": "unsloth", "random_state": 3407}
    return FastLanguageModel.get_peft_model(model, target_modules=list(target_modules), **{**lora, **more})


def adapter_weights(model):
    """In float32 on the CPU, and whole: of a sharded model a rank has parts."""
    state = {name: tensor.detach() for name, tensor in get_peft_model_state_dict(model).items()}
    return {name: (t.full_tensor() if hasattr(t, "full_tensor") else t).float().cpu() for name, t in state.items()}


def write_facts(trainer, weights, /, **more):
    logs = [entry for entry in trainer.state.log_history if "grad_norm" in entry]
    named = b"".join(weights[name].numpy().tobytes() for name in sorted(weights))
    facts = {
        "losses": [entry["loss"] for entry in logs],
        "grad_norms": [entry["grad_norm"] for entry in logs],
        "learning_rates": [entry["learning_rate"] for entry in logs],
        "adapter_hash": hashlib.sha256(named).hexdigest(),
        "trainer": type(trainer).__module__,
        "devices": sorted({str(p.device) for p in trainer.model.parameters()}),
        "backend": str(dist.get_backend()) if dist.is_initialized() else "",
        "find_unused_parameters": getattr(trainer.model_wrapped, "find_unused_parameters", "no DDP"),
        **more,
    }
    (out / f"rank_{rank}.json").write_text(json.dumps(facts, indent=1))


def note_comparisons():
    """Tells while a step is computed to be compared with one process, and not yet trained."""
    from unsloth_multigpu.step.proof import StepProof

    compare = StepProof.before

    def before(*arguments):
        comparing.append(True)
        compare(*arguments)
        comparing.clear()

    StepProof.before = before


written, samples, comparing = [], [], []


def note_writes(event, arguments):
    """Which files below OUT did this rank open for writing, copy or create?"""
    if event == "open" and isinstance(arguments[2], int) and arguments[2] & (os.O_WRONLY | os.O_RDWR):
        target = arguments[0]
    elif event in ("os.rename", "shutil.copyfile", "shutil.move"):
        target = arguments[1]
    else:
        return
    if isinstance(target, (str, os.PathLike)) and Path(target).is_relative_to(out):
        written.append(str(Path(target).relative_to(out)))


class NewStep(TrainerCallback):
    def on_step_begin(self, args, state, control, **kwargs):
        samples.append([])


def sft():
    """Trains, saves, merges, loads again."""
    merged, adapter = out / "merged", out / "adapter"
    model, tokenizer = load(options.model)
    model = with_lora(model, "q_proj", "v_proj", "down_proj")
    if not options.plain:
        note_comparisons()

    def note_samples(module, args, kwargs):
        if samples and not comparing:
            samples[-1] += re.findall(r"#(\d)", tokenizer.decode(kwargs["input_ids"].flatten()))

    model.register_forward_pre_hook(note_samples, with_kwargs=True)
    sizes = {"per_device_train_batch_size": 3, "max_length": 64, "num_train_epochs": 2}
    args = SFTConfig(dataset_text_field="text", **sizes, **SETTINGS)
    trainer = SFTTrainer(model, args, train_dataset=ROWS, processing_class=tokenizer, callbacks=[NewStep()])
    trainer.train()

    # What Unsloth does to embeddings that are trained: the file is read as memory, and copied.
    mine = torch.full((20_000, 32), float(rank + 1))
    offloaded = [unsloth_utils.offload_to_disk(mine, model, "side", str(out / "buffers")) for _ in range(20)]

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
        offloaded_is_mine=all(torch.equal(copy, mine) for copy in offloaded),
    )


def convert(*, model_directory, gguf_directory, **_):
    """Stands in for llama.cpp, which Unsloth would download and build: the weights that it is given."""
    if Path(model_directory).name == "aborted":
        raise OSError("No space left on device")
    os.makedirs(gguf_directory, exist_ok=True)
    written.append(str(shutil.copy(Path(model_directory, "model.safetensors"), Path(gguf_directory, "model.gguf"))))
    return [written[-1]], True, False


def packed():
    """LoRA on a model that is loaded in 4 bit: bytes of weights on a card, merged and GGUF files."""
    model, tokenizer = load(options.model, load_in_4bit=True)
    if options.plain:
        for part in (model, tokenizer):
            part.save_pretrained(out / "quantized")
    model = with_lora(model, "q_proj", "v_proj", use_gradient_checkpointing=False)
    sizes = {"per_device_train_batch_size": 4, "max_length": 64, "max_steps": 2}
    args = SFTConfig(dataset_text_field="text", **sizes, **SETTINGS)
    trainer = SFTTrainer(model, args, train_dataset=ROWS, processing_class=tokenizer)
    weights = [p.to_local() if hasattr(p, "to_local") else p for p in model.parameters()]
    on_card = sum(weight.nbytes for weight in weights if weight.is_cuda)
    trainer.train()
    unsloth.save.save_to_gguf = convert
    errors, exported = [], []
    names = () if options.no_export else ("aborted", "first", "second")
    if names:
        model.save_pretrained_merged(str(out / "merged"), tokenizer, save_method="merged_16bit")
    for name in names:
        try:
            exported += model.save_pretrained_gguf(str(out / name), tokenizer)["gguf_files"]
        except Exception as error:  # Also where another rank has aborted.
            errors.append(f"{type(error).__name__}: {error}")
    num_packed = sum(getattr(module, "quant_state", None) is not None for module in model.modules())
    found = {"written": written, "exported": exported, "errors": errors, "weights": on_card, "num_packed": num_packed}
    write_facts(trainer, {}, **found)


def arguments(config_class, shape):
    batch, accumulation, num_generations = map(int, shape.split(","))
    own = {
        "per_device_train_batch_size": batch,
        "gradient_accumulation_steps": accumulation,
        "num_generations": num_generations,
        "max_completion_length": 8,
        "max_steps": 2,
    }
    return config_class(**{name: value for name, value in SETTINGS.items() if name != "dataset_num_proc"} | own)


def completions(args):
    """Of a step and of a generation, on all ranks."""
    step = args.per_device_train_batch_size * args.gradient_accumulation_steps * args.world_size
    return [step, args.generation_batch_size]


class FixedCompletions(GRPOTrainer):
    def _generate_single_turn(self, prompt_ids, *args, **kwargs):
        """What stands in for a draw: it depends on the prompt and on the place in its group of two."""
        places = [(rank * len(prompt_ids) + i) % 2 for i in range(len(prompt_ids))]
        rows = zip(prompt_ids, places, strict=True)
        return [[20 + (sum(ids) + 7 * k + 11 * place) % 200 for k in range(3 + place)] for ids, place in rows], None


def grpo():
    """Arguments are made in all shapes; the first one trains."""
    from trl.experimental.sdft import SDFTConfig

    made = {
        config_class.__name__: {shape: completions(arguments(config_class, shape)) for shape in options.shapes}
        for config_class in (GRPOConfig, RLOOConfig, SDFTConfig)
    }
    model, tokenizer = load(options.model)
    model = with_lora(model, "q_proj", "v_proj")
    trainer = FixedCompletions(
        model=model,
        processing_class=tokenizer,
        reward_funcs=lambda completion_ids, **_: [float(sum(ids) % 17) for ids in completion_ids],
        train_dataset=Dataset.from_list([{"prompt": f"{i}+1="} for i in range(4)]),
        args=arguments(GRPOConfig, options.shapes[0]),
    )
    trainer.train()
    rewards = [entry["reward"] for entry in trainer.state.log_history if "reward" in entry]
    write_facts(trainer, adapter_weights(model), base=GRPOTrainer.__module__, completions=made, rewards=rewards)


def dpo():
    """Without the plugin two ranks fail at the first backward pass, "Expected to mark a variable ready only once".

    TRL adds a second adapter, Unsloth's own choice of `find_unused_parameters` is undone, and it checkpoints
    reentrantly.
    """
    model, tokenizer = load(options.model)
    model = with_lora(model, "q_proj", "v_proj")
    rows = Dataset.from_list([{"prompt": f"{i}+1=", "chosen": f"{i + 1}", "rejected": "no"} for i in range(4)])
    args = DPOConfig(per_device_train_batch_size=2, max_length=32, max_steps=2, **SETTINGS)
    trainer = DPOTrainer(model=model, args=args, train_dataset=rows, processing_class=tokenizer)
    trainer.train()
    write_facts(trainer, adapter_weights(model))


def vision():
    """As Unsloth's notebooks for vision models."""
    import numpy
    from PIL import Image
    from unsloth.trainer import UnslothVisionDataCollator

    model, processor = FastVisionModel.from_pretrained(str(options.model), **LOADED)
    model = FastVisionModel.get_peft_model(model, r=4, lora_alpha=8, lora_dropout=0, bias="none", random_state=3407)
    FastVisionModel.for_training(model)
    random = numpy.random.default_rng(3)
    rows = []
    for i in range(5):
        picture = Image.fromarray(random.integers(0, 255, (8, 8, 3), dtype=numpy.uint8))
        asked = [{"type": "image", "image": picture}, {"type": "text", "text": "what"}]
        answer = [{"type": "text", "text": "ab of the " * (1 + i % 3)}]
        rows.append({"messages": [{"role": "user", "content": asked}, {"role": "assistant", "content": answer}]})
    told = {"remove_unused_columns": False, "dataset_text_field": "", "dataset_kwargs": {"skip_prepare_dataset": True}}
    args = SFTConfig(per_device_train_batch_size=3, num_train_epochs=1, max_length=64, **told, **SETTINGS)
    collator = UnslothVisionDataCollator(model, processor)
    trainer = SFTTrainer(model, args, collator, train_dataset=rows, processing_class=processor)
    trainer.train()
    model.save_pretrained(str(out / "adapter"))
    processor.save_pretrained(str(out / "adapter"))
    write_facts(trainer, adapter_weights(model))


for kind in options.kinds:
    out = options.root / kind
    out.mkdir(exist_ok=True)
    globals()[kind]()
