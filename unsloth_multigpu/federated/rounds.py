"""The rounds of a federated training: around a Flower strategy, one that makes each round repeatable and reported."""

from __future__ import annotations

import dataclasses
import random
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol, cast

from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict

# Strategies raise it where replies do not fit. Flower exports it from this module only.
from flwr.app.exception import AppExitException
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result, Strategy

from unsloth_multigpu.errors import FederatedError
from unsloth_multigpu.federated.aggregation import aggregate_lora, find_pairs, weighted_mean
from unsloth_multigpu.federated.checkpoint import History, SavedRound, write_round
from unsloth_multigpu.federated.reply import (
    Kind,
    arrays_of,
    as_floats,
    device_reports,
    judge,
    like,
    num_bytes,
    weight_of,
)
from unsloth_multigpu.federated.report import FederatedReport, FederatedResult, RoundReport, write_rounds
from unsloth_multigpu.federated.strategy import has_server_optimizer, is_weighted_mean, quiet_flower, weight_key
from unsloth_multigpu.federated.task import ClientRecord
from unsloth_multigpu.logs import get_logger

_log = get_logger(__name__)
_FIRST_LINE_S = 5.0
_NEXT_LINE_S = 60.0


class Slots(Protocol):
    """What a grid of slots knows beyond Flower's grid."""

    @property
    def devices_of_slots(self) -> Sequence[str]:
        """Slot number -> its device."""

    def client_states(self) -> dict[int, RecordDict]:
        """Each client's `Context.state`."""

    def load_client_states(self, states: Mapping[int, RecordDict]) -> None:
        """Puts them back."""

    def take_records(self) -> list[ClientRecord]:
        """What became of each message since the last call."""


@dataclass(frozen=True)
class RoundPlan:
    """What does not change from round to round.

    Args:
        config: Goes to every client in every round, in addition to "server-round".
        layout: Names and shapes of what does not travel.
        buffers: Names of arrays that are no parameters, as running statistics.
        evaluates: Whether clients evaluate.
        facts: What a resumed training must have in common with the one before.
        output_dir: Where rounds are saved; None = nowhere.
        server_evaluate: Gets the round, the global arrays and the residual.
    """

    server_id: str
    num_clients: int
    seed: int = 0
    config: Mapping[str, Any] = field(default_factory=dict)
    layout: Sequence[str] = ()
    buffers: Sequence[str] = ()
    evaluates: bool = True
    lora_aggregation: Literal["mean", "project", "exact"] = "mean"
    min_success: float = 0.0
    facts: Mapping[str, Any] = field(default_factory=dict)
    output_dir: Path | None = None
    server_evaluate: Callable[[int, ArrayRecord, ArrayRecord | None], MetricRecord] | None = None


class SteeredStrategy(Strategy):
    """A strategy around the user's: the same clients in every repetition, replies in the order of the clients.

    Flower's loop counts from 1; after a resume this class counts on from the saved round. Python's and NumPy's random
    numbers are seeded while clients are drawn, and put back after. While results are put together they are not: noise
    for differential privacy that a known seed makes again would hide nothing.

    Args:
        strategy: Flower's; its state changes.
        saved: The round from which to resume.
        slots: Where the clients run, if it is this package's grid.
    """

    def __init__(
        self, strategy: Strategy, plan: RoundPlan, saved: SavedRound | None = None, slots: Slots | None = None
    ) -> None:
        self.strategy = strategy
        self.plan = plan
        self.residual = saved.residual if saved else None
        self._slots = slots
        self._num_before = saved.server_round if saved else 0
        self._history = saved.history if saved else History()
        self._arrays = saved.arrays if saved else ArrayRecord()
        self._round = RoundReport(self._num_before, 0.0, 0)
        self._begin_s = 0.0
        self._timeout_s = 0.0
        self._num_asked = 0
        self._has_warned = False

    def run(
        self, grid: Grid, arrays: ArrayRecord, num_rounds: int, *, timeout_s: float, startup_s: float = 0.0
    ) -> FederatedResult:
        """Trains up to and with round `num_rounds`.

        Args:
            arrays: The global arrays to begin with, unless a saved round has them.
            timeout_s: Limit of one phase of a round, training or evaluation, and before it of waiting for nodes.
            startup_s: For the report.

        Raises:
            FederatedError: A round cannot be finished.
            OSError: A round cannot be saved.
        """
        plan, history, self._timeout_s = self.plan, self._history, timeout_s
        self._arrays = self._arrays if self._num_before else arrays
        with quiet_flower():
            self.start(
                grid,
                self._arrays,
                max(0, num_rounds - self._num_before),
                timeout_s,
                ConfigRecord(dict(plan.config)),
                ConfigRecord(dict(plan.config)),
                self._end_round,
            )
        num_slots = len(self._slots.devices_of_slots) if self._slots else 0
        return FederatedResult(
            Result(self._arrays, history.train, history.evaluate, history.server),
            FederatedReport(plan.server_id, plan.num_clients, num_slots, startup_s, tuple(history.rounds)),
        )

    def summary(self) -> None:
        """Flower's lines on the strategy."""
        self.strategy.summary()

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Opens the round and draws its clients."""
        round_overall = server_round + self._num_before
        self._round, self._begin_s, self._arrays = RoundReport(round_overall, 0.0, 0), time.monotonic(), arrays
        with self._named("configure_train"), self._drawing(grid, "train") as limited:
            return self._completed_messages(self.strategy.configure_train(round_overall, arrays, config, limited))

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Puts the clients' arrays together as the strategy does."""
        judged = self._judged(replies, "train")
        contents = [reply.content for reply in judged if reply.has_content()]
        kept = [arrays_of(content) for content in contents]
        weights = [weight_of(content, weight_key(self.strategy)) for content in contents]
        for content in contents:
            as_floats(content, self.plan.buffers)
        with self._named("aggregate_train"):
            arrays, metrics = self.strategy.aggregate_train(self._round.server_round, judged)
        if arrays is not None:
            arrays = self._completed_arrays(arrays, kept, weights)
            self._note(num_examples=int(sum(weights)))
        elif contents:
            self._note_failures([f"{type(self.strategy).__name__} used no reply: the weights stay as they were"])
        self._note(received_bytes=sum(map(num_bytes, kept)), train_metrics=dict(metrics or {}))
        if metrics is not None:
            self._history.train[self._round.server_round] = metrics
        return arrays, metrics

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Draws the clients that evaluate."""
        self._arrays = arrays
        if not self.plan.evaluates:
            self._num_asked = 0
            return []
        with self._named("configure_evaluate"), self._drawing(grid, "evaluate") as limited:
            server_round = self._round.server_round
            return self._completed_messages(self.strategy.configure_evaluate(server_round, arrays, config, limited))

    def aggregate_evaluate(self, server_round: int, replies: Iterable[Message]) -> MetricRecord | None:
        """Puts the clients' metrics together as the strategy does."""
        if not (judged := self._judged(replies, "evaluate")):
            return None
        with self._named("aggregate_evaluate"):
            metrics = self.strategy.aggregate_evaluate(self._round.server_round, judged)
        self._note(evaluate_metrics=dict(metrics or {}))
        if metrics is not None:
            self._history.evaluate[self._round.server_round] = metrics
        return metrics

    def _end_round(self, server_round: int, arrays: ArrayRecord) -> MetricRecord | None:
        """Flower's loop calls it before the first and after each round."""
        is_start = server_round == 0
        if is_start and self._num_before:
            return None
        round_overall = server_round + self._num_before
        evaluate = self.plan.server_evaluate
        metrics = evaluate(round_overall, arrays, self.residual) if evaluate else None
        if metrics is not None:
            self._history.server[round_overall] = metrics
        if is_start:
            return metrics
        self._note(server_metrics=dict(metrics or {}), seconds=time.monotonic() - self._begin_s)
        if self._slots is not None:
            records = self._slots.take_records()
            self._note(devices=device_reports(self._slots.devices_of_slots, records))
            again = [r for r in records if r.attempts > 1 and not r.error]
            self._note_failures([f"client {r.client_id}: {r.kind} needed {r.attempts} attempts" for r in again])
        self._history.rounds.append(self._round)
        if self.plan.output_dir is not None:
            self._save(self.plan.output_dir, arrays)
        _log.info("%s", self._round.summary())
        return metrics

    def _save(self, output_dir: Path, arrays: ArrayRecord) -> None:
        states = self._slots.client_states() if self._slots else {}
        saved = SavedRound(self._round.server_round, arrays, self.residual, self.plan.layout, states, self._history)
        left_out = write_round(output_dir, saved, self.strategy, self.plan.facts)
        write_rounds(output_dir, [self._round], must_append=True)
        if left_out and not self._has_warned:
            self._has_warned = True
            _log.warning("not saved, so a resumed training starts with its initial value: %s", ", ".join(left_out))

    def _judged(self, replies: Iterable[Message], kind: Kind) -> list[Message]:
        judged, failures = judge(
            list(replies),
            kind,
            self._round.server_round,
            num_asked=self._num_asked,
            min_success=self.plan.min_success,
            weight_key=weight_key(self.strategy),
        )
        self._note_failures(failures)
        return judged

    def _completed_messages(self, messages: Iterable[Message]) -> list[Message]:
        messages = sorted(messages, key=lambda message: message.metadata.dst_node_id)
        if self.residual is not None:
            for message in messages:
                message.content["residual"] = self.residual
        self._num_asked = len(messages)
        sent = sum(num_bytes(record) for message in messages for record in message.content.array_records.values())
        self._note(sent_bytes=self._round.sent_bytes + sent)
        return messages

    def _completed_arrays(self, arrays: ArrayRecord, replies: list[ArrayRecord], weights: list[float]) -> ArrayRecord:
        """What the strategy made, with LoRA's product, running statistics and dtypes as they should be."""
        if is_weighted_mean(self.strategy):
            lora = aggregate_lora(replies, weights, arrays, mode=self.plan.lora_aggregation, residual=self.residual)
            arrays, self.residual = lora.arrays, lora.residual
            self._note(lora_remainder=lora.relative_remainder)
            is_first = self._round.server_round == self._num_before + 1
            if is_first and lora.relative_remainder is None and find_pairs(arrays):
                _log.info("lora_remainder is not reported: too many clients x rank, or factors of convolutions")
        elif has_server_optimizer(self.strategy) and self.plan.buffers:
            # A server optimizer could step a running variance below zero.
            arrays = ArrayRecord({**arrays, **weighted_mean(replies, weights, self.plan.buffers)})
        return like(arrays, self._arrays)

    def _note(self, **changes: Any) -> None:
        self._round = dataclasses.replace(self._round, **changes)

    def _note_failures(self, failures: Sequence[str]) -> None:
        self._note(failures=(*self._round.failures, *failures))

    @contextmanager
    def _named(self, step: str) -> Iterator[None]:
        try:
            yield
        except AppExitException as error:
            raise FederatedError(
                f"round {self._round.server_round}: {type(self.strategy).__name__}.{step}: {error}",
                hint="Every client must return the same metrics, among them those that the strategy needs.",
            ) from error

    def _drawing(self, grid: Grid, kind: Kind) -> AbstractContextManager[Grid]:
        server_round = self._round.server_round
        what = f"round {server_round}: {type(self.strategy).__name__}.configure_{kind}"
        return drawing(grid, f"{self.plan.seed}/{server_round}/{kind}", what, self._timeout_s)


@contextmanager
def drawing(grid: Grid, seed: str, what: str, timeout_s: float) -> Iterator[Grid]:
    """Seeds what strategies draw clients with, and puts it back. Yields the grid to draw from.

    Flower's strategies wait for nodes without a limit, and say so in a log that is off here. On the yielded grid they
    wait at most `timeout_s`.

    Args:
        seed: Any text.
        what: Who waits, as in "round 2: FedAvg.configure_train".

    Raises:
        FederatedError: There were too few nodes for `timeout_s` seconds.
    """
    import numpy as np

    before, numpy_before = random.getstate(), np.random.get_state()
    drawn = random.Random(seed).getrandbits(32)
    random.seed(drawn)
    np.random.seed(drawn)
    limited = _LimitedGrid(grid, what, timeout_s)
    try:
        yield cast(Grid, limited)
    finally:
        limited.timeout_s = float("inf")  # The strategy may keep the grid and use it later.
        random.setstate(before)
        np.random.set_state(numpy_before)


class _LimitedGrid:
    """A grid that counts its nodes for a limited time. No subclass: it also has what a grid has beyond Flower's."""

    def __init__(self, grid: Grid, what: str, timeout_s: float) -> None:
        self._grid = grid
        self._what = what
        self.timeout_s = timeout_s
        self._begin_s = time.monotonic()
        self._next_line_s = _FIRST_LINE_S
        self._has_looked = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._grid, name)

    def get_node_ids(self) -> list[int]:
        node_ids, waited_s = list(self._grid.get_node_ids()), time.monotonic() - self._begin_s
        has_looked, self._has_looked = self._has_looked, True
        # The first look may be late by itself, and find all.
        if has_looked and waited_s > self.timeout_s:
            raise FederatedError(
                f"{self._what} still waits for nodes after {self.timeout_s:g} s; {len(node_ids)} are connected.",
                hint="Start more SuperNodes, or lower the strategy's min_train_nodes, min_evaluate_nodes and "
                "min_available_nodes.",
            )
        if waited_s > self._next_line_s:
            _log.info("%s waits for nodes: connected=%d", self._what, len(node_ids))
            self._next_line_s = waited_s + _NEXT_LINE_S
        return node_ids
