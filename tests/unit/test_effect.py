"""What a mapped function reaches: which changes of it are seen, and what is left alone."""

from types import SimpleNamespace

import pytest
import torch

from unsloth_multigpu.step import effect
from unsloth_multigpu.step.effect import state_digest

# Functions of a script, which dill follows; those of modules count by their names.
SCRIPT = """
import collections, functools, itertools, random
import numpy, torch

TOTAL, TABLE = 0, {}

def count_globally(value):
    global TOTAL
    TOTAL += 1

def fill_table(value):
    TABLE[str(value)] = len(TABLE)

class Vocabulary:
    total = 0
    def __init__(self):
        self.ids = {}
    def __call__(self, value):
        self.ids.setdefault(value, len(self.ids))
    def count(self, value):
        Vocabulary.total += 1

def closures():
    counter, number, nested, words = collections.Counter(), 0, {"a": [set()]}, set()
    numbers, own, generator = itertools.count(), random.Random(1), numpy.random.default_rng(0)
    torchs, tensor, array = torch.Generator(), torch.zeros(3), numpy.zeros(3)
    def default(value, found=[]):
        found.append(value)
    def nonlocals(value):
        nonlocal number
        number += 1
    return {
        "counter": lambda value: counter.update([value]),
        "nonlocal": nonlocals,
        "nested set": lambda value: nested["a"][0].add(len(value)),
        "random.Random": lambda value: own.random(),
        "numpy generator": lambda value: generator.random(),
        "torch generator": lambda value: torch.rand(1, generator=torchs),
        "tensor": lambda value: tensor.add_(1),
        "array": lambda value: array.__setitem__(0, array[0] + 1),
        "default": default,
        "bound builtin": words.add,
        "partial": functools.partial(lambda found, value: found.append(value), []),
    }

FUNCTIONS = {
    "global": count_globally,
    "global of a helper": lambda value: fill_table(value),
    "callable object": Vocabulary(),
    "class attribute": Vocabulary().count,
    **closures(),
}
"""


def test_changes_of_what_a_function_reaches_are_seen():
    names = {"__name__": "__main__"}
    exec(SCRIPT, names)
    for name, function in names["FUNCTIONS"].items():
        before = state_digest(function)
        assert before is not None, name
        assert state_digest(function) == before, name
        function("word")
        assert state_digest(function) != before, name


def test_argument_that_is_filled_is_seen_and_reading_is_no_change():
    kept, table, layer = [], {"a": 1}, torch.nn.Linear(2, 2)

    def read(value):
        return table["a"], layer(torch.zeros(1, 2))

    roots = ((read,), {"fn_kwargs": {"kept": kept}})
    before = state_digest(*roots)
    read("a")
    assert state_digest(*roots) == before is not None
    kept.append(1)
    assert state_digest(*roots) != before


def test_tokenizer_may_change_how_it_truncates():
    class Tokenizer:
        __module__ = "transformers.some"

        def __init__(self):
            self.model_max_length, self.backend, self.tokens = 8, SimpleNamespace(truncation=None), ["a"]

        def get_added_vocab(self):
            return {}

        def __len__(self):
            return len(self.tokens)

    tokenizer = Tokenizer()
    before = state_digest(tokenizer)
    tokenizer.backend.truncation = 8
    assert state_digest(tokenizer) == before
    tokenizer.tokens.append("b")
    assert state_digest(tokenizer) != before


@pytest.mark.parametrize("strange", [(n for n in range(3)), b"x" * 2000])
def test_what_cannot_be_pickled_or_is_too_large_is_not_looked_at(monkeypatch, strange):
    monkeypatch.setattr(effect, "_MAX_BYTES", 1000)
    assert state_digest(lambda: strange) is None
