"""The random state of a process as plain data, and random numbers that leave it alone.

The state is that of Python, NumPy, torch on the CPU and, where asked for, torch on the current device.
"""

from __future__ import annotations

import base64
import random
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch

from unsloth_multigpu.accelerator import KINDS
from unsloth_multigpu.wire.digest import digest_int64

_Item = TypeVar("_Item")


def read_random_state(device_type: str = "cpu") -> dict[str, Any]:
    """What JSON can carry, about 20 KB; `write_random_state` puts it back, here or in another process.

    With an accelerator, the state of the current device is added.
    """
    import numpy

    version, internal, gauss = random.getstate()
    kind, keys, *rest = numpy.random.get_state(legacy=True)
    state = {
        "python": [version, list(internal), gauss],
        "numpy": [kind, _text(keys.tobytes()), *rest],  # type: ignore[union-attr]
        "torch": _text(torch.get_rng_state().numpy().tobytes()),
    }
    if device_type != "cpu":
        state["device"] = [device_type, _text(getattr(torch, device_type).get_rng_state().numpy().tobytes())]
    return state


def device_in_use() -> str:
    """The kind of accelerator that this process has opened; "cpu" before that: asking an accelerator would open it."""
    in_use = [name for name in KINDS if hasattr(torch, name) and getattr(torch, name).is_initialized()]
    return in_use[0] if in_use else "cpu"


def write_random_state(state: dict[str, Any]) -> None:
    """Restores the result of `read_random_state`, also after JSON."""
    import numpy

    version, internal, gauss = state["python"]
    random.setstate((version, tuple(internal), gauss))
    kind, words, *rest = state["numpy"]
    numpy.random.set_state((kind, numpy.frombuffer(base64.b64decode(words), numpy.uint32), *rest))
    torch.set_rng_state(_tensor(state["torch"]))
    if "device" in state:
        device_type, words = state["device"]
        getattr(torch, device_type).set_rng_state(_tensor(words))


@contextmanager
def kept_random_state() -> Iterator[None]:
    """Restores the generators. Reading and collating a row may draw numbers, which the training must not notice."""
    import numpy

    python, numpys, torchs = random.getstate(), numpy.random.get_state(), torch.get_rng_state()
    try:
        yield
    finally:
        random.setstate(python)
        numpy.random.set_state(numpys)
        torch.set_rng_state(torchs)


@contextmanager
def seeded_draws(seed: int) -> Iterator[None]:
    """Seeds the three generators with `seed`, and restores them at the end. Generators of devices are left alone."""
    import numpy

    with kept_random_state():
        random.seed(seed)
        numpy.random.seed(seed % 2**32)
        torch.default_generator.manual_seed(seed)
        yield


def draw_base_seed() -> None:
    """Draws what a `torch.utils.data.DataLoader` draws when it begins an iteration."""
    torch.empty((), dtype=torch.int64).random_()


def draw_seed(*place: int) -> int:
    """A seed of 63 bits for a place, such as (seed of the run, epoch, step); unrelated to that of the next place."""
    return digest_int64(repr(place).encode()) % 2**64 >> 1


def drawn_from(state: dict[str, Any] | None, source: Iterable[_Item]) -> tuple[list[_Item], dict[str, Any] | None]:
    """Lists what `source` gives, with the generators at `state`, None = as they are.

    Returns the items, and the state at which they were drawn, None where they do not depend on it.
    """
    before = read_random_state()
    begin = before if state is None else state
    write_random_state(begin)
    items = list(source)
    is_random = read_random_state() != begin
    if state is not None:
        write_random_state(before)
    return items, begin if is_random else None


def _text(data: bytes) -> str:
    return base64.b64encode(data).decode()


def _tensor(text: str) -> torch.Tensor:
    return torch.frombuffer(bytearray(base64.b64decode(text)), dtype=torch.uint8)
