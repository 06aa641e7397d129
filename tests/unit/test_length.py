"""Lengths of samples: read from what is there, and never guessed."""

import pytest
import torch
from datasets import Dataset
from torch.utils.data import Subset

from unsloth_multigpu.deal.length import read_lengths
from unsloth_multigpu.deal.sampler import step_loader
from unsloth_multigpu.deal.step import StepShape
from unsloth_multigpu.errors import SetupError

TOKENS = [[1, 2, 3], [1], [], [1, 2]]
LENGTHS = [3, 1, 0, 2]


class Rows(torch.utils.data.Dataset):
    def __init__(self, **attributes):
        vars(self).update(attributes)

    def __len__(self):
        return len(TOKENS)

    def __getitem__(self, index):
        return {"input_ids": TOKENS[index]}


def lengths(dataset, *, may_read_rows=False):
    return read_lengths(dataset, "length", may_read_rows=may_read_rows)


def test_fewer_rows_than_a_batch_that_must_be_whole_are_an_error():
    def loader(batch_size):
        rows = torch.utils.data.DataLoader(Rows(), batch_size=batch_size, drop_last=True)
        shape = StepShape(0, 2, 1, regroup=True)
        return step_loader(rows, shape, lambda loader: loader, list)

    assert loader(4)
    with pytest.raises(SetupError, match=r"4 row\(s\) make no whole batch of 5 with dataloader_drop_last=True"):
        loader(5)


class Stream(torch.utils.data.IterableDataset):
    def __iter__(self):
        return iter(TOKENS)


@pytest.mark.parametrize("dataset", [Rows(), Stream()], ids=["rows", "stream"])
def test_data_set_of_ready_batches_is_an_error(dataset):
    loader = torch.utils.data.DataLoader(dataset, batch_size=None)
    with pytest.raises(SetupError, match="ready batches"):
        step_loader(loader, StepShape(0, 2, 1, regroup=False), lambda loader: loader, list)


@pytest.mark.parametrize(
    "dataset",
    [
        Dataset.from_dict({"input_ids": TOKENS}),
        Dataset.from_dict({"input_ids": TOKENS, "length": [9, 9, 9, 9]}),
        Dataset.from_dict({"text": ["a"] * 4, "length": LENGTHS}),
        Dataset.from_dict({"input_ids": TOKENS}).with_format("torch"),
        Dataset.from_dict({"input_ids": TOKENS[::-1]}).select([3, 2, 1, 0]),
        [{"input_ids": row} for row in TOKENS],
        [{"input_ids": torch.tensor(row)} for row in TOKENS],
        Rows(lengths=LENGTHS),
        Rows(lengths=torch.tensor(LENGTHS)),
        Subset(Rows(lengths=[*LENGTHS[::-1]]), [3, 2, 1, 0]),
    ],
    ids=["column", "tokens before column", "lengths", "format", "order", "list", "tensors", "own", "tensor", "subset"],
)
def test_lengths_are_read(dataset):
    assert lengths(dataset) == LENGTHS


@pytest.mark.parametrize("ids", ["ids", "input_ids"])
def test_answers_follow_their_prompt(ids):
    rows = {f"prompt_{ids}": [[1, 2], [1]], f"chosen_{ids}": [[1], [1, 2, 3]], f"rejected_{ids}": [[1, 2], [1]]}
    assert lengths(Dataset.from_dict(rows)) == [4, 4]


def test_rows_of_another_kind_are_read_when_asked():
    assert lengths(Rows(), may_read_rows=True) == LENGTHS


@pytest.mark.parametrize(
    ("dataset", "message"),
    [
        (Rows(), "Rows has no attribute `lengths` with the tokens of each row"),
        (Rows(lengths=[1]), r"Rows.lengths has 1 entries for 4 rows"),
        (Dataset.from_dict({"text": ["a"]}), "no input_ids and no column 'length'"),
        (Dataset.from_dict({"input_ids": [[1], None]}), "row 1 has no input_ids"),
        (Dataset.from_dict({"text": ["a"]}).with_transform(lambda rows: rows), "get their tokens when they are read"),
        (["a text"], "rows have no input_ids"),
    ],
)
def test_unknown_lengths_are_an_error(dataset, message):
    with pytest.raises(SetupError, match=message) as error:
        lengths(dataset)
    assert error.value.hint
