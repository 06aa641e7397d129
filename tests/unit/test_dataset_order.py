"""Data is mapped once per node: in which order ranks work, and how they know each other's calls."""

import functools
import random
from types import SimpleNamespace

import pytest
from torch.distributed import HashStore

from tests.helpers.board import manager_of
from unsloth_multigpu.hooks import datasets as hook
from unsloth_multigpu.hooks.datasets import dataset_patches


class Ranks:
    """The patched `map` of each rank, with one store between them, notes who called it, and with what."""

    def __init__(self, num_ranks):
        self.store = HashStore()
        self.order = []
        self.maps = [self._map(rank, num_ranks) for rank in range(num_ranks)]

    def _map(self, rank, num_ranks):
        manager = manager_of(self.store, rank, num_ranks)
        (patch,) = dataset_patches(None, lambda: manager)

        def original(data, function, **kwargs):
            self.order.append((rank, data.name))
            function()
            return f"mapped {data.name}"

        return functools.partial(patch.wrap, original)


@pytest.fixture(autouse=True)
def plain_hash(monkeypatch):
    """The hash of `datasets` without its import: data, and what the function is called."""

    def call_hash(data, function, args, kwargs):
        name = function.__name__
        return None if name == "unhashable" else f"{data.name} {name}"

    monkeypatch.setattr(hook, "_call_hash", call_hash)


def work():
    """A function that can be hashed."""


def unhashable():
    """One that cannot."""


def test_error_of_the_first_rank_sets_the_others_free():
    def fail():
        raise ValueError("bad row")

    ranks = Ranks(2)
    for rank in (0, 1):
        with pytest.raises(ValueError, match="bad row"):
            ranks.maps[rank](SimpleNamespace(name="a"), fail)
    assert ranks.order == [(0, "a"), (1, "a")]


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ([("a", unhashable), ("b", work)], [("a", unhashable), ("b", work)]),  # It is awaited by its number.
        ([("shard 0", work)], [("shard 1", work)]),  # Each rank has its own data.
    ],
)
def test_call_that_is_not_the_first_ranks_is_made_by_each_without_a_wait(first, second):
    ranks = Ranks(2)
    for rank, calls in enumerate((first, second)):
        for data, function in calls:
            ranks.maps[rank](SimpleNamespace(name=data), function)
    assert ranks.order == [(0, data) for data, _ in first] + [(1, data) for data, _ in second]


def test_draws_of_the_function_count_on_every_rank_and_once():
    ranks, drawn, is_cached = Ranks(2), [], False

    def draw():
        if not is_cached:
            random.random()

    for rank in (0, 1):
        for _ in range(2):
            random.seed(5)
            ranks.maps[rank](SimpleNamespace(name="a"), draw)
            drawn.append(random.random())
            is_cached = True
    assert drawn[:2] == drawn[2:]
    assert drawn[0] != drawn[1]
