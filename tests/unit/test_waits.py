"""What a rank counts of its own training: waiting, tokens, padding, the median of its steps."""

import pytest
import torch

from unsloth_multigpu.group import waits
from unsloth_multigpu.group.waits import Waits
from unsloth_multigpu.train.figures import TokenCount

CARD = torch.device("meta")


class Event:
    """Of a device that is `Event.clock` far."""

    clock = 0.0
    num_made = 0

    def __init__(self, device, enable_timing=False):
        assert device == CARD
        Event.num_made += 1
        self.time_s = 0.0

    def record(self):
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


@pytest.mark.parametrize(
    ("inputs", "expected"),
    [
        ({"input_ids": ids(1, 9), "position_ids": ids(1, 9)}, (9, 0)),
        # A mask of another shape is attention's, and says nothing of tokens.
        ({"input_ids": ids(2, 3), "attention_mask": torch.ones(2, 1, 3, 3)}, (6, 0)),
        ({"prompt_ids": ids(2, 3), "prompt_mask": ids(2, 3), "completion_ids": ids(2, 2)}, (10, 0)),
        (
            {
                "chosen_input_ids": ids(1, 4),
                "chosen_attention_mask": torch.tensor([[1, 1, 0, 0]]),
                "rejected_input_ids": ids(1, 3),
            },
            (5, 2),
        ),
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
