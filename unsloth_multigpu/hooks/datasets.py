"""Data sets are prepared once per node: the others read what the node's first rank has written."""

from __future__ import annotations

import functools
import hashlib
import pickle
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from unsloth_multigpu.errors import RankTimeoutError
from unsloth_multigpu.logs import get_logger
from unsloth_multigpu.patching import Patch

if TYPE_CHECKING:
    from unsloth_multigpu.core.manager import DDPManager

logger = get_logger(__name__)

_POLL_S = 0.02


def dataset_patches(run_dir: str | None, get_manager: Callable[[], DDPManager | None]) -> list[Patch]:
    """Patches of `datasets`.

    Args:
        run_dir: Private folder that all ranks of this node see; None if the launcher gave none.
        get_manager: Gives the manager, whose store works before there is a process group; None where the other ranks
            do not run this code.
    """
    return [
        Patch(
            target="datasets.arrow_dataset:Dataset.map",
            supports="datasets>=3.4.1,<5",
            wrap=functools.partial(_map_once, _MapOrder(run_dir, get_manager)),
            reason="Every rank would process every row, at the same time and into the same cache file. "
            "Dataset.filter and DatasetDict.map call it.",
            needs=("cache_file_name", "load_from_cache_file", "keep_in_memory"),
        )
    ]


def _map_once(order: _MapOrder, original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def map(self: Any, *args: Any, **kwargs: Any) -> Any:
        return order.run(original, self, args, kwargs)

    return map


class _MapOrder:
    """Lets the node's first rank do a `map` before the others do the same one.

    A call is known by the data's fingerprint, the function's hash and the arguments. Where ranks differ in these
    (a function that cannot be hashed, say) each does its own work: right, only not shared.
    """

    def __init__(self, run_dir: str | None, get_manager: Callable[[], DDPManager | None]) -> None:
        self._run_dir = run_dir
        self._get_manager = get_manager
        self._manager: DDPManager | None = None
        self._num_calls = 0
        self._depth = 0

    def run(self, original: Callable[..., Any], dataset: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        function = args[0] if args else kwargs.get("function")
        if self._depth or kwargs.get("keep_in_memory"):
            return original(dataset, *args, **kwargs)
        manager = self._get_manager()
        if manager is None:
            return original(dataset, *args, **kwargs)
        if manager is not self._manager:
            # A new one has an empty store: ranks that left a notebook's cell at different places count anew.
            self._manager, self._num_calls = manager, 0
        identity = manager.identity
        node = f"map/{identity.rank - identity.local_rank}"
        self._num_calls += 1
        key = f"{node}/done/{_call_hash(dataset, function, args, kwargs) or f'{identity.rank} {self._num_calls}'}"
        kwargs = self._with_cache_file(dataset, key, args, kwargs)
        if identity.local_rank > 0:
            self._await(manager, key, f"{node}/calls/{self._num_calls}")
        # A map inside the mapped function belongs to this call, on every rank.
        self._depth += 1
        try:
            return original(dataset, *args, **kwargs)
        finally:
            self._depth -= 1
            if identity.local_rank == 0:
                # Also after an error: the others then do the same call and meet the same error.
                manager.publish(key)
                manager.publish(f"{node}/calls/{self._num_calls}")

    def _with_cache_file(self, dataset: Any, key: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        """Data made in memory has no cache file by which the other ranks could read the result: it gets one."""
        is_shareable = self._run_dir is not None and not dataset.cache_files and len(args) <= 1
        if not is_shareable or kwargs.get("cache_file_name") or kwargs.get("load_from_cache_file") is False:
            return kwargs
        folder = Path(str(self._run_dir)) / "maps"
        folder.mkdir(mode=0o700, exist_ok=True)
        return {
            **kwargs,
            "cache_file_name": str(folder / f"{key.rpartition('/')[2]}.arrow"),
            "load_from_cache_file": True,
        }

    def _await(self, manager: DDPManager, key: str, call: str) -> None:
        deadline = time.monotonic() + manager.config.timeout_s
        # Once the first rank has passed its call of this number it will not come to this one any more.
        while not manager.is_published(key) and not manager.is_published(call):
            if manager.has_rank_0_left():
                return  # The cell's part that only this rank does: nobody else needs it.
            if time.monotonic() > deadline:
                raise RankTimeoutError(
                    f"rank {manager.identity.rank} waited timeout_s={manager.config.timeout_s:g} seconds for the "
                    "first rank of its node to process the data set.",
                    hint="Call Dataset.map on all ranks, or raise timeout_s where it only takes long.",
                )
            time.sleep(_POLL_S)


def _call_hash(dataset: Any, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str | None:
    """Equal on all ranks for the same call; None where something in it cannot be hashed."""
    from datasets.fingerprint import Hasher

    # The number of processes and the progress bar's text change nothing in the result.
    what = {k: v for k, v in kwargs.items() if k not in ("num_proc", "desc", "function")}
    try:
        parts = (dataset._fingerprint, Hasher.hash(function), Hasher.hash(args[1:]), Hasher.hash(what))
    except (TypeError, AttributeError, RecursionError, pickle.PicklingError) as error:
        logger.info("Dataset.map: each rank does its own work, the function cannot be hashed (%s)", error)
        return None
    return hashlib.blake2b("/".join(parts).encode(), digest_size=16).hexdigest()
