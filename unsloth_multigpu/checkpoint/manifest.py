"""Manifests, which mark complete checkpoints because they are written last, and the lock of a save. Needs no torch.

The manifest's CRC-32 sums find truncated files and flipped bits. They do not protect against forgery.
"""

from __future__ import annotations

import dataclasses
import errno
import fcntl
import json
import os
import re
import shutil
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from unsloth_multigpu.logs import get_logger
from unsloth_multigpu.wire.process import try_lock

logger = get_logger(__name__)

MANIFEST = "unsloth_multigpu.json"
# Checkpoints are written in this folder of the output folder, and renamed when they are complete.
PART_FOLDER = "_unsloth_multigpu_part"
_REPLACED = "replaced-"  # The older checkpoint of the same name, in that folder.
_FORMAT = 2
_CHUNK_BYTES = 1 << 22
_NAME = re.compile(r"checkpoint-(\d+)")


@dataclass(frozen=True)
class Manifest:
    """Description of a checkpoint.

    Args:
        run_id: The run that wrote it, "" if the launcher has set none.
        step: Optimizer steps.
        world_size: Ranks that wrote it.
        is_resumable: It has weights, an optimizer and the Trainer's state, so not with `save_only_model`.
        facts: Identify the training, see `checkpoint.resume.Resume.facts`.
        cursor: Finished "steps" of the epoch, if this package divides its samples; the "epoch" of a stream.
        files: Size in bytes and CRC-32 of each file, by its path in the folder.
        is_sharded: Each rank held a shard of the weights. None = not known.
        first_step: Result of the comparison of the first step with one process.
        is_evaluation_due: The training was stopped before or in the evaluation of this step.
    """

    run_id: str
    step: int
    world_size: int
    is_resumable: bool
    facts: dict[str, Any]
    cursor: dict[str, int]
    files: dict[str, tuple[int, int]] = dataclasses.field(default_factory=dict)
    is_sharded: bool | None = None
    first_step: dict[str, Any] = dataclasses.field(default_factory=dict)
    is_evaluation_due: bool = False


def seal(folder: Path, manifest: Manifest) -> None:
    """Flushes all files of a folder to the disk, and then writes the manifest with their sizes and checksums.

    Raises:
        OSError: The disk is full or fails.
    """
    files = {path.relative_to(folder).as_posix(): _measured(path, must_flush=True) for path in _files_in(folder)}
    for inner in {path.parent for path in _files_in(folder)} | {folder}:
        flush_folder(inner)
    body = {"format": _FORMAT, **dataclasses.asdict(dataclasses.replace(manifest, files=files))}
    part = folder / f".{MANIFEST}"
    with part.open("w", encoding="ascii") as file:
        json.dump({"crc32": _crc_of(body), "manifest": body}, file, indent=1)
        file.flush()
        os.fsync(file.fileno())
    os.replace(part, folder / MANIFEST)
    flush_folder(folder)


def read_manifest(folder: Path) -> Manifest | None:
    """Reads the manifest of a checkpoint; None if the Trainer wrote it without this package.

    Raises:
        ValueError: The manifest is damaged, or has another format.
    """
    try:
        stored = json.loads((folder / MANIFEST).read_bytes())
        body = stored["manifest"]
        is_intact = stored["crc32"] == _crc_of(body)
        version = body.pop("format")
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        why = f": {error.strerror}" if isinstance(error, OSError) else ""
        raise ValueError(f"{MANIFEST} cannot be read{why}") from error
    if not is_intact:
        raise ValueError(f"{MANIFEST} was changed after it was written")
    if version != _FORMAT:
        raise ValueError(f"{MANIFEST} has format {version} of another version of unsloth_multigpu")
    return Manifest(**{**body, "files": {name: (size, crc) for name, (size, crc) in body["files"].items()}})


def check(folder: Path) -> str | None:
    """Returns the first defect of a checkpoint; None if it is complete. Additional files are ignored."""
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
            if _measured(path)[1] != crc:
                return f"{name} was changed after it was written"
        except OSError as error:
            return f"{name} cannot be read: {error.strerror}"
    return None


def checkpoints_in(output_dir: Path) -> list[tuple[int, Path]]:
    """Returns (step, folder) of each checkpoint, the newest first."""
    if not output_dir.is_dir():
        return []
    found = [(_NAME.fullmatch(path.name), path) for path in output_dir.iterdir() if path.is_dir()]
    return sorted(((int(match[1]), path) for match, path in found if match), reverse=True)


def put_in_place(part: Path, final: Path) -> None:
    """Renames a sealed folder to its final name, and then deletes an older folder of that name."""
    older = part.with_name(_REPLACED + final.name)
    if final.exists():
        os.rename(final, older)
    os.rename(part, final)
    flush_folder(final.parent)
    shutil.rmtree(older, ignore_errors=True)
    with suppress(OSError):  # Not empty.
        part.parent.rmdir()


@contextmanager
def saving_in(output_dir: Path) -> Iterator[bool]:
    """Locks a folder within the context, in which one process at a time writes, completes or removes checkpoints.

    Yields False if another process has the lock. The lock ends with its process. So files of a killed run are told
    apart from those of a running one. Yields True on a file system without locks.
    """
    descriptor = os.open(output_dir, os.O_RDONLY | os.O_DIRECTORY)
    try:
        yield try_lock(descriptor) != "held"
    finally:
        with suppress(OSError):  # Closing is not enough: a forked child has the lock, too.
            fcntl.flock(descriptor, fcntl.LOCK_UN)
        os.close(descriptor)


def clear_parts(output_dir: Path) -> bool:
    """Removes the incomplete checkpoints of killed runs. Those that are complete but not renamed get their names.

    Returns False, and changes nothing, if another process is saving in the folder.
    """
    parts = output_dir / PART_FOLDER
    if not parts.is_dir():
        return True
    with saving_in(output_dir) as is_alone:
        for name in {path.name.removeprefix(_REPLACED) for path in parts.iterdir()} if is_alone else ():
            try:
                settle(parts / name, output_dir / name)
            except OSError as error:  # It may be another user's.
                logger.warning("the incomplete checkpoint %s cannot be removed: %s", parts / name, error)
    return is_alone


def settle(part: Path, final: Path) -> None:
    """Renames what an ended save has left if it is complete, else removes it. Requires the lock of `saving_in`."""
    older = part.with_name(_REPLACED + part.name)
    if check(part) is None:
        put_in_place(part, final)
    elif older.exists() and not final.exists():
        os.rename(older, final)
    for path in (part, older):
        shutil.rmtree(path, ignore_errors=True)
    with suppress(OSError):  # Not empty, or gone.
        part.parent.rmdir()


def _files_in(folder: Path) -> list[Path]:
    return sorted(p for p in folder.rglob("*") if p.is_file() and p.name not in (MANIFEST, f".{MANIFEST}"))


def _measured(path: Path, *, must_flush: bool = False) -> tuple[int, int]:
    """Returns size in bytes and CRC-32 of a file."""
    size, crc, buffer = 0, 0, bytearray(_CHUNK_BYTES)
    with path.open("rb", buffering=0) as file:
        if must_flush:
            os.fsync(file.fileno())
        while count := file.readinto(buffer):
            crc = zlib.crc32(memoryview(buffer)[:count], crc)
            size += count
    return size, crc


def flush_folder(folder: Path) -> None:
    """Flushes a folder's entries to the disk, so that they survive a power failure."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        # Some network file systems cannot flush folders.
        if error.errno not in (errno.EINVAL, errno.EBADF, errno.ENOTSUP):
            raise
    finally:
        os.close(descriptor)


def _crc_of(body: Any) -> int:
    return zlib.crc32(json.dumps(body, sort_keys=True).encode())
