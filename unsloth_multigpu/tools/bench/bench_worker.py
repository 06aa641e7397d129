"""The training script of every arm of a benchmark: a plain Trainer, in some arms after `enable_multi_gpu()`."""

from __future__ import annotations

import importlib
import json
import os
import sys
from pathlib import Path
from typing import Any

from unsloth_multigpu.accelerator import CPU_BACKEND
from unsloth_multigpu.tools.bench.arm import ARMS, Arm
from unsloth_multigpu.tools.bench.bench_option import HEAD_SIZE, UNSLOTH, BenchOptions
from unsloth_multigpu.tools.bench.unsloth_arm import load_model, make_trainer

# transformers' BatchRebalanceSampler always uses this seed; so do the other arms, so that all see the same order.
_ORDER_SEED = 42
_LORA: dict[str, Any] = {
    "r": 8,
    "lora_alpha": 16,
    "lora_dropout": 0.0,
    "target_modules": ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"],
}


def main(settings_file: str) -> None:
    """Trains with the settings in a file, and writes `rank_R.json` beside it."""
    settings = json.loads(Path(settings_file).read_text(encoding="utf-8"))
    arm, options = ARMS[settings["arm"]], BenchOptions(**settings["options"])
    if arm.line is not None:
        from unsloth_multigpu.plugin import enable_multi_gpu

        # The comparison of the first step would count as samples of that step.
        given = {"check_first_step": "off", **arm.line, "device": options.device}
        enable_multi_gpu(num_gpus=arm.num_devices(options), **given)
    rank = int(os.environ.get("RANK", "0"))
    record = _train(arm, options, rank)
    path = Path(settings_file).with_name(f"rank_{rank}.json")
    path.with_suffix(".part").write_text(json.dumps({"rank": rank, **record}), encoding="utf-8")
    path.with_suffix(".part").rename(path)
    import torch.distributed as dist

    if dist.is_initialized():
        dist.destroy_process_group()  # At the interpreter's end its threads may abort the process.


def _train(arm: Arm, options: BenchOptions, rank: int) -> dict[str, Any]:
    if options.library == UNSLOTH:
        importlib.import_module(UNSLOTH)  # First, as in users' scripts.
    import torch
    from datasets import Dataset
    from transformers import Trainer, TrainerCallback, TrainingArguments

    from unsloth_multigpu.plugin import get_multi_gpu_status
    from unsloth_multigpu.tools.bench.meter import Meter, peak_bytes

    is_cuda = options.device == "cuda"
    rows = options.rows()
    max_length = max(map(len, rows))
    if options.library == UNSLOTH:
        model, tokenizer = load_model(options, max_length, _LORA)
    else:
        model, tokenizer = make_model(options, max_length), None
    meter = Meter(model, is_cuda=is_cuda)

    class MarkSteps(TrainerCallback):  # type: ignore[misc, unused-ignore]
        def on_epoch_begin(self, *_: Any, **__: Any) -> None:
            meter.mark_begin()

        def on_step_end(self, *_: Any, **__: Any) -> None:
            meter.mark_step()

    # With lengths, so that samplers need not read the rows.
    data = Dataset.from_dict({"input_ids": rows, "length": list(map(len, rows))})
    values = training_values(arm, options)
    if options.library == UNSLOTH:
        trainer = make_trainer(model, tokenizer, values, options, max_length, data, [MarkSteps()])
    else:
        trainer = Trainer(
            model=model,
            args=TrainingArguments(**values),
            train_dataset=data,
            data_collator=end_to_end if options.padding_free else collate,
            callbacks=[MarkSteps()],
        )
    trainer.train()
    history, report = trainer.state.log_history, get_multi_gpu_status().report
    sent_bytes = 0 if not arm.uses_all_devices else None if report is None else report.ranks[rank].sent_bytes
    return {
        "steps": meter.steps(),
        "gradient_norms": [entry["grad_norm"] for entry in history if "grad_norm" in entry and arm.is_synchronous],
        "peak_bytes": peak_bytes(is_cuda),
        "device": torch.cuda.get_device_name() if is_cuda else "cpu",
        "sent_bytes": sent_bytes,
        "planner": {} if report is None else dict(report.planner),
    }


def make_model(options: BenchOptions, max_length: int) -> Any:
    """Creates a Llama with random weights from the seed, with an adapter if `train` is "lora"."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(options.seed)
    hidden_size, num_layers, vocab_size = options.model_shape
    num_heads = hidden_size // HEAD_SIZE
    model: Any = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=vocab_size,
            hidden_size=hidden_size,
            intermediate_size=3 * hidden_size,
            num_hidden_layers=num_layers,
            num_attention_heads=num_heads,
            num_key_value_heads=num_heads // 4 if num_heads % 4 == 0 else num_heads,
            max_position_embeddings=max_length,
            use_cache=False,
        )
    )
    if options.train == "lora":
        from peft import LoraConfig, get_peft_model

        model = model.to(torch.bfloat16 if options.dtype == "bf16" else torch.float32)
        model = get_peft_model(model, LoraConfig(**_LORA))
    return model


def training_values(arm: Arm, options: BenchOptions) -> dict[str, Any]:
    """Returns the arguments of `TrainingArguments`."""
    return {
        "output_dir": "output",
        "per_device_train_batch_size": options.batch_size,
        "gradient_accumulation_steps": arm.num_accumulated(options),
        "optim": options.optim,
        "bf16": options.dtype == "bf16",
        "gradient_checkpointing": options.gradient_checkpointing,
        "gradient_checkpointing_kwargs": {"use_reentrant": False} if options.gradient_checkpointing else None,
        "use_cpu": options.device == "cpu",
        "ddp_backend": CPU_BACKEND if options.is_card_shared else None,
        "seed": options.seed,
        "data_seed": _ORDER_SEED,
        # Logging gathers the loss from all ranks: ranks that step independently would wait for each other.
        "logging_strategy": "steps" if arm.is_synchronous else "no",
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": [],
        "disable_tqdm": True,
        "remove_unused_columns": False,
        "num_train_epochs": 1,
        "learning_rate": 1e-5,
        **arm.training,
    }


def collate(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Pads to the longest row: input_ids, attention_mask and labels, each rows x longest."""
    import torch
    from torch.nn.utils.rnn import pad_sequence

    each = [torch.tensor(row["input_ids"]) for row in rows]
    ids = pad_sequence(each, batch_first=True)
    mask = pad_sequence([torch.ones_like(row) for row in each], batch_first=True)
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}


def end_to_end(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Concatenates rows: input_ids, position_ids and labels, each 1 x tokens. The first token of a row is no label."""
    import torch

    ids = torch.tensor([[token for row in rows for token in row["input_ids"]]])
    positions = torch.cat([torch.arange(len(row["input_ids"])) for row in rows])[None]
    return {"input_ids": ids, "position_ids": positions, "labels": ids.masked_fill(positions == 0, -100)}


if __name__ == "__main__":
    main(sys.argv[1])
