"""Checkpoints of a federated training: one file per finished round, written atomically.

The file has plain data for `torch.load(weights_only=True)`, and no code. It is a ZIP archive with checksums.
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
from flwr.serverapp.strategy import Strategy

from unsloth_multigpu.checkpoint.manifest import flush_folder
from unsloth_multigpu.errors import ConfigError, ResumeError
from unsloth_multigpu.federated.flower_strategy import has_state, layers_of
from unsloth_multigpu.federated.round_report import RoundReport, round_from_dict
from unsloth_multigpu.logs import get_logger
from unsloth_multigpu.wire.process import try_lock

_log = get_logger(__name__)
_NAME = re.compile(r"round-(\d+)\.pt")
_LOCK = ".rounds.lock"
_NUM_KEPT = 2


@dataclass(frozen=True)
class SavedRound:
    """A training after one of its rounds.

    Args:
        server_round: Number of the round.
        arrays: The global arrays after it.
        layout: Names and shapes of the model's tensors.
        reports: Reports of all rounds so far.
        first_metrics: Metrics of the server's evaluation before the first round.
        strategy: Packed attributes of the strategy and of each wrapped one.
        facts: Settings that must be equal after a resume, as JSON values.
    """

    server_round: int
    arrays: ArrayRecord
    layout: Sequence[str]
    reports: Sequence[RoundReport]
    first_metrics: Mapping[str, Any]
    strategy: Sequence[Mapping[str, Any]]
    facts: Mapping[str, Any]

    def restore(self, strategy: Strategy) -> None:
        """Restores the state after the round in `strategy`, which has the same classes."""
        for layer, stored in zip(layers_of(strategy), self.strategy, strict=True):
            for name, packed in stored.items():
                part: Any = vars(layer).get(name)
                if has_state(part):
                    part.load_state_dict(unpack(packed))
                else:
                    setattr(layer, name, unpack(packed))


@contextmanager
def open_folder(output_dir: Path, resume: str | None) -> Iterator[Path | None]:
    """Creates and locks the folder, if its file system has locks, and finds the round from which to resume.

    Yields the file of that round; None = from the beginning.

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
                hint="Wait for its end, end it, or choose another output_dir.",
            )
        yield _round_to_resume(output_dir, resume)


def _round_to_resume(output_dir: Path, resume: str | None) -> Path | None:
    rounds = rounds_in(output_dir)
    if resume is None and rounds:
        raise ConfigError(
            f"output_dir={str(output_dir)!r} has {rounds[-1].name} of an earlier training.",
            hint="resume='auto' resumes from it; for a new training choose another output_dir or delete this one.",
        )
    for file in reversed(rounds):
        try:
            with zipfile.ZipFile(file) as archive:
                if (damaged := archive.testzip()) is None:
                    return file
        except (OSError, zipfile.BadZipFile) as error:
            damaged = str(error)
        _log.warning("%s is skipped, because it is damaged: %s", file, damaged)
    return None


def rounds_in(output_dir: Path) -> list[Path]:
    """Returns the files of rounds, the newest last."""
    found = {path: _NAME.fullmatch(path.name) for path in output_dir.iterdir()}
    return [path for _, path in sorted((int(match[1]), path) for path, match in found.items() if match)]


def write_round(output_dir: Path, saved: SavedRound) -> None:
    """Writes a round as `round-K.pt`, and deletes all but the last two. Raises OSError."""
    state = {field.name: getattr(saved, field.name) for field in dataclasses.fields(saved)}
    state |= {"arrays": pack(saved.arrays), "facts": json.dumps(saved.facts)}
    state["reports"] = [dataclasses.asdict(report) for report in saved.reports]
    part, name = output_dir / ".round.part", f"round-{saved.server_round}.pt"
    with part.open("wb") as file:
        torch.save(state, file)
        file.flush()
        os.fsync(file.fileno())
    os.replace(part, output_dir / name)
    flush_folder(output_dir)
    kept = {f"round-{number}.pt" for number in range(saved.server_round - _NUM_KEPT + 1, saved.server_round + 1)}
    for path in rounds_in(output_dir):
        if path.name not in kept:
            path.unlink()


def read_round(file: Path, facts: Mapping[str, Any], num_rounds: int) -> SavedRound:
    """Reads a round of the training that resumes, with these settings and total number of rounds.

    Raises:
        ResumeError: A setting differs.
        ConfigError: The saved round is later than the last one.
    """
    state = torch.load(file, weights_only=True)
    stored, now = json.loads(state["facts"]), json.loads(json.dumps(dict(facts)))
    for name in [*stored, *now]:
        if stored.get(name) != now.get(name):
            raise ResumeError(
                f"{file} was written with {name}={stored.get(name)!r}, this training has {now.get(name)!r}.",
                hint="Use the same settings, or another output_dir for a new training.",
            )
    if state["server_round"] > num_rounds:
        raise ConfigError(
            f"num_rounds={num_rounds}, but {file} is already the state after round {state['server_round']}.",
            hint="num_rounds counts all rounds, including those before a resume.",
        )
    state["arrays"] = unpack(state["arrays"])
    return SavedRound(**{**state, "reports": [round_from_dict(report) for report in state["reports"]]})


def pack_strategy(strategy: Strategy) -> tuple[list[dict[str, Any]], list[str]]:
    """Returns the packed attributes of a strategy and its wrapped ones, and the names of those that are not stored."""
    layers: list[dict[str, Any]] = []
    left_out = []
    for layer in layers_of(strategy):
        layers.append({})
        for name, value in vars(layer).items():
            if isinstance(value, Strategy) or (callable(value) and not has_state(value)):
                continue
            try:
                layers[-1][name] = pack(value)
            except TypeError:
                left_out.append(f"{type(layer).__name__}.{name}")
    return layers, left_out


def pack(value: Any) -> Any:
    """Converts a value to plain data: other types than numbers, texts, lists and dicts become (kind, content).

    Raises TypeError for a type that cannot be stored.
    """
    import numpy as np

    # Before the check for float: numpy.float64 is a float, but promotes float32, which a float does not.
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
    if has_state(value):
        return pack(value.state_dict())
    raise TypeError(f"{type(value).__module__}.{type(value).__qualname__} is not stored")


def unpack(packed: Any) -> Any:
    """Reverses `pack`. Arrays are copies."""
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
