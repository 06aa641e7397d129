"""What a federated training did, as plain data: rounds, who ran where, how busy each device was, what was measured."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from unsloth_multigpu.words import aligned

if TYPE_CHECKING:
    from flwr.serverapp.strategy import Result

# A metric as Flower's records hold it: a number or a list of numbers.
Metrics = Mapping[str, Any]
_JSON_LINES = "rounds.jsonl"


@dataclass
class ClientRecord:
    """What became of one message to one client.

    Args:
        kind: "train", "evaluate" or "query".
        slot: Number of the slot that answered it, or was the last to try; -1 = it was not begun.
        device: That slot's device, like "cuda:1".
        begin_s: When that slot got it, on the clock of `time.monotonic`.
        seconds: From then until its reply was here.
        peak_memory_bytes: What torch reserved there at most; 0 on the CPU.
        attempts: How often a slot began with it.
    """

    client_id: int
    kind: str
    slot: int = -1
    device: str = ""
    begin_s: float = 0.0
    seconds: float = 0.0
    peak_memory_bytes: int = 0
    error: str | None = None
    attempts: int = 0


@dataclass(frozen=True)
class DeviceReport:
    """One device in one round.

    Args:
        device: As in "cuda:0" or "cpu:1".
        client_ids: Clients that trained there, in the order in which they began.
        busy_s: Seconds in which at least one client ran there.
        peak_memory_bytes: Of the client that needed most; None where it was not measured.
    """

    device: str
    client_ids: tuple[int, ...]
    busy_s: float
    peak_memory_bytes: int | None = None


@dataclass(frozen=True)
class RoundReport:
    """One round.

    Args:
        server_round: 1 = the first.
        seconds: Wall time from choosing the clients to the server's own evaluation; writing a checkpoint is not in it.
        num_examples: Training examples of all clients whose result was used.
        devices: Every device that has a slot.
        failures: One line for each client that was left out, or that had to run again.
        lora_remainder: Relative size of what the adapter of the round leaves of mean(B A); None without LoRA, and where
            "mean" would measure it for long.
    """

    server_round: int
    seconds: float
    num_examples: int
    devices: tuple[DeviceReport, ...] = ()
    train_metrics: Metrics = dataclasses.field(default_factory=dict)
    evaluate_metrics: Metrics = dataclasses.field(default_factory=dict)
    server_metrics: Metrics = dataclasses.field(default_factory=dict)
    failures: tuple[str, ...] = ()
    lora_remainder: float | None = None

    def utilisation(self, device: DeviceReport) -> float:
        """Share of the round, 0 to 1, in which the device had a client to run."""
        return min(1.0, device.busy_s / self.seconds) if self.seconds > 0 else 0.0

    def row(self) -> dict[str, str]:
        """Its figures, each with its name."""
        row = {"round": str(self.server_round), "seconds": f"{self.seconds:.1f}", "examples": str(self.num_examples)}
        row |= {d.device: f"{len(d.client_ids)} cl {self.utilisation(d):.0%}" for d in self.devices}
        every = (("", self.train_metrics), ("eval_", self.evaluate_metrics), ("server_", self.server_metrics))
        row |= {prefix + name: _short(value) for prefix, metrics in every for name, value in metrics.items()}
        if self.lora_remainder is not None:
            row["lora_remainder"] = f"{self.lora_remainder:.2g}"
        return row | ({"failures": str(len(self.failures))} if self.failures else {})


@dataclass(frozen=True)
class FederatedReport:
    """All rounds of a federated training; `str()` makes a table of it.

    Args:
        server_id: Name of the server.
        num_clients: Clients that could take part.
        num_slots: Processes that ran clients.
        startup_s: Seconds before the first round: slots started, a model built in each of them, a saved round read.
        rounds: The first one first.
    """

    server_id: str
    num_clients: int
    num_slots: int = 0
    startup_s: float = 0.0
    rounds: tuple[RoundReport, ...] = ()

    @property
    def seconds(self) -> float:
        """Wall time of all rounds together, without start-up."""
        return sum(r.seconds for r in self.rounds)

    def __str__(self) -> str:
        head = f"server_id={self.server_id} clients={self.num_clients} slots={self.num_slots}"
        head += f" startup_s={self.startup_s:.1f} rounds={len(self.rounds)} seconds={self.seconds:.1f}"
        rows = [r.row() for r in self.rounds]
        names = list(dict.fromkeys(name for row in rows for name in row))
        table = aligned([names, *([row.get(name, "-") for name in names] for row in rows)], num_left=0)
        return "\n".join(
            [head, *table, *(f"round {r.server_round}: {text}" for r in self.rounds for text in r.failures)]
        )


@dataclass(frozen=True)
class FederatedResult:
    """What `fit` returns.

    Args:
        result: Flower's Result: the global arrays, and the clients' and the server's metrics by round.
        report: What each round took, and where.
    """

    result: Result
    report: FederatedReport

    @property
    def rounds(self) -> tuple[RoundReport, ...]:
        """The rounds of the report, the first one first."""
        return self.report.rounds


def device_reports(devices_of_slots: Sequence[str], records: Sequence[ClientRecord]) -> tuple[DeviceReport, ...]:
    """What each device did in a round, in the order of the slots."""
    reports = []
    for device in dict.fromkeys(devices_of_slots):
        own = sorted((r for r in records if r.device == device), key=lambda r: r.begin_s)
        clients = tuple(r.client_id for r in own if r.kind == "train")
        busy_s = busy_seconds((r.begin_s, r.begin_s + r.seconds) for r in own)
        peak_bytes = max((r.peak_memory_bytes for r in own), default=0)
        reports.append(DeviceReport(device, clients, busy_s, peak_bytes or None))
    return tuple(reports)


def busy_seconds(intervals: Iterable[tuple[float, float]]) -> float:
    """Seconds that are covered by at least one of the intervals (begin, end), which may overlap."""
    total, until = 0.0, float("-inf")
    for begin, end in sorted(intervals):
        total += max(0.0, end - max(begin, until))
        until = max(until, end)
    return total


def write_rounds(folder: Path, rounds: Sequence[RoundReport], *, must_append: bool) -> None:
    """Writes the rounds as JSON lines, so that a training can be watched from outside; raises OSError."""
    with open(folder / _JSON_LINES, "a" if must_append else "w", encoding="ascii") as file:
        file.writelines(json.dumps(dataclasses.asdict(line)) + "\n" for line in rounds)
        file.flush()
        os.fsync(file.fileno())


def round_from_dict(stored: Mapping[str, Any]) -> RoundReport:
    """The round that `dataclasses.asdict` made a dict of."""
    return RoundReport(**{**stored, "devices": tuple(DeviceReport(**device) for device in stored["devices"])})


def _short(value: Any) -> str:
    if isinstance(value, list | tuple):
        return "[" + ",".join(map(_short, value)) + "]"
    return f"{value:.4g}" if isinstance(value, float) else str(value)
