"""Patches savers so that rank 0 writes files once, while the other ranks wait."""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from unsloth_multigpu.patching import Patch

if TYPE_CHECKING:
    from unsloth_multigpu.group.manager import DDPManager
    from unsloth_multigpu.group.saves import Saves

_TRANSFORMERS, _DATASETS, _UNSLOTH = "transformers>=4.57,<6", "datasets>=3.4.1,<6", "unsloth_zoo>=2026.10.7"

# Target -> versions. Not every version has all of them.
_SAVERS = {
    "transformers.modeling_utils:PreTrainedModel.save_pretrained": _TRANSFORMERS,
    "transformers.tokenization_utils_base:PreTrainedTokenizerBase.save_pretrained": _TRANSFORMERS,
    "transformers.tokenization_utils_tokenizers:TokenizersBackend.save_pretrained": _TRANSFORMERS,
    "transformers.video_processing_utils:BaseVideoProcessor.save_pretrained": _TRANSFORMERS,
    "transformers.processing_utils:ProcessorMixin.save_pretrained": _TRANSFORMERS,
    "transformers.image_processing_base:ImageProcessingMixin.save_pretrained": _TRANSFORMERS,
    "transformers.feature_extraction_utils:FeatureExtractionMixin.save_pretrained": _TRANSFORMERS,
    "transformers.configuration_utils:PreTrainedConfig.save_pretrained": _TRANSFORMERS,
    "transformers.configuration_utils:PretrainedConfig.save_pretrained": _TRANSFORMERS,  # Its name up to version 4.
    "transformers.generation.configuration_utils:GenerationConfig.save_pretrained": _TRANSFORMERS,
    "peft.peft_model:PeftModel.save_pretrained": "peft>=0.18",
    "unsloth_zoo.cpu.loader:save_pretrained_merged": _UNSLOTH,
    "unsloth_zoo.cpu.loader:save_pretrained_gguf": _UNSLOTH,
    "matplotlib.figure:Figure.savefig": "matplotlib>=3",
    **{f"datasets.arrow_dataset:Dataset.{name}": _DATASETS for name in ("save_to_disk", "to_csv", "to_json")},
    "datasets.arrow_dataset:Dataset.to_parquet": _DATASETS,
    "transformers.utils.hub:PushToHubMixin.push_to_hub": _TRANSFORMERS,
    "unsloth_zoo.cpu.loader:push_to_hub_merged": _UNSLOTH,
    "datasets.arrow_dataset:Dataset.push_to_hub": _DATASETS,
}


def saving_patches(gate: SaveGate) -> list[Patch]:
    """Returns patches of all functions that write files or upload."""
    trainer, bind = "transformers.trainer:Trainer", functools.partial(_bind_guarded, gate)
    return [
        *(Patch(target, supports, gate.once, optional=True) for target, supports in _SAVERS.items()),
        Patch(f"{trainer}.save_model", _TRANSFORMERS, gate.after_rank_0),
        *(Patch(f"{trainer}.{n}", _TRANSFORMERS, gate.learn_of_rank_0) for n in ("push_to_hub", "init_hf_repo")),
        Patch("unsloth.save:_bind_saving_method", "unsloth>=2026.10.7", bind, optional=True),
    ]


class SaveGate:
    """Lets rank 0 write while the other ranks wait for it, see `group.saves`.

    Args:
        get_manager: Returns the manager, whose store works without a process group; None after the session is closed,
            since savers that Unsloth has put on a model outlive it.
    """

    def __init__(self, rank: int, get_manager: Callable[[], DDPManager | None]) -> None:
        self._rank = rank
        self._get_manager = get_manager
        self._is_inside = False
        self._is_writer = rank == 0
        # On rank 0: the gathered weights of the sharded model that is being saved.
        self._state: dict[str, Any] | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        # Unsloth puts guarded savers on the tokenizer, which mapped functions hold and `datasets` hashes.
        return str, (type(self).__name__,)

    def once(self, original: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """Lets only rank 0 write or upload. Otherwise all ranks write one folder at once, and read unfinished files."""
        return self._save(original, args, kwargs, runs_everywhere=False)

    def after_rank_0(self, original: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """Makes the other ranks wait for rank 0, which alone saves, so that they can read the folder afterwards."""
        return self._save(original, args, kwargs, runs_everywhere=True)

    def learn_of_rank_0(self, original: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """Raises an error of rank 0, which alone uploads, on the other ranks, too: they would wait for its save."""
        return self._save(original, args, kwargs, runs_everywhere=True, names_path=False)

    def _save(
        self,
        original: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        *,
        runs_everywhere: bool,
        names_path: bool = True,
    ) -> Any:
        path, name = _path_of(args, kwargs) if names_path else "", getattr(original, "__qualname__", "save")
        if self._is_inside:
            # Savers call each other; the outermost call counts for all of them. A file object is the rank's own.
            is_run = path is None or self._is_writer or runs_everywhere
            return self._call(original, args, kwargs) if is_run else None
        manager = None if path is None else self._get_manager()
        if manager is None and path is not None and sharded_model(args) is not None:
            from unsloth_multigpu.group.saves import saved_alone

            raise saved_alone(name)
        if path is None or manager is None:
            return self._call(original, args, kwargs)
        saves = manager.saves
        with saves.visit(f"{name}({path!r})" if names_path else name):
            runs_here = runs_everywhere
            if (model := sharded_model(args)) is not None:
                runs_here = self._gather(saves, model, original, is_of_trainer=model is not args[0])
            save = functools.partial(self._outermost, original, args, kwargs)
            if self._rank == 0:
                return saves.write("" if _uploads(original) else path, save)
            if runs_everywhere and getattr(getattr(args[0], "args", None), "should_save", False):
                save(is_writer=True)  # save_on_each_node: the first rank of each node writes its own.
            elif runs_here:
                save()
            is_rank_0s, result = saves.follow()
            return result if is_rank_0s or runs_here else save(is_writer=True)

    def _gather(self, saves: Saves, model: Any, original: Callable[..., Any], *, is_of_trainer: bool) -> bool:
        """Gathers the weights of a sharded model on rank 0. Collective.

        Returns True if the saver gathers them itself, so that all ranks must call it.

        Raises:
            DistributedError: Another rank's script has ended without this save.
            RankTimeoutError: Another rank has not reached this save.
        """
        from unsloth_multigpu.shard.whole import whole_state

        saves.meet()
        if is_of_trainer or original.__module__.startswith("unsloth."):
            return True
        state = whole_state(model)
        self._state = state if self._rank == 0 else None
        return False

    def _call(self, original: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Calls the function. A saver of a sharded model gets the gathered weights and the model's original class."""
        # An uploader calls a saver, which gets them.
        if _uploads(original) or not args or sharded_model(args) is not args[0]:
            return original(*args, **kwargs)
        from unsloth_multigpu.shard.whole import own_class, tied_again

        gathered = kwargs.get("state_dict")  # By the Trainer.
        state = tied_again(args[0], gathered) if gathered else self._state
        if not state:
            return original(*args, **kwargs)
        with own_class(args[0]):
            return original(*args, **{**kwargs, "state_dict": state})

    def _outermost(
        self, original: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], *, is_writer: bool = False
    ) -> Any:
        self._is_inside, self._is_writer = True, is_writer or self._rank == 0
        try:
            return self._call(original, args, kwargs)
        finally:
            self._is_inside, self._is_writer = False, self._rank == 0
            self._state = None

    def leave(self) -> None:
        """Publishes that this rank's script has ended, since others may wait for it to save a sharded model."""
        dist, manager = sys.modules.get("torch.distributed"), self._get_manager()
        if manager is None or dist is None or not dist.is_initialized():
            return  # This rank has not opened a process group, so no other rank waits for it.
        manager.saves.leave()


def _uploads(original: Callable[..., Any]) -> bool:
    return getattr(original, "__name__", "").startswith("push_to_hub")


def _bind_guarded(
    gate: SaveGate, original: Callable[..., Any], /, func: Callable[..., Any], obj: Any, name: str
) -> Any:
    """Guards the savers of Unsloth: two ranks that merge into one folder would merge the LoRA weights twice."""
    return original(functools.wraps(func)(functools.partial(gate.once, func)), obj, name)


def sharded_model(args: tuple[Any, ...]) -> Any:
    """Returns the sharded model of a saver: its `self`, or the `model` of that; None if nothing is sharded."""
    torch = sys.modules.get("torch")
    if torch is None or not args:
        return None
    owners = (args[0], getattr(args[0], "model", None) if hasattr(args[0], "accelerator") else None)
    from unsloth_multigpu.group.shards import has_shards

    return next((o for o in owners if isinstance(o, torch.nn.Module) and has_shards(o)), None)


def _path_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> str | None:
    """Returns the path: the first argument after `self`, or its keyword. None for file objects."""
    names = ("save_directory", "output_dir", "fname", "dataset_path", "path_or_buf", "repo_id")
    value = args[1] if len(args) > 1 else next((kwargs[n] for n in names if n in kwargs), "")
    if isinstance(value, (str, os.PathLike)):
        # A repository's name is not a path, but making it absolute does no harm: it is only compared.
        return os.path.abspath(os.fspath(value))
    return "" if value is None else None
