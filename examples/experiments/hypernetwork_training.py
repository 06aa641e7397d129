"""Data, model and loop of `hypernetwork.py`: a classifier whose weights a shared generator makes from small signals."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from pydoc_data.topics import topics as python_help

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

import unsloth_multigpu as ump

NUM_SIGNALS = 8  # Numbers of the signal of one generated layer.
CONTEXT = 8  # Characters from which the next one is told.
_BLOCK = 1024  # Characters of a piece of text that is for training or for the test, never both.


@dataclass(frozen=True)
class Task:
    """A data set and how long it is trained on.

    Args:
        train: Inputs `[samples, features]` and labels `[samples]`; whole batches of 256.
        num_symbols: Characters, where the inputs are numbers of characters; 0 where they are features.
        width: Neurons of a layer.
        learning_rate: Of Adam, where a condition names no other.
        factors: Learning rates of the sweep, as multiples of that one.
    """

    name: str
    train: tuple[Tensor, Tensor]
    test: tuple[Tensor, Tensor]
    num_classes: int
    num_symbols: int
    width: int
    num_epochs: int
    learning_rate: float
    factors: tuple[float, ...]


@dataclass(frozen=True)
class Arm:
    """One condition.

    Args:
        batch_size: Samples of an optimizer step, over all ranks.
        num_parts: Parts of that batch, each with its own dropout stream, whose gradients are averaged.
        is_ddp: Part r is computed by rank r; else one process computes all parts.
        same_streams: All parts draw the masks of part 0, as ranks do that set the same seed.
        samples: "all" in one order; "split" = the same, batch by batch from the two ranks' shares; "half" = the share
            of rank 0 alone.
    """

    name: str
    text: str
    batch_size: int = 256
    num_parts: int = 1
    is_ddp: bool = False
    same_streams: bool = False
    samples: str = "all"
    dropout: float = 0.2
    epochs_factor: int = 1
    factor: float = 1.0


@dataclass(frozen=True)
class Run:
    """What one training gave: test accuracy in percent, mean test loss in nats, and the range of the signals."""

    arm: str
    seed: int
    learning_rate: float
    num_updates: int
    accuracy: float
    test_loss: float
    signal_low: float
    signal_high: float
    signal_std: float
    weights: Tensor = dataclasses.field(repr=False, compare=False)


class HyperNetwork(nn.Module):
    """Three layers whose weights are `generator(signal)`: one signal for each layer, one generator for all.

    The static hypernetwork of Ha, Dai and Le, "HyperNetworks" (2016, arXiv:1609.09106). The generator makes a square
    matrix and a bias; a layer with fewer inputs or outputs takes the upper left part.
    """

    def __init__(self, task: Task, dropout: float) -> None:
        super().__init__()
        self.width, self.dropout = task.width, dropout
        num_inputs = task.train[0].shape[1] if not task.num_symbols else task.width
        self.shapes = [(num_inputs, self.width), (self.width, self.width), (self.width, task.num_classes)]
        self.embedding = nn.Embedding(task.num_symbols, task.width // CONTEXT) if task.num_symbols else None
        self.generator = nn.Linear(NUM_SIGNALS, self.width * (self.width + 1))
        # At right angles and of one length: no seed begins with two layers alike, or with a faint one.
        self.signals = nn.Parameter(nn.init.orthogonal_(torch.empty(len(self.shapes), NUM_SIGNALS)))
        # Generated weights begin with He's variance, 2 / width.
        nn.init.normal_(self.generator.weight, std=(2 / self.width) ** 0.5)
        nn.init.zeros_(self.generator.bias)

    def forward(self, x: Tensor, stream: torch.Generator | None = None) -> Tensor:
        """Logits `[samples, classes]` of inputs `[samples, features]`; dropout with the numbers of `stream`, if any."""
        if self.embedding is not None:
            x = self.embedding(x).flatten(1)
        made = self.generator(self.signals).view(-1, self.width, self.width + 1)
        for layer, (weights, (num_inputs, num_outputs)) in enumerate(zip(made, self.shapes, strict=True)):
            if layer:
                x = F.relu(x)
                if stream is not None and self.dropout:
                    x = x * torch.empty_like(x).bernoulli_(1 - self.dropout, generator=stream) / (1 - self.dropout)
            x = F.linear(x, weights[:num_outputs, :num_inputs], weights[:num_outputs, -1])
        return x


def load_task(name: str, *, num_epochs: int | None, quick: bool) -> Task:
    """The task "text" or "digits"; `quick` takes a small part of it."""
    factors = (1.0, 2.0, 30.0) if quick else (0.3, 1.0, 2.0, 4.0, 8.0, 30.0)
    if name == "text":
        train, test, num_symbols = _text(2048 if quick else 45056, 512 if quick else 8192)
        return Task(name, train, test, num_symbols, num_symbols, 128, num_epochs or 2, 1e-3, factors)
    train, test = _digits(1280)
    return Task(name, train, test, 10, 0, 64, num_epochs or (2 if quick else 12), 1e-3, factors)


def train(task: Task, arm: Arm, seed: int, rank: int) -> Run:
    """Trains one model. With `arm.is_ddp` all ranks call it together.

    The seed is that of weights, order and dropout. Arms with the same seed begin with the same weights and go through
    the samples in the same order, so that their results can be compared seed by seed.
    """
    torch.manual_seed(seed)
    module = HyperNetwork(task, arm.dropout)
    model = ump.wrap_model_multi_gpu(module) if arm.is_ddp else module
    optimizer = torch.optim.Adam(model.parameters(), lr=arm.factor * task.learning_rate)
    streams = [_stream(seed, 0 if arm.same_streams else part) for part in range(arm.num_parts)]
    mine = [rank] if arm.is_ddp else range(arm.num_parts)
    order = _stream(seed, 99)
    num_updates = 0
    inputs, labels = task.train
    for _ in range(arm.epochs_factor * task.num_epochs):
        for parts in plan_steps(torch.randperm(len(labels), generator=order), arm):
            optimizer.zero_grad()
            for part in mine:
                loss = F.cross_entropy(model(inputs[parts[part]], streams[part]), labels[parts[part]])
                (loss / len(mine)).backward()
            optimizer.step()
            num_updates += 1
    return _finish(task, arm, seed, num_updates, module)


def plan_steps(order: Tensor, arm: Arm) -> list[list[Tensor]]:
    """`steps[step][part]` = indices of samples; `order` = those of one epoch.

    Shares are dealt as torch's DistributedSampler deals them: rank r of N takes every N-th, beginning with r. So a step
    of two ranks sees the samples that one process sees in a batch as large as both.
    """
    if arm.samples == "half":
        order = order[::2]
    elif arm.samples == "split":
        order = torch.cat([batch[rank::2] for batch in order.split(2 * arm.batch_size) for rank in range(2)])
    return [[batch[part :: arm.num_parts] for part in range(arm.num_parts)] for batch in order.split(arm.batch_size)]


def gather(mine: Sequence[Run]) -> list[list[Run]]:
    """`runs[rank]`, on every rank. Collective."""
    gathered: list[list[Run]] = [[] for _ in range(dist.get_world_size())]
    dist.all_gather_object(gathered, list(mine))
    return gathered


@torch.no_grad()
def _finish(task: Task, arm: Arm, seed: int, num_updates: int, model: HyperNetwork) -> Run:
    logits, labels = model(task.test[0]), task.test[1]
    return Run(
        arm=arm.name,
        seed=seed,
        learning_rate=arm.factor * task.learning_rate,
        num_updates=num_updates,
        accuracy=100 * float((logits.argmax(1) == labels).double().mean()),
        test_loss=float(F.cross_entropy(logits, labels)),
        signal_low=float(model.signals.min()),
        signal_high=float(model.signals.max()),
        signal_std=float(model.signals.std()),
        weights=torch.cat([p.flatten() for p in model.parameters()]).clone(),
    )


def _stream(seed: int, number: int) -> torch.Generator:
    return torch.Generator().manual_seed(1000 * seed + number)


def _text(num_train: int, num_test: int) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor], int]:
    text = "\n".join(python_help[name] for name in sorted(python_help))
    symbols = {symbol: number for number, symbol in enumerate(sorted(set(text)))}
    windows = torch.tensor([symbols[symbol] for symbol in text]).unfold(0, CONTEXT + 1, 1)
    starts = torch.randperm(len(windows), generator=_stream(0, 0))
    starts = starts[starts % _BLOCK < _BLOCK - CONTEXT]  # No window reaches into the next block.
    is_test = starts // _BLOCK % 8 == 7
    picked = [windows[starts[~is_test][:num_train]], windows[starts[is_test][:num_test]]]
    train, test = ((rows[:, :-1].contiguous(), rows[:, -1].contiguous()) for rows in picked)
    return train, test, len(symbols)


def _digits(num_train: int) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    from sklearn.datasets import load_digits

    features, labels = load_digits(return_X_y=True)
    x, y = torch.tensor(features / 16, dtype=torch.float32), torch.tensor(labels)
    order = torch.randperm(len(y), generator=_stream(0, 0))
    first, rest = order[:num_train], order[num_train:]
    return (x[first], y[first]), (x[rest], y[rest])
