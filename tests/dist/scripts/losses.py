"""Trains with losses that scripts write, and writes gradient norms, weights and warnings of each, for comparison.

Usage: losses.py --num-gpus N --jobs class_weights:22x5x1,contrastive:22x4x2 --out DIR
A job is a kind with rows x batch size x accumulation.
"""

import argparse
import logging
import random
from pathlib import Path

import unsloth_multigpu as ump

parser = argparse.ArgumentParser()
parser.add_argument("--num-gpus", type=int, required=True)
parser.add_argument("--jobs", required=True)
parser.add_argument("--out", required=True)
args = parser.parse_args()

ump.enable_multi_gpu(num_gpus=args.num_gpus)

import torch
from common import SGD, Said, logged, write_outcome
from torch.nn import functional
from transformers import (
    BertConfig,
    BertForMaskedLM,
    BertForQuestionAnswering,
    BertForSequenceClassification,
    BertForTokenClassification,
    MixtralConfig,
    MixtralForCausalLM,
    Trainer,
    TrainingArguments,
)

SIZES = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 64}
BERT = {**SIZES, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
WEIGHTS = torch.tensor([1.0, 5.0, 10.0])


def make_rows(count):
    rng = random.Random(5)
    rows = []
    for i in range(count):
        size = rng.randrange(3, 12)
        tokens = [rng.randrange(1, 64) for _ in range(size)]
        rows.append(
            {
                "input_ids": tokens,
                "class": rng.randrange(3) if i % 3 else -100,
                "known_class": rng.randrange(3),
                "tokens": [token % 3 if rng.random() < 0.6 else -100 for token in tokens[:-1]] + [1],
                # Every second row has no label.
                "masked": [token if i % 2 and k == 0 else -100 for k, token in enumerate(tokens)],
                "weight": rng.uniform(0.2, 4.0),
                "start": rng.randrange(size) if rng.random() < 0.7 else 99,
                "end": rng.randrange(size),
            }
        )
    return rows


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


class OwnLoss(Trainer):
    loss = None

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        return self.loss(model, inputs)


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


def scores(model, inputs):
    return model(input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"]).logits


def class_losses(model, inputs):
    return functional.cross_entropy(scores(model, inputs), inputs["labels"], reduction="none")


def token_losses(model, inputs):
    return functional.cross_entropy(scores(model, inputs).transpose(1, 2), inputs["labels"], reduction="none")


def class_weights(model, inputs):
    return torch.nn.CrossEntropyLoss(weight=WEIGHTS)(scores(model, inputs), inputs["labels"])


def token_class_weights(model, inputs):
    logits = scores(model, inputs).flatten(0, 1)
    return functional.cross_entropy(logits, inputs["labels"].flatten(), weight=WEIGHTS)


def weighted_rows(model, inputs):
    return (inputs["weight"] * class_losses(model, inputs)).sum() / inputs["weight"].sum()


def attended_mean(model, inputs):
    return token_losses(model, inputs).sum() / inputs["attention_mask"].sum()


def two_means(model, inputs):
    losses, counted = token_losses(model, inputs), inputs["labels"].ne(-100)
    return losses.sum() / counted.sum() + (losses.sum(1) / counted.sum(1)).mean()


def contrastive(model, inputs):
    rows = scores(model, inputs)
    return functional.cross_entropy(rows @ rows.T, torch.arange(len(rows)))


def mean_of_rows(model, inputs):
    return class_losses(model, inputs).mean()


def flooded(model, inputs):
    return (mean_of_rows(model, inputs) - 1.0).abs() + 1.0


def focal(model, inputs):
    loss = mean_of_rows(model, inputs)
    return (1 - torch.exp(-loss)) ** 2 * loss


def later_another(model, inputs):
    later_another.num_calls += 1
    return mean_of_rows(model, inputs) if later_another.num_calls < 3 else contrastive(model, inputs)


later_another.num_calls = 0


def summed_target(model, inputs):
    return functional.cross_entropy(scores(model, inputs), inputs["target"], reduction="sum")


def mean_target(model, inputs):
    losses = functional.cross_entropy(scores(model, inputs).transpose(1, 2), inputs["target"], reduction="none")
    return losses.sum() / inputs["attention_mask"].sum()


def classifier(loss=None, **columns):
    columns = columns or {"labels": "known_class"}
    return BertForSequenceClassification(BertConfig(num_labels=3, **BERT)), loss, collator(**columns)


def tagger(loss=None, **columns):
    columns = columns or {"labels": "tokens"}
    return BertForTokenClassification(BertConfig(num_labels=3, **BERT)), loss, collator(**columns)


def router():
    experts = {"num_local_experts": 2, "num_experts_per_tok": 1, "num_key_value_heads": 2, "output_router_logits": True}
    return MixtralForCausalLM(MixtralConfig(**SIZES, **experts)), None, collator(labels="input_ids")


def questions():
    model = BertForQuestionAnswering(BertConfig(**BERT))
    return model, None, collator(start_positions="start", end_positions="end")


KINDS = {
    "classifier": classifier,
    "class_weights": lambda: classifier(class_weights),
    "ignored_rows": lambda: classifier(labels="class"),
    "token_class_weights": lambda: tagger(token_class_weights),
    "weighted_rows": lambda: classifier(weighted_rows, labels="known_class", weight="weight"),
    "attended_mean": lambda: tagger(attended_mean),
    "summed_target": lambda: classifier(summed_target, target="known_class"),
    "mean_target": lambda: tagger(mean_target, target="tokens"),
    "masked": lambda: (BertForMaskedLM(BertConfig(**BERT)), None, collator(labels="masked")),
    "two_means": lambda: tagger(two_means),
    "contrastive": lambda: classifier(contrastive),
    "reads_padding": lambda: (Pooled(norm=False), None, collator(labels="known_class")),
    "batch_norm": lambda: (Pooled(norm=True), None, collator(labels="known_class")),
    "flooded": lambda: classifier(flooded),
    "focal": lambda: classifier(focal),
    "later_another": lambda: classifier(later_another),
    "questions": questions,
    "router": router,
}


def run(job):
    kind, _, shape = job.partition(":")
    rows, batch_size, accumulation = map(int, shape.split("x"))
    torch.manual_seed(3)
    model, loss, collate = KINDS[kind]()
    for name, parameter in model.named_parameters():
        if "classifier" in name or "head" in name or "qa_outputs" in name:
            torch.nn.init.normal_(parameter, std=0.5)
    config = TrainingArguments(
        str(out / "checkpoints"),
        per_device_train_batch_size=batch_size,
        gradient_accumulation_steps=accumulation,
        num_train_epochs=2,
        max_grad_norm=1e9,
        remove_unused_columns=False,
        **SGD,
    )
    trainer = (OwnLoss if loss else Trainer)(
        model=model, args=config, train_dataset=make_rows(rows), data_collator=collate
    )
    if loss:
        trainer.loss = loss
    said = Said()
    logging.getLogger("unsloth_multigpu").addHandler(said)
    trainer.train()
    logging.getLogger("unsloth_multigpu").removeHandler(said)
    facts = {**logged(trainer, "grad_norm", "loss"), "said": said.records}
    write_outcome(out, job, facts, model.named_parameters())


out = Path(args.out)
out.mkdir(parents=True, exist_ok=True)
for job in args.jobs.split(","):
    run(job)
