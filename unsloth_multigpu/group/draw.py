"""Random numbers of the main generators: those of a step by themselves, and the state of all three as plain data."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch

_Item = TypeVar("_Item")


def random_state() -> dict[str, Any]:
    """The states of Python's, NumPy's and torch's generators on the CPU, as JSON values."""
    import numpy

    kind, keys, *rest = numpy.random.get_state(legacy=True)
    version, internal, gauss = random.getstate()
    return {
        "python": [version, list(internal), gauss],
        "numpy": [kind, keys.tolist(), *rest],  # type: ignore[union-attr, unused-ignore]
        "torch": torch.get_rng_state().tolist(),
    }


def set_random_state(state: dict[str, Any]) -> None:
    """Goes back to a `random_state()`."""
    import numpy

    version, internal, gauss = state["python"]
    random.setstate((version, tuple(internal), gauss))
    kind, keys, *rest = state["numpy"]
    numpy.random.set_state((kind, numpy.array(keys, dtype=numpy.uint32), *rest))
    torch.set_rng_state(torch.tensor(state["torch"], dtype=torch.uint8))


def drawn_from(state: dict[str, Any] | None, source: Iterable[_Item]) -> tuple[list[_Item], dict[str, Any] | None]:
    """Lists what `source` gives, with the generators at `state`, None = as they are.

    Returns:
        The items; and the state at which they were drawn, None where they do not depend on it.
    """
    before = random_state()
    begin = before if state is None else state
    set_random_state(begin)
    items = list(source)
    is_random = random_state() != begin
    if state is not None:
        set_random_state(before)
    return items, begin if is_random else None


def draw_seed(*place: int) -> int:
    """A seed of 63 bits for a place, such as (seed of the run, epoch, step): neighbours have nothing in common."""
    digest = hashlib.blake2b(repr(place).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


@contextmanager
def seeded_draws(seed: int) -> Iterator[None]:
    """Lets the three generators begin at `seed`, and puts them back. Generators of devices are left alone."""
    import numpy

    python, numpys, torchs = random.getstate(), numpy.random.get_state(), torch.get_rng_state()
    random.seed(seed)
    numpy.random.seed(seed % 2**32)
    torch.default_generator.manual_seed(seed)
    try:
        yield
    finally:
        random.setstate(python)
        numpy.random.set_state(numpys)
        torch.set_rng_state(torchs)
