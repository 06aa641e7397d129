"""What a function reaches: which changes of it are seen, and what is left alone."""

from __future__ import annotations

import collections
import functools
import itertools
import random
import threading
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch

from unsloth_multigpu.step import effect
from unsloth_multigpu.step.effect import state_digest

TOTAL = 0
TABLE: dict[str, int] = {}


def count_globally(value: object) -> None:
    global TOTAL
    TOTAL += 1


def through_a_helper(value: object) -> None:
    fill_table(value)


def fill_table(value: object) -> None:
    TABLE[str(value)] = len(TABLE)


class Vocabulary:
    total = 0

    def __init__(self) -> None:
        self.ids: dict[object, int] = {}
        self.lock = threading.Lock()  # Cannot be pickled.

    def __call__(self, value: object) -> None:
        self.ids.setdefault(value, len(self.ids))

    def count(self, value: object) -> None:
        Vocabulary.total += 1


def closures() -> dict[str, Callable[[Any], object]]:
    counter: collections.Counter[str] = collections.Counter()
    number = 0
    nested: dict[str, list[set[int]]] = {"a": [set()]}
    numbers, own, generator = itertools.count(), random.Random(1), numpy.random.default_rng(0)
    torchs, tensor, array = torch.Generator(), torch.zeros(3), numpy.zeros(3)
    words: set[object] = set()

    def attribute(value: object) -> None:
        attribute.count = getattr(attribute, "count", 0) + 1  # type: ignore[attr-defined]

    def default(value: object, found: list[object] = []) -> None:  # noqa: B006
        found.append(value)

    def nonlocals(value: object) -> None:
        nonlocal number
        number += 1

    @functools.lru_cache
    def cached(value: str) -> None:
        counter.update([value])

    return {
        "counter": lambda value: counter.update([value]),
        "nonlocal": nonlocals,
        "nested set": lambda value: nested["a"][0].add(len(value)),
        "itertools.count": lambda value: next(numbers),
        "random.Random": lambda value: own.random(),
        "numpy generator": lambda value: generator.random(),
        "torch generator": lambda value: torch.rand(1, generator=torchs),
        "tensor": lambda value: tensor.add_(1),
        "array": lambda value: array.__setitem__(0, array[0] + 1),
        "attribute": attribute,
        "default": default,
        "cached": cached,
        "bound builtin": words.add,
        "partial": functools.partial(lambda found, value: found.append(value), []),
    }


OBJECTS: dict[str, Callable[[Any], object]] = {
    "global": count_globally,
    "global of a helper": through_a_helper,
    "callable object": Vocabulary(),
    "class attribute": Vocabulary().count,
    **closures(),
}


@pytest.mark.parametrize("name", OBJECTS)
def test_change_is_seen(name: str) -> None:
    function = OBJECTS[name]
    before = state_digest(function)
    assert before is not None
    assert state_digest(function) == before
    function("word")
    assert state_digest(function) != before


def test_argument_that_is_filled_is_seen() -> None:
    kept: list[int] = []
    roots = ((fill_table,), {"fn_kwargs": {"kept": kept}})
    before = state_digest(*roots)
    kept.append(1)
    assert state_digest(*roots) != before


def test_reading_is_no_change() -> None:
    table = {"a": 1}
    layer = torch.nn.Linear(2, 2)

    def read(value: object) -> object:
        return read and (table["a"], layer(torch.zeros(1, 2)), TABLE.get("a"))

    before = state_digest(read)
    read("a")
    assert state_digest(read) == before is not None


def test_writing_a_models_weights_is_seen() -> None:
    layer = torch.nn.Linear(2, 2)
    before = state_digest(lambda: layer)
    with torch.no_grad():
        layer.weight.add_(1)
    assert state_digest(lambda: layer) != before


def test_open_files_and_generators_count_as_unchanged() -> None:
    lines = (n for n in range(3))
    before = state_digest(lambda: lines)
    next(lines)
    assert state_digest(lambda: lines) == before is not None


def test_object_that_refuses_to_be_pickled_counts_as_unchanged() -> None:
    class Refuses:
        def __reduce_ex__(self, protocol: object) -> tuple[Any, ...]:
            raise KeyError("no")

    class Lies:
        def __reduce_ex__(self, protocol: object) -> tuple[Any, ...]:
            return (str, "no tuple")

    refuses, lies = Refuses(), Lies()
    assert state_digest(lambda: refuses) == state_digest(lambda: refuses) is not None
    assert state_digest(lambda: lies) is None


def test_what_is_too_large_is_not_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(effect, "_MAX_BYTES", 1000)
    data = b"x" * 2000
    assert state_digest(lambda: data) is None
    assert state_digest(lambda: data[:10], None) is None
    deep: list[Any] = []
    for _ in range(100_000):
        deep = [deep]
    assert state_digest(deep) is None
