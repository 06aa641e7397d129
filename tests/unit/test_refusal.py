"""Which errors end a training that one process would have made, and what the supervisor makes of them."""

import pytest

from unsloth_multigpu.errors import (
    ConfigError,
    DistributedError,
    DivergenceError,
    NonFiniteGradientError,
    PatchError,
    RankTimeoutError,
    SetupError,
)
from unsloth_multigpu.launch.cause import find_early_exit
from unsloth_multigpu.launch.refusal import REFUSED, find_refusal, is_refusal
from unsloth_multigpu.wire.event import Event


def event(kind, rank, time_s, **facts):
    return Event(kind, rank, 0, float(time_s), -1, facts)


def refused(rank, time_s):
    return event(REFUSED, rank, time_s, error="SetupError: no", exit_code=69, num_steps=0)


@pytest.mark.parametrize(
    ("kind", "at_first", "later"),
    [
        (SetupError, True, True),
        (ConfigError, True, True),
        (PatchError, True, True),
        (DivergenceError, True, True),
        (DistributedError, True, False),
        (RankTimeoutError, True, False),
        (NonFiniteGradientError, False, False),
    ],
)
def test_errors_that_one_process_would_not_have_met(kind, at_first, later):
    error = kind("no", hint="None.")
    assert [is_refusal(error, 0), is_refusal(error, 3)] == [at_first, later]


def test_the_last_training_of_a_rank_counts():
    assert find_refusal([event("started", 0, 1)]) is None
    found = find_refusal([refused(0, 1), refused(1, 2)])
    assert found == (69, "train() was refused: SetupError: no; the script continued without it")
    trained_later = [refused(0, 1), refused(1, 2), event("trained", 0, 3), event("trained", 1, 4)]
    assert find_refusal(trained_later) is None
    assert find_refusal(trained_later[:-1]) is not None
    assert find_refusal([*trained_later, refused(0, 5)]) is not None


def test_rank_that_left_by_a_refusal_has_left():
    events = [event("training", 0, 1), event("training", 1, 2), event("left_training", 1, 3, error="SetupError: no")]
    assert find_early_exit([*events, refused(1, 4)], {}) is events[-1]
