"""Trains with losses that are put together at random, a few steps each. Clipping keeps squares of losses finite."""

import random

import torch
from common import SGD, Said, arguments, logged
from torch.nn import functional
from transformers import Trainer


class Tokens(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head = torch.nn.Embedding(16, 8), torch.nn.Linear(8, 4)

    def forward(self, input_ids):
        return self.head(self.embed(input_ids))


def make_rows(rng, count):
    rows = []
    for _ in range(count):
        size = rng.randrange(2, 7)
        ids = [rng.randrange(1, 16) for _ in range(size)]
        labels = [i % 4 if rng.random() < 0.7 else -100 for i in ids]
        rows.append({"ids": ids, "labels": labels, "weight": rng.random()})
    return rows


def collator(copies):
    def collate(rows):
        rows = [row for row in rows for _ in range(1 + len(row["ids"]) % copies)]
        width = max(len(row["ids"]) for row in rows)
        return {
            "input_ids": torch.tensor([row["ids"] + [0] * (width - len(row["ids"])) for row in rows]),
            "labels": torch.tensor([row["labels"] + [-100] * (width - len(row["ids"])) for row in rows]),
            "weight": torch.tensor([row["weight"] for row in rows]),
        }

    return collate


def mean_of_labels(losses, inputs):
    return losses.sum() / inputs["labels"].ne(-100).sum().clamp(min=1)


def mean_of_rows(losses, inputs):
    return (losses.sum(1) / inputs["labels"].ne(-100).sum(1).clamp(min=1)).mean()


REDUCTIONS = {
    "labels": mean_of_labels,
    "rows": mean_of_rows,
    "sum": lambda losses, inputs: losses.sum() / 10,
    "weighted": lambda losses, inputs: (losses.sum(1) * inputs["weight"]).sum() / inputs["weight"].sum(),
    "both": lambda losses, inputs: mean_of_labels(losses, inputs) + mean_of_rows(losses, inputs),
    "worst": lambda losses, inputs: losses.sum(1).max(),
    "padded": lambda losses, inputs: losses.mean(),
}
OUTER = {
    "": lambda loss: loss,
    "root": lambda loss: (loss + 0.1).sqrt(),
    "square": lambda loss: loss**2,
    "flooded": lambda loss: (loss - 1.2).abs(),
}


class Composed(Trainer):
    """Its parts are attributes."""

    num_calls = 0

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        logits = model(inputs["input_ids"]).transpose(1, 2)
        losses = functional.cross_entropy(logits, inputs["labels"], weight=self.weights, reduction="none")
        loss = self.outer(self.reduction(losses, inputs))
        self.num_calls += 1
        return loss * (1 + 0.1 * (self.num_calls % 3)) if self.counts else loss


def run(seed):
    rng = random.Random(seed)
    accumulation = rng.choice((1, 1, 2, 3))
    reduction, outer = rng.choice(list(REDUCTIONS)), rng.choice(("", "", *OUTER))
    torch.manual_seed(seed)
    model, copies = Tokens(), rng.choice((1, 1, 3))
    settings = {**SGD, "learning_rate": 0.2, "max_steps": 5, "max_grad_norm": 1.0, "use_cpu": True}
    config = arguments("unused", rng.randrange(2, 6), accumulation, remove_unused_columns=False, **settings)
    trainer = Composed(model=model, args=config, train_dataset=make_rows(rng, 23), data_collator=collator(copies))
    trainer.reduction, trainer.outer = REDUCTIONS[reduction], OUTER[outer]
    trainer.weights = torch.tensor([1.0, 2.0, 4.0, 8.0]) if rng.random() < 0.3 else None
    trainer.counts = rng.random() < 0.15
    if rng.random() < 0.1:
        model.head.weight.register_hook(lambda gradient: gradient.clamp(-0.01, 0.01))
    said = Said()
    error = said.train(trainer)
    what = f"{seed}: {reduction} {outer} x{copies} acc {accumulation} counts {trainer.counts}"
    weights = torch.cat([p.detach().flatten() for p in model.parameters()]).tolist()
    return {
        "what": what,
        **logged(trainer, "grad_norm"),
        "weights": weights,
        "said": [text for level, text in said.records if level == "WARNING"],
        "error": f"{type(error).__name__}: {error}" if error else "",
    }
