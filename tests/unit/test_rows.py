"""The digest of some rows of a data set: it tells other rows, and draws nothing."""

import random

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset as TorchDataset
from torch.utils.data import IterableDataset, Subset

from tests.helpers.trainer import FakeTrainer
from unsloth_multigpu.group.facts import digest_of_rows, facts_of_evaluation, num_rows
from unsloth_multigpu.group.random_state import read_random_state

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
