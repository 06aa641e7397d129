"""Data sets are prepared once per node: the others read what the node's first rank has written."""

from __future__ import annotations

import functools
import hashlib
import inspect
import json
import pickle
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from unsloth_multigpu.errors import RankTimeoutError
from unsloth_multigpu.logs import get_logger
from unsloth_multigpu.patching import Patch
from unsloth_multigpu.step.effect import state_digest

if TYPE_CHECKING:
    from unsloth_multigpu.group.manager import DDPManager

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
            supports="datasets>=3.4.1,<6",
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

    A function can do more than return rows: count words, number labels. Where its state has changed in the first
    rank's call, the others call it themselves and leave the cache alone. What it drew from the global random
    generators they take over.
    """

    def __init__(self, run_dir: str | None, get_manager: Callable[[], DDPManager | None]) -> None:
        self._run_dir = run_dir
        self._get_manager = get_manager
        self._manager: DDPManager | None = None
        self._num_calls = 0
        self._depth = 0
        self._noted: set[str] = set()
        self._own_folder: tempfile.TemporaryDirectory[str] | None = None

    def run(self, original: Callable[..., Any], dataset: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        function = args[0] if args else kwargs.get("function")
        if self._depth or kwargs.get("keep_in_memory"):
            return original(dataset, *args, **kwargs)
        manager = self._get_manager()
        if manager is None:
            return original(dataset, *args, **kwargs)
        if manager is not self._manager:
            # A new one has an empty store: ranks that left a notebook's cell at different places count from zero again.
            self._manager, self._num_calls = manager, 0
            self._noted.clear()
        identity = manager.identity
        node = f"map/{identity.rank - identity.local_rank}"
        self._num_calls += 1
        call_hash = _call_hash(dataset, function, args, kwargs)
        key = f"{node}/done/{call_hash or f'{identity.rank} {self._num_calls}'}"
        call = f"{node}/calls/{self._num_calls}"
        # A map inside the mapped function belongs to this call, on every rank.
        self._depth += 1
        try:
            kwargs = self._with_cache_file(dataset, key, args, kwargs)
            work = functools.partial(original, dataset)
            # The same call again finds the cache on every rank.
            is_first = call_hash is not None and key not in self._noted
            self._noted.add(key)
            if identity.local_rank == 0:
                return self._lead(manager, work, args, kwargs, key, call, watches=is_first)
            self._await(manager, key, call)
            return self._follow(manager, work, args, kwargs, key if is_first else None)
        finally:
            self._depth -= 1

    def _lead(
        self,
        manager: DDPManager,
        work: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        key: str,
        call: str,
        *,
        watches: bool,
    ) -> Any:
        """The first rank's part: works, and tells the others which side effects the call had."""
        before = _Before(args, kwargs) if watches else None
        try:
            result = work(*args, **kwargs)
            if before is not None and (effect := before.effect()):
                manager.publish(f"{key}/effect", json.dumps(effect))
                if effect["calls"]:
                    logger.info("Dataset.map: %s, so every rank calls the function itself", effect["calls"])
            return result
        finally:
            # Also after an error: the others then do the same call and meet the same error.
            manager.publish(key)
            manager.publish(call)

    def _follow(
        self,
        manager: DDPManager,
        work: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        key: str | None,
    ) -> Any:
        """Another rank's part: reads the first rank's cache, and repeats the side effects of its call."""
        if key is None or not manager.is_published(f"{key}/effect"):
            return work(*args, **kwargs)
        effect = json.loads(manager.wait_for(f"{key}/effect", "Dataset.map", timeout_s=manager.config.timeout_s))
        drawn = effect["drawn"]
        if effect["calls"]:
            args, kwargs = self._past_the_cache(work, args, kwargs, key)
            return work(*args, **kwargs)
        from unsloth_multigpu.group.random_state import write_random_state
        from unsloth_multigpu.launch.seeding import generator_digests

        # A rank that the script has seeded otherwise stays as it is.
        is_alike = drawn is not None and drawn["before"] == generator_digests()
        result = work(*args, **kwargs)
        if is_alike:
            write_random_state(drawn["after"])
        return result

    def _past_the_cache(
        self, work: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], key: str
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Arguments that let this rank call the function, into a file of its own."""
        names = list(inspect.signature(work).parameters)
        given = {**dict(zip(names[: len(args)], args, strict=True)), **kwargs} if len(args) > 1 else kwargs
        if self._run_dir is None and self._own_folder is None:
            self._own_folder = tempfile.TemporaryDirectory(prefix="unsloth_multigpu_map_")
        folder = Path(self._own_folder.name if self._own_folder else f"{self._run_dir}/maps")
        folder.mkdir(mode=0o700, exist_ok=True)
        assert self._manager is not None
        name = f"{key.rpartition('/')[2]}_{self._manager.identity.rank}.arrow"
        own = {"load_from_cache_file": False, "cache_file_name": str(folder / name)}
        return args if len(args) <= 1 else (), {**given, **own}

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
        # Once the first rank has passed its call with this number, it will not make this call any more.
        while not manager.is_published(key) and not manager.is_published(call):
            if manager.is_abandoned():
                return  # Only this rank runs this part of the cell; no other rank needs the result.
            if time.monotonic() > deadline:
                raise RankTimeoutError(
                    f"rank {manager.identity.rank} waited timeout_s={manager.config.timeout_s:g} seconds for the "
                    "first rank of its node to process the data set.",
                    hint="Call Dataset.map on all ranks, or raise timeout_s where it only takes long.",
                )
            time.sleep(_POLL_S)


class _Before:
    """State that a mapped function reaches, and that of the random generators, before it is called."""

    def __init__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        from unsloth_multigpu.launch.seeding import generator_digests

        self._roots = (args, kwargs)
        self._state = state_digest(*self._roots)
        self._draws = generator_digests()

    def effect(self) -> dict[str, Any] | None:
        """What the other ranks have to do; None = nothing. `calls` is why they call the function, `drawn` its draws."""
        from unsloth_multigpu.launch.seeding import generator_digests

        calls = ""
        if self._state is None:
            calls = "what the function reaches is too large, or too strange, to see whether it has changed"
        elif state_digest(*self._roots) != self._state:
            calls = "the function has changed what it reaches"
        if generator_digests() == self._draws:
            return {"calls": calls, "drawn": None} if calls else None
        from unsloth_multigpu.group.random_state import read_random_state

        return {"calls": calls, "drawn": {"before": self._draws, "after": read_random_state()}}


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
