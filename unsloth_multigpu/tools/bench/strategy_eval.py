"""How well a model predicts texts that it did not learn: what a rank measures at the end of each epoch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from unsloth_multigpu.tools.bench.arm import Arm
from unsloth_multigpu.tools.bench.option import LEARNING_RATE

if TYPE_CHECKING:
    import torch


def learning_arguments(arm: Arm, num_epochs: int, batch_size: int) -> dict[str, Any]:
    """What a training with tests adds to `TrainingArguments`."""
    return {
        "num_train_epochs": num_epochs,
        "learning_rate": LEARNING_RATE,
        # The first epochs of a longer run are then those of a shorter one.
        "lr_scheduler_type": "constant",
        "eval_strategy": "epoch",
        "per_device_eval_batch_size": batch_size,
        # PEFT's models do not tell.
        "label_names": ["labels"],
        # A loss is put together from all ranks: those that step by themselves would meet in each step.
        "logging_strategy": "steps" if arm.meets_every_step else "epoch",
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
    """One record per epoch, see `bench_result.EpochRecord`, from `TrainerState.log_history`."""
    records, losses = [], []
    for entry in history:
        if "loss" in entry:
            losses.append(entry["loss"])
        if "eval_accuracy" in entry:
            test = {"test_loss": entry["eval_token_loss"], "accuracy": entry["eval_accuracy"]}
            records.append({"train_loss": sum(losses) / len(losses), **test})
            losses = []
    return records
