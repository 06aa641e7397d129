"""A federated training on the disk: one folder per finished round, whole or not there at all.

The state of strategies is plain data that `torch.load(weights_only=True)` reads: there is no code in files.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import re
import shutil
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, MetricRecord, RecordDict
from flwr.serverapp.strategy import Strategy

from unsloth_multigpu.checkpoint.claim import Claim, take
from unsloth_multigpu.checkpoint.manifest import (
    MANIFEST,
    PART_FOLDER,
    Manifest,
    check,
    put_in_place,
    read_manifest,
    seal,
)
from unsloth_multigpu.errors import ConfigError, ResumeError
from unsloth_multigpu.federated.report import RoundReport, round_from_dict
from unsloth_multigpu.federated.strategy import layers_of
from unsloth_multigpu.logs import get_logger

_log = get_logger(__name__)
_NAME = re.compile(r"round-(\d+)")
_ARRAYS = "arrays.safetensors"
_STATE = "state.pt"
_IN_STATE = ("residual", "layout", "first_metrics")
_NUM_KEPT = 2
_RECORDS: dict[str, type[Any]] = {kind.__name__: kind for kind in (ArrayRecord, ConfigRecord, MetricRecord, RecordDict)}


@dataclass(frozen=True)
class SavedRound:
    """A training after one of its rounds.

    Args:
        server_round: The last round that is in it.
        arrays: The global arrays after it.
        residual: What exact aggregation of LoRA left in addition; None where there is nothing.
        layout: Names and shapes of what does not travel.
        reports: Of all rounds so far.
        first_metrics: Of the server's evaluation before the first round.
        strategy: What `pack_strategy` made of the strategy.
    """

    server_round: int
    arrays: ArrayRecord
    residual: ArrayRecord | None
    layout: Sequence[str]
    reports: Sequence[RoundReport]
    first_metrics: Mapping[str, Any]
    strategy: list[dict[str, Any]] = field(default_factory=list)

    def restore(self, strategy: Strategy) -> None:
        """Gives `strategy` the state that it had after the round."""
        restore_strategy(strategy, self.strategy)


@contextmanager
def open_folder(output_dir: Path, resume: str | None) -> Iterator[Path | None]:
    """Makes the folder, removes what a killed server left half written, and finds the round from which to resume.

    Within it no other training can open the folder, where its file system has locks.

    Yields:
        The folder of that round; None = from the beginning.

    Raises:
        ConfigError: There are rounds and `resume` does not say what to do with them, or they are of another training;
            another training that lives writes the folder; it cannot be written.
    """
    try:
        output_dir.mkdir(parents=True, exist_ok=True)
        claim = take(output_dir / PART_FOLDER / "rounds")
    except OSError as error:
        raise ConfigError(
            f"output_dir={str(output_dir)!r} cannot be written: {error.strerror}.", hint="Change output_dir."
        ) from error
    if claim is None:
        raise ConfigError(
            f"output_dir={str(output_dir)!r}: a training that is not over writes its rounds there.",
            hint="Wait until it has ended, end it, or choose another output_dir.",
        )
    # Loaders of an evaluation on the server, say. It cannot be unregistered; it holds only a weak reference.
    os.register_at_fork(after_in_child=functools.partial(_forget, weakref.ref(claim)))
    try:
        for half in (output_dir / PART_FOLDER).glob("*round-*"):
            shutil.rmtree(half, ignore_errors=True)
        yield _round_to_resume(output_dir, resume)
    finally:
        claim.release()


def _forget(claim: weakref.ref[Claim]) -> None:
    alive = claim()
    if alive is not None:
        alive.forget()


def _round_to_resume(output_dir: Path, resume: str | None) -> Path | None:
    rounds = rounds_in(output_dir)
    if resume is None and rounds:
        raise ConfigError(
            f"output_dir={str(output_dir)!r} holds {rounds[-1].name} of an earlier training.",
            hint="resume='auto' resumes from it; for a new training choose another output_dir or delete this one.",
        )
    for folder in reversed(rounds):
        wrong = check(folder)
        if wrong is None:
            return folder
        _log.warning("%s is left out: %s", folder, wrong)
    return None


def rounds_in(output_dir: Path) -> list[Path]:
    """Folders of rounds, the newest last; whole or not."""
    found = [(_NAME.fullmatch(path.name), path) for path in output_dir.iterdir() if path.is_dir()]
    return [path for _, path in sorted((int(match[1]), path) for match, path in found if match)]


def write_round(output_dir: Path, saved: SavedRound, strategy: Strategy, facts: Mapping[str, Any]) -> list[str]:
    """Writes a round as `round-K` and deletes all but it and the one before.

    Args:
        facts: Settings that must be the same when the training resumes: name -> JSON value.

    Returns:
        Attributes of the strategy that could not be stored.

    Raises:
        OSError: The disk is full or fails.
    """
    import numpy as np
    from safetensors.numpy import save_file

    part = output_dir / PART_FOLDER / f"round-{saved.server_round}"
    part.mkdir(parents=True)
    layers, left_out = pack_strategy(strategy)
    # safetensors writes memory in its order: a transposed array would be read back with other values.
    arrays = {name: np.ascontiguousarray(array.numpy()).reshape(array.shape) for name, array in saved.arrays.items()}
    save_file(arrays, part / _ARRAYS)  # Can be read without this package.
    state = {name: pack(getattr(saved, name)) for name in _IN_STATE}
    state |= {"names": list(arrays), "reports": [dataclasses.asdict(r) for r in saved.reports], "strategy": layers}
    torch.save(state, part / _STATE)
    seal(part, Manifest("", saved.server_round, 0, True, dict(facts), {}, {}))
    put_in_place(part, output_dir / part.name)
    for folder in rounds_in(output_dir):
        if not saved.server_round - _NUM_KEPT < _number(folder) <= saved.server_round:
            # First its manifest: half of a round must not count as one.
            with suppress(OSError):
                (folder / MANIFEST).unlink()
            shutil.rmtree(folder, ignore_errors=True)
    return left_out


def read_round(folder: Path, facts: Mapping[str, Any], num_rounds: int) -> SavedRound:
    """A round that `write_round` wrote.

    Args:
        facts: Settings of the training that resumes.
        num_rounds: Its rounds in all.

    Raises:
        ResumeError: The settings differ; the message names the first that does.
        ConfigError: The saved round is later than the last one.
    """
    from safetensors.numpy import load_file

    manifest = read_manifest(folder)
    assert manifest is not None  # `open_folder` has checked it.
    _check_facts(folder, manifest.facts, facts)
    if manifest.step > num_rounds:
        raise ConfigError(
            f"num_rounds={num_rounds}, but {folder} is already the state after round {manifest.step}.",
            hint="num_rounds counts all rounds, with those before a resume.",
        )
    state, arrays = torch.load(folder / _STATE, weights_only=True), load_file(folder / _ARRAYS)
    return SavedRound(
        manifest.step,
        ArrayRecord({name: Array(arrays[name]) for name in state["names"]}),  # In the strategy's order.
        reports=[round_from_dict(report) for report in state["reports"]],
        strategy=state["strategy"],
        **{name: unpack(state[name]) for name in _IN_STATE},
    )


def _check_facts(folder: Path, stored: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    # Through JSON, as the stored ones went.
    now = json.loads(json.dumps(now))
    for name in [*stored, *now]:
        if stored.get(name) != now.get(name):
            raise ResumeError(
                f"{folder} was made with {name}={stored.get(name)!r}, this training has {now.get(name)!r}.",
                hint="Use the same settings, or another output_dir for a new training.",
            )


def _number(folder: Path) -> int:
    match = _NAME.fullmatch(folder.name)
    return int(match[1]) if match else 0


def pack(value: Any) -> Any:
    """Numbers, texts, lists and dicts as they are; all else as a pair of its kind and its content.

    Raises:
        TypeError: A value of a kind that is not stored.
    """
    import numpy as np

    # Checked before float: numpy.float64 is a float, but its sums with float32 have another dtype than a float's.
    if isinstance(value, np.ndarray | np.generic | Array):
        kind = "scalar" if isinstance(value, np.generic) else type(value).__name__
        return kind, torch.from_numpy(np.array(value.numpy() if isinstance(value, Array) else value, order="C"))
    if value is None or isinstance(value, bool | int | float | str | bytes):
        return value
    if isinstance(value, tuple):
        return "tuple", tuple(pack(item) for item in value)  # No list: it may be the key of a dict.
    if isinstance(value, list):
        return [pack(item) for item in value]
    if isinstance(value, dict):
        return {pack(key): pack(item) for key, item in value.items()}
    if type(value).__name__ in _RECORDS and isinstance(value, Mapping):
        return type(value).__name__, {key: pack(item) for key, item in value.items()}
    if has_state_dict(value):
        return "state_dict", pack(value.state_dict())
    raise TypeError(f"{type(value).__module__}.{type(value).__qualname__} is not stored")


def unpack(packed: Any) -> Any:
    """What `pack` was given. Arrays are copies of their own."""
    if isinstance(packed, list):
        return [unpack(item) for item in packed]
    if isinstance(packed, dict):
        return {unpack(key): unpack(item) for key, item in packed.items()}
    if not isinstance(packed, tuple):
        return packed
    kind, content = packed
    if kind == "tuple":
        return tuple(unpack(item) for item in content)
    if kind in ("ndarray", "Array", "scalar"):
        array = content.numpy().copy()
        return Array(array) if kind == "Array" else array if kind == "ndarray" else array[()]
    # In the original order: some strategies match arrays by position.
    return _RECORDS[kind](unpack(content)) if kind in _RECORDS else unpack(content)


def pack_strategy(strategy: Strategy) -> tuple[list[dict[str, Any]], list[str]]:
    """Attributes of a strategy and of what it wraps, and the names of those that are of no kind that can be stored."""
    layers, left_out = [], []
    for layer in layers_of(strategy):
        stored: dict[str, Any] = {}
        for name, value in vars(layer).items():
            if isinstance(value, Strategy) or (callable(value) and not has_state_dict(value)):
                continue
            try:
                stored[name] = pack(value)
            except TypeError:
                left_out.append(f"{type(layer).__name__}.{name}")
        layers.append({"class": type(layer).__name__, "parts": _parts(layer), "attributes": stored})
    return layers, left_out


def restore_strategy(strategy: Strategy, layers: list[dict[str, Any]]) -> None:
    """Gives a strategy the attributes that `pack_strategy` stored.

    Raises:
        ResumeError: The stored state is that of another strategy, or of one with other parts that have state of their
            own: an accountant of privacy would be put out of use, or would begin in the middle.
    """
    own = list(layers_of(strategy))
    before = [(stored["class"], stored["parts"]) for stored in layers]
    now = [(type(layer).__name__, _parts(layer)) for layer in own]
    if before != now:
        raise ResumeError(
            f"the round was made with strategy {_names(before)}, this is {_names(now)}.",
            hint="Use the same strategy with the same parts.",
        )
    for layer, stored in zip(own, layers, strict=True):
        for name, packed in stored["attributes"].items():
            if name in stored["parts"]:
                getattr(layer, name).load_state_dict(unpack(packed))
            else:
                setattr(layer, name, unpack(packed))


def has_state_dict(value: Any) -> bool:
    return callable(getattr(value, "state_dict", None)) and callable(getattr(value, "load_state_dict", None))


def _parts(layer: Strategy) -> list[str]:
    return sorted(name for name, value in vars(layer).items() if has_state_dict(value))


def _names(layers: list[tuple[str, list[str]]]) -> str:
    return " of ".join(f"{kind} with {', '.join(parts)}" if parts else kind for kind, parts in layers)
