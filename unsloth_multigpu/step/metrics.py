"""Combines what the ranks have counted and measured into the metrics that one process would log."""

from __future__ import annotations

import itertools
import json
import math
from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from unsloth_multigpu.group.manager import DDPManager
from unsloth_multigpu.part import Override, Part
from unsloth_multigpu.step.deal import Piece
from unsloth_multigpu.step.loss import IGNORED
from unsloth_multigpu.step.step import MicroBatch, Step
from unsloth_multigpu.trainer_protocol import ArgumentsLike, ControlLike, StateLike, TrainerLike

if TYPE_CHECKING:
    from unsloth_multigpu.step.sequence import SharedSequence

# Where TRL's trainers collect what they log, by "train" and "eval".
STORES = ("_metrics", "_stored_metrics")
# Their running count of tokens, and the metric that shows it.
_TOKENS, _TOKENS_METRIC = "_total_train_tokens", "num_tokens"
# TRL's metrics that are no means over rows.
_MEANS_OVER_TOKENS = ("entropy", "mean_token_accuracy")
_EXTREMES: dict[str, Callable[..., float]] = {"min_reward": min, "max_reward": max}
# Steps after which the ranks exchange what they noted where nothing is logged for long: it would become large.
_MOST_STEPS = 256


class Metrics(Part):
    """Everything that reaches `Trainer.log`, as one process has it.

    Each rank notes what its micro-batches add to the trainer's metrics, and the loss of each step. Before a line is
    written, an evaluation or a checkpoint, and when an epoch ends, the ranks exchange this once; each then holds the
    mean over the micro-batches that one process would have computed. TRL logs and clears it as ever. Fillers count
    nothing.

    A micro-batch that one rank has computed whole has its own value. Of micro-batches that ranks share, the values of
    the parts are averaged, weighted by rows; means over tokens are weighted by tokens, and the least and the greatest
    reward is that of all. What is another mean than these is near that of one process, see docs/your_run.md.

    Attributes:
        is_dealing: True where we chose the samples; other trainers gather their metrics themselves.
    """

    place = "metrics"

    def __init__(self, trainer: TrainerLike, manager: DDPManager) -> None:
        super().__init__(trainer, manager)
        self.is_dealing = False
        # Micro-batches of one process in an epoch and in a step of it; None where an epoch has no length.
        self._num_references: tuple[int, int] | None = None
        # Of each step since the last exchange: the number of steps before it, whether ranks share its micro-batches,
        # and what this rank's micro-batches add to its loss.
        self._losses: list[tuple[int, bool, torch.Tensor]] = []
        # Metric, number of the step (below 0: of a micro-batch whose samples ranks share) and whether ranks share the
        # micro-batch -> value, its weight, and how many micro-batches of one process it is of; of each of this rank's.
        self._noted: dict[tuple[str, int, bool], list[tuple[float, float, float]]] = defaultdict(list)
        # Metric -> sum and number of its values that were exchanged, and are not logged yet.
        self._merged: dict[str, tuple[float, float]] = {}
        self._loss_sum = 0.0
        self._last_logged = -1
        self._num_tokens = 0
        self._is_epoch_end = False

    def overrides(self) -> dict[str, Override]:
        return {"_maybe_log_save_evaluate": self._log_save_evaluate}

    def on_epoch_end(self, args: ArgumentsLike, state: StateLike, control: ControlLike, **kwargs: Any) -> None:
        # The Trainer is about to log what its last step has left; after the last epoch nothing else comes.
        self._is_epoch_end = True

    def begin(self, loader: Any, num_accumulated: int) -> None:
        """From here on steps are dealt. Called with the loader of one process, and its micro-batches in a step."""
        from transformers.trainer_utils import has_length

        self.is_dealing = True
        self._num_tokens = getattr(self._trainer, _TOKENS, 0)
        self._num_references = (len(loader), num_accumulated) if has_length(loader) else None

    @contextmanager
    def micro_batch(
        self, micro_batch: MicroBatch, step: Step, sequence: SharedSequence | None = None
    ) -> Iterator[None]:
        """Notes what the loss of a micro-batch adds to the trainer's metrics; a filler's is taken out again.

        Ranks that share its samples note a part each, and the first one its tokens.
        """
        before = {name: len(values) for name, values, _ in self._collected()}
        num_tokens = getattr(self._trainer, _TOKENS, None)
        yield
        piece = micro_batch.piece
        is_repeated = sequence is not None and sequence.rank > 0
        if (piece.is_filler or is_repeated) and num_tokens is not None:
            setattr(self._trainer, _TOKENS, num_tokens)
        num_references, is_shared = _of_references(piece, step.sizes)
        is_shared |= sequence is not None
        for name, values, store in self._collected():
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
        """All micro-batches of a step are computed.

        Args:
            losses: What each adds to its loss, times the ranks.
            is_shared: Ranks share the micro-batches of one process.
        """
        self._losses.append((self._trainer.state.global_step, is_shared, losses.detach()))

    def _collected(self) -> list[tuple[str, list[Any], dict[str, list[Any]]]]:
        """Each training metric: its name with its store's, its values, and where they lie."""
        found = []
        for attribute in STORES:
            stores = getattr(self._trainer, attribute, None)
            if isinstance(stores, Mapping) and "train" in stores:
                store: Any = stores["train"]
                found += [(f"{attribute}/{name}", values, store) for name, values in list(store.items())]
        return found

    def _log_save_evaluate(self, original: Callable[..., Any], tr_loss: torch.Tensor, *args: Any, **kw: Any) -> Any:
        """`Trainer._maybe_log_save_evaluate`: what every rank comes by when a step or an epoch has ended."""
        control, is_end, self._is_epoch_end = self._trainer.control, self._is_epoch_end, False
        if is_end and not self._manager.config.is_synchronous:
            # Ranks that step by themselves need not wait for each other before the end.
            state = self._trainer.state
            is_end = control.should_training_stop or state.global_step >= state.max_steps
        is_long = len(self._losses) >= _MOST_STEPS and self._manager.config.is_synchronous
        if is_end or is_long or control.should_log or control.should_evaluate or control.should_save:
            if self.is_dealing:
                self.merge()
                tr_loss.fill_(self._loss_sum)
            elif is_end:
                # The last line has what this rank adds up after the last one.
                rows = self._manager.gather_floats([float(tr_loss)])
                tr_loss.fill_(sum(row[0] for row in rows) / len(rows))
        result = original(tr_loss, *args, **kw)
        if self._trainer._globalstep_last_logged != self._last_logged:
            self._loss_sum, self._last_logged = 0.0, self._trainer._globalstep_last_logged
        return result

    def epoch_of(self, epoch: float) -> float:
        """How many epochs are done where the Trainer has counted our steps, of which the last may be a small one."""
        if self._num_references is None:
            return epoch
        of_epoch, of_step = self._num_references
        num_steps = -(-of_epoch // of_step)
        begun = math.ceil(epoch - 1e-9) - 1
        return begun + min(round((epoch - begun) * num_steps) * of_step, of_epoch) / of_epoch

    def merge(self) -> None:
        """Gives every rank what all ranks have noted since the last exchange. Collective, if there was a step."""
        if not self._losses:
            return
        num_tokens = getattr(self._trainer, _TOKENS, 0) - self._num_tokens
        noted = [[*key, rows] for key, rows in self._noted.items()]
        mine = {"tokens": num_tokens, "losses": [losses.tolist() for _, _, losses in self._losses], "noted": noted}
        ranks = [json.loads(text) for text in self._manager.gather_texts(json.dumps(mine))]
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
        """Adds the losses of each step as the Trainer would, which skips those that are not finite."""
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
        """Puts the mean over what one process would have added into each list."""
        there = {name for name, _, _ in self._collected()}
        # What was logged since is no longer there.
        merged = {name: total for name, total in self._merged.items() if name in there}
        for (name, _, is_shared), rows in found.items():
            value = sum(v * weight for v, weight, _ in rows) / sum(weight for _, weight, _ in rows)
            num_references = sum(n for _, _, n in rows)
            if is_shared:
                if _metric(name) in _EXTREMES:
                    value = _EXTREMES[_metric(name)](v for v, _, _ in rows)
                # A part may have nothing to add, as of chosen answers.
                num_references = max(1, round(num_references))
            before = merged.get(name, (0.0, 0.0))
            merged[name] = (before[0] + num_references * value, before[1] + num_references)
        for name, (total, count) in merged.items():
            getattr(self._trainer, name.partition("/")[0])["train"][_metric(name)] = [total / count]
        for name, values, _ in self._collected():
            if _metric(name) == _TOKENS_METRIC and hasattr(self._trainer, _TOKENS):
                values[:] = [self._num_tokens]
        self._merged = merged


def _metric(name: str) -> str:
    """As TRL calls it: without the store."""
    return name.partition("/")[2]


def _of_references(piece: Piece, sizes: Sequence[int]) -> tuple[float, bool]:
    """How many micro-batches of one process the rows of a piece are, and whether other pieces have more of their rows.

    Args:
        piece: Of a step.
        sizes: Rows of each micro-batch of that step in one process.
    """
    ends = list(itertools.accumulate(sizes))
    rows = Counter(bisect_right(ends, position) for position in piece.positions)
    return sum(n / sizes[r] for r, n in rows.items()), any(n < sizes[r] for r, n in rows.items())


def _num_targets(inputs: Mapping[str, Any]) -> int:
    """Tokens that the loss of a micro-batch is taken over; 0 where they are not known."""
    labels, mask = inputs.get("labels"), inputs.get("completion_mask")
    if isinstance(labels, torch.Tensor) and labels.dim() == 2:
        return int(labels[:, 1:].ne(IGNORED).sum())
    return int(mask[:, 1:].sum()) if isinstance(mask, torch.Tensor) else 0
