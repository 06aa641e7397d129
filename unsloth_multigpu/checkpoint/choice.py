"""Which checkpoint a training resumes from: a decision of one node over the manifests in an output folder."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from unsloth_multigpu.checkpoint.manifest import MANIFEST, Manifest, check, checkpoints_in, read_manifest
from unsloth_multigpu.checkpoint.mode import was_sharded
from unsloth_multigpu.errors import ResumeError

_NO_OPTIMIZER = "it holds no optimizer (save_only_model=True)"


@dataclass(frozen=True)
class Wanted:
    """Which checkpoints a training can resume from.

    Args:
        world_size: Ranks of this run.
        grows_with_ranks: True where a step has as many samples more as there are ranks (global_batch="scale").
        facts: What the training must be, see `checkpoint.resume.training_facts`. None = whatever the script passes.
        run_id: The run that must have written it. None = any.
    """

    world_size: int
    grows_with_ranks: bool
    facts: Mapping[str, Any] | None = None
    run_id: str | None = None

    def objection(self, manifest: Manifest, folder: Path) -> str | None:
        """Why a training cannot resume from a checkpoint, without a look at its files.

        Raises:
            ResumeError: It is of this training, but its steps are other ones.
        """
        if self.facts is not None:
            for name in {**self.facts, **manifest.facts}:
                theirs, mine = manifest.facts.get(name), self.facts.get(name)
                if theirs != mine:
                    return f"{name} was {theirs}, now it is {mine}"
        if not manifest.is_resumable:
            return _NO_OPTIMIZER
        if self.grows_with_ranks and manifest.world_size != self.world_size:
            raise ResumeError(
                f"{folder} was written by {manifest.world_size} rank(s), now there are {self.world_size}: with "
                "global_batch='scale' a step has other samples then.",
                hint=f"Set num_gpus={manifest.world_size}, or begin a new training with resume='off'.",
            )
        return None


@dataclass(frozen=True)
class Found:
    """The newest checkpoint of one node that a training can resume from, if any, and what is to be said about others.

    Args:
        step: None = there is none.
        lines: One for each checkpoint that was passed over, or that cannot be checked.
    """

    step: int | None
    lines: tuple[str, ...]


def find_newest(output_dir: Path, wanted: Wanted, at_most: int | None = None) -> Found:
    """Looks for the newest whole checkpoint. Only its files are read, and those of newer ones that turn out torn.

    Args:
        output_dir: Where the Trainer puts its checkpoints.
        wanted: Which of them count.
        at_most: The newest step that counts; None = any.

    Raises:
        ResumeError: See `Wanted.objection`.
    """
    lines = []
    for step, folder in checkpoints_in(output_dir):
        if at_most is not None and step > at_most:
            continue
        try:
            manifest = read_manifest(folder)
        except ValueError as error:
            lines.append(f"{folder} is passed over: {error}")
            continue
        if manifest is None and wanted.facts is None:
            return Found(step, (*lines, _unchecked(folder)))
        if manifest is None:
            lines.append(f"{folder} is passed over: it has no {MANIFEST} that tells what training it is of")
            continue
        if wanted.run_id not in (None, manifest.run_id):
            continue
        problem = wanted.objection(manifest, folder) or check(folder)
        if problem is None:
            return Found(step, tuple(lines))
        lines.append(f"{folder} is passed over: {problem}")
    return Found(None, tuple(lines))


def find_mode(output_dir: Path, facts: Mapping[str, Any]) -> tuple[Path, bool] | None:
    """The checkpoint that resume="auto" would take, and whether its training was sharded. None = there is none.

    Contents are not read, which may take minutes: one that turns out torn has most likely an older one of its way.

    Args:
        output_dir: Where the Trainer puts its checkpoints.
        facts: What the training must be, see `checkpoint.resume.training_facts`.
    """
    for _, folder in checkpoints_in(output_dir):
        try:
            manifest = read_manifest(folder)
        except ValueError:
            continue
        if manifest is None:
            continue
        # Whether the number of ranks will do is not asked here, and refused where it is known.
        wanted = Wanted(manifest.world_size, grows_with_ranks=False, facts=facts)
        if wanted.objection(manifest, folder) is None and check(folder, reads_files=False) is None:
            way = was_sharded(folder, manifest)
            return None if way is None else (folder, way)
    return None


def check_asked(folder: Path, wanted: Wanted) -> tuple[str, ...]:
    """Checks a checkpoint that the script names.

    Returns:
        What is to be said about it.

    Raises:
        ResumeError: It is not whole, or the training cannot resume from it.
    """
    try:
        manifest = read_manifest(folder)
        problem = None if manifest is None else wanted.objection(manifest, folder) or check(folder)
    except ValueError as error:
        problem = str(error)
    if problem is None:
        # What is not there at all, Hugging Face's own error names.
        return (_unchecked(folder),) if manifest is None and folder.is_dir() else ()
    if problem == _NO_OPTIMIZER:
        raise ResumeError(
            f"a training cannot resume from {folder}: {problem}.",
            hint="Load the model from it and begin a new training.",
        )
    newest = find_newest(folder.parent, wanted).step
    other = "Its folder has no whole one" if newest is None else f"Use {folder.parent}/checkpoint-{newest}"
    raise ResumeError(
        f"{folder} is not whole: {problem}.", hint=f"{other}; if you changed it on purpose, delete its {MANIFEST}."
    )


def _unchecked(folder: Path) -> str:
    return f"{folder} has no {MANIFEST}: whether it is whole cannot be checked"
