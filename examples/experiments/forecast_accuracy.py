"""Is the forecast right? From one CPU rank to two, over six set-ups, in seconds that the ranks have computed.

    python examples/experiments/forecast_accuracy.py --repeats 3        # the table of docs/forecast.md
    python examples/experiments/forecast_accuracy.py --only full-ragged

Each set-up runs `unsloth-multigpu forecast --check 2 --clock cpu` on this file: 16 steps on one rank, and the same
steps on two. Set-ups are interleaved. Other programs on the machine change the wall time of a step, and hardly the
seconds that a single-threaded rank computes; what the link takes is not in them, and not in this comparison.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

MODELS, DATA = ("full", "lora"), ("ragged", "equal", "padding-free")
SETUPS = tuple(f"{model}-{data}" for model in MODELS for data in DATA)
STEPS, BATCH, ACCUMULATION, NUM_ROWS = 16, 8, 2, 512
# Of log-normal lengths, in tokens.
MEDIAN, SIGMA, SHORTEST, LONGEST, EQUAL = 80, 0.8, 8, 512, 120


def row_lengths(data: str) -> list[int]:
    """Tokens of each row."""
    if data == "equal":
        return [EQUAL] * NUM_ROWS
    draw = random.Random(0)
    return [min(LONGEST, max(SHORTEST, round(MEDIAN * draw.lognormvariate(0, SIGMA)))) for _ in range(NUM_ROWS)]


def train(setup: str) -> None:
    """The user's script: a small Llama on random tokens."""
    import torch
    from transformers import DataCollatorWithFlattening, LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

    model_kind, _, data = setup.partition("-")
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=192,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=4,
        vocab_size=512,
        use_cache=False,
    )
    model: Any = LlamaForCausalLM(config)
    if model_kind == "lora":
        from peft import LoraConfig, get_peft_model

        model = get_peft_model(model, LoraConfig(r=8, target_modules="all-linear", task_type="CAUSAL_LM"))
    draw = random.Random(1)
    rows = [{"input_ids": [draw.randrange(1, 512) for _ in range(n)]} for n in row_lengths(data)]

    def pad(batch: list[dict[str, list[int]]]) -> dict[str, torch.Tensor]:
        longest = max(len(row["input_ids"]) for row in batch)
        ids = torch.tensor([row["input_ids"] + [0] * (longest - len(row["input_ids"])) for row in batch])
        return {"input_ids": ids, "attention_mask": (ids > 0).long(), "labels": ids.masked_fill(ids == 0, -100)}

    arguments = TrainingArguments(
        "out",
        per_device_train_batch_size=BATCH,
        gradient_accumulation_steps=ACCUMULATION,
        max_steps=200,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        use_cpu=True,
    )
    flat = data == "padding-free"
    collator = DataCollatorWithFlattening() if flat else pad
    Trainer(model=model, args=arguments, train_dataset=rows, data_collator=collator).train()


def compare(setup: str, folder: Path) -> dict[str, float]:
    """One forecast and its check."""
    options = ["--json", "--check", "2", "--clock", "cpu", "--device", "cpu", "--steps", str(STEPS), "--gpus", "2"]
    command = [
        sys.executable,
        "-m",
        "unsloth_multigpu.cli.main",
        "forecast",
        *options,
        "--",
        str(Path(__file__).resolve()),
    ]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    run = subprocess.run(
        [*command, "--train", setup], cwd=folder, env=environment, stdout=subprocess.PIPE, text=True, check=True
    )
    found = json.loads(run.stdout)
    (one, two) = found["forecasts"]
    return {
        **found["check"],
        "one_s": one["step_s"],
        "speed_up": two["speed_up"],
        "misfit": found["measured"]["misfit"],
    }


def main() -> None:
    """Prints the table in Markdown."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--train", choices=SETUPS, help=argparse.SUPPRESS)
    parser.add_argument("--only", choices=SETUPS)
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    if options.train:
        train(options.train)
        return
    setups = [options.only] if options.only else list(SETUPS)
    found: dict[str, list[dict[str, float]]] = {setup: [] for setup in setups}
    with tempfile.TemporaryDirectory() as folder:
        for repeat in range(options.repeats):
            for setup in setups:
                found[setup].append(compare(setup, Path(folder)))
                print(repeat + 1, setup, f"{found[setup][-1]['ratio']:.3f}", file=sys.stderr, flush=True)
    head = ("Set-up", "Forecast, s a step", "Measured, s a step", "Forecast / measured", "Each repeat", "Fit within")
    print(f"| {' | '.join(head)} |\n{'|---' * len(head)}|")
    for setup, runs in found.items():
        forecast_s, measured_s, ratio, misfit = (
            statistics.median(run[name] for run in runs) for name in ("forecast_s", "measured_s", "ratio", "misfit")
        )
        each = ", ".join(f"{run['ratio']:.2f}" for run in runs)
        name = setup.replace("-", ", ", 1)
        print(f"| {name} | {forecast_s:.3f} | {measured_s:.3f} | {ratio:.2f} | {each} | {misfit:.1%} |")


if __name__ == "__main__":
    main()
