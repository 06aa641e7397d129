"""Files are written once: rank 0 saves, the others wait until the file is there and continue."""

from __future__ import annotations

import functools
import os
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

from unsloth_multigpu.errors import DistributedError, RankTimeoutError, SetupError
from unsloth_multigpu.hooks.journal import Entry, Journal, real_path, take_inventory
from unsloth_multigpu.hooks.outcome import error_of, failure
from unsloth_multigpu.logs import get_logger
from unsloth_multigpu.patching import Patch
from unsloth_multigpu.wire.wait import wait_until

if TYPE_CHECKING:
    from unsloth_multigpu.group.manager import DDPManager

logger = get_logger(__name__)

_POLL_S = 0.02
# After this time without the other ranks a save of a sharded model says whom it waits for.
_QUIET_S = 3.0
# After this time without a save of rank 0, a folder that rank 0 does not name counts as another rank's own.
OWN_PATH_GRACE_S = 10.0
# Key that a rank publishes when its script is over.
_LEFT = "parts/left/{}"
# An export that rank 0 has begun may take hours; if rank 0 dies meanwhile, the launcher ends the run.
SAVE_LIMIT_S = 86_400.0
_TRANSFORMERS = "transformers>=4.57,<6"
_DATASETS = "datasets>=3.4.1,<6"
_GATHERS = "Saving a sharded model gathers the weights of all ranks, so all ranks must call it."
_RACE = "All ranks would write one folder at once, and read what another is just writing."
_ONCE = "All ranks would upload the same files."
_UNSLOTH_MERGE = "Two ranks that merge into one folder merge the LoRA weights twice, without an error."

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
    "unsloth_zoo.cpu.loader:save_pretrained_merged": "unsloth_zoo>=2026.10.7",
    "unsloth_zoo.cpu.loader:save_pretrained_gguf": "unsloth_zoo>=2026.10.7",
    "matplotlib.figure:Figure.savefig": "matplotlib>=3",
    "datasets.arrow_dataset:Dataset.save_to_disk": _DATASETS,
    "datasets.arrow_dataset:Dataset.to_csv": _DATASETS,
    "datasets.arrow_dataset:Dataset.to_json": _DATASETS,
    "datasets.arrow_dataset:Dataset.to_parquet": _DATASETS,
}
_PUSHERS = {
    "transformers.utils.hub:PushToHubMixin.push_to_hub": _TRANSFORMERS,
    "unsloth_zoo.cpu.loader:push_to_hub_merged": "unsloth_zoo>=2026.10.7",
    "datasets.arrow_dataset:Dataset.push_to_hub": _DATASETS,
}


def saving_patches(gate: SaveGate) -> list[Patch]:
    """Patches of everything that writes files or uploads."""
    patches = [
        Patch(target=target, supports=supports, wrap=wrap, reason=reason, optional=True)
        for table, wrap, reason in ((_SAVERS, gate.once, _RACE), (_PUSHERS, gate.upload_once, _ONCE))
        for target, supports in table.items()
    ]
    patches.append(
        Patch(
            target="transformers.trainer:Trainer.save_model",
            supports=_TRANSFORMERS,
            wrap=gate.after_rank_0,
            reason="The Trainer saves from rank 0 alone and lets the others read a folder that is not there yet.",
        )
    )
    patches += [
        Patch(
            target=target,
            supports=_TRANSFORMERS,
            wrap=gate.learn_of_rank_0,
            reason="What fails where rank 0 alone uploads would leave the others waiting for its save.",
        )
        for target in ("transformers.trainer:Trainer.push_to_hub", "transformers.trainer:Trainer.init_hf_repo")
    ]
    patches.append(
        Patch(
            target="unsloth.save:_bind_saving_method",
            supports="unsloth>=2026.10.7",
            wrap=functools.partial(_bind_guarded, gate),
            reason=_UNSLOTH_MERGE,
            optional=True,
        )
    )
    return patches


class SaveGate:
    """Lets rank 0 write and the other ranks wait for it, by the path that is written.

    Waiting is by the store and not by a barrier: an export may take longer than a collective may, and code that only
    rank 0 reaches must not wait for the others. Rank 0 publishes each save when it begins and when it ends, and
    each removal of what it has saved.

    Args:
        rank: This rank.
        get_manager: Gives the manager, whose store works before there is a process group; None once the session is
            closed: savers that Unsloth has put on a model outlive it.

    Attributes:
        journal: What rank 0 has saved and removed.
        position: Number of the last entry of the journal that this rank has come past; -1 = none.
    """

    def __init__(self, rank: int, get_manager: Callable[[], DDPManager | None]) -> None:
        self.rank = rank
        self._get_manager = get_manager
        self._manager: DDPManager | None = None
        self._count_from_here()
        self._depth = 0
        self._is_writer = rank == 0
        # The whole weights of the sharded model that is being saved, on rank 0.
        self._state: dict[str, Any] | None = None

    def _count_from_here(self) -> None:
        self.journal = Journal()
        self.position = -1
        self._num_saves = 0
        self._counts: Counter[str] = Counter()
        # Files saved before that the running saver has removed.
        self.removed: list[str] = []

    def find_manager(self) -> DDPManager | None:
        """A new manager has an empty store: ranks that have left a cell at different places count from zero again."""
        manager = self._get_manager()
        if manager is not None and manager is not self._manager:
            self._manager = manager
            self._count_from_here()
        return manager

    @property
    def is_saving(self) -> bool:
        """True inside a saver."""
        return self._depth > 0

    def __reduce__(self) -> tuple[Any, ...]:
        # Unsloth puts guarded savers on the tokenizer, which mapped functions hold and `datasets` hashes.
        return str, (type(self).__name__,)

    def once(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Wraps a function `(self, path, ...)` that writes `path`: only rank 0 calls it."""
        return self._gated(original, runs_everywhere=False)

    def upload_once(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Wraps a function `(self, name, ...)` that uploads: only rank 0 calls it."""
        return self._gated(original, runs_everywhere=False, writes_files=False)

    def after_rank_0(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Wraps a function that all ranks must call but only rank 0 writes in: the others then wait for rank 0."""
        return self._gated(original, runs_everywhere=True)

    def learn_of_rank_0(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """As `after_rank_0`, for a function whose first argument is no path."""
        return self._gated(original, runs_everywhere=True, names_path=False)

    def _gated(
        self, original: Callable[..., Any], *, runs_everywhere: bool, writes_files: bool = True, names_path: bool = True
    ) -> Callable[..., Any]:
        @functools.wraps(original)
        def gated(*args: Any, **kwargs: Any) -> Any:
            path = _path_of(args, kwargs) if names_path else ""
            if self._depth:
                kwargs = self._given(args, kwargs)
            # A file object is the rank's own. Savers call each other; the outermost call counts for all of them.
            if path is None or (self._depth and (self._is_writer or runs_everywhere)):
                return self._call(original, args, kwargs)
            if self._depth:
                return None
            manager = self.find_manager()
            if manager is None:
                return original(*args, **kwargs)
            what = f"{getattr(original, '__qualname__', 'save')}({path!r})" if names_path else original.__qualname__
            self._num_saves += 1
            self._counts[what] += 1
            runs_here = runs_everywhere
            if (model := sharded_model(args)) is not None:
                runs_here = self._gather(manager, model, original, what, is_of_trainer=model is not args[0])
            # An uploader calls a saver, which is given them then.
            given = self._given(args, kwargs) if writes_files else kwargs
            save = functools.partial(self._nested, functools.partial(self._call, original, args, given))
            if self.rank == 0:
                entry = Entry(what, _folder_of(path, args) if writes_files else "")
                return self._write(manager, entry, save)
            if runs_everywhere and getattr(getattr(args[0], "args", None), "should_save", False):
                return self._write_own(save)  # save_on_each_node: the first rank of each node writes its own.
            if runs_here:
                save()
            place = self._place_of(manager, what)
            if place is not None:
                return self._outcome(manager, place, what)
            return None if runs_here else self._write_own(save)

        return gated

    def _gather(
        self, manager: DDPManager, model: Any, original: Callable[..., Any], what: str, *, is_of_trainer: bool
    ) -> bool:
        """Puts the parts of a sharded model together on rank 0, unless the saver does. Collective.

        Returns:
            True for a saver that puts them together itself, which all ranks are to call.

        Raises:
            SetupError: The saver reads weights of which each rank holds a part.
            DistributedError: Another rank's script has ended without it.
            RankTimeoutError: Another rank has not come to this save.
        """
        from unsloth_multigpu.group.shards import whole_state

        self._meet(manager, what)
        is_of_transformers = getattr(getattr(model, "config", None), "distributed_config", None) is not None
        if is_of_transformers and is_of_trainer:
            raise SetupError(
                f"{what}: a Trainer cannot save a model that transformers has sharded by DistributedConfig.",
                hint="Call trainer.model.save_pretrained(...) on all ranks.",
            )
        if is_of_transformers or is_of_trainer or original.__module__.startswith("unsloth."):
            return True
        if original.__module__.startswith("unsloth_zoo.cpu"):
            raise SetupError(
                f"{what}: Unsloth's CPU backend cannot merge or convert a sharded model.",
                hint="Save it by save_pretrained(), and merge it in a process of its own.",
            )
        state = whole_state(model)
        self._state = state if self.rank == 0 else None
        return False

    def _meet(self, manager: DDPManager, what: str) -> None:
        """Waits for all ranks, each of which holds a part of what is saved."""
        identity, number = manager.identity, self._counts[what]
        keys = {rank: f"parts/{what}/{number}/{rank}" for rank in range(identity.world_size)}
        manager.publish(keys[identity.rank])
        missing = list(keys)

        def are_there() -> bool:
            gone = [rank for rank in missing if manager.is_published(_LEFT.format(rank))]  # Asked first: a rank may
            missing[:] = [rank for rank in missing if not manager.is_published(keys[rank])]  # save and leave.
            if lost := [rank for rank in gone if rank in missing]:
                raise DistributedError(
                    f"{what}: the script of rank(s) {_listed(lost)} has ended without this save. {_GATHERS}",
                    hint="Call it on all ranks, not under `if rank == 0:`. The files are written once.",
                )
            return not missing

        begin_s, limit_s = time.monotonic(), manager.config.timeout_s
        if wait_until(are_there, begin_s + min(_QUIET_S, limit_s)):
            return
        logger.warning("%s waits for rank(s) %s. %s", what, _listed(missing), _GATHERS.rstrip("."))
        if not wait_until(are_there, begin_s + limit_s):
            raise RankTimeoutError(
                f"rank {identity.rank} waited timeout_s={limit_s:g} seconds for rank(s) {_listed(missing)} in {what}. "
                f"{_GATHERS}",
                hint="Call it on all ranks, not under `if rank == 0:`, or raise timeout_s where it only takes long.",
            )

    def _given(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        """The arguments of a model's saver, with its whole weights where these were gathered."""
        if not args or sharded_model(args) is not args[0]:
            return kwargs
        from unsloth_multigpu.group.shards import tied_again

        if gathered := kwargs.get("state_dict"):  # By the Trainer.
            return {**kwargs, "state_dict": tied_again(args[0], gathered)}
        return kwargs if self._state is None else {**kwargs, "state_dict": self._state}

    def _call(self, original: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        with self._as_it_was(args, kwargs):
            return original(*args, **kwargs)

    def _as_it_was(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> AbstractContextManager[None]:
        """A sharded model of which the whole weights are written has its own class for that long."""
        if not kwargs.get("state_dict") or sharded_model(args) is not args[0]:
            return nullcontext()
        from unsloth_multigpu.group.shards import own_class

        return own_class(args[0])

    def _write_own(self, save: Callable[[], Any]) -> Any:
        self._is_writer = True
        try:
            return save()
        finally:
            self._is_writer = False

    def _nested(self, save: Callable[[], Any]) -> Any:
        self._depth += 1
        try:
            return save()
        finally:
            self._depth -= 1
            if not self._depth:
                self._state = None

    def _write(self, manager: DDPManager, entry: Entry, save: Callable[[], Any]) -> Any:
        number = self.journal.begin(manager, entry)
        self.removed = []
        before = take_inventory(entry.path) if entry.path else {}
        try:
            result = save()
        except BaseException as error:
            self.journal.end(manager, number, **failure(error))
            raise
        after = take_inventory(entry.path) if entry.path else {}
        files = {file: stat for file, stat in after.items() if before.get(file) != stat}
        self.journal.end(manager, number, result=_plain(result), files=files, removed=self.removed)
        return result

    def note(self, manager: DDPManager, entry: Entry, remove: Callable[[], Any]) -> Any:
        """Rank 0 removes files that it has saved, and the other ranks are told."""
        number = self.journal.begin(manager, entry)
        try:
            result = remove()
        except BaseException as error:
            self.journal.end(manager, number, **failure(error))
            raise
        self.journal.end(manager, number)
        return result

    def saved_by_rank_0(self, manager: DDPManager, path: str) -> set[int]:
        """Numbers of rank 0's saves of which a removal of `path` on this rank would take something away."""
        for number, entry in enumerate(self.journal.read(manager)):
            if entry.outcome is None and not entry.is_removal and entry.path and entry.touches(path):
                self.journal.wait(manager, number, timeout_s=SAVE_LIMIT_S)
                self.journal.read(manager)
        identity = manager.identity
        # A file of the same name on another node may be that node's own.
        is_one_disk = identity.rank == identity.local_rank
        found = self.journal.saved_in(path).items()
        return {number for file, (number, stat) in found if is_one_disk or _is_same(file, stat)}

    def leave(self) -> None:
        """This rank's script is over: others may wait for it to save a sharded model."""
        dist, manager = sys.modules.get("torch.distributed"), self._get_manager()
        if manager is None or dist is None or not dist.is_initialized():
            return  # It has trained nothing with them.
        try:
            manager.publish(_LEFT.format(self.rank))
        except RuntimeError as gone:
            logger.debug("who serves the store has left before: %s", gone)

    def end(self) -> None:
        """Rank 0's script is over."""
        manager = self._manager
        if manager is None or not self.journal.entries or manager.identity.launcher == "notebook":
            return  # A kernel's ranks end with it.
        manager.publish("saves/end")
        if self._get_manager() is None:
            return  # What was removed since the session was closed is not known.
        lost = [file for file in self.journal.files if not os.path.lexists(file)]
        if lost:
            logger.warning(
                "%s was saved and is gone (with %d other files), but this script has not removed it in Python: "
                "another rank, or a program, has",
                lost[0],
                len(lost) - 1,
            )

    def _place_of(self, manager: DDPManager, what: str) -> int | None:
        """Number of rank 0's save that this one is; None if rank 0 does not write there.

        A folder can be the rank's own, from tempfile say. That is so once rank 0 has made as many saves as this rank,
        none of them here, and is not about to make another.
        """
        limit_s = manager.config.timeout_s
        begin = quiet_since = time.monotonic()
        while True:
            has_left = manager.is_abandoned()  # Asked first, so that a save before it left is still seen below.
            num_before = len(self.journal.entries)
            entries = self.journal.read(manager)
            if len(entries) > num_before:
                quiet_since = time.monotonic()
            saves = [i for i, entry in enumerate(entries) if not entry.is_removal]
            places = [i for i in saves if entries[i].what == what]
            if len(places) >= self._counts[what]:
                return places[self._counts[what] - 1]
            now = time.monotonic()
            is_busy = bool(entries) and entries[-1].outcome is None
            if len(saves) < self._num_saves or is_busy:
                quiet_since = now
            if is_busy:
                begin = now  # Rank 0 is in another save, which may take long.
            if has_left and len(saves) < self._num_saves:
                raise DistributedError(
                    f"rank {self.rank} waits for rank 0 in {what}, and rank 0 has left the cell.",
                    hint="Save on all ranks.",
                )
            if has_left or now - quiet_since > OWN_PATH_GRACE_S:
                logger.warning("%s is this rank's alone, rank 0 saved %s", what, entries[saves[-1]].what)
                return None
            if now - begin > limit_s:
                raise RankTimeoutError(
                    f"rank {self.rank} waited timeout_s={limit_s:g} seconds for rank 0 in {what}.",
                    hint="Save on all ranks, or raise timeout_s where it only takes long.",
                )
            time.sleep(_POLL_S)

    def _outcome(self, manager: DDPManager, place: int, what: str) -> Any:
        outcome = self.journal.wait(manager, place, timeout_s=SAVE_LIMIT_S)
        self.position = max(self.position, place)
        if "error" in outcome:
            raise error_of(outcome, what)
        self._check_there(manager, place)
        result = outcome["result"]
        return tuple(result) if isinstance(result, list) else result

    def _check_there(self, manager: DDPManager, place: int) -> None:
        """Programs that another rank starts (`rm -rf`) bypass the patches that protect what rank 0 has saved."""
        saved = self.journal.entries[place]
        lost = [file for file in saved.files if not os.path.lexists(file)]
        if not lost or manager.identity.rank != manager.identity.local_rank:
            return  # Another node may have another disk.
        # Rank 0 may be further in the script, and have removed it or saved there again.
        if any(entry.touches(saved.path) for entry in self.journal.read(manager)[place + 1 :]):
            return
        raise DistributedError(
            f"rank 0 has done {saved.what}, and {lost[0]} is gone (with {len(lost) - 1} other files), which rank 0 has "
            f"not removed. Rank {self.rank} came to this save later: its part of the script, or a program that it "
            "started, has.",
            hint="Remove files in Python (shutil.rmtree, os.remove), or on rank 0 alone.",
        )


def _bind_guarded(gate: SaveGate, original: Callable[..., Any]) -> Callable[..., Any]:
    """Unsloth puts its savers on each model and tokenizer as instance attributes, all through one function."""

    @functools.wraps(original)
    def bind(func: Callable[..., Any], obj: Any, name: str) -> Any:
        return original(gate.once(func), obj, name)

    return bind


def sharded_model(args: tuple[Any, ...]) -> Any:
    """The model that a saver's `self` is, or has as its `model`, where its weights are sharded."""
    torch = sys.modules.get("torch")
    if torch is None or not args:
        return None
    owners = (args[0], getattr(args[0], "model", None) if hasattr(args[0], "accelerator") else None)
    from unsloth_multigpu.group.shards import has_shards

    return next((o for o in owners if isinstance(o, torch.nn.Module) and has_shards(o)), None)


def _path_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> str | None:
    """What is written: the first argument after `self`, or the keyword that names it. None for file objects."""
    names = ("save_directory", "output_dir", "fname", "dataset_path", "path_or_buf", "repo_id")
    value = args[1] if len(args) > 1 else next((kwargs[n] for n in names if n in kwargs), "")
    if isinstance(value, (str, os.PathLike)):
        # A repository's name is not a path, but making it absolute does no harm: it is only compared.
        return os.path.abspath(os.fspath(value))
    return "" if value is None else None


def _folder_of(path: str, args: tuple[Any, ...]) -> str:
    """Where the files go; "" is a trainer's own folder."""
    folder = path or getattr(getattr(args[0], "args", None), "output_dir", None)
    return real_path(folder) if folder else ""


def _listed(ranks: Iterable[int]) -> str:
    return ", ".join(map(str, ranks))


def _is_same(file: str, stat: tuple[int, int, int]) -> bool:
    return take_inventory(file).get(file) == tuple(stat)


def _plain(result: Any) -> Any:
    """The result if other ranks can be given it as JSON, else None."""
    is_plain = isinstance(result, (str, int, float, bool, type(None)))
    if isinstance(result, (tuple, list)) and all(isinstance(r, str) for r in result):
        return list(result)
    return result if is_plain else None
