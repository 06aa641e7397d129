"""The training script that every arm of a benchmark runs: a plain Trainer, and for some arms the one line before it."""

from __future__ import annotations

import dataclasses
import functools
import importlib
import json
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from unsloth_multigpu.accelerator import CPU_BACKEND
from unsloth_multigpu.tools.bench.arm import Arm, find_arm, num_accumulated, num_devices, speed_of
from unsloth_multigpu.tools.bench.data import NUM_ID_TOKENS, make_rows, make_test_rows
from unsloth_multigpu.tools.bench.option import HEAD_SIZE, LEARNING_RATE, UNSLOTH, BenchOptions
from unsloth_multigpu.tools.bench.turn import Turn
from unsloth_multigpu.tools.bench.unsloth import load_model, make_trainer

if TYPE_CHECKING:
    import torch

    from unsloth_multigpu.tools.bench.meter import Meter

# transformers' BatchRebalanceSampler always uses this seed; so do the other arms, so that all see the same order.
_ORDER_SEED = 42
_LORA: dict[str, Any] = {
    "r": 8,
    "lora_alpha": 16,
    "lora_dropout": 0.0,
    "target_modules": ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"],
}


def main(settings_file: str) -> None:
    """Trains as the file of settings says, and leaves `rank_R.json` next to it."""
    settings = json.loads(Path(settings_file).read_text(encoding="utf-8"))
    arm, options = find_arm(settings["arm"]), BenchOptions(**settings["options"])
    if arm.line is not None:
        from unsloth_multigpu.plugin import enable_multi_gpu

        enable_multi_gpu(num_gpus=num_devices(arm, options), device=options.device, **arm.line)
    rank = int(os.environ.get("RANK", "0"))
    turn = None if settings["turns"] is None else Turn(settings["turns"], arm.name)
    record = _train(arm, options, rank, turn)
    path = Path(settings_file).with_name(f"rank_{rank}.json")
    path.with_suffix(".part").write_text(json.dumps({"rank": rank, **record}), encoding="utf-8")
    path.with_suffix(".part").rename(path)
    _leave_group()


def _leave_group() -> None:
    """Ends the group's threads: left to the interpreter's end they abort a process now and then."""
    import torch.distributed as dist

    if dist.is_initialized():
        dist.destroy_process_group()


def _train(arm: Arm, options: BenchOptions, rank: int, turn: Turn | None) -> dict[str, Any]:
    if options.library == UNSLOTH:
        importlib.import_module(UNSLOTH)  # First, as in its users' scripts.
    import torch
    from transformers import TrainerCallback

    from unsloth_multigpu.tools.bench.meter import Meter, is_expandable, num_compiled, peak_bytes, reserved_bytes

    is_cuda = options.device == "cuda"
    rows, test_rows = make_rows(options), make_test_rows(options)
    max_length = max(map(len, [*rows, *test_rows]))
    if options.library == UNSLOTH:
        model, tokenizer = load_model(options, max_length, _LORA)
    else:
        model, tokenizer = make_model(options, max_length), None
    compiled: list[int] = []
    meter = Meter(model, vocab_size=options.vocab_size, is_cuda=is_cuda, speed=speed_of(arm, options, rank))

    class MarkSteps(TrainerCallback):  # type: ignore[misc, unused-ignore]
        def on_epoch_begin(self, *_: Any, **__: Any) -> None:
            if turn is not None:
                turn.wait()
            meter.mark_begin()

        def on_step_end(self, *_: Any, **__: Any) -> None:
            meter.mark_step()
            compiled.append(num_compiled())
            if turn is not None:
                turn.wait()
                meter.mark_begin()

    # Samplers that need lengths find them here without reading the rows.
    columns: dict[str, list[Any]] = {"input_ids": rows, "length": list(map(len, rows))}
    trainer = _make_trainer(arm, options, model, tokenizer, meter, columns, test_rows, MarkSteps())
    trainer.train()
    history = trainer.state.log_history
    norms = [entry["grad_norm"] for entry in history if "grad_norm" in entry] if arm.is_synchronous else []
    return {
        "steps": meter.steps(),
        "gradient_norms": norms,
        "peak_bytes": peak_bytes(is_cuda),
        "device": torch.cuda.get_device_name() if is_cuda else "cpu",
        "num_threads": torch.get_num_threads(),
        "epochs": epoch_records(history),
        "sent_bytes": _sent_bytes(arm, rank),
        "reserved_bytes": reserved_bytes() if is_cuda else None,
        "planner": _planner(),
        "trainer": f"{type(trainer).__module__}.{type(trainer).__name__}",
        "num_compiled": compiled,
        "is_expandable": is_expandable() if is_cuda else None,
    }


def _make_trainer(
    arm: Arm,
    options: BenchOptions,
    model: Any,
    tokenizer: Any,
    meter: Meter,
    columns: dict[str, list[Any]],
    test_rows: list[list[int]],
    callback: Any,
) -> Any:
    from datasets import Dataset
    from transformers import Trainer, TrainingArguments

    rows, values = Dataset.from_dict(columns), _training_values(arm, options)
    if options.library == UNSLOTH:
        return make_trainer(model, tokenizer, values, options, max(columns["length"]), rows, [callback])

    class TimedTrainer(Trainer):  # type: ignore[misc, unused-ignore]
        def evaluate(self, *args: Any, **kwargs: Any) -> Any:
            meter.extend_step()  # The ranks have waited for each other in it.
            return super().evaluate(*args, **kwargs)

    return TimedTrainer(
        model=model,
        args=TrainingArguments(**values),
        train_dataset=rows,
        eval_dataset=Dataset.from_dict({"input_ids": test_rows}) if test_rows else None,
        data_collator=end_to_end
        if options.padding_free
        else functools.partial(collate, num_given=NUM_ID_TOKENS if options.is_learning else 0),
        compute_metrics=mean_scores if test_rows else None,
        preprocess_logits_for_metrics=score_rows if test_rows else None,
        callbacks=[callback],
    )


def _planner() -> dict[str, Any]:
    """What our planner had measured, empty where it planned nothing."""
    from unsloth_multigpu.plugin import get_multi_gpu_status

    report = get_multi_gpu_status().report
    return {} if report is None else dict(report.planner)


def _sent_bytes(arm: Arm, rank: int) -> int | None:
    """What this rank sent for gradients and weights, None where it is not counted."""
    from unsloth_multigpu.plugin import get_multi_gpu_status

    if not arm.uses_all_devices:
        return 0
    report = get_multi_gpu_status().report
    return None if report is None else report.ranks[rank].sent_bytes


def make_model(options: BenchOptions, max_length: int) -> Any:
    """A Llama with weights drawn from the seed, with an adapter where that is asked for."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(options.seed)
    num_heads = options.hidden_size // HEAD_SIZE
    model: Any = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=options.vocab_size,
            hidden_size=options.hidden_size,
            intermediate_size=3 * options.hidden_size,
            num_hidden_layers=options.num_layers,
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


def _training_values(arm: Arm, options: BenchOptions) -> dict[str, Any]:
    """Arguments of `TrainingArguments`."""
    from transformers import TrainingArguments

    known = {f.name for f in dataclasses.fields(TrainingArguments)}
    training = dict(arm.training)
    if training.get("train_sampling_strategy") == "group_by_length" and "train_sampling_strategy" not in known:
        training = {"group_by_length": True}  # Its name in transformers 4.
    if options.is_learning:
        training |= learning_arguments(arm, options)
    else:
        training |= {"num_train_epochs": 1, "learning_rate": 1e-5}
    return {
        "output_dir": "output",
        "per_device_train_batch_size": options.batch_size,
        "gradient_accumulation_steps": num_accumulated(arm, options),
        "optim": options.optim,
        "bf16": options.dtype == "bf16",
        "gradient_checkpointing": options.gradient_checkpointing,
        "gradient_checkpointing_kwargs": {"use_reentrant": False} if options.gradient_checkpointing else None,
        "use_cpu": options.device == "cpu",
        "ddp_backend": CPU_BACKEND if options.is_card_shared else None,
        "seed": options.seed,
        "data_seed": _ORDER_SEED,
        "logging_steps": 1,
        "save_strategy": "steps" if options.save_steps and arm.may_save else "no",
        "save_steps": options.save_steps or 500,
        "save_total_limit": 1,
        "report_to": [],
        "disable_tqdm": True,
        "remove_unused_columns": False,
        **training,
    }


def learning_arguments(arm: Arm, options: BenchOptions) -> dict[str, Any]:
    """What a training with tests adds to `TrainingArguments`."""
    return {
        "num_train_epochs": options.epochs,
        "learning_rate": LEARNING_RATE,
        # The first epochs of a longer run are then those of a shorter one.
        "lr_scheduler_type": "constant",
        "eval_strategy": "epoch",
        "per_device_eval_batch_size": options.batch_size,
        # PEFT's models do not declare them.
        "label_names": ["labels"],
        # Logging gathers the loss from all ranks: ranks that step independently would wait for each other.
        "logging_strategy": "steps" if arm.is_synchronous else "epoch",
    }


def score_rows(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Loss, hits and number of the next tokens of each row, summed: rows x 3, so that ranks have little to gather.

    Args:
        logits: rows x tokens x vocabulary.
        labels: rows x tokens, -100 = not to be predicted.
    """
    import torch
    from torch.nn.functional import cross_entropy

    guesses, wanted = logits[:, :-1].float(), labels[:, 1:]
    losses = cross_entropy(guesses.transpose(1, 2), wanted, ignore_index=-100, reduction="none")
    hits = guesses.argmax(dim=2) == wanted
    return torch.stack([losses.sum(1), hits.sum(1).float(), (wanted != -100).sum(1).float()], dim=1)


def mean_scores(prediction: Any) -> dict[str, float]:
    """Means over all tokens, from a prediction of `score_rows`."""
    loss, num_hits, num_tokens = prediction.predictions.sum(axis=0, dtype=float)
    return {"token_loss": float(loss / num_tokens), "accuracy": float(num_hits / num_tokens)}


def epoch_records(history: Sequence[Mapping[str, Any]]) -> list[dict[str, float]]:
    """One record per epoch, see `result.RankRecord`, from `TrainerState.log_history`."""
    records, losses = [], []
    for entry in history:
        if "loss" in entry:
            losses.append(entry["loss"])
        if "eval_accuracy" in entry:
            test = {"test_loss": entry["eval_token_loss"], "accuracy": entry["eval_accuracy"]}
            records.append({"train_loss": sum(losses) / len(losses), **test})
            losses = []
    return records


def collate(rows: list[dict[str, Any]], num_given: int) -> dict[str, Any]:
    """Pads to the longest row: input_ids, attention_mask and labels, each rows x longest.

    Args:
        num_given: The first tokens of a row that are not to be predicted.
    """
    import torch

    longest = max(len(row["input_ids"]) for row in rows)
    ids = torch.zeros(len(rows), longest, dtype=torch.int64)
    mask = torch.zeros_like(ids)
    for number, row in enumerate(rows):
        ids[number, : len(row["input_ids"])] = torch.tensor(row["input_ids"])
        mask[number, : len(row["input_ids"])] = 1
    labels = ids.masked_fill(mask == 0, -100)
    labels[:, :num_given] = -100
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


def end_to_end(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Lays rows one after the other: input_ids, position_ids and labels, each 1 x tokens. A first token is no label."""
    import torch

    ids = torch.tensor([[token for row in rows for token in row["input_ids"]]])
    positions = torch.cat([torch.arange(len(row["input_ids"])) for row in rows])[None]
    return {"input_ids": ids, "position_ids": positions, "labels": ids.masked_fill(positions == 0, -100)}


if __name__ == "__main__":
    main(sys.argv[1])
