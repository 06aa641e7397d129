"""Unsloth LoRA fine-tuning on every device of this machine, checked against one process.

    python examples/ddp_quick_start.py                 # every GPU; without one, 2 CPU ranks; downloads nothing
    python examples/ddp_quick_start.py --model unsloth/Llama-3.2-1B-Instruct --dataset texts.jsonl --batch-size 16

`train` is the script of a user: a model with random weights learns to count. `main` runs it as one process, runs it
again after the plugin's line, and compares.
"""

from __future__ import annotations

import argparse
import itertools
import json
import logging
import math
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

import unsloth_multigpu as ump

OUTPUT = Path("outputs/quick_start")
ONE_PROCESS, MULTI_GPU = OUTPUT / "one_process", OUTPUT / "multi_gpu"
# Set where there is a one-process run to compare with; the ranks inherit it.
COMPARE = "QUICK_START_COMPARE"
# Largest relative difference that rounding explains.
BOUNDS = {"fp32": 1e-4, "bf16": 1e-1, "fp16": 1e-1}


def main() -> None:
    options = parse_options()
    be_brief()
    if options.one_process:
        train(options, ONE_PROCESS)
        return
    num_gpus = options.num_gpus or num_devices()
    if options.compare and "RANK" not in os.environ:
        run_one_process(num_gpus)

    ump.enable_multi_gpu(num_gpus=num_gpus)  # The line: starts this command once for each device.

    trainer = train(options, MULTI_GPU)
    agrees = True
    if COMPARE in os.environ and trainer.is_world_process_zero():
        agrees = compare()
    print(f"The trained adapter is in {MULTI_GPU}.", flush=True)
    if not agrees:
        sys.exit("The gradients or adapters differ by more than rounding explains; see the table above.")


def train(options: argparse.Namespace, output: Path):
    from unsloth import FastLanguageModel  # isort: skip  # Before trl and transformers, which it changes.

    import torch
    from datasets import Dataset
    from tiny_model import counts
    from trl import SFTConfig, SFTTrainer

    model, tokenizer = FastLanguageModel.from_pretrained(
        options.model or tiny_model(),
        max_seq_length=512,
        dtype=None if torch.accelerator.is_available() else torch.float32,
        load_in_4bit=False,
    )
    layers = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    if not options.model:
        layers += ["embed_tokens", "lm_head"]  # Random weights have no words yet.
    model = FastLanguageModel.get_peft_model(
        model, r=16, lora_alpha=16, lora_dropout=0.0, target_modules=layers, random_state=3407
    )
    if options.dataset:
        dataset = load_rows(options.dataset)
    else:
        dataset = Dataset.from_dict({"text": counts(options.steps * options.batch_size)})
    trainer = SFTTrainer(
        model=model,
        processing_class=tokenizer,
        train_dataset=dataset,
        args=SFTConfig(
            output_dir=str(output),
            per_device_train_batch_size=options.batch_size,
            gradient_accumulation_steps=1,  # Unsloth's default is 2.
            max_steps=options.steps,
            max_length=512,
            learning_rate=2e-4 if options.model else 5e-3,  # Random weights bear larger steps.
            warmup_steps=2,
            optim="adamw_torch",
            bf16=False,  # fp32 on a CPU; on a GPU Unsloth turns bf16 or fp16 on by itself.
            seed=3407,
            logging_steps=1,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
        ),
    )
    times = log_steps(trainer)
    before = "" if options.dataset else score(model, tokenizer)
    trainer.train()
    if before:
        after = score(model, tokenizer)
        if trainer.is_world_process_zero():
            print(f"  before: {before}\n  after:  {after}", flush=True)
    model.save_pretrained(output)
    tokenizer.save_pretrained(output)
    save_metrics(trainer, times, output)
    return trainer


def tiny_model() -> str:
    from tiny_model import build_tiny, counting

    numbers = [counting(0, 100)] * 50  # Each number becomes a token.
    return build_tiny(OUTPUT / "tiny_model", hidden_size=192, num_layers=3, vocab_size=400, texts=numbers)


def score(model, tokenizer) -> str:
    """From how many of 20 numbers the model counts on by five, given four, and what it makes of one."""
    from tiny_model import counting
    from unsloth import FastLanguageModel

    starts = range(0, 100, 5)
    FastLanguageModel.for_inference(model)
    prompts = [counting(start, 4) for start in starts]
    inputs = tokenizer(prompts, return_tensors="pt", padding=True, padding_side="left").to(model.device)
    tokens = model.generate(**inputs, max_new_tokens=5, do_sample=False)
    FastLanguageModel.for_training(model)
    texts = tokenizer.batch_decode(tokens, skip_special_tokens=True)
    num_right = sum(text == counting(start, 9) for text, start in zip(texts, starts, strict=True))
    return f"{num_right:2} of 20 right, {prompts[0]!r} -> {texts[0].removeprefix(prompts[0]).strip()!r}"


def log_steps(trainer) -> list[float]:
    """One short line for each step in place of the Trainer's own; returns the list that fills with their times."""
    from transformers import PrinterCallback, TrainerCallback

    times: list[float] = []

    class StepLog(TrainerCallback):
        def on_log(self, args, state, control, logs=None, **kwargs):
            if "grad_norm" in logs:
                times.append(time.perf_counter())
                if state.is_world_process_zero:
                    loss, grad_norm = float(logs["loss"]), float(logs["grad_norm"])
                    step = f"{state.global_step:2}/{state.max_steps}"
                    print(f"  step {step}  loss {loss:.4f}  gradient norm {grad_norm:.4f}", flush=True)

    trainer.remove_callback(PrinterCallback)
    trainer.add_callback(StepLog())
    return times


def save_metrics(trainer, times: list[float], output: Path) -> None:
    import torch

    precision = trainer.accelerator.mixed_precision
    metrics = {
        "grad_norms": [row["grad_norm"] for row in trainer.state.log_history if "grad_norm" in row],
        "step_s": statistics.median(end - start for start, end in itertools.pairwise(times)),
        "world_size": trainer.args.world_size,
        "threads": torch.get_num_threads(),
        "precision": "fp32" if precision == "no" else precision,
    }
    if trainer.is_world_process_zero():
        (output / "metrics.json").write_text(json.dumps(metrics))


def load_rows(name: str):
    """A file (json, jsonl, csv, parquet, txt) or a data set of the Hugging Face hub."""
    from datasets import load_dataset

    suffix = Path(name).suffix.removeprefix(".")
    if Path(name).is_file():
        dataset = load_dataset({"jsonl": "json", "txt": "text"}.get(suffix, suffix), data_files=name, split="train")
    else:
        dataset = load_dataset(name, split="train")
    if not {"text", "messages", "prompt"} & set(dataset.column_names):
        sys.exit(f"--dataset {name} has the columns {dataset.column_names}; expected text, messages, or prompt.")
    return dataset


def run_one_process(num_gpus: int) -> None:
    """The same training without the plugin, on one device: one GPU, or the CPU threads that one rank gets."""
    cores = len(os.sched_getaffinity(0))
    first_gpu = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
    environment = {"OMP_NUM_THREADS": str(max(1, cores // num_gpus)), **os.environ, "CUDA_VISIBLE_DEVICES": first_gpu}
    print("Without the plugin, as one process:", flush=True)
    command = [sys.executable, *sys.argv, "--one-process"]
    run = subprocess.run(command, env=environment)
    if run.returncode:
        sys.exit(f"The one-process run failed with exit code {run.returncode}.")
    os.environ[COMPARE] = "1"
    print(f"With the plugin, {num_gpus} ranks:", flush=True)


def compare() -> bool:
    """Prints the table of both runs, and tells whether they agree."""
    from safetensors.torch import load_file

    one, many = (json.loads((run / "metrics.json").read_text()) for run in (ONE_PROCESS, MULTI_GPU))
    norms = list(zip(one["grad_norms"], many["grad_norms"], strict=True))
    # fp16 begins with a few infinite norms, whose steps it skips.
    norm_errors = [abs(a - b) / a for a, b in norms if math.isfinite(a) or math.isfinite(b)]
    adapter, other = (load_file(run / "adapter_model.safetensors") for run in (ONE_PROCESS, MULTI_GPU))
    adapter_errors = [float((a - other[name]).norm() / a.norm()) for name, a in adapter.items()]
    bound = BOUNDS[many["precision"]]
    agrees = all(error <= bound for error in norm_errors + adapter_errors)  # False for NaN, unlike max().
    speed = one["step_s"] / many["step_s"]
    verdict = "The runs agree" if agrees else "THE RUNS DO NOT AGREE"
    print(f"""
                                     1 process  {many["world_size"]:5} ranks
  CPU threads of each process     {one["threads"]:12}{many["threads"]:13}
  seconds per step (median)       {one["step_s"]:12.3f}{many["step_s"]:13.3f}    {speed:.2f} times as fast
  gradient norm of the last step  {norms[-1][0]:12.6f}{norms[-1][1]:13.6f}
  largest relative difference:  gradient norm of a step {max(norm_errors):.1e}, adapter matrix {max(adapter_errors):.1e}
  {verdict}: rounding explains up to {bound:.0e} in {many["precision"]}.
""")
    return agrees


def be_brief() -> None:
    """Leaves out the libraries' progress bars, and what they say about parts of them that are not used here."""
    os.environ.setdefault("TQDM_DISABLE", "1")
    for name in ("torch.utils._pytree", "bitsandbytes"):
        logging.getLogger(name).setLevel(logging.ERROR)


def num_devices() -> int:
    import torch

    return torch.accelerator.device_count() or 2


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="Hugging Face name or folder [a tiny Llama, made on the spot]")
    parser.add_argument("--dataset", help="Hugging Face name or file [numbers to count]")
    parser.add_argument("--num-gpus", type=int, help="ranks [every GPU; without one, 2 CPU ranks]")
    parser.add_argument("--steps", type=int, default=10, help="optimizer steps [10]")
    parser.add_argument("--batch-size", type=int, default=8, help="samples of an optimizer step [8]")
    parser.add_argument("--no-compare", dest="compare", action="store_false", help="train once, with the plugin only")
    parser.add_argument("--one-process", action="store_true", help="train once, without the plugin")
    options = parser.parse_args()
    if options.steps < 2:
        parser.error(f"--steps {options.steps}: the time of a step needs 2 or more")
    return options


if __name__ == "__main__":
    main()
