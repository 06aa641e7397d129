"""Was a checkpoint written by ranks that hold parts of the weights? Only files; no torch.

The two modes do not read each other's checkpoints: accelerate looks for files that the other mode does not write, and a
Trainer refuses those that FSDP writes.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from unsloth_multigpu.checkpoint.manifest import Manifest, checkpoints_in, read_manifest
from unsloth_multigpu.errors import SetupError
from unsloth_multigpu.trainer_protocol import TrainerLike

# Of accelerate's FSDP, whole or in parts, and of Unsloth's with UNSLOTH_FSDP2_DCP_OPTIM=1.
_SHARDED_FILES = ("pytorch_model_fsdp.bin", "pytorch_model_fsdp_*/.metadata", "optimizer.bin", "optimizer_*/.metadata")
_WHOLE_FILE = "optimizer.pt"
_HELD = {True: "a part of the weights (sharded)", False: "all weights (not sharded)"}


def was_sharded(folder: Path, manifest: Manifest | None) -> bool | None:
    """Whether ranks that each held a part of the weights wrote a checkpoint. None = nothing there tells it.

    Args:
        folder: The checkpoint.
        manifest: Its own, if it has one. One of an earlier version does not say it; then the files do.
    """
    if manifest is not None and manifest.is_sharded is not None:
        return manifest.is_sharded
    if any(next(folder.glob(name), None) is not None for name in _SHARDED_FILES):
        return True
    return False if (folder / _WHOLE_FILE).is_file() else None


def refuse_other_mode(
    folder: Path, manifest: Manifest | None, *, is_sharded: bool, world_size: int, files_tell: bool = True
) -> None:
    """Refuses to resume a sharded training from a checkpoint of one that was not, and or the reverse.

    Args:
        folder: The checkpoint.
        manifest: Its own, if it has one.
        is_sharded: Each rank of this training holds a part of the weights.
        world_size: Ranks of this training.
        files_tell: False = the engine that shards writes the files of one process, as Unsloth's does.

    Raises:
        SetupError: It was written in the other mode.
    """
    was = was_sharded(folder, manifest)
    is_told = manifest is not None and manifest.is_sharded is not None
    if was is None or was == is_sharded or not (is_told or files_tell):
        return
    mode = "Train sharded again (shard='on')" if was else "Train without sharding again (shard='off')"
    more = ", on two GPUs or more" if was and world_size == 1 else ""
    raise SetupError(
        f"{folder} was written by ranks that each held {_HELD[was]}, and now each holds {_HELD[is_sharded]}: a "
        "training cannot resume in the other mode.",
        hint=f"{mode}{more}, or begin a new training: load the model from that folder, set resume='off' and leave "
        "resume_from_checkpoint out.",
    )


def refuse_sharded(trainer: TrainerLike, arguments: dict[str, Any]) -> None:
    """Refuses what one process cannot resume from, where nothing of ours steers its training.

    Args:
        trainer: A `transformers.Trainer` or subclass.
        arguments: Of the call of `train()`.

    Raises:
        SetupError: The checkpoint that the script asks for was written by ranks that each held a part of the weights.
    """
    asked = arguments.get("resume_from_checkpoint")
    if asked is True:  # The Trainer takes the newest, and says so where there is none.
        asked = next((path for _, path in checkpoints_in(Path(trainer.args.output_dir))), None)
    if not isinstance(asked, (str, os.PathLike)) or trainer.is_fsdp_enabled:
        return
    folder = Path(asked)
    try:
        manifest = read_manifest(folder)
    except ValueError:
        manifest = None  # Whether it is whole is not checked here either.
    refuse_other_mode(folder, manifest, is_sharded=False, world_size=1)
