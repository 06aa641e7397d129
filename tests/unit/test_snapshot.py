"""What a pass over a step may have changed is as it was behind it, and dropout is off in it."""

import copy
import random
from collections import Counter, OrderedDict, defaultdict, deque
from types import SimpleNamespace

import numpy
import pytest
import torch

from unsloth_multigpu.step.snapshot import KeptObjects, kept_training_state

HISTORY = []


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2))
        self.register_buffer("mean", torch.zeros(2))
        self.num_calls = 0

    def forward(self, x):
        self.num_calls += 1
        self.mean += 1
        self.last = x
        HISTORY.append(self.num_calls)
        return self.layer(x)


class Trainer:
    """A script's own, with all that it may count by."""

    def __init__(self):
        self.model, self.optimizer = Model(), None
        self.args = SimpleNamespace(device=torch.device("cpu"))
        self.metrics = defaultdict(list, loss=[1.0])
        self.teacher = {"w": torch.ones(2)}
        self.generators = [random.Random(1), torch.Generator(), numpy.random.default_rng(0)]
        self.nested, self.logs = {"a": [{1}]}, []
        self.train_dataset = [1]
        self.loss = self.make_loss()

    def log(self, line):
        self.logs.append(line)

    def make_loss(self):
        count = 0

        def loss(x):
            nonlocal count
            count += 1
            loss.average = count
            return count

        return loss

    def compute(self):
        loss = self.model(torch.ones(3, 2)).sum() * self.loss(1)
        loss.backward()
        self.metrics["loss"].append(2.0)
        self.metrics["new"].append(3.0)
        self.teacher["w"].mul_(2)
        self.nested["a"][0].add(2)
        self.nested["b"] = self
        self.fresh = 1
        self.log({})
        self.generators[1] = None
        random.random(), numpy.random.rand(), torch.rand(1)
        self.train_dataset.append(2)


def fields(thing, *left_out):
    return {name: value for name, value in vars(thing).items() if name not in left_out and not name.startswith("_")}


def state_of(trainer):
    first, _, last = trainer.generators
    return repr(
        [
            fields(trainer, "model", "loss", "train_dataset", "args"),
            dict(trainer.model.named_buffers()),
            fields(trainer.model),
            [p.grad for p in trainer.model.parameters()],
            [random.getstate(), numpy.random.get_state(), torch.get_rng_state().sum(), first.getstate(), last.random()],
            [HISTORY, trainer.loss.__closure__[0].cell_contents, vars(trainer.loss)],
        ]
    )


def test_a_pass_leaves_no_trace():
    trainer = Trainer()
    trainer.model(torch.ones(3, 2)).sum().backward()
    with KeptObjects(trainer):
        before = state_of(trainer)
        versions = [b._version for b in trainer.model.buffers()]
    for _ in range(2):
        with kept_training_state(trainer):
            trainer.compute()
        with KeptObjects(trainer):
            assert state_of(trainer) == before
    assert trainer.train_dataset == [1, 2, 2]  # Data are no state.
    with KeptObjects(trainer.model):
        pass
    assert versions[-1] < [b._version for b in trainer.model.buffers()][-1]
    again = [b._version for b in trainer.model.buffers()]
    with KeptObjects(trainer.model):
        pass
    assert [b._version for b in trainer.model.buffers()] == again  # What is not written does not count as changed.


@pytest.mark.parametrize(
    "held",
    [
        *(Counter(b=3, a=1), OrderedDict(b=3, a=1), defaultdict(int, b=3, a=1), {"b": 3, "a": 1}),
        *(["b", "a"], deque(["b", "a"]), {2, 1}),
    ],
    ids=lambda held: type(held).__name__,
)
def test_containers_of_the_script_are_as_before(held):
    before = copy.copy(held)
    with KeptObjects(held):
        held.clear()
    assert held == before
    assert list(held) == list(before)


def test_arrays_of_the_script_are_as_before():
    counts, data, number = numpy.zeros(3), numpy.zeros(3), numpy.float32(1)
    data.flags.writeable = False
    frozen, resized = numpy.zeros(3), numpy.zeros(3)
    with KeptObjects([frozen, resized, counts, data, number]):
        counts[1] += 1
        frozen.setflags(write=False)
        resized.resize(4, refcheck=False)
    assert not counts.any()
