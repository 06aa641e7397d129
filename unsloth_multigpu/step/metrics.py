"""Combines what the ranks have counted and measured into the metrics that one process would log."""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import astuple, dataclass, field, replace
from typing import Any

import torch

from unsloth_multigpu.group.manager import DDPManager
from unsloth_multigpu.logs import get_logger
from unsloth_multigpu.part import Override, Part
from unsloth_multigpu.step.loss import IGNORED
from unsloth_multigpu.step.step import MicroBatch
from unsloth_multigpu.trainer_protocol import ArgumentsLike, ControlLike, StateLike, TrainerLike

logger = get_logger(__name__)

# Where TRL's trainers collect what they log, by "train" and "eval".
STORES = ("_metrics", "_stored_metrics")
# Their running count of tokens.
_NUM_TOKENS = "_total_train_tokens"
# TRL's metrics that are no means over rows.
_MEANS_OVER_TOKENS = ("entropy", "mean_token_accuracy")
_EXTREMES: dict[str, Callable[..., float]] = {"min_reward": min, "max_reward": max}
# Steps after which the ranks meet where nothing is logged for long: what they note would become large.
_MOST_STEPS = 256


@dataclass
class _Record:
    """What one micro-batch of this rank has told.

    Args:
        step: Number of its step since the ranks last met.
        is_own: False for one that a stream has left over, which one process computes before the step it is added to.
        group: See `Piece.group`.
        num_rows: Samples in it.
        shape: Rows and width of its main input; zeros where that is not padded.
        num_targets: Tokens that its loss is taken over; 0 where they are not known.
        values: Metric -> what it has added to its list.
        loss: What it adds to the loss of its step, times the number of ranks.
    """

    step: int
    is_own: bool
    group: tuple[int, ...]
    num_rows: int
    shape: tuple[int, int]
    num_targets: int = 0
    values: dict[str, list[float]] = field(default_factory=dict)
    loss: Any = 0.0


# Step, `is_own` and group, in the order of one process -> their micro-batches of all ranks.
_Groups = dict[tuple[int, bool, tuple[int, ...]], list[_Record]]


class Metrics(Part):
    """Everything that reaches `Trainer.log`, as one process has it.

    Each rank notes what its micro-batches add to the trainer's metrics, and the loss of each step. Before a line is
    written, an evaluation or a checkpoint, and when an epoch ends, the ranks meet once; every rank then holds the lists
    that one process would hold: one value for each of its micro-batches. Fillers count nothing. TRL averages these
    lists and clears them as ever.

    A micro-batch that one rank has computed whole has its own value. One that ranks share has the mean of their values,
    weighted by rows; means over tokens are weighted by tokens, and the least and the greatest reward is that of all.
    What is another mean than these is near that of one process, see docs/your_run.md. Where rows were exchanged between
    the micro-batches of a step, each of them has the value of all together. The loss is always that of one process.

    Args:
        trainer: A `transformers.Trainer` or subclass.
        manager: This rank's manager.

    Attributes:
        is_dealing: True where we chose the samples; other trainers gather their metrics themselves.
    """

    place = "metrics"

    def __init__(self, trainer: TrainerLike, manager: DDPManager) -> None:
        self._trainer = trainer
        self._manager = manager
        self.is_dealing = False
        # Micro-batches of one process in an epoch and in a step of it; None where an epoch has no length.
        self._num_references: tuple[int, int] | None = None
        # Of the micro-batches since the ranks last met, the one that is computed included.
        self._records: list[_Record] = []
        # Metrics that are no lists of values but have a last one.
        self._replaced: set[str] = set()
        # Of each step since the ranks last met: the number of steps before it.
        self._steps: list[int] = []
        self._loss_sum = 0.0
        self._last_logged = -1
        self._num_tokens_before = 0
        self._has_warned = self._is_epoch_end = False

    def overrides(self) -> dict[str, Override]:
        return {
            "_maybe_log_save_evaluate": self._log_save_evaluate,
            "log": self._log,
            "evaluation_loop": self._evaluation_loop,
        }

    def on_epoch_end(self, args: ArgumentsLike, state: StateLike, control: ControlLike, **kwargs: Any) -> None:
        # The Trainer is about to log what its last step has left; after the last epoch nothing else comes.
        self._is_epoch_end = True

    def begin(self, loader: Any, num_accumulated: int) -> None:
        """From here on steps are dealt. Called with the loader of one process, and its micro-batches in a step."""
        from transformers.trainer_utils import has_length

        self.is_dealing = True
        self._num_tokens_before = getattr(self._trainer, _NUM_TOKENS, 0)
        self._num_references = (len(loader), num_accumulated) if has_length(loader) else None

    @contextmanager
    def micro_batch(self, micro_batch: MicroBatch, *, is_left_over: bool = False) -> Iterator[None]:
        """Notes what the loss of a micro-batch adds to the trainer's metrics; a filler's is taken out again."""
        trainer, piece, inputs = self._trainer, micro_batch.piece, micro_batch.inputs
        record = _Record(len(self._steps), not is_left_over, piece.group, len(piece.positions), _shape(trainer, inputs))
        before = {name: (values, len(values)) for name, values, _ in self._collected()}
        num_tokens = getattr(trainer, _NUM_TOKENS, None)
        self._records.append(record)
        yield
        record.values = self._take_out(before)
        if piece.is_shared and record.values:
            record.num_targets = _num_targets(inputs)
        if not piece.is_filler:
            return
        self._records.pop()
        if num_tokens is not None:
            setattr(trainer, _NUM_TOKENS, num_tokens)
        for name, _, store in self._collected():
            if name in before:
                store[_metric(name)] = before[name][0]
            else:
                del store[_metric(name)]

    def _take_out(self, before: Mapping[str, tuple[list[Any], int]]) -> dict[str, list[float]]:
        """Removes what a micro-batch has added to the lists, until the ranks meet; they and their lengths `before`."""
        new = {}
        for name, values, _ in self._collected():
            old, num_old = before.get(name, ([], 0))
            if name.endswith("/num_tokens") or (name in before and values is not old):
                # A running count, or a last value: TRL puts a new list in the place of the old one.
                self._replaced.add(name)
            if name not in self._replaced and len(values) > num_old:
                new[name] = [float(value) for value in values[num_old:]]
                del values[num_old:]
        return new

    def note_loss(self, loss: torch.Tensor, micro_batch: MicroBatch) -> None:
        """Notes what a micro-batch adds to the loss of its step; one without anything to average has no loss."""
        if not micro_batch.piece.is_filler:
            self._records[-1].loss = torch.full_like(loss, math.nan) if micro_batch.is_unweighted else loss.detach()

    def end_step(self) -> None:
        """All micro-batches of a step are noted."""
        self._steps.append(self._trainer.state.global_step)

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
        is_long = len(self._steps) >= _MOST_STEPS and self._manager.config.is_synchronous
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

    def _log(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """`Trainer.log`: a line that the ranks do not write together holds none of their parts."""
        if not (self._records or self._steps) or not self._collected():
            return original(*args, **kwargs)
        if self._manager.identity.rank == 0 and not self._has_warned:
            self._has_warned = True
            logger.warning(
                "log() was called outside the training's own log lines: TRL's metrics come with the next of them"
            )
        with ExitStack() as stack:
            for attribute in STORES:
                stores = getattr(self._trainer, attribute, {})
                if "train" in stores:
                    stack.callback(stores.__setitem__, "train", stores["train"])
                    stores["train"] = defaultdict(list)
            return original(*args, **kwargs)

    def _evaluation_loop(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """`Trainer.evaluation_loop`, whose metrics have the tokens that were seen in training."""
        self.merge()
        return original(*args, **kwargs)

    def epoch_of(self, epoch: float) -> float:
        """How many epochs are done where the Trainer has counted our steps, of which the last may be a small one."""
        if self._num_references is None:
            return epoch
        of_epoch, of_step = self._num_references
        num_steps = -(-of_epoch // of_step)
        begun = math.ceil(epoch - 1e-9) - 1
        return begun + min(round((epoch - begun) * num_steps) * of_step, of_epoch) / of_epoch

    def merge(self) -> None:
        """Gives every rank what all ranks have noted since they last met. Collective, if there was a step."""
        if not self._steps:
            return
        trainer = self._trainer
        last = {name: float(values[-1]) for name, values, _ in self._collected() if name in self._replaced and values}
        num_tokens = getattr(trainer, _NUM_TOKENS, 0) - self._num_tokens_before
        told = [astuple(replace(record, loss=float(record.loss))) for record in self._records]
        ours = {"tokens": num_tokens, "last": last, "records": told}
        ranks = [json.loads(text) for text in self._manager.gather_texts(json.dumps(ours))]
        self._num_tokens_before += sum(rank["tokens"] for rank in ranks)
        if hasattr(trainer, _NUM_TOKENS):
            setattr(trainer, _NUM_TOKENS, self._num_tokens_before)
        found: _Groups = defaultdict(list)
        for step, is_own, group, *rest in (row for rank in ranks for row in rank["records"]):
            found[step, is_own, tuple(group)].append(_Record(step, is_own, tuple(group), *rest))
        groups = dict(sorted(found.items()))
        self._add_losses(groups, len(ranks))
        self._write(groups, [rank["last"] for rank in ranks])
        self._add_padding(groups)
        self._records, self._steps = [], []

    def _add_losses(self, groups: _Groups, num_ranks: int) -> None:
        """Adds the loss of each micro-batch as the Trainer would, which skips those that are not finite."""
        last_logged = self._trainer._globalstep_last_logged
        if last_logged != self._last_logged:
            self._loss_sum, self._last_logged = 0.0, last_logged
        for (step, *_), pieces in groups.items():
            loss = sum(piece.loss for piece in pieces) / num_ranks
            if self._trainer.args.logging_nan_inf_filter and not math.isfinite(loss):
                loss = self._loss_sum / (1 + self._steps[step] - last_logged)
            self._loss_sum += loss

    def _write(self, groups: _Groups, last: list[dict[str, float]]) -> None:
        """Adds to the lists what one process would have added."""
        for (*_, group), pieces in groups.items():
            for name in {name: None for piece in pieces for name in piece.values}:
                self._list(name).extend(_values_of(name, pieces) * len(group))
        for name in {name for rank in last for name in rank}:
            values = [rank[name] for rank in last if name in rank]
            is_count = name.endswith("/num_tokens") and hasattr(self._trainer, _NUM_TOKENS)
            mean = values[0] if len(set(values)) == 1 else sum(values) / len(values)
            self._list(name)[:] = [self._num_tokens_before if is_count else mean]
        for name, values, store in self._collected():
            if not values:  # TRL divides by their number.
                del store[_metric(name)]

    def _list(self, name: str) -> list[Any]:
        store: dict[str, list[Any]] = getattr(self._trainer, name.partition("/")[0])["train"]
        return store.setdefault(_metric(name), [])

    def _add_padding(self, groups: _Groups) -> None:
        """Counts tokens and operations as for whole micro-batches: a part of one is padded less."""
        num_more = 0
        for pieces in (pieces for (*_, group), pieces in groups.items() if len(group) == 1):
            width = max(piece.shape[1] for piece in pieces)
            num_more += sum(piece.shape[0] * (width - piece.shape[1]) for piece in pieces)
        trainer = self._trainer
        if not num_more:
            return
        if str(getattr(trainer.args, "include_num_input_tokens_seen", "no")) in ("all", "True"):
            trainer.state.num_input_tokens_seen += num_more
        if self._manager.identity.rank == 0:
            name = getattr(trainer.model, "main_input_name", "input_ids")
            trainer.current_flos += float(trainer.floating_point_ops({name: torch.empty(num_more, device="meta")}))


def _metric(name: str) -> str:
    """As TRL calls it: without the store."""
    return name.partition("/")[2]


def _values_of(name: str, pieces: Sequence[_Record]) -> list[float]:
    """What a group of micro-batches adds to the list of a metric."""
    if len(pieces) == 1:
        return pieces[0].values[name]
    metric, there = _metric(name), [(value, piece) for piece in pieces for value in piece.values.get(name, [])]
    if metric in _EXTREMES:
        return [_EXTREMES[metric](value for value, _ in there)]
    is_over_tokens = metric in _MEANS_OVER_TOKENS and any(piece.num_targets for _, piece in there)
    weights = [piece.num_targets if is_over_tokens else piece.num_rows for _, piece in there]
    return [sum(value * n for (value, _), n in zip(there, weights, strict=True)) / sum(weights)]


def _num_targets(inputs: Mapping[str, Any]) -> int:
    labels, mask = inputs.get("labels"), inputs.get("completion_mask")
    if isinstance(labels, torch.Tensor) and labels.dim() == 2:
        return int(labels[:, 1:].ne(IGNORED).sum())
    return int(mask[:, 1:].sum()) if isinstance(mask, torch.Tensor) else 0


def _shape(trainer: TrainerLike, inputs: Any) -> tuple[int, int]:
    name = getattr(trainer.model, "main_input_name", "input_ids")
    tensor = inputs.get(name) if isinstance(inputs, Mapping) else None
    if not isinstance(tensor, torch.Tensor) or tensor.dim() != 2 or "position_ids" in inputs:
        return (0, 0)  # Rows that are laid end to end have no padding.
    return (len(tensor), tensor.shape[1])
