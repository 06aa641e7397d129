"""Patches that refuse a training in a process that this package does not steer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from unsloth_multigpu.errors import SetupError
from unsloth_multigpu.patching import Patch

_TRAIN, _SUPPORTS = "transformers.trainer:Trainer.train", "transformers>=4.57,<6"


def followed_train_patch(is_followed: Callable[[], bool]) -> Patch:
    """Returns the patch that stops a training which `unsloth-multigpu verify` does not record."""

    def refused(original: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """Refuses a training that verify does not record: it would run to its end and overwrite saved files."""
        if not is_followed():
            raise SetupError(
                "verify cannot follow this training and does not begin it: enable_multi_gpu() is not in effect.",
                hint="Let the script call it on every way to train(), or take it out: verify then does it.",
            )
        return original(*args, **kwargs)

    return Patch(_TRAIN, _SUPPORTS, refused)


def unsteered_train_patch(is_lone: Callable[[], bool]) -> Patch:
    """Returns the patch for a process started by multiprocessing, in which `enable_multi_gpu` does nothing.

    Args:
        is_lone: True if `enable_multi_gpu` is in effect nevertheless, or the process is not a rank.
    """

    def refused(original: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """Refuses the training of a rank that is taken for a helper process: it would train by itself."""
        if not is_lone():
            raise SetupError(
                "multiprocessing has started this process as a rank, and enable_multi_gpu() is not in effect: it was "
                "called while the script was imported, or before the variables of the rank were set.",
                hint="Call it in the function that multiprocessing starts, once RANK, LOCAL_RANK, WORLD_SIZE, "
                "MASTER_ADDR and MASTER_PORT are set; or start the script with `python train.py` and without spawn.",
            )
        return original(*args, **kwargs)

    return Patch(_TRAIN, _SUPPORTS, refused, optional=True)
