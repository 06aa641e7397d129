"""Patches functions that save or upload, so that only rank 0 writes, while the other ranks wait."""

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

# Target -> supported versions. Not every version has all targets.
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
    """Returns patches of the functions that save or upload."""
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
        get_manager: Returns the manager, whose store works without a process group. Returns None after the session is
            closed: savers that Unsloth has bound to a model outlive it.
    """

    def __init__(self, rank: int, get_manager: Callable[[], DDPManager | None]) -> None:
        self._rank = rank
        self._get_manager = get_manager
        self._is_inside = False
        self._is_writer = rank == 0
        # On rank 0, while a sharded model is saved: its gathered weights.
        self._state: dict[str, Any] | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        # Unsloth binds patched savers to the tokenizer, which mapped functions refer to and `datasets` hashes.
        return str, (type(self).__name__,)

    def once(self, original: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """Lets only rank 0 save or upload. Otherwise all ranks write into one folder, and read unfinished files."""
        return self._save(original, args, kwargs, runs_everywhere=False)

    def after_rank_0(self, original: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """Makes the other ranks wait until rank 0, which alone saves, has done so: they may read the folder next."""
        return self._save(original, args, kwargs, runs_everywhere=True)

    def learn_of_rank_0(self, original: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """Raises an error of rank 0, which alone uploads, also on the other ranks, which would wait for it."""
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
            # Savers call each other, and the outermost one has waited already. A file object belongs to its rank.
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
                save(is_writer=True)  # save_on_each_node: the first rank of each node writes, too.
            elif runs_here:
                save()
            is_rank_0s, result = saves.follow()
            return result if is_rank_0s or runs_here else save(is_writer=True)

    def _gather(self, saves: Saves, model: Any, original: Callable[..., Any], *, is_of_trainer: bool) -> bool:
        """Gathers the weights of a sharded model on rank 0. Collective.

        Returns True, and gathers nothing, if the saver gathers them itself: then all ranks must call it.

        Raises:
            DistributedError: Another rank's script has ended without this save.
            RankTimeoutError: Another rank has not reached this save.
        """
        from unsloth_multigpu.shard.whole import full_state_dict

        saves.meet()
        if is_of_trainer or original.__module__.startswith("unsloth."):
            return True
        state = full_state_dict(model)
        self._state = state if self._rank == 0 else None
        return False

    def _call(self, original: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Calls the original. For a sharded model it gets the gathered weights, and sees the model's original class."""
        # A function that uploads calls a saver, which gets them.
        if _uploads(original) or not args or sharded_model(args) is not args[0]:
            return original(*args, **kwargs)
        from unsloth_multigpu.shard.whole import original_class, with_tied_weights

        gathered = kwargs.get("state_dict")  # By the Trainer.
        state = with_tied_weights(args[0], gathered) if gathered else self._state
        if not state:
            return original(*args, **kwargs)
        with original_class(args[0]):
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
        """Publishes that this rank's script has ended: others may wait for it to save a sharded model."""
        dist, manager = sys.modules.get("torch.distributed"), self._get_manager()
        if manager is None or dist is None or not dist.is_initialized():
            return  # Without a process group no other rank waits for this one.
        manager.saves.leave()


def _uploads(original: Callable[..., Any]) -> bool:
    return getattr(original, "__name__", "").startswith("push_to_hub")


def _bind_guarded(
    gate: SaveGate, original: Callable[..., Any], /, func: Callable[..., Any], obj: Any, name: str
) -> Any:
    """Lets only rank 0 run Unsloth's savers: two ranks that merge into one folder would merge LoRA weights twice."""
    return original(functools.wraps(func)(functools.partial(gate.once, func)), obj, name)


def sharded_model(args: tuple[Any, ...]) -> Any:
    """Returns the sharded model that is saved: `self`, or the `model` of a Trainer; None if it is not sharded."""
    torch = sys.modules.get("torch")
    if torch is None or not args:
        return None
    owners = (args[0], getattr(args[0], "model", None) if hasattr(args[0], "accelerator") else None)
    from unsloth_multigpu.group.shards import has_shards

    return next((o for o in owners if isinstance(o, torch.nn.Module) and has_shards(o)), None)


def _path_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> str | None:
    """Returns the first argument after `self`, or its keyword, as an absolute path; None for a file object."""
    names = ("save_directory", "output_dir", "fname", "dataset_path", "path_or_buf", "repo_id")
    value = args[1] if len(args) > 1 else next((kwargs[n] for n in names if n in kwargs), "")
    if isinstance(value, (str, os.PathLike)):
        # The name of a repository becomes a path, too. That does no harm: it is only compared.
        return os.path.abspath(os.fspath(value))
    return "" if value is None else None
