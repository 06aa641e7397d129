"""What the variants of gradient_sync.py learn: handwritten digits, and the text of Python's own help."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pydoc_data.topics import topics

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

CONTEXT_CHARACTERS = 48
NUM_TEXTS, NUM_TEST_TEXTS = 1280, 256
NUM_DIGITS, NUM_TEST_DIGITS = 1797, 360


@dataclass(frozen=True)
class Data:
    """Inputs (rows, ...) and targets: (rows,) classes, or (rows, length) the next character at each place."""

    inputs: torch.Tensor
    targets: torch.Tensor
    test_inputs: torch.Tensor
    test_targets: torch.Tensor


@dataclass(frozen=True)
class Task:
    """One thing to learn.

    Args:
        what: Model, data and optimizer in words.
        num_epochs: Of a run at full size.
        max_seeds: A slow task runs with fewer seeds than were asked for.
        make_optimizer: Parameters, learning rate -> optimizer.
    """

    name: str
    what: str
    num_epochs: int
    max_seeds: int
    learning_rate: float
    read_data: Callable[[], Data]
    make_model: Callable[[], nn.Module]
    make_optimizer: Callable[..., torch.optim.Optimizer]


def loss_of(model: nn.Module, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Mean cross entropy of all rows, of all places where rows are texts; in nats."""
    return F.cross_entropy(model(inputs).flatten(0, -2), targets.flatten())


@torch.no_grad()
def accuracy_of(model: nn.Module, data: Data) -> float:
    """Part of the test set's targets that the model's first guess meets."""
    model.eval()
    guess = model(data.test_inputs).argmax(-1)
    model.train()
    return float((guess == data.test_targets).float().mean())


@cache
def read_digits() -> Data:
    """scikit-learn's 1797 digits of 8 x 8 pixels (it brings them along), pixels scaled to 0..1. Collective."""
    pixels, classes = torch.empty(NUM_DIGITS, 64), torch.empty(NUM_DIGITS, dtype=torch.int64)
    if dist.get_rank() == 0:  # The import alone takes seconds; the others get what rank 0 has read.
        from sklearn.datasets import load_digits

        read = load_digits(return_X_y=True)
        pixels, classes = torch.tensor(read[0], dtype=torch.float32), torch.tensor(read[1])
    dist.broadcast(pixels, src=0)
    dist.broadcast(classes, src=0)
    order = torch.randperm(NUM_DIGITS, generator=torch.Generator().manual_seed(0))
    inputs, targets = pixels[order] / 16, classes[order]
    cut = len(order) - NUM_TEST_DIGITS
    return Data(inputs[:cut], targets[:cut], inputs[cut:], targets[cut:])


@cache
def read_text() -> Data:
    """Rows of characters from Python's help; a row's targets are its inputs one place further."""
    text = "\n".join(topics[name] for name in sorted(topics))
    number_of = {character: number for number, character in enumerate(sorted(set(text)))}
    length = CONTEXT_CHARACTERS + 1
    starts = range(0, len(text) - length, length)
    chosen = random.Random(0).sample(starts, NUM_TEXTS + NUM_TEST_TEXTS)
    rows = torch.tensor([[number_of[c] for c in text[start : start + length]] for start in chosen])
    train, test = rows[:NUM_TEXTS], rows[NUM_TEXTS:]
    return Data(train[:, :-1], train[:, 1:], test[:, :-1], test[:, 1:])


class TinyLM(nn.Module):
    """A causal transformer over characters."""

    def __init__(self, num_characters: int, hidden_size: int = 48, num_layers: int = 2) -> None:
        super().__init__()
        self.embed = nn.Embedding(num_characters, hidden_size)
        self.place = nn.Embedding(CONTEXT_CHARACTERS, hidden_size)
        # Without dropout, so that ranks and one process compute the same.
        layer = nn.TransformerEncoderLayer(
            hidden_size, 4, 4 * hidden_size, dropout=0.0, activation="gelu", batch_first=True, norm_first=True
        )
        self.layers = nn.TransformerEncoder(layer, num_layers, enable_nested_tensor=False)
        self.norm = nn.LayerNorm(hidden_size)
        self.head = nn.Linear(hidden_size, num_characters)

    def forward(self, characters: torch.Tensor) -> torch.Tensor:
        """(rows, length) numbers of characters -> (rows, length, num_characters)."""
        length = characters.shape[1]
        mask = nn.Transformer.generate_square_subsequent_mask(length)
        hidden = self.embed(characters) + self.place.weight[:length]
        return self.head(self.norm(self.layers(hidden, mask=mask, is_causal=True)))


def make_mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))


def make_cnn() -> nn.Module:
    return nn.Sequential(
        nn.Unflatten(1, (1, 8, 8)),
        nn.Conv2d(1, 16, 3, padding=1),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1),
        nn.BatchNorm2d(32),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(32, 10),
    )


def make_lm() -> nn.Module:
    return TinyLM(num_characters=len(set("".join(topics.values())) | {"\n"}))


def make_sgd(parameters, learning_rate: float) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, learning_rate)


def make_momentum(parameters, learning_rate: float) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, learning_rate, momentum=0.9)


def make_adamw(parameters, learning_rate: float) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, learning_rate, weight_decay=0.01)


TASKS = {
    task.name: task
    for task in (
        Task("digits", "digits, three linear layers, plain SGD", 12, 99, 0.1, read_digits, make_mlp, make_sgd),
        Task(
            "momentum",
            "digits, three linear layers, SGD with momentum 0.9",
            *(8, 1, 0.05, read_digits, make_mlp, make_momentum),
        ),
        Task(
            "cnn",
            "digits, two convolutions with BatchNorm, SGD with momentum 0.9",
            *(4, 1, 0.02, read_digits, make_cnn, make_momentum),
        ),
        Task("text", "next character, transformer of two layers, AdamW", 4, 1, 3e-3, read_text, make_lm, make_adamw),
    )
}
