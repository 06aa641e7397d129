"""Digests of some rows of a data set: they tell other rows, read what is cheap to read, and draw nothing."""

import random

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset as TorchDataset
from torch.utils.data import IterableDataset, Subset

from tests.helpers.trainer import FakeTrainer
from unsloth_multigpu.group.facts import facts_of_evaluation
from unsloth_multigpu.group.random_state import read_random_state
from unsloth_multigpu.group.rows import digests_of_rows, num_rows

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
def test_each_row_of_a_small_data_set_is_compared_and_found_in_its_eighth(kind):
    first = digests_of_rows(kind(rows_of()))
    assert len(first) == 8
    assert digests_of_rows(kind(rows_of())) == first
    for changed in (0, 207, NUM - 1):
        second = digests_of_rows(kind(rows_of(changed)))
        (different,) = [(mine, other) for mine, other in zip(first, second, strict=True) if mine != other]
        (begin, end), *others = ([*map(int, text.partition(":")[0].split("-"))] for text in different)
        assert begin <= changed <= end
        assert others == [[begin, end]]


@pytest.mark.parametrize(
    ("rows", "other"),
    [([1, 2], [1.0, 2.5]), ([[1, None]], [[1, 0]]), ([{"a": 2**70}], [{"a": 2**71}]), ([["a", 1]], [["b", 1]])],
)
def test_values_of_every_kind_are_compared(rows, other):
    for kind in (list, Own):
        assert digests_of_rows(kind(rows)) != digests_of_rows(kind(other))


def test_lists_with_gaps_and_without_rows_are_read():
    rows = [{"x": [1, 2]}, {"x": [3, None]}, {"x": []}, {"x": None}]
    assert digests_of_rows(hf(rows)) == digests_of_rows(hf(rows)) != digests_of_rows(hf(rows[::-1]))
    assert digests_of_rows([]) == []
    assert digests_of_rows(hf(rows).select([])) == []


@pytest.mark.parametrize(("width", "num"), [(None, 64), (9_999, 64), (10_000, 32)])
def test_rows_that_may_be_images_are_few_and_reading_draws_nothing(width, num):
    data, before = Own(rows_of(), width), read_random_state()
    digests_of_rows(data)
    assert read_random_state() == before
    assert len(data.read) == num or num == 64 <= len(data.read) < 64 + 32
    assert {0, NUM - 1} <= data.read


@pytest.mark.parametrize(("length", "num"), [(10, 1_000), (100_000, 160), (2_000_000, 32)])
def test_long_rows_are_few(length, num):
    class Counted(list):
        def __getitem__(self, index):
            read.append(index)
            return super().__getitem__(index)

    read = []
    digests_of_rows(Counted(["x" * length] * 2_000))
    assert len(read) == num + (32 if num > 32 else 0)


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
        "sampled evaluation rows": digests_of_rows(rows_of()),
    }
    trainer.eval_dataset = {"a": rows_of(num=2), "b": rows_of(num=1)}
    facts = facts_of_evaluation(trainer)
    assert (facts["evaluation samples 'a'"], facts["evaluation samples 'b'"]) == (2, 1)
    assert [text.partition(":")[0] for text in facts["sampled evaluation rows 'a'"]] == ["0-0", "1-1"]
