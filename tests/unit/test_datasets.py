"""Data sets on several ranks: mapped once per node, and compared by a digest of some rows, which draws nothing."""

import functools
import random
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch.distributed import HashStore
from torch.utils.data import Dataset as TorchDataset
from torch.utils.data import IterableDataset, Subset

from tests.helpers.board import manager_of
from tests.helpers.trainer import FakeTrainer
from unsloth_multigpu.group.facts import digest_of_rows, facts_of_evaluation, num_rows
from unsloth_multigpu.group.random_state import read_random_state
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


NUM = 400


class Own(TorchDataset):
    """A data set of the script. It counts what is read of it."""

    def __init__(self, rows, width=None):
        self.rows, self.read, self.width = rows, set(), width

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        self.read.add(index)
        torch.rand(3)
        np.random.rand()
        random.random()
        row = self.rows[index]
        return row if self.width is None else {"pixels": torch.zeros(self.width), "label": row["labels"]}


def rows_of(changed=None, num=NUM):
    rows = [{"input_ids": [i, *range(5)], "labels": i % 3, "weight": [0.5, 1], "text": f"row {i}"} for i in range(num)]
    if changed is not None:
        rows[changed]["labels"] += 1
    return rows


def hf(rows):
    from datasets import Dataset

    return Dataset.from_list(rows)


def hf_transformed(rows):
    data = hf(rows)
    data.set_transform(lambda batch: {"x": [random.random() for _ in batch["labels"]]})
    return data


def tensors(rows):
    return [{name: torch.tensor(row[name]) for name in ("input_ids", "labels")} for row in rows]


def subset(rows):
    return Subset(hf([*rows, *rows]), range(len(rows)))


@pytest.mark.parametrize("kind", [hf, hf_transformed, list, tensors, subset])
def test_rows_that_are_read_are_compared(kind):
    first = digest_of_rows(kind(rows_of()))
    assert digest_of_rows(kind(rows_of())) == first
    read = Own(rows_of())
    digest_of_rows(read)
    assert (len(read.read), {0, NUM - 1} <= read.read) == (64, True)
    changed = {digest_of_rows(kind(rows_of(row))) for row in (0, sorted(read.read)[20], NUM - 1)}
    assert len(changed - {first}) == 3
    assert digest_of_rows(kind(rows_of()[::-1])) != first


@pytest.mark.parametrize("width", [None, 10_000])
def test_reading_draws_nothing(width):
    before = read_random_state()
    digest_of_rows(Own(rows_of(), width))
    assert read_random_state() == before


def test_streams_have_no_rows():
    class Stream(IterableDataset):
        def __len__(self):
            return 3

        def __iter__(self):
            return iter(range(3))

    assert (num_rows(Stream()), num_rows(iter([])), num_rows(None), num_rows([1])) == (None, None, None, 1)


def test_evaluation_data_is_compared_alone_and_by_name():
    trainer = FakeTrainer()
    trainer.args.eval_strategy, trainer.args.eval_on_start = "no", False
    trainer.eval_dataset = rows_of()
    assert facts_of_evaluation(trainer) == {}  # The training does not evaluate.
    trainer.args.eval_strategy = "epoch"
    assert facts_of_evaluation(trainer) == {
        "evaluation samples": NUM,
        "sampled evaluation rows": digest_of_rows(rows_of()),
    }
    trainer.eval_dataset = {"a": rows_of(num=2), "b": rows_of(num=1)}
    facts = facts_of_evaluation(trainer)
    assert (facts["evaluation samples 'a'"], facts["evaluation samples 'b'"]) == (2, 1)
    assert facts["sampled evaluation rows 'a'"] == digest_of_rows(rows_of(num=2))
