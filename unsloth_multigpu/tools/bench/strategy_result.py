"""What a strategy's model has learned: measured in each rank after each epoch, and summed up as tables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from unsloth_multigpu.tools.bench.arm import REFERENCE, Arm
from unsloth_multigpu.tools.bench.option import LEARNING_RATE, BenchOptions
from unsloth_multigpu.tools.bench.result import ArmResult, EpochRecord, RankRecord, Runs, Spread, measure_run, ratios
from unsloth_multigpu.tools.bench.strategy_arm import DDP
from unsloth_multigpu.tools.bench.table import Table, memory_text, norm_text, spread_text

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
        # PEFT's models do not declare them.
        "label_names": ["labels"],
        # Logging gathers the loss from all ranks: ranks that step independently would wait for each other.
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
    """One record per epoch, see `result.EpochRecord`, from `TrainerState.log_history`."""
    records, losses = [], []
    for entry in history:
        if "loss" in entry:
            losses.append(entry["loss"])
        if "eval_accuracy" in entry:
            test = {"test_loss": entry["eval_token_loss"], "accuracy": entry["eval_accuracy"]}
            records.append({"train_loss": sum(losses) / len(losses), **test})
            losses = []
    return records


@dataclass(frozen=True)
class StrategyResult:
    """A strategy over all rounds, in addition to its `ArmResult`.

    Args:
        times_ddp: Its tokens per second divided by those of DDP in the same round; None where DDP was not run.
        epoch_s: Seconds of an epoch without its test, means of a round's epochs.
        train_losses, test_losses, accuracies: One for each epoch; see `EpochRecord`.
        sent_bytes_per_step: Of the rank that sends most; None = not known.
        num_updates: Optimizer steps, one after the other, that the weights have seen at the end.
    """

    name: str
    times_ddp: Spread | None
    epoch_s: Spread
    train_losses: tuple[Spread, ...]
    test_losses: tuple[Spread, ...]
    accuracies: tuple[Spread, ...]
    sent_bytes_per_step: float | None
    num_updates: int


def summarize_strategies(runs: Runs, options: BenchOptions) -> list[StrategyResult]:
    """One result per strategy, in the order of `runs`."""
    speeds = {
        name: [measure_run(ranks, options.num_warmup).tokens_per_s for ranks in rounds] for name, rounds in runs.items()
    }
    return [
        StrategyResult(
            name=name,
            times_ddp=ratios(speeds[name], speeds.get(DDP)),
            epoch_s=Spread.of(_epoch_s(ranks) for ranks in rounds),
            train_losses=_spreads([[epoch.train_loss for epoch in _epochs(ranks)] for ranks in rounds]),
            test_losses=_spreads([[epoch.test_loss for epoch in _epochs(ranks)] for ranks in rounds]),
            accuracies=_spreads([[epoch.accuracy for epoch in _epochs(ranks)] for ranks in rounds]),
            sent_bytes_per_step=_sent_bytes_per_step(rounds),
            num_updates=len(rounds[0][0].steps),
        )
        for name, rounds in runs.items()
    ]


def _epochs(ranks: Sequence[RankRecord]) -> Sequence[EpochRecord]:
    return ranks[0].epochs


def _epoch_s(ranks: Sequence[RankRecord]) -> float:
    return max(sum(step.wall_s for step in rank.steps) for rank in ranks) / len(_epochs(ranks))


def _spreads(values: Sequence[Sequence[float]]) -> tuple[Spread, ...]:
    """Spreads over the rounds of `values[round][epoch]`."""
    return tuple(map(Spread.of, zip(*values, strict=True)))


def _sent_bytes_per_step(rounds: Sequence[Sequence[RankRecord]]) -> float | None:
    sent = [rank.sent_bytes / len(rank.steps) for ranks in rounds for rank in ranks if rank.sent_bytes is not None]
    return max(sent) if len(sent) == sum(map(len, rounds)) else None


def strategy_tables(results: Sequence[StrategyResult], arms: Mapping[str, ArmResult]) -> list[Table]:
    """Speed and exactness of each strategy, and what it has learned after each epoch."""
    return [_speed_table(results, arms), _learning_table(results)]


def _speed_table(results: Sequence[StrategyResult], arms: Mapping[str, ArmResult]) -> Table:
    columns = ["strategy", "tokens/s", f"x {REFERENCE}", f"x {DDP}", "s/epoch", "test loss", "accuracy"]
    columns += ["norm difference", "samples", "MB sent/step", "updates", "CPU s", "peak memory"]
    legend = (
        "tokens/s: tokens that are no padding, of all ranks. Medians of the rounds with (smallest-largest);",
        "the ratios are taken within each round. s/epoch: seconds of an epoch, without its test.",
        "test loss, accuracy: at the end, of the next byte in texts that were not learned.",
        f"norm difference: of the gradient from {REFERENCE}, relative, the largest of the first epoch's steps;",
        "- where a step has no gradient of all ranks. samples: whether each step has those of " + REFERENCE + ".",
        "MB sent/step: of the rank that sends most, in the algorithms that are usual, the first broadcast of the",
        "weights included. updates: optimizer steps that the weights have seen, one after the other. CPU s: CPU time",
        "of the slowest rank of each timed step, summed: what counts where other programs disturb. peak memory: of",
        "one process, its GPUs added up.",
    )
    rows = [
        [
            r.name,
            spread_text(arms[r.name].tokens_per_s, "{:,.0f}".format),
            spread_text(arms[r.name].times_reference, "{:.2f}".format),
            spread_text(r.times_ddp, "{:.2f}".format),
            spread_text(r.epoch_s, "{:.1f}".format),
            spread_text(r.test_losses[-1], "{:.3f}".format),
            spread_text(r.accuracies[-1], "{:.1%}".format),
            norm_text(arms[r.name]),
            {True: "same", False: "other", None: "-"}[arms[r.name].has_same_samples],
            "-" if r.sent_bytes_per_step is None else f"{r.sent_bytes_per_step / 1e6:.2f}",
            str(r.num_updates),
            f"{arms[r.name].cpu_s.median:.1f}",
            memory_text(arms[r.name]),
        ]
        for r in results
    ]
    return Table(columns, rows, legend)


def _learning_table(results: Sequence[StrategyResult]) -> Table:
    epochs = range(1, len(results[0].accuracies) + 1)
    columns = ["strategy", *(f"{what} {n}" for n in epochs for what in ("train loss", "test loss", "accuracy"))]
    rows = []
    for r in results:
        cells = [r.name]
        for train_loss, test_loss, accuracy in zip(r.train_losses, r.test_losses, r.accuracies, strict=True):
            cells += [spread_text(loss, "{:.3f}".format) for loss in (train_loss, test_loss)]
            cells.append(spread_text(accuracy, "{:.1%}".format))
        rows.append(cells)
    return Table(columns, rows, ("train loss: mean over the steps of the epoch. The rest is measured at its end.",))
