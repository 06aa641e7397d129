"""Chooses the checkpoint that a training resumes from, by the manifests in an output folder. Needs no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from unsloth_multigpu.checkpoint.manifest import MANIFEST, Manifest, check, checkpoints_in, read_manifest
from unsloth_multigpu.errors import ResumeError, SetupError

_OF_ANOTHER_RUN = "another run wrote it"
_HELD = {True: "a part of the weights (sharded)", False: "all weights (not sharded)"}


@dataclass(frozen=True)
class Wanted:
    """Which checkpoints a training can resume from.

    Args:
        world_size: Ranks of this run.
        grows_with_ranks: More ranks make a step larger (global_batch="scale").
        facts: Facts that must be equal, see `checkpoint.resume.training_facts`. None = any training.
        run_id: The run that must have written it. None = any.
    """

    world_size: int
    grows_with_ranks: bool
    facts: Mapping[str, Any] | None = None
    run_id: str | None = None

    def objection(self, manifest: Manifest, folder: Path) -> str | None:
        """Returns why a training cannot resume from a checkpoint, by its manifest; None if it can.

        Raises:
            ResumeError: It belongs to this training, but a step had other samples.
        """
        if self.run_id not in (None, manifest.run_id):
            return _OF_ANOTHER_RUN
        if self.facts is not None:
            for name in {**self.facts, **manifest.facts}:
                theirs, mine = manifest.facts.get(name), self.facts.get(name)
                if theirs != mine:
                    return f"{name} was {theirs}, now it is {mine}"
        if not manifest.is_resumable:
            return "it has no optimizer (save_only_model=True)"
        if self.grows_with_ranks and manifest.world_size != self.world_size:
            raise ResumeError(
                f"{folder} was written by {manifest.world_size} rank(s), now there are {self.world_size}: with "
                "global_batch='scale' a step would have other samples.",
                hint=f"Set num_gpus={manifest.world_size}, or begin a new training with resume='off'.",
            )
        return None


@dataclass(frozen=True)
class Found:
    """The checkpoint that a training resumes from.

    Args:
        folder: Its folder; None without one.
        lines: Warnings, one for each checkpoint that is skipped or cannot be checked.
    """

    folder: Path | None
    lines: tuple[str, ...] = ()


def find_newest(output_dir: Path, wanted: Wanted) -> Found:
    """Finds the newest complete checkpoint. Older ones are not read.

    Args:
        output_dir: Folder of the Trainer's checkpoints.
        wanted: The conditions.

    Raises:
        ResumeError: See `Wanted.objection`.
    """
    lines: list[str] = []
    for _, folder in checkpoints_in(output_dir):
        problem, warnings = _examined(folder, wanted)
        lines += warnings
        if problem is None:
            return Found(folder, tuple(lines))
        if problem != _OF_ANOTHER_RUN:
            lines.append(f"{folder} is skipped: {problem}")
    return Found(None, tuple(lines))


def check_asked(folder: Path, wanted: Wanted) -> tuple[str, ...]:
    """Checks a checkpoint that the script names. If it does not exist, Hugging Face raises its own error.

    Returns:
        Warnings.

    Raises:
        ResumeError: It is incomplete, or the training cannot resume from it.
    """
    problem, warnings = _examined(folder, wanted) if folder.is_dir() else (None, ())
    if problem is not None:
        newest = find_newest(folder.parent, wanted).folder
        other = "Its folder has no complete checkpoint" if newest is None else f"Use {newest}"
        raise ResumeError(
            f"a training cannot resume from {folder}: {problem}.",
            hint=f"{other}, or load the model from it and begin a new training. If you changed the files on purpose, "
            f"delete its {MANIFEST}.",
        )
    return warnings


def _examined(folder: Path, wanted: Wanted) -> tuple[str | None, tuple[str, ...]]:
    """Returns why a training cannot resume from a checkpoint, None if it can; and warnings."""
    try:
        manifest = read_manifest(folder)
    except ValueError as error:
        return str(error), ()
    if manifest is not None:
        return wanted.objection(manifest, folder) or check(folder), ()
    if wanted.facts is not None:
        return f"it has no {MANIFEST}, which identifies the training", ()
    return None, (f"{folder} has no {MANIFEST}, so it cannot be checked for completeness",)


def refuse_other_mode(folder: Path, manifest: Manifest | None, *, is_sharded: bool, world_size: int) -> None:
    """Refuses to resume a sharded training from a checkpoint of an unsharded one, or the reverse.

    The two modes write different files. A checkpoint without a manifest is left to the libraries.

    Args:
        folder: The checkpoint.
        manifest: Its manifest, if it has one.
        is_sharded: Each rank of this training holds a shard of the weights.
        world_size: Ranks of this training.

    Raises:
        SetupError: It was written in the other mode.
    """
    was = None if manifest is None else manifest.is_sharded
    if was is None or was == is_sharded:
        return
    mode = "Train sharded again (shard='on')" if was else "Train without sharding again (shard='off')"
    more = ", on two GPUs or more" if was and world_size == 1 else ""
    raise SetupError(
        f"{folder} was written by ranks that each held {_HELD[was]}, and now each holds {_HELD[is_sharded]}: a "
        "training cannot resume in the other mode.",
        hint=f"{mode}{more}, or begin a new training: load the model from that folder, set resume='off' and leave "
        "resume_from_checkpoint out.",
    )
