"""Losses and collators that scripts write: what a multi-GPU tool cannot know of a training. Used by own_code.py."""

import os
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch.nn import functional
from transformers import (
    BertConfig,
    BertForMaskedLM,
    BertForSequenceClassification,
    BertForTokenClassification,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    Trainer,
)

SIZES = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 64}
STILL = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
BERT = BertConfig(num_labels=3, **STILL, **SIZES)
WEIGHTS = torch.tensor([1.0, 5.0, 10.0])


def classifier():
    return BertForSequenceClassification(BERT)


def llama():
    return LlamaForCausalLM(LlamaConfig(**SIZES, num_key_value_heads=2))


def collator(**columns):
    """`columns`: names in the batch -> names in a row."""

    def collate(rows):
        width = max(len(r["input_ids"]) for r in rows)
        ids = torch.tensor([r["input_ids"] + [0] * (width - len(r["input_ids"])) for r in rows])
        batch = {"input_ids": ids, "attention_mask": (ids > 0).long()}
        for name, column in columns.items():
            values = [r[column] for r in rows]
            if isinstance(values[0], list):
                values = [v + [-100] * (width - len(v)) for v in values]
            batch[name] = torch.tensor(values)
        return batch

    return collate


collate_classes, collate_tags = collator(labels="class"), collator(labels="tags")


def collate_tokens(rows):
    batch = collate_classes(rows)
    return {**batch, "labels": batch["input_ids"].masked_fill(batch["input_ids"] == 0, -100)}


def collate_chunks(rows):
    """A row for each three tokens of a sample."""
    chunks = [(row["input_ids"][i : i + 3], row["class"]) for row in rows for i in range(0, len(row["input_ids"]), 3)]
    return collate_classes([{"input_ids": tokens, "class": label} for tokens, label in chunks])


def collate_tuple(rows):
    batch = collate_classes(rows)
    return batch["input_ids"], batch["attention_mask"], batch["labels"]


class CountingCollator:
    """Each call changes what it gives next."""

    def __init__(self):
        self.num_calls = 0

    def __call__(self, rows):
        self.num_calls += 1
        return collate_classes(rows)


class Curriculum(CountingCollator):
    """Rows are cut shorter in the first steps."""

    def __call__(self, rows):
        most = 3 + (self.num_calls + 1) // 2
        return super().__call__([{**row, "input_ids": row["input_ids"][:most]} for row in rows])


class EqualFirst(CountingCollator):
    """Rows are equally long in the first 17 steps: their mean is that of their tokens."""

    def __call__(self, rows):
        self.num_calls += 1
        most = 3 if self.num_calls <= 17 else None
        return collate_tokens([{**row, "input_ids": row["input_ids"][:most]} for row in rows])


def collate_masked(rows):
    """Leaves out tokens at random."""
    batch = collate_classes(rows)
    return {**batch, "input_ids": batch["input_ids"].masked_fill(torch.rand(batch["input_ids"].shape) < 0.3, 0)}


class Augmented(torch.utils.data.Dataset):
    """Rows that begin at random."""

    def __init__(self, rows):
        self.rows, self.num_read = rows, 0

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        return {**self.rows[index], "input_ids": self.part_of(self.rows[index]["input_ids"])}

    def part_of(self, tokens):
        return tokens[random.randrange(2) :]


class Counted(Augmented):
    """Rows that grow with the number of those that were read."""

    def part_of(self, tokens):
        self.num_read += 1
        return tokens[: 2 + self.num_read // 2]


def scores(model, inputs):
    return model(input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"]).logits


def class_losses(model, inputs):
    return functional.cross_entropy(scores(model, inputs), inputs["labels"], reduction="none")


class OwnLoss(Trainer):
    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        return class_losses(model, inputs).mean() * self.factor()

    def factor(self):
        return 1.0


def of(loss):
    """A Trainer with this loss."""

    class Own(Trainer):
        def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
            return loss(model, inputs)

    return Own


def class_weights(model, inputs):
    """Of rows or of tokens."""
    return torch.nn.CrossEntropyLoss(weight=WEIGHTS)(scores(model, inputs).flatten(0, -2), inputs["labels"].flatten())


def weighted_rows(model, inputs):
    return (inputs["weight"] * class_losses(model, inputs)).sum() / inputs["weight"].sum()


def contrastive(model, inputs):
    rows = scores(model, inputs)
    return functional.cross_entropy(rows @ rows.T, torch.arange(len(rows)))


def row_means(model, inputs):
    labels = inputs["labels"][:, 1:]
    losses = functional.cross_entropy(scores(model, inputs)[:, :-1].transpose(1, 2), labels, reduction="none")
    return (losses.sum(1) / labels.ne(-100).sum(1)).mean()


def summed_target(model, inputs):
    return functional.cross_entropy(scores(model, inputs), inputs["target"], reduction="sum")


def by_names(model, inputs):
    weights = [p.pow(2).sum() for name, p in model.named_parameters() if name.startswith("classifier")]
    return class_losses(model, inputs).mean() + 0.1 * sum(weights)


def steep(model, inputs):
    """Draws for nothing. The last bits of the weights change its gradient, by less than parts of a micro-batch do."""
    torch.rand(())
    (weight,) = (p for name, p in model.named_parameters() if name.endswith("classifier.weight"))
    loss = class_losses(model, inputs).mean()
    total = weight.double().sum()
    return loss + 1.5e-3 * loss.square() + 100 * (total - round(float(total), 3)).square()


def by_attribute(model, inputs):
    loss = class_losses(model, inputs).mean()
    return loss + 0.1 * model.classifier.weight.pow(2).sum() if hasattr(model, "classifier") else loss


def tuples(model, inputs):
    ids, mask, labels = inputs
    return functional.cross_entropy(model(input_ids=ids, attention_mask=mask).logits, labels)


def by_embeddings(model, inputs):
    embeddings = model.get_input_embeddings()(inputs["input_ids"])
    output = model(inputs_embeds=embeddings, attention_mask=inputs["attention_mask"])
    return functional.cross_entropy(output.logits, inputs["labels"])


class Opaque(torch.nn.Module):
    """Returns an object in which DDP finds no tensor."""

    def __init__(self):
        super().__init__()
        self.embed, self.head = torch.nn.Embedding(64, 16), torch.nn.Linear(16, 3)

    def forward(self, input_ids, attention_mask):
        mask = attention_mask[..., None]
        return SimpleNamespace(logits=self.head((self.embed(input_ids) * mask).sum(1) / mask.sum(1)))


class Pooled(torch.nn.Module):
    """Reads each row by an LSTM, padding too, or by its mean and a batch norm."""

    def __init__(self, *, norm):
        super().__init__()
        self.embed, self.head = torch.nn.Embedding(64, 16), torch.nn.Linear(16, 3)
        self.reader = torch.nn.BatchNorm1d(16) if norm else torch.nn.LSTM(16, 16, batch_first=True)

    def forward(self, input_ids, attention_mask, labels=None):
        states = self.embed(input_ids)
        if isinstance(self.reader, torch.nn.LSTM):
            row = self.reader(states)[0][:, -1]
        else:
            mask = attention_mask[..., None]
            row = self.reader((states * mask).sum(1) / mask.sum(1))
        return {"loss": functional.cross_entropy(self.head(row), labels)}


class Branches(torch.nn.Module):
    """Uses a layer in some micro-batches alone."""

    def __init__(self):
        super().__init__()
        self.model, self.head = classifier(), torch.nn.Linear(3, 3)

    def forward(self, input_ids, attention_mask, labels):
        logits = self.model(input_ids=input_ids, attention_mask=attention_mask).logits
        return {"loss": functional.cross_entropy(self.head(logits) if labels[0] == 0 else logits, labels)}


class ChangesForm(Trainer):
    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        losses = class_losses(model, inputs)
        if self.state.global_step < 8:
            return losses.mean()
        weights = 1.0 / torch.bincount(inputs["labels"], minlength=3)[inputs["labels"]]
        return (losses * weights).sum() / weights.sum()


def gathers_by_torch(model, inputs):
    """Negatives of all ranks, as in CLIP; the rows of this rank know theirs."""
    rows = scores(model, inputs)
    others, begin = [rows], 0
    if dist.is_initialized():
        rank, others = dist.get_rank(), [None] * dist.get_world_size()
        dist.all_gather_object(others, rows.detach())
        others[rank], begin = rows, sum(map(len, others[:rank]))
    return functional.cross_entropy(rows @ torch.cat(others).T, torch.arange(len(rows)) + begin)


class GathersByAccelerate(Trainer):
    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        rows = scores(model, inputs)
        others = self.accelerator.gather_for_metrics(input_data=rows)
        begin = self.accelerator.process_index * len(rows)
        return functional.cross_entropy(rows @ others.T, torch.arange(len(rows)) + begin)


class ByRate(OwnLoss):
    def factor(self):
        return 1.0 + self.lr_scheduler.get_last_lr()[0] + self.optimizer.param_groups[0]["lr"]


class Ready(Trainer):
    """Ready batches, each given as a row."""

    def get_train_dataloader(self):
        rows = list(self.train_dataset)
        batches = [collate_classes(rows[i : i + 4]) for i in range(0, len(rows), 4)]
        return torch.utils.data.DataLoader(batches, batch_size=1, collate_fn=lambda rows: rows[0], shuffle=False)


class Noisy(OwnLoss):
    """Noise that is no dropout."""

    def factor(self):
        return 1.0 + torch.rand(())


class Tight(OwnLoss):
    """The whole micro-batch does not fit on one of several devices."""

    def compute_loss(self, model, inputs, *arguments, **keywords):
        if os.environ.get("WORLD_SIZE", "1") != "1" and len(inputs["labels"]) > 2:
            raise torch.OutOfMemoryError("out of memory, as planted")
        return super().compute_loss(model, inputs, *arguments, **keywords)


def router():
    experts = {"num_local_experts": 2, "num_experts_per_tok": 1, "num_key_value_heads": 2, "output_router_logits": True}
    return MixtralForCausalLM(MixtralConfig(**SIZES, **experts))


@dataclass(frozen=True)
class Kind:
    """`collate` makes the collator, `dataset` what the rows are in."""

    trainer: type[Trainer] = Trainer
    model: Callable[[], torch.nn.Module] = classifier
    collate: Callable[[], Any] = lambda: collate_classes
    settings: dict[str, Any] = field(default_factory=dict)
    dataset: Callable[[list[dict[str, Any]]], Any] = lambda rows: rows


KINDS = {
    "class_weights": Kind(of(class_weights)),
    "token_class_weights": Kind(of(class_weights), lambda: BertForTokenClassification(BERT), lambda: collate_tags),
    "weighted_rows": Kind(of(weighted_rows), collate=lambda: collator(labels="class", weight="weight")),
    "row_means": Kind(of(row_means), llama, EqualFirst),
    "summed_target": Kind(of(summed_target), collate=lambda: collator(target="class")),
    "masked": Kind(model=lambda: BertForMaskedLM(BERT), collate=lambda: collator(labels="masked")),
    "contrastive": Kind(of(contrastive)),
    "by_names": Kind(of(by_names)),
    "steep": Kind(of(steep)),
    "by_attribute": Kind(of(by_attribute)),
    "by_embeddings": Kind(of(by_embeddings)),
    "opaque": Kind(of(lambda model, inputs: class_losses(model, inputs).mean()), Opaque),
    "reads_padding": Kind(model=lambda: Pooled(norm=False)),
    "batch_norm": Kind(model=lambda: Pooled(norm=True)),
    "router": Kind(model=router, collate=lambda: collator(labels="input_ids")),
    "chunks": Kind(OwnLoss, collate=lambda: collate_chunks),
    "changes_form": Kind(ChangesForm),
    "gathers_by_torch": Kind(of(gathers_by_torch)),
    "gathers_by_accelerate": Kind(GathersByAccelerate),
    "by_rate": Kind(ByRate),
    "tuples": Kind(of(tuples), collate=lambda: collate_tuple),
    "noisy": Kind(Noisy),
    "tight": Kind(Tight),
    "ready": Kind(Ready),
    "counting": Kind(OwnLoss, collate=CountingCollator),
    "curriculum": Kind(OwnLoss, collate=Curriculum),
    "branches": Kind(model=Branches, settings={"ddp_find_unused_parameters": True}),
    "masks_at_random": Kind(collate=lambda: collate_masked),
    "augmented": Kind(dataset=Augmented),
    "dropout": Kind(model=lambda: BertForSequenceClassification(BertConfig(num_labels=3, **SIZES))),
    "counted_rows": Kind(dataset=Counted),
}
