"""Whole checkpoints: a manifest, written last, tells a whole folder from a torn one. Only files; no torch.

The manifest's CRC-32 finds writes that were cut off and bits that flipped. It does not protect against forgery: who can
write the files can write the manifest.
"""

from __future__ import annotations

import dataclasses
import errno
import json
import os
import re
import shutil
import zlib
from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from unsloth_multigpu.checkpoint.claim import MARK, take
from unsloth_multigpu.logs import get_logger

logger = get_logger(__name__)

MANIFEST = "unsloth_multigpu.json"
# Checkpoints are written in this folder of the output folder, and renamed when they are whole.
PART_FOLDER = "_unsloth_multigpu_part"
_REPLACED = "replaced-"
_FORMAT = 1
_CHUNK_BYTES = 1 << 22
_NAME = re.compile(r"checkpoint-(\d+)")
# What lies of an unfinished checkpoint in `PART_FOLDER`: it, the older one of its name, and its lock.
_OF_PART = re.compile(rf"(?:{_REPLACED}|\.)?(checkpoint-\d+)(?:\.lock)?")
# Of federated trainings, which clear their own.
_OF_ROUND = re.compile(r"\.rounds\.lock|.*round-\d+")
# Times closer than this cannot be compared: file systems round or invent them.
_LEAST_SPREAD_S = 1.0


@dataclass(frozen=True)
class Manifest:
    """What a checkpoint is.

    Args:
        run_id: Of the run that wrote it, "" where the launcher gave none.
        step: Optimizer steps that are in it.
        world_size: Ranks that wrote it.
        is_resumable: False where it holds no optimizer, as with `save_only_model`.
        facts: What the training is: name -> JSON value, see `checkpoint.resume.training_facts`.
        cursor: "epoch" and how many "steps" and "samples" of it were seen, where they are counted.
        planner: What the planner had measured.
        files: Path in the folder -> its size in bytes and the CRC-32 of its content.
        is_sharded: Each rank held a part of the weights. None = an earlier version wrote it, see `checkpoint.mode`.
        first_step: What the comparison of the first step with that of one process has found.
    """

    run_id: str
    step: int
    world_size: int
    is_resumable: bool
    facts: dict[str, Any]
    cursor: dict[str, int]
    planner: dict[str, Any]
    files: dict[str, tuple[int, int]] = dataclasses.field(default_factory=dict)
    is_sharded: bool | None = None
    first_step: dict[str, Any] = dataclasses.field(default_factory=dict)


def seal(folder: Path, manifest: Manifest) -> None:
    """Flushes all files of `folder` to the disk and then writes the manifest with their sizes and checksums.

    Raises:
        OSError: The disk is full or fails.
    """
    files = {_relative(path, folder): _measured(path, must_flush=True) for path in _files_in(folder)}
    for inner in {path.parent for path in _files_in(folder)} | {folder}:
        _flush_folder(inner)
    body = {"format": _FORMAT, **dataclasses.asdict(dataclasses.replace(manifest, files=files))}
    part = folder / f".{MANIFEST}"
    with part.open("w", encoding="ascii") as file:
        json.dump({"crc32": _crc_of(body), "manifest": body}, file, indent=1)
        file.flush()
        os.fsync(file.fileno())
    os.replace(part, folder / MANIFEST)
    _flush_folder(folder)


def read_manifest(folder: Path) -> Manifest | None:
    """The manifest of a checkpoint; None if it has none, as what the Trainer writes without this package.

    Raises:
        ValueError: There is one that does not hold; the message names it.
    """
    try:
        text = (folder / MANIFEST).read_bytes()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise ValueError(f"{MANIFEST} cannot be read: {error.strerror}") from error
    try:
        stored = json.loads(text)
        body = stored["manifest"]
        is_whole = stored["crc32"] == _crc_of(body)
        version = body.pop("format")
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{MANIFEST} cannot be read") from error
    if not is_whole:
        raise ValueError(f"{MANIFEST} was changed after it was written")
    if version != _FORMAT:
        raise ValueError(f"{MANIFEST} has format {version}, which another version of unsloth_multigpu wrote")
    return Manifest(**{**body, "files": {name: (size, crc) for name, (size, crc) in body["files"].items()}})


def check(folder: Path, *, reads_files: bool = True) -> str | None:
    """What is wrong with a checkpoint, naming the file; None if it is whole. Files that were added do not matter.

    Args:
        folder: The checkpoint.
        reads_files: False = sizes alone are compared, which costs nothing.
    """
    try:
        manifest = read_manifest(folder)
    except ValueError as error:
        return str(error)
    if manifest is None:
        return f"{MANIFEST} is missing"
    for name, (size, crc) in manifest.files.items():
        path = folder / name
        try:
            if not path.is_file():
                return f"{name} is missing"
            if path.stat().st_size != size:
                return f"{name} has {path.stat().st_size} bytes of {size}"
            if reads_files and _measured(path)[1] != crc:
                return f"{name} was changed after it was written"
        except OSError as error:
            return f"{name} cannot be read: {error.strerror}"
    return None


def _step_of(name: str) -> int | None:
    """40 for "checkpoint-40", None for a name that is not a checkpoint's."""
    match = _NAME.fullmatch(name)
    return int(match[1]) if match else None


def checkpoints_in(output_dir: Path) -> list[tuple[int, Path]]:
    """Step and folder of each checkpoint, the newest first."""
    if not output_dir.is_dir():
        return []
    found = [(_step_of(path.name), path) for path in output_dir.iterdir() if path.is_dir()]
    return sorted(((step, path) for step, path in found if step is not None), reverse=True)


def put_in_place(part: Path, final: Path) -> None:
    """Gives a sealed folder its name. An older folder of that name is deleted once the new one is there."""
    older = part.with_name(_REPLACED + final.name)
    if final.is_file():
        aside = final.with_name(f"{final.name}.replaced")
        os.rename(final, aside)
        logger.warning("%s was a file, which is %s now", final, aside)
    elif final.exists():
        os.rename(final, older)
    os.rename(part, final)
    _flush_folder(final.parent)
    shutil.rmtree(older, ignore_errors=True)
    with suppress(OSError):  # Not empty: its lock is held, or another save failed there.
        part.parent.rmdir()


def clear_parts(output_dir: Path) -> list[str]:
    """Removes checkpoints that killed runs left unfinished; one that only lacked its last rename is renamed.

    One whose lock cannot be opened stays, with a warning: it may be another user's.

    Returns:
        Names of those that a process which lives is writing. They stay as they are.
    """
    parts, living = output_dir / PART_FOLDER, []
    try:
        found = {path: _OF_PART.fullmatch(path.name) for path in list(parts.iterdir())}
    except (FileNotFoundError, NotADirectoryError):
        return []
    for name in sorted({match[1] for match in found.values() if match}):
        try:
            claim = take(parts / name, is_for_writing=False)
        except OSError as error:
            logger.warning("the unfinished checkpoint %s cannot be cleared and stays: %s", parts / name, error)
            continue
        if claim is None:
            living.append(name)
            continue
        try:
            settle(parts / name, output_dir / name)
        finally:
            claim.release()
    for path in [path for path, match in found.items() if not match and not _OF_ROUND.fullmatch(path.name)]:
        shutil.rmtree(path, ignore_errors=True)
        with suppress(OSError):  # A folder, which is gone.
            path.unlink()
    with suppress(OSError):  # Not empty: another run saves.
        parts.rmdir()
    return living


def settle(part: Path, final: Path) -> None:
    """Ends what a killed save left of one checkpoint: what is whole gets the name, and nothing else is left.

    Only for who has the claim of it, see `claim.take`.
    """
    older = part.with_name(_REPLACED + part.name)
    if check(part) is None:
        (part / MARK).unlink(missing_ok=True)
        put_in_place(part, final)
    elif older.exists() and not final.exists():
        os.rename(older, final)
    for path in (part, older):
        shutil.rmtree(path, ignore_errors=True)


@dataclass(frozen=True)
class Saved:
    """A checkpoint as rotation sees it: its step, when it was written in seconds, and whether it looks whole.

    Args:
        is_enough: A training can resume from it; or the run wants to keep no more of a checkpoint than the model.
    """

    step: int
    time_s: float
    is_whole: bool
    is_enough: bool = True


def superfluous(saved: Sequence[Saved], limit: int | None, keep: Collection[int]) -> list[int]:
    """Steps whose checkpoints `save_total_limit` removes, the oldest first.

    Args:
        saved: All checkpoints of the folder.
        limit: Most checkpoints to keep; None or 0 = all.
        keep: Steps that stay whatever the limit is. So does the newest whole one, of those that are enough if any is.
    """
    if not limit or limit < 0 or not saved:
        return []
    times = [s.time_s for s in saved]
    is_dated = max(times) - min(times) >= _LEAST_SPREAD_S
    by_age = sorted(saved, key=lambda s: (s.time_s if is_dated else 0.0, s.step))
    whole = [s for s in by_age if s.is_whole]
    newest = ([s for s in whole if s.is_enough] or whole)[-1:]
    kept = {s.step for s in saved if s.step in keep} | {s.step for s in newest}
    # Torn ones go first: a torn one must not push out a whole one.
    others = [s.step for s in sorted(by_age, key=lambda s: s.is_whole) if s.step not in kept]
    return others[: max(0, len(saved) - max(limit, len(kept)))]


def rotate(output_dir: Path, limit: int | None, keep: Collection[int], *, saves_only_model: bool = False) -> None:
    """Deletes superfluous checkpoints, see `superfluous`.

    Args:
        output_dir: Folder of the checkpoints.
        limit: Most checkpoints to keep; None or 0 = all.
        keep: Steps that stay whatever the limit is.
        saves_only_model: The run wants checkpoints that no training can resume from.
    """
    if not limit or limit < 0:
        return
    folders = dict(checkpoints_in(output_dir))
    saved = [_as_saved(step, path, saves_only_model=saves_only_model) for step, path in folders.items()]
    for step in superfluous(saved, limit, keep):
        # The manifest goes first: half of a checkpoint must not count as a whole one.
        with suppress(OSError):
            (folders[step] / MANIFEST).unlink()
        shutil.rmtree(folders[step], ignore_errors=True)


def _as_saved(step: int, folder: Path, *, saves_only_model: bool) -> Saved:
    is_whole = check(folder, reads_files=False) is None
    manifest = read_manifest(folder) if is_whole else None
    is_enough = saves_only_model or (manifest is not None and manifest.is_resumable)
    return Saved(step, folder.stat().st_mtime, is_whole, is_enough)


def _files_in(folder: Path) -> list[Path]:
    return sorted(p for p in folder.rglob("*") if p.is_file() and p.name not in (MANIFEST, f".{MANIFEST}", MARK))


def _relative(path: Path, folder: Path) -> str:
    return path.relative_to(folder).as_posix()


def _measured(path: Path, *, must_flush: bool = False) -> tuple[int, int]:
    """Size in bytes and CRC-32 of a file."""
    size, crc, buffer = 0, 0, bytearray(_CHUNK_BYTES)
    with path.open("rb", buffering=0) as file:
        if must_flush:
            os.fsync(file.fileno())
        while count := file.readinto(buffer):
            crc = zlib.crc32(memoryview(buffer)[:count], crc)
            size += count
    return size, crc


def _flush_folder(folder: Path) -> None:
    """Flushes the names in a folder to the disk, so that they survive a loss of power."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        # Some network file systems flush files only.
        if error.errno not in (errno.EINVAL, errno.EBADF, errno.ENOTSUP):
            raise
    finally:
        os.close(descriptor)


def _crc_of(body: Any) -> int:
    return zlib.crc32(json.dumps(body, sort_keys=True).encode())
