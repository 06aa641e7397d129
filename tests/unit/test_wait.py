"""What processes wait for, and the digests by which they compare what they have."""

import hashlib
import time

import pytest

from unsloth_multigpu.group.random_state import draw_seed
from unsloth_multigpu.wire.wait import wait_until


def test_wait_ends_with_the_condition_with_the_deadline_or_with_an_error():
    looks = iter([False, False, True])
    assert wait_until(lambda: next(looks), time.monotonic() + 5.0, poll_s=0.0)
    begin_s = time.monotonic()
    assert not wait_until(lambda: False, begin_s + 0.05)
    assert 0.05 <= time.monotonic() - begin_s < 30.0
    assert wait_until(lambda: True, 0.0)  # What is there already is there, however late it is.
    with pytest.raises(ZeroDivisionError):
        wait_until(lambda: bool(1 // 0), time.monotonic() + 5.0)


def test_seeds_of_places_stay_those_that_checkpoints_were_trained_with():
    for place in ((42, 0, 3), (0,), (2**40, 1, 0)):
        digest = hashlib.blake2b(repr(place).encode(), digest_size=8).digest()
        assert draw_seed(*place) == int.from_bytes(digest, "little") >> 1
