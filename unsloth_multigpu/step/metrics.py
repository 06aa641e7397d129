"""Combines the ranks' losses and metrics into those that one process would log."""

from __future__ import annotations

import itertools
import math
from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from unsloth_multigpu.deal.deal import MicroBatch, Piece, Step
from unsloth_multigpu.group.manager import DDPManager
from unsloth_multigpu.part import ArgumentsLike, ControlLike, Override, Part, StateLike, TrainerLike
from unsloth_multigpu.step.loss import IGNORED

if TYPE_CHECKING:
    from unsloth_multigpu.step.sequence import SharedSequence

# Attributes in which TRL's trainers collect metrics, by "train" and "eval".
STORES = ("_metrics", "_stored_metrics")
# The token counter of TRL's trainers, and its metric.
_TOKENS, _TOKENS_METRIC = "_total_train_tokens", "num_tokens"
# TRL's metrics that are not means over rows.
_MEANS_OVER_TOKENS = ("entropy", "mean_token_accuracy")
_EXTREMES: dict[str, Callable[..., float]] = {"min_reward": min, "max_reward": max}
# If nothing is logged, the ranks exchange their records after this many steps, to bound their size.
_MOST_STEPS = 256


class Metrics(Part):
    """Makes the numbers that reach `Trainer.log` those of one process.

    Each rank records what its micro-batches add to the trainer's metrics, and the loss of each step. The ranks exchange
    the records before a log line, an evaluation, a checkpoint, and at the end of an epoch. Each then has as many values
    as one process, which TRL averages, logs and clears as usual. Fillers have weight 0.

    A micro-batch computed by one rank keeps its value. For shared micro-batches, the values of the parts are averaged,
    weighted by rows, or by tokens for means over tokens; the minimum and maximum reward are those of all parts. Other
    kinds of means are only near those of one process, see docs/your_run.md.

    Attributes:
        is_dealing: The step feed deals the samples. Otherwise trainers gather their metrics themselves.
    """

    place = "metrics"

    def __init__(self, trainer: TrainerLike, manager: DDPManager) -> None:
        super().__init__(trainer, manager)
        self.is_dealing = False
        # Micro-batches of one process in an epoch and in a step; None if the epoch has no length.
        self._num_references: tuple[int, int] | None = None
        # For each step since the last exchange: number of steps before it, whether ranks share its micro-batches, and
        # what this rank's micro-batches add to its loss.
        self._losses: list[tuple[int, bool, torch.Tensor]] = []
        # (metric, step, whether ranks share the micro-batch) -> for each micro-batch of this rank: value, weight, and
        # the number of micro-batches of one process it stands for. A negative step: ranks share the samples.
        self._noted: dict[tuple[str, int, bool], list[tuple[float, float, float]]] = defaultdict(list)
        self._loss_sum = 0.0
        self._last_logged = -1
        self._num_tokens = 0
        self._is_epoch_end = False

    def overrides(self) -> dict[str, Override]:
        return {"_maybe_log_save_evaluate": self._log_save_evaluate}

    def on_epoch_end(self, args: ArgumentsLike, state: StateLike, control: ControlLike, **kwargs: Any) -> None:
        # After the last epoch, this is the last chance to log.
        self._is_epoch_end = True

    def begin(self, loader: Any, num_accumulated: int) -> None:
        """Called when steps are dealt, with the loader of one process and its micro-batches per step."""
        from transformers.trainer_utils import has_length

        self.is_dealing = True
        self._num_tokens = getattr(self._trainer, _TOKENS, 0)
        self._num_references = (len(loader), num_accumulated) if has_length(loader) else None

    @contextmanager
    def micro_batch(
        self, micro_batch: MicroBatch, step: Step, sequence: SharedSequence | None = None
    ) -> Iterator[None]:
        """Records what the loss of a micro-batch adds to the trainer's metrics, and removes it there.

        Fillers are not recorded. Ranks that share samples record a part each; only the first counts tokens.
        """
        before = {name: len(values) for name, values, _ in collected(self._trainer, "train")}
        num_tokens = getattr(self._trainer, _TOKENS, None)
        yield
        piece = micro_batch.piece
        is_repeated = sequence is not None and sequence.rank > 0
        if (piece.is_filler or is_repeated) and num_tokens is not None:
            setattr(self._trainer, _TOKENS, num_tokens)
        num_references, is_shared = _of_references(piece, step.sizes)
        is_shared |= sequence is not None
        for name, values, store in collected(self._trainer, "train"):
            num_old, metric = before.get(name, 0), _metric(name)
            new = [float(value) for value in values[num_old:]]
            if metric == _TOKENS_METRIC or not new:
                continue
            del values[num_old:]
            if not values:  # TRL divides by their number.
                del store[metric]
            if not piece.is_filler:
                is_over_tokens = is_shared and metric in _MEANS_OVER_TOKENS
                if is_over_tokens and sequence is not None and not sequence.num_targets:
                    continue
                num_targets = _num_targets(micro_batch.inputs) if sequence is None else sequence.num_targets
                weight = (num_targets if is_over_tokens else 0) or num_references
                row = (sum(new) / len(new), weight, num_references)
                place = len(self._losses) if sequence is None else -sequence.number
                self._noted[name, place, is_shared].append(row)

    def end_step(self, losses: torch.Tensor, *, is_shared: bool) -> None:
        """Records what each micro-batch, or part of one, adds to a step's loss, times the number of ranks."""
        self._losses.append((self._trainer.state.global_step, is_shared, losses.detach()))

    def _log_save_evaluate(self, original: Callable[..., Any], tr_loss: torch.Tensor, *args: Any, **kw: Any) -> Any:
        """Overrides `Trainer._maybe_log_save_evaluate`, which every rank calls at the end of a step or an epoch."""
        control, is_end, self._is_epoch_end = self._trainer.control, self._is_epoch_end, False
        if is_end and not self._manager.config.is_synchronous:
            # Ranks that step independently wait for each other only at the end of the training.
            is_end = self.ends_training()
        is_long = len(self._losses) >= _MOST_STEPS and self._manager.config.is_synchronous
        if is_end or is_long or control.should_log or control.should_evaluate or control.should_save:
            if self.is_dealing:
                self.merge()
                tr_loss.fill_(self._loss_sum)
            elif is_end:
                # The last line has the loss since the previous line, on each rank.
                losses = self._manager.gather_json(float(tr_loss))
                tr_loss.fill_(sum(losses) / len(losses))
        result = original(tr_loss, *args, **kw)
        if self._trainer._globalstep_last_logged != self._last_logged:
            self._loss_sum, self._last_logged = 0.0, self._trainer._globalstep_last_logged
        return result

    def epoch_of(self, epoch: float) -> float:
        """Converts the Trainer's epoch, which counts steps, to that of one process: the last step may be smaller."""
        if self._num_references is None:
            return epoch
        of_epoch, of_step = self._num_references
        num_steps = -(-of_epoch // of_step)
        begun = math.ceil(epoch - 1e-9) - 1
        return begun + min(round((epoch - begun) * num_steps) * of_step, of_epoch) / of_epoch

    def merge(self) -> None:
        """Exchanges the records since the last exchange. Collective, if there was a step."""
        if not self._losses:
            return
        num_tokens = getattr(self._trainer, _TOKENS, 0) - self._num_tokens
        noted = [[*key, rows] for key, rows in self._noted.items()]
        mine = {"tokens": num_tokens, "losses": [losses.tolist() for _, _, losses in self._losses], "noted": noted}
        ranks = self._manager.gather_json(mine)
        self._add_losses([rank["losses"] for rank in ranks])
        self._num_tokens += sum(rank["tokens"] for rank in ranks)
        if hasattr(self._trainer, _TOKENS):
            setattr(self._trainer, _TOKENS, self._num_tokens)
        found: dict[tuple[str, int, bool], list[tuple[float, float, float]]] = defaultdict(list)
        for name, step, is_shared, rows in (each for rank in ranks for each in rank["noted"]):
            found[name, step, is_shared] += rows
        self._write(found)
        self._losses.clear()
        self._noted.clear()

    def _add_losses(self, ranks: Sequence[Sequence[Sequence[float]]]) -> None:
        """Adds the losses of each step as the Trainer does, which replaces non-finite ones by the mean so far."""
        last_logged = self._trainer._globalstep_last_logged
        if last_logged != self._last_logged:
            self._loss_sum, self._last_logged = 0.0, last_logged
        for (num_before, is_shared, _), losses in zip(self._losses, zip(*ranks, strict=True), strict=True):
            of_step = list(itertools.chain.from_iterable(losses))
            for loss in [sum(of_step)] if is_shared else of_step:
                if self._trainer.args.logging_nan_inf_filter and not math.isfinite(loss):
                    loss = len(ranks) * self._loss_sum / (1 + num_before - last_logged)
                self._loss_sum += loss / len(ranks)

    def _write(self, found: Mapping[tuple[str, int, bool], Sequence[tuple[float, float, float]]]) -> None:
        """Adds to each metric's list as many values as one process would have added: their mean in each step."""
        for (name, _, is_shared), rows in found.items():
            value = sum(v * weight for v, weight, _ in rows) / sum(weight for _, weight, _ in rows)
            if is_shared and _metric(name) in _EXTREMES:
                value = _EXTREMES[_metric(name)](v for v, _, _ in rows)
            store = getattr(self._trainer, name.partition("/")[0])["train"]
            # A part may add no value, for example without chosen answers.
            store.setdefault(_metric(name), []).extend([value] * max(1, round(sum(n for _, _, n in rows))))
        for name, values, _ in collected(self._trainer, "train"):
            if _metric(name) == _TOKENS_METRIC and hasattr(self._trainer, _TOKENS):
                values[:] = [self._num_tokens]


def collected(trainer: TrainerLike, kind: str) -> list[tuple[str, list[Any], dict[str, list[Any]]]]:
    """Returns each of TRL's metrics, "train" or "eval": its name with that of its store, its values, and the store."""
    found = []
    for attribute in STORES:
        stores = getattr(trainer, attribute, None)
        if isinstance(stores, Mapping) and kind in stores:
            store: Any = stores[kind]
            found += [(f"{attribute}/{name}", values, store) for name, values in list(store.items())]
    return found


def _metric(name: str) -> str:
    """Returns TRL's name of a metric, without that of the store."""
    return name.partition("/")[2]


def _of_references(piece: Piece, sizes: Sequence[int]) -> tuple[float, bool]:
    """Returns how many micro-batches of one process (of `sizes`) a piece stands for, and if others share them."""
    ends = list(itertools.accumulate(sizes))
    rows = Counter(bisect_right(ends, position) for position in piece.positions)
    return sum(n / sizes[r] for r, n in rows.items()), any(n < sizes[r] for r, n in rows.items())


def _num_targets(inputs: Mapping[str, Any]) -> int:
    """Returns the number of tokens in the loss of a micro-batch; 0 if unknown."""
    labels, mask = inputs.get("labels"), inputs.get("completion_mask")
    if isinstance(labels, torch.Tensor) and labels.dim() == 2:
        return int(labels[:, 1:].ne(IGNORED).sum())
    return int(mask[:, 1:].sum()) if isinstance(mask, torch.Tensor) else 0
