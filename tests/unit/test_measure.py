"""What is measured for the planner: laps without the wait for others, and lengths that are never guessed."""

import time

import pytest
import torch
from datasets import Dataset
from torch import nn
from torch.utils.data import Subset

from tests.helpers.refused import refused
from unsloth_multigpu.deal.measure import Stopwatch, read_lengths
from unsloth_multigpu.errors import SetupError

PAUSE_S = 0.05


class Slow(torch.autograd.Function):
    """Takes its time forward and backward."""

    @staticmethod
    def forward(ctx, x):
        time.sleep(PAUSE_S)
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        time.sleep(PAUSE_S)
        return gradient


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.frozen = nn.Linear(2, 2).requires_grad_(False)
        self.first, self.last = nn.Linear(2, 2), nn.Linear(2, 2)

    def forward(self, x, *, uses_first=True):
        x = self.frozen(x)
        return self.last(Slow.apply(self.first(x) if uses_first else x.requires_grad_()))


def step(model, watch, **options):
    with watch.timing(model):
        model(torch.ones(1, 2), **options).sum().backward()
        time.sleep(4 * PAUSE_S)  # Where DDP waits for the other ranks.
    return watch.lap


def test_lap_is_the_computation_without_the_wait_and_there_is_none_without_the_gradient():
    model = Model()
    watch = Stopwatch(torch.device("cpu"))
    begin = time.perf_counter()
    lap = step(model, watch)
    assert 2 * PAUSE_S <= lap.seconds() <= time.perf_counter() - begin - 4 * PAUSE_S
    # The step before must not be taken for this one.
    assert step(model, watch, uses_first=False) is None


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
        (Rows(lengths=[1]), "Rows.lengths has 1 entries for 4 rows"),
        (Dataset.from_dict({"text": ["a"]}), "no input_ids and no column 'length'"),
        (Dataset.from_dict({"input_ids": [[1], None]}), "row 1 has no input_ids"),
        (Dataset.from_dict({"text": ["a"]}).with_transform(lambda rows: rows), "get their tokens when they are read"),
        (["a text"], "rows have no input_ids"),
    ],
)
def test_unknown_lengths_are_an_error(dataset, message):
    with refused(SetupError, message):
        lengths(dataset)
