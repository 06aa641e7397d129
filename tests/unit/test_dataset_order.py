"""Data is mapped once per node: in which order ranks work, and how they know each other's calls."""

from __future__ import annotations

import functools
import random
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from unsloth_multigpu.errors import RankTimeoutError
from unsloth_multigpu.hooks import datasets as hook
from unsloth_multigpu.hooks.datasets import dataset_patches
from unsloth_multigpu.wire.identity import RankIdentity

LIMIT_S = 0.2


class FakeData:
    """Stands in for a `Dataset`: `map` notes who called it, and with what."""

    def __init__(self, name: str, cache_files: tuple[str, ...] = ("data.arrow",)) -> None:
        self.name = name
        self.cache_files = cache_files


class Ranks:
    """The patched `map` of each rank, with one store between them."""

    def __init__(self, num_ranks: int, per_node: int, run_dir: Path | None = None, limit_s: float = LIMIT_S) -> None:
        self.store: dict[str, str] = {}
        self.calls: list[tuple[int, str, dict[str, Any]]] = []
        self.has_left = False
        self.is_apart = False
        self.limit_s = limit_s
        self.maps = [self._map(rank, num_ranks, per_node, run_dir) for rank in range(num_ranks)]

    def _map(self, rank: int, num_ranks: int, per_node: int, run_dir: Path | None) -> Callable[..., Any]:
        manager = SimpleNamespace(
            identity=RankIdentity(rank, rank % per_node, num_ranks, per_node, "torchrun"),
            config=SimpleNamespace(timeout_s=self.limit_s),
            publish=lambda key, value="": self.store.__setitem__(key, value),
            is_published=self.store.__contains__,
            read=self.store.get,
            is_abandoned=lambda: self.has_left,
        )
        manager.wait = functools.partial(self._wait, rank)
        (patch,) = dataset_patches(
            None if run_dir is None else str(run_dir), lambda: None if self.is_apart else manager
        )  # type: ignore[arg-type, return-value]

        def original(data: FakeData, function: Callable[[], object], **kwargs: Any) -> str:
            self.calls.append((rank, data.name, kwargs))
            function()
            return f"mapped {data.name}"

        return functools.partial(patch.wrap, original)

    def _wait(self, rank: int, read: Callable[[], str | None], what: str, *, timeout_s: float, hint: str) -> str:
        deadline = time.monotonic() + timeout_s
        while (found := read()) is None:
            if time.monotonic() > deadline:
                raise RankTimeoutError(f"rank {rank} waited {timeout_s:g} seconds for {what}.", hint=hint)
            time.sleep(0.01)
        return found

    @property
    def order(self) -> list[tuple[int, str]]:
        return [(rank, name) for rank, name, _ in self.calls]


@pytest.fixture(autouse=True)
def plain_hash(monkeypatch: pytest.MonkeyPatch) -> None:
    """The hash of `datasets` without its import: data, and what the function is called."""

    def call_hash(data: FakeData, function: Callable[..., Any], args: object, kwargs: dict[str, Any]) -> str | None:
        name = function.__name__
        return None if name == "unhashable" else f"{data.name} {name}"

    monkeypatch.setattr(hook, "_call_hash", call_hash)


def work() -> None:
    """A function that can be hashed."""


def unhashable() -> None:
    """One that cannot."""


def test_first_rank_of_the_node_maps_before_the_others() -> None:
    ranks = Ranks(3, per_node=3, limit_s=20.0)
    threads = [threading.Thread(target=ranks.maps[rank], args=(FakeData("a"), work)) for rank in (1, 2)]
    for thread in threads:
        thread.start()
    time.sleep(0.05)
    assert ranks.order == []
    assert ranks.maps[0](FakeData("a"), work) == "mapped a"
    for thread in threads:
        thread.join(timeout=10)
    assert ranks.order[0] == (0, "a")
    assert sorted(ranks.order) == [(0, "a"), (1, "a"), (2, "a")]


def test_rank_waits_for_the_limit_and_names_it() -> None:
    ranks = Ranks(2, per_node=2)
    with pytest.raises(RankTimeoutError, match=rf"rank 1 waited {LIMIT_S} seconds") as error:
        ranks.maps[1](FakeData("a"), work)
    assert "Hint: Call Dataset.map on all ranks" in str(error.value)
    assert ranks.calls == []


def test_rank_works_by_itself_where_rank_0_has_left_the_cell() -> None:
    ranks = Ranks(2, per_node=2)
    ranks.has_left = True
    ranks.maps[1](FakeData("a"), work)
    assert ranks.order == [(1, "a")]


def test_error_of_the_first_rank_sets_the_others_free() -> None:
    def fail() -> None:
        raise ValueError("bad row")

    ranks = Ranks(2, per_node=2)
    for rank in (0, 1):
        with pytest.raises(ValueError, match="bad row"):
            ranks.maps[rank](FakeData("a"), fail)
    assert ranks.order == [(0, "a"), (1, "a")]


def test_function_that_cannot_be_hashed_is_awaited_by_its_number() -> None:
    ranks = Ranks(2, per_node=2)
    for data, function in (("a", unhashable), ("b", work)):
        ranks.maps[0](FakeData(data), function)
    for data, function in (("a", unhashable), ("b", work)):
        ranks.maps[1](FakeData(data), function)
    assert ranks.order == [(0, "a"), (0, "b"), (1, "a"), (1, "b")]


def test_data_that_differs_from_the_first_ranks_is_mapped_without_a_wait() -> None:
    ranks = Ranks(2, per_node=2)
    ranks.maps[0](FakeData("shard 0"), work)
    ranks.maps[1](FakeData("shard 1"), work)
    assert ranks.order == [(0, "shard 0"), (1, "shard 1")]


def test_map_of_a_cell_that_not_all_ranks_run_does_not_count() -> None:
    ranks = Ranks(2, per_node=2)
    ranks.is_apart = True
    ranks.maps[1](FakeData("a"), unhashable)
    assert not ranks.store
    ranks.is_apart = False
    for rank in (0, 1):
        ranks.maps[rank](FakeData("b"), unhashable)
    assert ranks.order == [(1, "a"), (0, "b"), (1, "b")]
    assert ranks.store.keys() == {"map/0/done/0 1", "map/0/calls/1"}


@pytest.mark.parametrize("function", [work, unhashable])
def test_map_within_a_mapped_function_is_no_call_of_its_own(function: Callable[[], None]) -> None:
    ranks = Ranks(2, per_node=2)
    for rank in (0, 1):

        def nested(rank: int = rank) -> None:
            ranks.maps[rank](FakeData("inner"), function)

        ranks.maps[rank](FakeData("outer"), nested)
    assert ranks.order == [(0, "outer"), (0, "inner"), (1, "outer"), (1, "inner")]


# Where the result is found by the others.


@pytest.mark.parametrize(
    ("cache_files", "kwargs"),
    [
        (("data.arrow",), {}),
        ((), {"cache_file_name": "mine.arrow"}),
        ((), {"load_from_cache_file": False}),
        ((), {"keep_in_memory": True}),
    ],
)
def test_choice_of_the_script_stays(tmp_path: Path, cache_files: tuple[str, ...], kwargs: dict[str, Any]) -> None:
    ranks = Ranks(1, per_node=1, run_dir=tmp_path)
    ranks.maps[0](FakeData("a", cache_files), work, **kwargs)
    assert ranks.calls == [(0, "a", kwargs)]


def test_draws_of_the_function_count_on_every_rank_and_once() -> None:
    ranks, drawn, is_cached = Ranks(2, per_node=2), [], False

    def draw() -> None:
        if not is_cached:
            random.random()

    for rank in (0, 1):
        for _ in range(2):
            random.seed(5)
            ranks.maps[rank](FakeData("a"), draw)
            drawn.append(random.random())
            is_cached = True
    assert drawn[:2] == drawn[2:]
    assert drawn[0] != drawn[1]
