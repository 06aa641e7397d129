"""Chooses the checkpoint that a training resumes from, by the manifests in an output folder. Needs no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from unsloth_multigpu.checkpoint.manifest import MANIFEST, Manifest, check, checkpoints_in, read_manifest
from unsloth_multigpu.errors import ResumeError, SetupError
from unsloth_multigpu.logs import get_logger

logger = get_logger(__name__)

_OF_ANOTHER_RUN = "another run wrote it"
_HELD = {True: "a part of the weights (sharded)", False: "all weights (not sharded)"}


@dataclass(frozen=True)
class Wanted:
    """Which checkpoints a training can resume from.

    Args:
        world_size: Ranks of this run.
        grows_with_ranks: More ranks make a step larger (global_batch="scale").
        facts: Facts that must be equal, see `checkpoint.resume.Resume.facts`. None = any training.
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


def find_newest(output_dir: Path, wanted: Wanted) -> Path | None:
    """Returns the newest complete checkpoint, and warns of newer ones that are skipped.

    Raises:
        ResumeError: See `Wanted.objection`.
    """
    for _, folder in checkpoints_in(output_dir):
        problem = _problem(folder, wanted)
        if problem is None:
            return folder
        if problem != _OF_ANOTHER_RUN:
            logger.warning("%s is skipped: %s", folder, problem)
    return None


def check_asked(folder: Path, wanted: Wanted) -> None:
    """Checks a checkpoint that the script names. If it does not exist, Hugging Face raises its own error.

    Raises:
        ResumeError: It is incomplete, or the training cannot resume from it.
    """
    problem = _problem(folder, wanted) if folder.is_dir() else None
    if problem is not None:
        newest = next((other for _, other in checkpoints_in(folder.parent) if _problem(other, wanted) is None), None)
        other = "Its folder has no complete checkpoint" if newest is None else f"Use {newest}"
        raise ResumeError(
            f"a training cannot resume from {folder}: {problem}.",
            hint=f"{other}, or load the model from it and begin a new training. If you changed the files on purpose, "
            f"delete its {MANIFEST}.",
        )


def _problem(folder: Path, wanted: Wanted) -> str | None:
    """Returns why a training cannot resume from a checkpoint; None if it can."""
    try:
        manifest = read_manifest(folder)
    except ValueError as error:
        return str(error)
    if manifest is not None:
        return wanted.objection(manifest, folder) or check(folder)
    if wanted.facts is not None:
        return f"it has no {MANIFEST}, which identifies the training"
    logger.warning("%s has no %s, so it cannot be checked for completeness", folder, MANIFEST)
    return None


def refuse_other_mode(folder: Path, manifest: Manifest | None, *, is_sharded: bool, world_size: int) -> None:
    """Refuses to resume a sharded training from a checkpoint of an unsharded one, or the reverse.

    The two modes write different files. A checkpoint without a manifest is left to the libraries.

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
