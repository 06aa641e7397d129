"""Combines what the ranks have counted and measured into the metrics that one process would log."""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from unsloth_multigpu.group.manager import DDPManager
from unsloth_multigpu.logs import get_logger
from unsloth_multigpu.part import Override, Part
from unsloth_multigpu.step.step import MicroBatch
from unsloth_multigpu.step.tracing import (
    Expression,
    NotThere,
    Parts,
    Trace,
    evaluate,
    is_guessed,
    merged,
    plain,
    source_of,
)
from unsloth_multigpu.trainer_protocol import ArgumentsLike, ControlLike, StateLike, TrainerLike

logger = get_logger(__name__)

# Where TRL's trainers collect what they log, by "train" and "eval".
STORES = ("_metrics", "_stored_metrics")
# Their running count of tokens.
_NUM_TOKENS = "_total_train_tokens"
# Means over rows that TRL takes before it gathers them.
_MEANS_OVER_ROWS = {"accuracy", "margin", "kl", "log_odds_ratio", "log_odds_chosen"}
# Of others' metrics; where their rows are on different ranks, none of the ranks makes it.
_DIFFERENCES = {"rewards/margins": ("rewards/chosen", "rewards/rejected")}
# A number that an expression gives again from a rank's own part, or it was not understood.
_SAME = 1e-3
# Steps after which the ranks meet where nothing is logged for long: what they note would become large.
_MOST_STEPS = 256


@dataclass
class _Record:
    """What one micro-batch of this rank has told.

    Args:
        step: Number of its step since the ranks last met.
        group: See `Piece.group`.
        num_rows: Samples in it.
        shape: First dimension and number of elements of its main input, and 1 where that is padded; 0 elements where
            there is none.
        values: Metric -> its value, and what it is made from.
        parts: Parts of what is gathered in it.
        loss: What it adds to the loss of its step, times the number of ranks.
    """

    step: int
    group: tuple[int, ...]
    num_rows: int
    shape: tuple[int, int, int] = (0, 0, 0)
    values: dict[str, list[Any]] = field(default_factory=dict)
    parts: Parts = field(default_factory=dict)
    loss: Any = 0.0

    @property
    def order(self) -> tuple[int, bool, int]:
        """Its place in one process: what a stream has left over comes before the step that it is added to."""
        place = self.group[0]
        return self.step, place >= 0, place if place >= 0 else -1 - place


class Metrics(Part):
    """Everything that reaches `Trainer.log`, as one process has it.

    Each rank notes what its micro-batches add to the trainer's metrics, and the loss of each step. Before a line is
    written, an evaluation or a checkpoint, and when an epoch ends, the ranks meet once; every rank then holds the lists
    that one process would hold: one value for each of its micro-batches. Fillers count nothing. TRL averages these
    lists and clears them as ever.

    What each value is made from is followed from the trainer's gathers, see `step.tracing`. A micro-batch that ranks
    share has the value of its rows together: sums, quotients of sums, means over rows, minima, maxima and what is
    computed from them. Where rows were exchanged between the micro-batches of a step, those of one process no longer
    exist: the value is that of the rows of all of them together, and counts as often as there were. It is one process's
    for means over rows of equal micro-batches; means over tokens weigh each token of the step alike, not each
    micro-batch, and minima and maxima are those of the step. With `gradient_accumulation_steps=1`, or where whole
    micro-batches are dealt, nothing differs.

    A value that is not made from gathers is known for whole micro-batches alone; in one that ranks share it is the mean
    of theirs, weighted by rows, and a WARNING names it once.

    Cost: two small collectives for each line, as many as before an evaluation or a checkpoint without one and at the
    end of an epoch; about a millisecond for each micro-batch that ranks share, whose gathers are followed.

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
        self._trace: Trace | None = None
        self._records: list[_Record] = []
        self._num_new: dict[str, int] = {}
        self._replaced: set[str] = set()
        # Of each step since the ranks last met: the number of steps before it.
        self._steps: list[int] = []
        self._loss_sum = 0.0
        self._last_logged = -1
        self._num_tokens_before = 0
        self._expressions: dict[str, Expression] = {}
        self._told: set[str] = set()
        self._is_epoch_end = False

    @contextmanager
    def around(self) -> Iterator[None]:
        self._num_tokens_before = getattr(self._trainer, _NUM_TOKENS, 0)
        yield

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
        self._num_references = (len(loader), num_accumulated) if has_length(loader) else None

    @contextmanager
    def micro_batch(self, micro_batch: MicroBatch, *, is_left_over: bool = False) -> Iterator[None]:
        """Notes what the loss of a micro-batch adds to the trainer's metrics; a filler's is taken out again.

        One that a stream has left over is another micro-batch than that of the same place in the step it is added to.
        """
        piece = micro_batch.piece
        before = {name: (values, len(values)) for name, values, _ in self._collected()}
        num_tokens = getattr(self._trainer, _NUM_TOKENS, None)
        self._trace = Trace(len(piece.positions)) if piece.is_shared else None
        try:
            yield
        finally:
            trace, self._trace = self._trace, None
        group = tuple(-1 - place for place in piece.group) if is_left_over else piece.group
        record = _Record(len(self._steps), group, len(piece.positions), _shape(self._trainer, micro_batch.inputs))
        self._note_values(record, before, is_filler=piece.is_filler)
        if trace is not None and any(value[1] is not None for value in record.values.values()):
            record.parts = trace.parts()
            self._check(record)
        if piece.is_filler:
            if num_tokens is not None:
                setattr(self._trainer, _NUM_TOKENS, num_tokens)
        else:
            self._records.append(record)

    def _note_values(self, record: _Record, before: Mapping[str, tuple[list[Any], int]], *, is_filler: bool) -> None:
        trainer = self._trainer
        count = getattr(trainer, _NUM_TOKENS, None)
        for name, values, store in self._collected():
            old, num_old = before.get(name, ([], 0))
            if name.endswith("/num_tokens") or (name in before and values is not old):
                # A running count, or a last value: TRL puts a new list in the place of the old one.
                self._replaced.add(name)
                num_old = 0
            new = values[num_old:]
            if name not in self._replaced:
                for i, value in enumerate(new):
                    record.values[f"{name}\n{i}" if i else name] = [plain(value), source_of(value)]
            values[num_old:] = [plain(value) for value in new]
            if not is_filler:
                self._num_new[name] = self._num_new.get(name, 0) + len(new)
            elif name in before:
                del old[before[name][1] :]
                store[_metric(name)] = old
            else:
                del store[_metric(name)]
        if count is not None:
            setattr(trainer, _NUM_TOKENS, plain(count))

    def _check(self, record: _Record) -> None:
        """Drops an expression that does not reproduce this rank's own number."""
        for value in record.values.values():
            try:
                own = math.nan if value[1] is None else evaluate(value[1], record.parts)
            except NotThere:
                own = math.nan
            if not math.isclose(own, value[0], rel_tol=_SAME, abs_tol=1e-6):
                value[1] = None

    def note_loss(self, loss: torch.Tensor, micro_batch: MicroBatch) -> None:
        """Notes what a micro-batch adds to the loss of its step; one without anything to average has no loss."""
        if not micro_batch.piece.is_filler:
            self._records[-1].loss = torch.full_like(loss, math.nan) if micro_batch.is_unweighted else loss.detach()

    def end_step(self) -> None:
        """All micro-batches of a step are noted."""
        self._steps.append(self._trainer.state.global_step)

    def gathered(self, name: str, tensor: Any, *args: Any, **kwargs: Any) -> Any:
        """What `Accelerator.gather` and its like give inside a loss: this rank's part, followed where it is one."""
        if not isinstance(tensor, torch.Tensor):
            return tensor
        if self._trace is None:
            return tensor[None] if tensor.dim() == 0 and name != "reduce" else tensor
        if name == "reduce":
            return self._trace.reduced(tensor, (args or [kwargs.get("reduction", "sum")])[0])
        return self._trace.enter(tensor)

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
        if is_end and not self._manager.config.meets_every_step:
            # Ranks that step by themselves need not wait for each other before the end.
            state = self._trainer.state
            is_end = control.should_training_stop or state.global_step >= state.max_steps
        is_long = len(self._steps) >= _MOST_STEPS and self._manager.config.meets_every_step
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
        if not self.is_dealing or not self._num_new:
            return original(*args, **kwargs)
        self._warn(
            "log() was called outside the training's own log lines: what TRL has measured since the last line "
            "is not in it but comes with the next one"
        )
        with ExitStack() as stack:
            for attribute in STORES:
                stores = getattr(self._trainer, attribute, None)
                if isinstance(stores, dict) and "train" in stores:
                    stack.callback(stores.__setitem__, "train", stores["train"])
                    stores["train"] = copy.copy(stores["train"])
                    stores["train"].clear()
            return original(*args, **kwargs)

    def _evaluation_loop(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """`Trainer.evaluation_loop`, whose metrics have the tokens that were seen in training."""
        if self.is_dealing:
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
        losses = [record.loss.float().reshape(()) for record in self._records]
        for record, loss in zip(self._records, torch.stack(losses).tolist() if losses else [], strict=True):
            record.loss = loss
        ours = {
            "tokens": getattr(trainer, _NUM_TOKENS, 0) - self._num_tokens_before,
            "last": {name: values[-1] for name, values, _ in self._collected() if name in self._replaced and values},
            **_packed(self._records),
        }
        ranks = [json.loads(text) for text in self._manager.gather_texts(json.dumps(ours))]
        self._num_tokens_before += sum(rank["tokens"] for rank in ranks)
        if hasattr(trainer, _NUM_TOKENS):
            setattr(trainer, _NUM_TOKENS, self._num_tokens_before)
        records = [record for rank in ranks for record in _unpacked(rank)]
        self._add_losses(records, len(ranks))
        for name, value in (pair for r in records for pair in r.values.items()):
            if value[1] is not None:
                self._expressions[name] = value[1]
        self._write(records, [rank["last"] for rank in ranks])
        self._add_padding(records)
        self._records, self._num_new, self._steps = [], {}, []

    def _add_losses(self, records: list[_Record], num_ranks: int) -> None:
        """Adds the loss of each micro-batch as the Trainer would, which skips those that are not finite."""
        losses: dict[tuple[int, bool, int], float] = {}
        for record in records:
            losses[record.order] = losses.get(record.order, 0.0) + record.loss / num_ranks
        last_logged = self._trainer._globalstep_last_logged
        if last_logged != self._last_logged:
            self._loss_sum, self._last_logged = 0.0, last_logged
        for (step, *_), loss in sorted(losses.items()):
            if self._trainer.args.logging_nan_inf_filter and not math.isfinite(loss):
                self._loss_sum += self._loss_sum / (1 + self._steps[step] - last_logged)
            else:
                self._loss_sum += loss

    def _write(self, records: list[_Record], last: list[dict[str, Any]]) -> None:
        """Puts the lists of one process in the place of this rank's."""
        for name, values, store in self._collected():
            kept = [] if name in self._replaced else values[: len(values) - self._num_new.get(name, 0)]
            store[_metric(name)] = kept
        groups: dict[tuple[int, tuple[int, ...]], list[_Record]] = {}
        for record in records:
            groups.setdefault((record.step, record.group), []).append(record)
        for (_, group), pieces in sorted(groups.items()):
            for name, value in self._values_of(pieces).items():
                self._list(name).extend([value] * len(group))
        for name in {name for rank in last for name in rank}:
            self._list(name)[:] = [self._last_value(name, [rank[name] for rank in last if name in rank])]
        for name, values, store in self._collected():
            if not values:  # TRL divides by their number.
                del store[_metric(name)]

    def _list(self, name: str) -> list[Any]:
        store: dict[str, list[Any]] = getattr(self._trainer, name.partition("/")[0])["train"]
        return store.setdefault(_metric(name), [])

    def _values_of(self, pieces: list[_Record]) -> dict[str, float]:
        """The metrics of a group of micro-batches."""
        if len(pieces) == 1:
            return {name: value for name, (value, _) in pieces[0].values.items()}
        parts = merged([piece.parts for piece in pieces])
        found = {}
        for name in {**self._expressions, **{name: None for piece in pieces for name in piece.values}}:
            value = self._value_of(name, pieces, parts)
            if value is not None:
                found[name] = value
        for name, (first, second) in _DIFFERENCES.items():
            for store in STORES:
                whole, *of = (f"{store}/{metric}" for metric in (name, first, second))
                if whole not in found and all(n in found for n in of):
                    found[whole] = found[of[0]] - found[of[1]]
        return found

    def _value_of(self, name: str, pieces: list[_Record], parts: Parts) -> float | None:
        present = [(p.values[name], p.num_rows) for p in pieces if name in p.values]
        expression = next((value[1] for value, _ in present if value[1] is not None), self._expressions.get(name))
        if expression is not None:
            try:
                value = evaluate(expression, parts)
            except NotThere:
                if not present:
                    return None
            else:
                if _metric(name) not in _MEANS_OVER_ROWS and is_guessed(expression, parts):
                    self._warn_of(name, [value[0] for value, _ in present])
                return value
        if not present:
            return None
        numbers = [float(value[0]) for value, _ in present]
        self._warn_of(name, numbers)
        if len(set(numbers)) == 1:
            return numbers[0]
        return sum(x * n for x, (_, n) in zip(numbers, present, strict=True)) / sum(n for _, n in present)

    def _last_value(self, name: str, values: list[Any]) -> Any:
        if name.endswith("/num_tokens") and hasattr(self._trainer, _NUM_TOKENS):
            return self._num_tokens_before
        self._warn_of(name, values)
        return values[0] if len(set(values)) == 1 else sum(values) / len(values)

    def _warn_of(self, name: str, values: list[float]) -> None:
        if len({value for value in values if not math.isnan(value)}) > 1:
            self._warn(
                f"{_metric(name)}: how {type(self._trainer).__name__} makes this metric is not "
                "known; where ranks share a micro-batch it is the mean of their values, weighted by rows"
            )

    def _warn(self, text: str) -> None:
        if text not in self._told:
            self._told.add(text)
            if self._manager.identity.rank == 0:
                logger.warning("%s", text)

    def _add_padding(self, records: list[_Record]) -> None:
        """Counts tokens and operations as for whole micro-batches: a part of one is padded less."""
        groups: dict[tuple[int, tuple[int, ...]], list[_Record]] = {}
        for record in records:
            groups.setdefault((record.step, record.group), []).append(record)
        num_more = 0
        for (_, group), pieces in groups.items():
            shapes = [piece.shape for piece in pieces]
            if len(group) == 1 and all(rows and is_padded for rows, _, is_padded in shapes):
                longest = max(num // rows for rows, num, _ in shapes)
                num_more += sum(rows * longest - num for rows, num, _ in shapes)
        trainer = self._trainer
        if not num_more:
            return
        if str(getattr(trainer.args, "include_num_input_tokens_seen", "no")) in ("all", "True"):
            trainer.state.num_input_tokens_seen += num_more
        if self._manager.identity.rank == 0:
            name = getattr(trainer.model, "main_input_name", "input_ids")
            trainer.current_flos += float(trainer.floating_point_ops({name: torch.empty(num_more, device="meta")}))


def _metric(name: str) -> str:
    """As TRL calls it: without the store, and the number of a value that is not the first of its micro-batch."""
    return name.partition("\n")[0].partition("/")[2]


def _shape(trainer: TrainerLike, inputs: Any) -> tuple[int, int, int]:
    name = getattr(trainer.model, "main_input_name", "input_ids")
    tensor = inputs.get(name) if isinstance(inputs, Mapping) else None
    if not isinstance(tensor, torch.Tensor) or tensor.dim() < 1:
        return (0, 0, 0)
    # Rows that are laid end to end have no padding.
    return (len(tensor), tensor.numel(), int(tensor.dim() == 2 and "position_ids" not in inputs))


def _packed(records: list[_Record]) -> dict[str, Any]:
    """Records for sending: names and expressions once each, the rest as numbers."""
    names: dict[str, int] = {}
    expressions: dict[str, int] = {}
    rows = []
    for record in records:
        values = [
            (names.setdefault(n, len(names)), v, expressions.setdefault(json.dumps(e), len(expressions)))
            for n, (v, e) in record.values.items()
        ]
        parts = [(names.setdefault(n, len(names)), *numbers) for n, numbers in record.parts.items()]
        rows.append((record.step, record.group, record.num_rows, record.shape, record.loss, values, parts))
    return {"names": list(names), "expressions": list(expressions), "records": rows}


def _unpacked(packed: Mapping[str, Any]) -> list[_Record]:
    names, expressions = packed["names"], [json.loads(text) for text in packed["expressions"]]
    return [
        _Record(
            step,
            tuple(group),
            num_rows,
            tuple(shape),
            {names[n]: [value, expressions[e]] for n, value, e in values},
            {names[n]: numbers for n, *numbers in parts},
            loss,
        )
        for step, group, num_rows, shape, loss, values, parts in packed["records"]
    ]
