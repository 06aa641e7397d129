"""Patches `datasets` so that the first rank of a node runs a `map`, and the others read its cache."""

from __future__ import annotations

import functools
import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from unsloth_multigpu.logs import get_logger
from unsloth_multigpu.patching import Patch
from unsloth_multigpu.seam import instance_attribute

if TYPE_CHECKING:
    from unsloth_multigpu.group.manager import DDPManager

logger = get_logger(__name__)


def dataset_patches(run_dir: str | None, get_manager: Callable[[], DDPManager | None]) -> list[Patch]:
    """Returns the patch of `Dataset.map`.

    Args:
        run_dir: Private folder that all ranks of this node can read; None if the launcher gave none.
        get_manager: Returns the manager, whose store works without a process group. Returns None while the other ranks
            do not run this code.
    """
    needs = ("cache_file_name", "load_from_cache_file", "keep_in_memory")
    run = _MapOrder(run_dir, get_manager).run
    return [Patch("datasets.arrow_dataset:Dataset.map", "datasets>=3.4.1,<6", run, needs=needs)]


class _MapOrder:
    """Lets the first rank of a node run a `map` before the others run the same one.

    A call is identified by the data's fingerprint, the function's hash and the arguments. If these differ between ranks
    or the function cannot be hashed, each rank runs its own map. The other ranks get the state of the first one's
    global random generators. Other side effects of the function occur on the first rank only.
    """

    def __init__(self, run_dir: str | None, get_manager: Callable[[], DDPManager | None]) -> None:
        self._run_dir = run_dir
        self._get_manager = get_manager
        self._manager: DDPManager | None = None
        self._num_calls = 0
        self._seen: set[str] = set()
        self._is_inside = False

    def run(self, original: Callable[..., Any], dataset: Any, /, *args: Any, **kwargs: Any) -> Any:
        """Lets one rank process the rows and the others read its cache, also in `filter` and `DatasetDict.map`."""
        manager = None if self._is_inside or kwargs.get("keep_in_memory") else self._get_manager()
        if manager is None:
            return original(dataset, *args, **kwargs)
        if manager is not self._manager:
            # A new manager has an empty store. Ranks that left a notebook's cell at different calls count from 0.
            self._manager, self._num_calls, self._seen = manager, 0, set()
        self._num_calls += 1
        function = args[0] if args else kwargs.get("function")
        identity, digest = manager.identity, _call_hash(dataset, function, args, kwargs)
        node = f"map/{identity.rank - identity.local_rank}"
        key = f"{node}/done/{digest or f'{identity.rank} {self._num_calls}'}"
        call = f"{node}/calls/{self._num_calls}"
        # A map inside the mapped function belongs to this call, on every rank.
        with instance_attribute(self, "_is_inside", True):
            kwargs = self._with_cache_file(dataset, key, args, kwargs)
            if identity.local_rank == 0:
                return self._lead(manager, key, call, functools.partial(original, dataset, *args, **kwargs))
            states = self._wait(manager, key, call)
            result = original(dataset, *args, **kwargs)
            if states and key not in self._seen:
                _take_over(states)
            self._seen.add(key)
            return result

    def _lead(self, manager: DDPManager, key: str, call: str, work: Callable[[], Any]) -> Any:
        """Runs the map on the first rank, and publishes the random state before and after it, if it has changed."""
        from unsloth_multigpu.group.random_state import read_random_state

        before, states = read_random_state(), ""
        try:
            result = work()
            if (after := read_random_state()) != before:
                states = json.dumps([before, after])
            return result
        finally:
            # Also after an error: the others then run the same call, and get the same error. If the call is repeated,
            # it reads the cache, and must not overwrite the random states.
            if states or not manager.is_published(key):
                manager.publish(key, states)
            manager.publish(call)

    def _wait(self, manager: DDPManager, key: str, call: str) -> str:
        """Waits for the first rank, and returns the random states that it has published; "" = none."""

        def read() -> str | None:
            # There is nothing to wait for if the first rank has finished a call with this number and another key, or
            # has left this cell of a notebook.
            is_past = manager.is_published(call) or manager.is_abandoned()  # Before `key`, which is published first.
            found = manager.read(key)
            return found if found is not None else "" if is_past else None

        return manager.wait(
            read,
            "the first rank of its node to process the data set",
            timeout_s=manager.config.timeout_s,
            hint="Call Dataset.map on all ranks, or raise timeout_s if it only takes long.",
        )

    def _with_cache_file(self, dataset: Any, key: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        """Names a cache file for the result of a data set in memory, so that the other ranks can read it."""
        is_shareable = self._run_dir is not None and not dataset.cache_files and len(args) <= 1
        if not is_shareable or kwargs.get("cache_file_name") or kwargs.get("load_from_cache_file") is False:
            return kwargs
        folder = Path(str(self._run_dir)) / "maps"
        folder.mkdir(mode=0o700, exist_ok=True)
        file = str(folder / f"{key.rpartition('/')[2]}.arrow")
        return {**kwargs, "cache_file_name": file, "load_from_cache_file": True}


def _take_over(states: str) -> None:
    """Sets the first rank's random state after the call, unless this rank's state differed from its before."""
    from unsloth_multigpu.group.random_state import read_random_state, write_random_state

    before, after = json.loads(states)
    if before == read_random_state():
        write_random_state(after)


def _call_hash(dataset: Any, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str | None:
    """Returns a hash that is equal on all ranks for the same call; None if something cannot be hashed."""
    from datasets.fingerprint import Hasher

    # These do not change the result: the number of processes and the text of the progress bar.
    what = {k: v for k, v in kwargs.items() if k not in ("num_proc", "desc", "function")}
    try:
        return str(Hasher.hash((dataset._fingerprint, Hasher.hash(function), args[1:], what)))
    except (TypeError, AttributeError, RecursionError, pickle.PicklingError) as error:
        logger.info("Dataset.map: each rank processes all rows, because the function cannot be hashed (%s)", error)
        return None
