"""A federated training on the disk: one folder per finished round, whole or not there at all."""

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
from typing import TYPE_CHECKING, Any

from flwr.app import ArrayRecord, MetricRecord, RecordDict
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
from unsloth_multigpu.federated.record import pack, pack_strategy, restore_strategy, unpack
from unsloth_multigpu.federated.report import RoundReport, round_from_json
from unsloth_multigpu.logs import get_logger

if TYPE_CHECKING:
    from unsloth_multigpu.federated.record import Tensors

_log = get_logger(__name__)
_NAME = re.compile(r"round-(\d+)")
_ARRAYS = "arrays.safetensors"
_OTHERS = "state.safetensors"
_STATE = "state.json"
_NUM_KEPT = 2


@dataclass
class History:
    """What came out of the rounds so far: Flower's metrics by round, and the reports."""

    train: dict[int, MetricRecord] = field(default_factory=dict)
    evaluate: dict[int, MetricRecord] = field(default_factory=dict)
    server: dict[int, MetricRecord] = field(default_factory=dict)
    rounds: list[RoundReport] = field(default_factory=list)


@dataclass(frozen=True)
class SavedRound:
    """A training after one of its rounds.

    Args:
        server_round: The last round that is in it.
        arrays: The global arrays after it.
        residual: What exact aggregation of LoRA left in addition; None where there is nothing.
        layout: Names and shapes of what does not travel.
        states: Each client's `Context.state`.
        strategy: What `pack_strategy` made of the strategy, with its tensors.
    """

    server_round: int
    arrays: ArrayRecord
    residual: ArrayRecord | None
    layout: Sequence[str]
    states: dict[int, RecordDict]
    history: History
    strategy: tuple[list[dict[str, Any]], Tensors] = field(default_factory=lambda: ([], {}))

    def restore(self, strategy: Strategy) -> None:
        """Gives `strategy` the state that it had after the round."""
        restore_strategy(strategy, *self.strategy)


@contextmanager
def open_folder(output_dir: Path, resume: str | None) -> Iterator[Path | None]:
    """Makes the folder, removes what a killed server left half written, and finds the round from which to resume.

    Within it no other training can open the folder, where its file system has locks.

    Yields:
        The folder of that round; None = from the beginning.

    Raises:
        ConfigError: There are rounds and `resume` does not say what to do with them, or they are of another training;
            another training that lives writes the folder; it cannot be written.
        ResumeError: The round that was named is not whole.
    """
    try:
        output_dir.mkdir(parents=True, exist_ok=True)
        claim = take(output_dir / PART_FOLDER / "rounds", is_for_writing=True)
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
    if resume not in (None, "auto"):
        folder = Path(str(resume))
        if rounds and folder.resolve().parent != output_dir.resolve():
            raise ConfigError(
                f"resume={resume!r}, but output_dir={str(output_dir)!r} holds {rounds[-1].name} of another training, "
                "which would be deleted.",
                hint="Choose an empty output_dir.",
            )
        return _whole(folder, rounds)
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
    from safetensors.numpy import save_file

    part = output_dir / PART_FOLDER / f"round-{saved.server_round}"
    part.mkdir(parents=True)
    arrays: Tensors = {}
    others: Tensors = {}
    layers, left_out = pack_strategy(strategy, others)
    state = {
        "arrays": pack(saved.arrays, arrays, "arrays"),
        "residual": pack(saved.residual, others, "residual"),
        "layout": list(saved.layout),
        "states": pack(saved.states, others, "states"),
        "metrics": [pack(m, others, "m") for m in (saved.history.train, saved.history.evaluate, saved.history.server)],
        "rounds": [dataclasses.asdict(report) for report in saved.history.rounds],
        "strategy": layers,
    }
    # Under their own names, so that the global weights can be read without this package.
    save_file({name.removeprefix("arrays/"): array for name, array in arrays.items()}, part / _ARRAYS)
    save_file(others, part / _OTHERS)
    (part / _STATE).write_text(json.dumps(state), encoding="ascii")
    seal(part, Manifest("", saved.server_round, 0, True, dict(facts), {}, {}))
    put_in_place(part, output_dir / part.name)
    for folder in rounds_in(output_dir):
        if not saved.server_round - _NUM_KEPT < _number(folder) <= saved.server_round:
            # First its manifest: half of a round must not count as one.
            with suppress(OSError):
                (folder / MANIFEST).unlink()
            shutil.rmtree(folder, ignore_errors=True)
    return left_out


def read_round(folder: Path, facts: Mapping[str, Any]) -> SavedRound:
    """A round that `write_round` wrote.

    Args:
        facts: Settings of the training that resumes.

    Raises:
        ResumeError: The settings differ; the message names the first that does.
    """
    from safetensors.numpy import load_file

    manifest = read_manifest(folder)
    assert manifest is not None  # `open_folder` has checked it.
    _check_facts(folder, manifest.facts, facts)
    state = json.loads((folder / _STATE).read_text(encoding="ascii"))
    arrays = {f"arrays/{name}": array for name, array in load_file(folder / _ARRAYS).items()}
    others = load_file(folder / _OTHERS)
    train, evaluate, server = (unpack(metrics, others) for metrics in state["metrics"])
    return SavedRound(
        manifest.step,
        unpack(state["arrays"], arrays),
        unpack(state["residual"], others),
        state["layout"],
        unpack(state["states"], others),
        History(train, evaluate, server, [round_from_json(report) for report in state["rounds"]]),
        (state["strategy"], others),
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


def _whole(folder: Path, rounds: list[Path]) -> Path:
    wrong = check(folder) if folder.is_dir() else "there is no such folder"
    if wrong is None:
        return folder
    whole = [path for path in rounds if check(path) is None]
    raise ResumeError(
        f"resume={str(folder)!r} cannot be used: {wrong}.",
        hint=f"Use {str(whole[-1])!r}." if whole else "Start from the beginning, without resume.",
    )


def _number(folder: Path) -> int:
    match = _NAME.fullmatch(folder.name)
    return int(match[1]) if match else 0
