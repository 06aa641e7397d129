"""The rounds of a federated training: their report, and the files from which a training resumes.

Each finished round is written atomically to a file of plain data, which `torch.load(weights_only=True)` can read.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from flwr.app import Array, ArrayRecord
from flwr.serverapp.strategy import Result, Strategy

from unsloth_multigpu.checkpoint.manifest import flush_folder
from unsloth_multigpu.errors import ConfigError, ResumeError
from unsloth_multigpu.federated.flower_strategy import nested_strategies
from unsloth_multigpu.logs import get_logger
from unsloth_multigpu.wire.process import try_lock
from unsloth_multigpu.words import aligned

_log = get_logger(__name__)
# Numbers or lists of numbers by name, as in Flower's MetricRecord.
Metrics = Mapping[str, Any]
_JSON_LINES = "rounds.jsonl"
_NAME = re.compile(r"round-(\d+)\.pt")
_LOCK = ".rounds.lock"


@dataclass
class ClientRecord:
    """What happened to a message to a client.

    Args:
        kind: "train", "evaluate" or "query".
        slot: Number of the slot of the last attempt; -1 = not started.
        begin_s: Start of the last attempt, on the clock of `time.monotonic`.
        seconds: Time from `begin_s` to the reply, or to the end of the limit.
        peak_memory_bytes: Peak of the device memory reserved by torch; 0 on the CPU.
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
        peak_memory_bytes: Largest `ClientRecord.peak_memory_bytes`; None on the CPU.
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
        num_examples: Sum of the numbers of examples that the clients' training returned; 0 if no reply was used.
        devices: All devices with a slot.
        train_metrics, evaluate_metrics: The clients' metrics, aggregated by the strategy.
        server_metrics: Metrics of `server_evaluate`.
        failures: One line for each problem, such as a client that was left out, had no data or had to run again.
        lora_remainder: Relative difference of the round's adapter from mean(B A), in the Frobenius norm; None without
            LoRA, or if computing it would take too long.
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
        """Returns the figures as text, by column."""
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
        num_slots: Number of processes for clients.
        startup_s: Seconds before the first round: starting slots, building models, reading a saved round.
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
        busy_s, until_s = 0.0, float("-inf")
        for record in own:  # Those of several slots may overlap.
            end_s = record.begin_s + record.seconds
            busy_s += max(0.0, end_s - max(record.begin_s, until_s))
            until_s = max(until_s, end_s)
        peak_bytes = max((r.peak_memory_bytes for r in own), default=0)
        reports.append(DeviceReport(device, clients, busy_s, peak_bytes or None))
    return tuple(reports)


def _short(value: Any) -> str:
    if isinstance(value, list | tuple):
        return "[" + ",".join(map(_short, value)) + "]"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


@dataclass(frozen=True)
class SavedRound:
    """A training after one of its rounds.

    Args:
        arrays: The global arrays after it.
        reports: Reports of all rounds so far.
        first_metrics: Metrics of `server_evaluate` before the first round.
        strategy: The first result of `pack_strategy`.
        facts: Settings that must be equal after a resume: the repr of each, by name.
        adapter: The same for the adapter, from `adapters.adapter_settings`.
    """

    arrays: ArrayRecord
    reports: Sequence[RoundReport]
    first_metrics: Mapping[str, Any]
    strategy: Sequence[Mapping[str, Any]]
    facts: Mapping[str, str]
    adapter: Mapping[str, str]

    def restore(self, strategy: Strategy) -> None:
        """Sets the saved attributes in `strategy`, which must have the same classes."""
        for each, stored in zip(nested_strategies(strategy), self.strategy, strict=True):
            for name, packed in stored.items():
                setattr(each, name, unpack(packed))


@contextmanager
def open_folder(output_dir: Path, resume: str | None) -> Iterator[Path | None]:
    """Creates the folder, locks it if its file system has locks, and finds the round from which to resume.

    Yields the file of that round; None = start from the beginning.
    Raises ConfigError if there are rounds and `resume` is not set, if another running training uses the folder, or if
    it cannot be written.
    """
    try:
        output_dir.mkdir(parents=True, exist_ok=True)
        lock = (output_dir / _LOCK).open("w")
    except OSError as error:
        raise ConfigError(
            f"output_dir={str(output_dir)!r} cannot be written: {error.strerror}.", hint="Change output_dir."
        ) from error
    with lock:
        if try_lock(lock.fileno()) == "held":
            raise ConfigError(
                f"output_dir={str(output_dir)!r}: another running training writes its rounds there.",
                hint="Wait until it ends, stop it, or choose another output_dir.",
            )
        rounds = rounds_in(output_dir)
        if resume is None and rounds:
            raise ConfigError(
                f"output_dir={str(output_dir)!r} has {rounds[-1].name} of an earlier training.",
                hint="resume='auto' resumes from it; for a new training choose another output_dir or delete this one.",
            )
        yield next(filter(_is_intact, reversed(rounds)), None)


def _is_intact(file: Path) -> bool:
    try:
        with zipfile.ZipFile(file) as archive:
            damaged = archive.testzip()
    except (OSError, zipfile.BadZipFile) as error:
        damaged = str(error)
    if damaged is not None:
        _log.warning("%s is skipped, because it is damaged: %s", file, damaged)
    return damaged is None


def rounds_in(output_dir: Path) -> list[Path]:
    """Returns the files of rounds in the order of their numbers."""
    found = {path: _NAME.fullmatch(path.name) for path in output_dir.iterdir()}
    return [path for _, path in sorted((int(match[1]), path) for path, match in found.items() if match)]


def write_round(output_dir: Path, saved: SavedRound) -> None:
    """Writes a round to `round-K.pt`, and all reports so far to rounds.jsonl, where a training can be watched.

    Deletes all rounds but the last two. Raises OSError if the disk is full or fails.
    """
    number, reports = len(saved.reports), [dataclasses.asdict(report) for report in saved.reports]
    state = vars(saved) | {"arrays": pack(saved.arrays), "reports": reports}
    partial, name = output_dir / ".round.part", f"round-{number}.pt"
    with partial.open("wb") as file:
        torch.save(state, file)
        file.flush()
        os.fsync(file.fileno())
    os.replace(partial, output_dir / name)
    flush_folder(output_dir)
    (output_dir / _JSON_LINES).write_text("".join(json.dumps(report) + "\n" for report in reports), encoding="ascii")
    for path in rounds_in(output_dir):
        if path.name not in (name, f"round-{number - 1}.pt"):
            path.unlink()


def read_round(file: Path, facts: Mapping[str, str], num_rounds: int) -> SavedRound:
    """Reads a saved round for a training with the settings `facts` that is to have `num_rounds` rounds in total.

    Raises:
        ResumeError: A setting differs.
        ConfigError: The number of the saved round is above `num_rounds`.
    """
    state = torch.load(file, weights_only=True)
    refuse_difference(file, state["facts"], facts)
    number = len(state["reports"])
    if number > num_rounds:
        raise ConfigError(
            f"num_rounds={num_rounds}, but {file} is already the state after round {number}.",
            hint="num_rounds counts all rounds, including those before a resume.",
        )
    for report in state["reports"]:
        report["devices"] = tuple(DeviceReport(**device) for device in report["devices"])
    reports = [RoundReport(**report) for report in state["reports"]]
    return SavedRound(**state | {"arrays": unpack(state["arrays"]), "reports": reports})


def refuse_difference(file: Path, stored: Mapping[str, str], here: Mapping[str, str]) -> None:
    """Raises ResumeError if a setting of the saved round, `stored`, differs from that of this training, `here`."""
    for name in [*stored, *here]:
        if stored.get(name) != here.get(name):
            raise ResumeError(
                f"{file} was written with {name}={stored.get(name)}, this training has {here.get(name)}.",
                hint="Use the same settings, or another output_dir for a new training.",
            )


def pack_strategy(strategy: Strategy) -> tuple[list[dict[str, Any]], list[str]]:
    """Returns the packed attributes of each nested strategy, and the names of the attributes that are not saved."""
    nested: list[dict[str, Any]] = []
    left_out = []
    for each in nested_strategies(strategy):
        nested.append({})
        for name, value in vars(each).items():
            if isinstance(value, Strategy) or callable(value):
                continue
            try:
                nested[-1][name] = pack(value)
            except TypeError:
                left_out.append(f"{type(each).__name__}.{name}")
    return nested, left_out


def pack(value: Any) -> Any:
    """Converts a value to numbers, str, bytes, lists, dicts and (kind, content). Raises TypeError if it cannot."""
    import numpy as np

    # Before the check for float: numpy.float64 is a subclass of float, but promotes float32 arrays, unlike float.
    if isinstance(value, np.ndarray | np.generic):
        kind = "scalar" if isinstance(value, np.generic) else "array"
        return kind, torch.from_numpy(np.array(value, order="C"))
    if value is None or isinstance(value, bool | int | float | str | bytes):
        return value
    if isinstance(value, list):
        return [pack(item) for item in value]
    if isinstance(value, dict):
        return {key: pack(item) for key, item in value.items()}
    if isinstance(value, ArrayRecord):
        return "record", {name: pack(array.numpy()) for name, array in value.items()}
    raise TypeError(f"{type(value).__module__}.{type(value).__qualname__} cannot be saved")


def unpack(packed: Any) -> Any:
    """Returns the value that `pack` has converted. Its arrays are copies."""
    if isinstance(packed, list):
        return [unpack(item) for item in packed]
    if isinstance(packed, dict):
        return {key: unpack(item) for key, item in packed.items()}
    if not isinstance(packed, tuple):
        return packed
    kind, content = packed
    if kind == "record":  # In the original order: some strategies match arrays by position.
        return ArrayRecord({name: Array(unpack(item)) for name, item in content.items()})
    array = content.numpy().copy()
    return array[()] if kind == "scalar" else array
