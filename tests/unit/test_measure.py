"""What a rank measures of its work: laps without the wait for others, lengths, which are never guessed, and tokens."""

import time

import pytest
import torch
from datasets import Dataset
from torch import nn
from torch.utils.data import Subset

from tests.helpers.refused import refused
from unsloth_multigpu.deal.measure import Stopwatch, read_lengths
from unsloth_multigpu.errors import SetupError
from unsloth_multigpu.group import waits
from unsloth_multigpu.group.waits import Waits
from unsloth_multigpu.train.figures import TokenCount

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


CARD = torch.device("meta")


class Event:
    """Of a device that is `Event.clock` far."""

    clock = 0.0
    num_made = 0

    def __init__(self, device, enable_timing=False):
        assert device == CARD
        Event.num_made += 1
        self.time_s = 0.0

    def record(self, stream):
        assert stream == f"stream of {CARD}"
        self.time_s = float(Event.num_made)

    def query(self):
        return Event.clock >= self.time_s

    def synchronize(self):
        Event.clock = max(Event.clock, self.time_s)

    def elapsed_time(self, other):
        return (other.time_s - self.time_s) * 1000


def test_waiting_within_waiting_counts_once(monkeypatch):
    clock = [0.0]
    monkeypatch.setattr(waits.time, "perf_counter", lambda: clock[0])
    found = Waits()
    with found.counted():
        clock[0] += 1.0
        with found.counted():
            clock[0] += 2.0
    clock[0] += 4.0
    found.add(6.0, found.now())
    assert found.seconds == 4.0


def test_device_is_not_waited_for(monkeypatch):
    Event.clock, Event.num_made = 0.0, 0
    monkeypatch.setattr(torch, "Event", Event)
    monkeypatch.setattr(torch.accelerator, "current_stream", lambda device: f"stream of {device}")
    found = Waits()
    found.count_on(CARD)
    with found.counted():
        pass
    found.add(found.now(), found.now())
    found.poll()
    assert found.seconds == 0.0
    Event.clock = 2.0
    found.poll()
    assert found.seconds == 1.0
    found.settle()
    assert (found.seconds, Event.clock) == (2.0, 4.0)


def ids(rows, columns):
    return torch.ones(rows, columns, dtype=torch.int64)


CHOSEN = {"chosen_input_ids": ids(1, 4), "chosen_attention_mask": torch.tensor([[1, 1, 0, 0]])}


@pytest.mark.parametrize(
    ("inputs", "expected"),
    [
        ({"input_ids": ids(1, 9), "position_ids": ids(1, 9)}, (9, 0)),
        # A mask of another shape is attention's, and says nothing of tokens.
        ({"input_ids": ids(2, 3), "attention_mask": torch.ones(2, 1, 3, 3)}, (6, 0)),
        ({"prompt_ids": ids(2, 3), "prompt_mask": ids(2, 3), "completion_ids": ids(2, 2)}, (10, 0)),
        ({**CHOSEN, "rejected_input_ids": ids(1, 3)}, (5, 2)),
        ({"input_ids": ids(1, 5), "decoder_input_ids": ids(1, 7)}, (5, 0)),
        ({"pixel_values": torch.ones(2, 3, 8, 8), "labels": ids(2, 1)}, (None, None)),
        ([{"prompt": "text"}], (None, None)),
    ],
)
def test_tokens_of_other_batches(inputs, expected):
    count = TokenCount()
    count.add(inputs, is_filler=False)
    count.end_step()
    assert (count.num_tokens, count.num_padding_tokens) == expected
