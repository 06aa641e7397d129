"""Reads, writes and restores the random generators of a process: Python, NumPy, torch on the CPU and on a device."""

from __future__ import annotations

import base64
import hashlib
import json
import random
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import numpy
import torch

from unsloth_multigpu.accelerator import KINDS

_Item = TypeVar("_Item")

# File in the private folder of a run: the result of `read_seeded_state` in the supervisor.
RANDOM_STATE_FILE = "random_state.json"


def read_random_state(device_type: str = "cpu") -> dict[str, Any]:
    """Returns the random state as JSON values, about 20 KB. `write_random_state` restores it in any process.

    If `device_type` is an accelerator, the state of its current device is included.
    """
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
    """Returns the kind of accelerator that this process has opened, else "cpu". Opens none."""
    in_use = [name for name in KINDS if hasattr(torch, name) and getattr(torch, name).is_initialized()]
    return in_use[0] if in_use else "cpu"


def write_random_state(state: dict[str, Any]) -> None:
    """Restores a state that `read_random_state` has returned."""
    version, internal, gauss = state["python"]
    random.setstate((version, tuple(internal), gauss))
    kind, words, *rest = state["numpy"]
    numpy.random.set_state((kind, numpy.frombuffer(base64.b64decode(words), numpy.uint32), *rest))
    torch.set_rng_state(_tensor(state["torch"]))
    if "device" in state:
        device_type, words = state["device"]
        getattr(torch, device_type).set_rng_state(_tensor(words))


def read_seeded_state() -> str:
    """Returns the random state and torch's seed as JSON, for `write_seeded_state` in other processes of the run."""
    return json.dumps([torch.initial_seed(), read_random_state()])


def write_seeded_state(text: str) -> None:
    """Gives this process the random state of another one. Nothing changes if the script has seeded both alike."""
    seed, state = json.loads(text)
    if torch.initial_seed() != seed:
        torch.manual_seed(seed)  # Also seeds devices, even if they are opened later.
    write_random_state(state)


@contextmanager
def kept_random_state() -> Iterator[None]:
    """Restores the generators at the end of the context. Code inside may draw numbers, such as a collator."""
    before = read_random_state()
    try:
        yield
    finally:
        write_random_state(before)


def seed_all(seed: int) -> None:
    """Seeds the generators of Python, NumPy and torch, also those of devices that are opened later."""
    random.seed(seed)
    numpy.random.seed(seed % 2**32)
    torch.manual_seed(seed)


@contextmanager
def seeded_draws(seed: int) -> Iterator[None]:
    """Seeds the generators of the CPU with `seed`, and restores them at the end of the context."""
    with kept_random_state():
        random.seed(seed)
        numpy.random.seed(seed % 2**32)
        torch.default_generator.manual_seed(seed)
        yield


def draw_seed(*position: int) -> int:
    """Returns a 63-bit seed for a position such as (seed of the run, epoch, step). Seeds of positions are unrelated."""
    digest = hashlib.blake2b(repr(position).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def drawn_from(state: dict[str, Any] | None, source: Iterable[_Item]) -> tuple[list[_Item], dict[str, Any] | None]:
    """Lists the items of `source`, starting from the random state `state`; None = the current one.

    Returns:
        The items, and the state at their start; None if they do not depend on it.
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
