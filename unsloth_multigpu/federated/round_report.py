"""The report of a federated training as plain data: rounds, clients, use of the devices, metrics."""

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

# Metrics of Flower's records: numbers or lists of numbers by name.
Metrics = Mapping[str, Any]
_JSON_LINES = "rounds.jsonl"


@dataclass
class ClientRecord:
    """Record of a message to a client.

    Args:
        kind: "train", "evaluate" or "query".
        slot: Number of the slot that answered it, or of the last attempt; -1 = not begun.
        device: Device of that slot, such as "cuda:1".
        begin_s: Start of the last attempt, on the clock of `time.monotonic`.
        seconds: Time from the start to the reply.
        peak_memory_bytes: Peak of the memory reserved by torch; 0 on the CPU.
        attempts: Number of attempts.
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
        device: Such as "cuda:0" or "cpu:1".
        client_ids: Clients that trained on it, in the order of their start.
        busy_s: Seconds in which at least one client ran on it.
        peak_memory_bytes: Largest peak of a client; None if not measured.
    """

    device: str
    client_ids: tuple[int, ...]
    busy_s: float
    peak_memory_bytes: int | None = None


@dataclass(frozen=True)
class RoundReport:
    """One round.

    Args:
        server_round: Number of the round, from 1.
        seconds: Wall time from the selection of clients to the server's own evaluation, without the checkpoint.
        num_examples: Training examples of all clients whose result was used.
        devices: Every device with a slot.
        failures: One line per client that was left out or had to run again.
        lora_remainder: Relative difference of the round's adapter from mean(B A); None without LoRA, and if computing
            it for "mean" would take long.
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
        """Returns the fraction of the round, 0 to 1, in which the device ran a client."""
        return min(1.0, device.busy_s / self.seconds) if self.seconds > 0 else 0.0

    def row(self) -> dict[str, str]:
        """Returns the figures as texts by name."""
        row = {"round": str(self.server_round), "seconds": f"{self.seconds:.1f}", "examples": str(self.num_examples)}
        row |= {d.device: f"{len(d.client_ids)} cl {self.utilisation(d):.0%}" for d in self.devices}
        every = (("", self.train_metrics), ("eval_", self.evaluate_metrics), ("server_", self.server_metrics))
        row |= {prefix + name: _short(value) for prefix, metrics in every for name, value in metrics.items()}
        if self.lora_remainder is not None:
            row["lora_remainder"] = f"{self.lora_remainder:.2g}"
        return row | ({"failures": str(len(self.failures))} if self.failures else {})


@dataclass(frozen=True)
class FederatedReport:
    """All rounds of a federated training. `str()` returns a table.

    Args:
        server_id: Name of the server.
        num_clients: Number of clients.
        num_slots: Number of processes for clients.
        startup_s: Seconds before the first round: starting slots, building models, reading a saved round.
        rounds: The rounds in order.
    """

    server_id: str
    num_clients: int
    num_slots: int = 0
    startup_s: float = 0.0
    rounds: tuple[RoundReport, ...] = ()

    @property
    def seconds(self) -> float:
        """Wall time of all rounds, without start-up."""
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
    """The result of `fit`.

    Args:
        result: Flower's Result: the global arrays, and the clients' and the server's metrics by round.
        report: Times and devices of each round.
    """

    result: Result
    report: FederatedReport

    @property
    def rounds(self) -> tuple[RoundReport, ...]:
        """The rounds of the report, in order."""
        return self.report.rounds


def device_reports(devices_of_slots: Sequence[str], records: Sequence[ClientRecord]) -> tuple[DeviceReport, ...]:
    """Returns the report of each device in a round, in the order of the slots."""
    reports = []
    for device in dict.fromkeys(devices_of_slots):
        own = sorted((r for r in records if r.device == device), key=lambda r: r.begin_s)
        clients = tuple(r.client_id for r in own if r.kind == "train")
        busy_s = busy_seconds((r.begin_s, r.begin_s + r.seconds) for r in own)
        peak_bytes = max((r.peak_memory_bytes for r in own), default=0)
        reports.append(DeviceReport(device, clients, busy_s, peak_bytes or None))
    return tuple(reports)


def busy_seconds(intervals: Iterable[tuple[float, float]]) -> float:
    """Returns the seconds covered by at least one of the intervals (begin, end), which may overlap."""
    total, until = 0.0, float("-inf")
    for begin, end in sorted(intervals):
        total += max(0.0, end - max(begin, until))
        until = max(until, end)
    return total


def write_rounds(folder: Path, rounds: Sequence[RoundReport], *, must_append: bool) -> None:
    """Writes the rounds as JSON lines, with which a training can be watched. Raises OSError."""
    with open(folder / _JSON_LINES, "a" if must_append else "w", encoding="ascii") as file:
        file.writelines(json.dumps(dataclasses.asdict(line)) + "\n" for line in rounds)
        file.flush()
        os.fsync(file.fileno())


def round_from_dict(stored: Mapping[str, Any]) -> RoundReport:
    """Creates a round from the result of `dataclasses.asdict`."""
    return RoundReport(**{**stored, "devices": tuple(DeviceReport(**device) for device in stored["devices"])})


def _short(value: Any) -> str:
    if isinstance(value, list | tuple):
        return "[" + ",".join(map(_short, value)) + "]"
    return f"{value:.4g}" if isinstance(value, float) else str(value)
