"""The rounds of a federated training: Flower's strategy decides, each round can be repeated, reported and saved."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, cast

from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord

# Strategies raise it where replies do not fit. Flower exports it from this module only.
from flwr.app.exception import AppExitException
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result, Strategy

from unsloth_multigpu.errors import FederatedError
from unsloth_multigpu.federated.aggregation import aggregate_lora, weighted_mean
from unsloth_multigpu.federated.checkpoint import SavedRound, write_round
from unsloth_multigpu.federated.reply import Kind, arrays_of, as_floats, judge, like, weight_of
from unsloth_multigpu.federated.report import (
    ClientRecord,
    FederatedReport,
    FederatedResult,
    RoundReport,
    device_reports,
    write_rounds,
)
from unsloth_multigpu.federated.strategy import has_server_optimizer, is_weighted_mean, quiet_flower, weight_key
from unsloth_multigpu.logs import get_logger

if TYPE_CHECKING:
    from unsloth_multigpu.federated.option import FitOptions
    from unsloth_multigpu.federated.training import ServerPlan, Start

_log = get_logger(__name__)
_FIRST_LINE_S = 5.0
_NEXT_LINE_S = 60.0


class Slots(Protocol):
    """What a grid of slots knows beyond Flower's grid; see `ProcessGrid`."""

    records: list[ClientRecord]

    @property
    def devices_of_slots(self) -> Sequence[str]:
        """Slot number -> its device."""


class Rounds:
    """Flower's loop of rounds: the same clients in every repetition, replies in the order of the clients.

    Python's and NumPy's random numbers are seeded while clients are drawn, and put back after. While results are put
    together they are not: noise for differential privacy that a known seed makes again would hide nothing.

    Args:
        grid: Where the clients are.
        strategy: Flower's; its state changes.
        facts: What a resumed training must have in common with the one before.
        evaluate: The server's own evaluation: gets the round, the global arrays and the residual.
        saved: The round from which to resume.
        slots: The grid, if it is this package's.

    Attributes:
        arrays: The global arrays now.
        residual: What clients add to their base weights, under exact aggregation of LoRA.
    """

    def __init__(
        self,
        plan: ServerPlan,
        options: FitOptions,
        start: Start,
        grid: Grid,
        num_clients: int,
        strategy: Strategy,
        *,
        facts: Mapping[str, Any],
        evaluate: Callable[[int, ArrayRecord, ArrayRecord | None], MetricRecord] | None = None,
        saved: SavedRound | None = None,
        slots: Slots | None = None,
    ) -> None:
        self.arrays = saved.arrays if saved else start.arrays
        self.residual = saved.residual if saved else None
        self._plan = plan
        self._options = options
        self._start = start
        self._grid = grid
        self._num_clients = num_clients
        self._strategy = strategy
        self._facts = facts
        self._evaluate = evaluate
        self._slots = slots
        self._config = {**(options.config or {}), "frozen-layout": list(start.layout)}
        self._reports = list(saved.reports) if saved else []
        self._first_metrics = saved.first_metrics if saved else None
        self._failures: list[str] = []
        self._has_warned = False

    def run(self, startup_s: float = 0.0) -> FederatedResult:
        """Trains up to and with the last round.

        Raises:
            FederatedError: A round cannot be finished.
            OSError: A round cannot be saved.
        """
        with quiet_flower():
            if self._first_metrics is None:
                self._first_metrics = self._evaluated(0)
            for number in range(len(self._reports) + 1, self._options.num_rounds + 1):
                self._reports.append(self._round(number))
                if self._options.output_dir is not None:
                    self._save(Path(self._options.output_dir))
                _log.info("%s", " ".join(f"{name}={text}" for name, text in self._reports[-1].row().items()))
        reports = tuple(self._reports)
        train, evaluate, server = (
            {report.server_round: MetricRecord(dict(m)) for report in reports if (m := getattr(report, name))}
            for name in ("train_metrics", "evaluate_metrics", "server_metrics")
        )
        if self._first_metrics:
            server = {0: MetricRecord(dict(self._first_metrics)), **server}
        num_slots = len(self._slots.devices_of_slots) if self._slots else 0
        return FederatedResult(
            Result(self.arrays, train, evaluate, server),
            FederatedReport(self._plan.server_id, self._num_clients, num_slots, startup_s, reports),
        )

    def _round(self, number: int) -> RoundReport:
        begin_s, self._failures = time.monotonic(), []
        found = self._train(number)
        if self._plan.evaluates and (replies := self._ask("evaluate", number)):
            with self._named(number, "aggregate_evaluate"):
                found["evaluate_metrics"] = dict(self._strategy.aggregate_evaluate(number, replies) or {})
        found["server_metrics"] = self._evaluated(number)
        if self._slots is not None:
            records, self._slots.records = self._slots.records, []
            found["devices"] = device_reports(self._slots.devices_of_slots, records)
            again = [record for record in records if record.attempts > 1 and not record.error]
            self._failures += [f"client {r.client_id}: {r.kind} needed {r.attempts} attempts" for r in again]
        return RoundReport(number, time.monotonic() - begin_s, failures=tuple(self._failures), **found)

    def _train(self, number: int) -> dict[str, Any]:
        """The clients' training, put together as the strategy does; returns what is to be reported of it."""
        replies = self._ask("train", number)
        contents = [reply.content for reply in replies if reply.has_content()]
        kept = [arrays_of(content) for content in contents]
        weights = [weight_of(content, weight_key(self._strategy)) for content in contents]
        for content in contents:
            as_floats(content, self._start.buffers)
        with self._named(number, "aggregate_train"):
            arrays, metrics = self._strategy.aggregate_train(number, replies)
        found: dict[str, Any] = {"num_examples": 0, "train_metrics": dict(metrics or {})}
        if arrays is None:
            if contents:
                name = type(self._strategy).__name__
                self._failures.append(f"{name} used no reply: the weights stay as they were")
            return found
        if is_weighted_mean(self._strategy):
            mode = self._plan.lora_aggregation
            lora = aggregate_lora(kept, weights, arrays, mode=mode, residual=self.residual)
            arrays, self.residual, found["lora_remainder"] = lora.arrays, lora.residual, lora.relative_remainder
        elif has_server_optimizer(self._strategy) and self._start.buffers:
            # A server optimizer could step a running variance below zero.
            arrays = ArrayRecord({**arrays, **weighted_mean(kept, weights, self._start.buffers)})
        self.arrays = like(arrays, self.arrays)
        return found | {"num_examples": int(sum(weights))}

    def _ask(self, kind: Kind, number: int) -> list[Message]:
        """Sends the global arrays to the clients that the strategy draws; returns the replies for it."""
        step, limit_s = f"configure_{kind}", self._options.round_timeout_s
        limited = LimitedGrid(self._grid, f"round {number}: {type(self._strategy).__name__}.{step}", limit_s)
        config = ConfigRecord(dict(self._config))
        with self._named(number, step), seeded_draw(f"{self._plan.seed}/{number}/{kind}"):
            messages = list(getattr(self._strategy, step)(number, self.arrays, config, cast(Grid, limited)))
        limited.timeout_s = float("inf")  # The strategy may keep the grid and use it later.
        messages.sort(key=lambda message: message.metadata.dst_node_id)
        for message in messages:
            if self.residual is not None:
                message.content["residual"] = self.residual
        judged, failures = judge(
            list(self._grid.send_and_receive(messages, timeout=limit_s)),
            kind,
            number,
            num_asked=len(messages),
            min_success=self._options.min_success,
            weight_key=weight_key(self._strategy),
        )
        self._failures += failures
        return judged

    def _evaluated(self, number: int) -> dict[str, Any]:
        return dict(self._evaluate(number, self.arrays, self.residual)) if self._evaluate else {}

    def _save(self, output_dir: Path) -> None:
        first, layout = self._first_metrics or {}, self._start.layout
        saved = SavedRound(len(self._reports), self.arrays, self.residual, layout, self._reports, first)
        left_out = write_round(output_dir, saved, self._strategy, self._facts)
        write_rounds(output_dir, self._reports[-1:], must_append=True)
        if left_out and not self._has_warned:
            self._has_warned = True
            _log.warning("not saved, so a resumed training starts with its initial value: %s", ", ".join(left_out))

    @contextmanager
    def _named(self, number: int, step: str) -> Iterator[None]:
        try:
            yield
        except AppExitException as error:
            raise FederatedError(
                f"round {number}: {type(self._strategy).__name__}.{step}: {error}",
                hint="Every client must return the same metrics, among them those that the strategy needs.",
            ) from error


@contextmanager
def seeded_draw(seed: str) -> Iterator[None]:
    """Seeds what strategies draw clients with, and puts it back."""
    import numpy as np

    before, numpy_before = random.getstate(), np.random.get_state()
    drawn = random.Random(seed).getrandbits(32)
    random.seed(drawn)
    np.random.seed(drawn)
    try:
        yield
    finally:
        random.setstate(before)
        np.random.set_state(numpy_before)


class LimitedGrid:
    """A grid that counts its nodes for a limited time: Flower's strategies wait for nodes without a limit or a word.

    No subclass: it also has what a grid has beyond Flower's.

    Args:
        what: Who waits, as in "round 2: FedAvg.configure_train".
    """

    def __init__(self, grid: Grid, what: str, timeout_s: float) -> None:
        self.timeout_s = timeout_s
        self._grid = grid
        self._what = what
        self._begin_s = time.monotonic()
        self._next_line_s = _FIRST_LINE_S
        self._has_looked = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._grid, name)

    def get_node_ids(self) -> list[int]:
        """The nodes that are connected; raises FederatedError after `timeout_s`."""
        node_ids, waited_s = list(self._grid.get_node_ids()), time.monotonic() - self._begin_s
        # The first look may be late by itself, and find all.
        if self._has_looked and waited_s > self.timeout_s:
            raise FederatedError(
                f"{self._what} still waits for nodes after {self.timeout_s:g} s; {len(node_ids)} are connected.",
                hint="Start more SuperNodes, or lower num-clients or the strategy's min_train_nodes, "
                "min_evaluate_nodes and min_available_nodes.",
            )
        if waited_s > self._next_line_s:
            _log.info("%s waits for nodes: connected=%d", self._what, len(node_ids))
            self._next_line_s = waited_s + _NEXT_LINE_S
        self._has_looked = True
        return node_ids
