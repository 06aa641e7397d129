"""Scripts whose step has code of their own, each in few lines: what a multi-GPU tool cannot know of a training.

Usage: attacks.py --num-gpus N --jobs chunks_1,counter_2 --out DIR
A job is a kind with its gradient_accumulation_steps.
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
import torch.distributed as dist
from common import SGD, Said, logged, write_outcome
from torch.nn import functional
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    BertForTokenClassification,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

SIZES = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 64}
BERT = {**SIZES, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
WEIGHTS = torch.tensor([1.0, 5.0, 10.0])


def make_rows(count):
    rng = random.Random(5)
    return [
        {"tokens": [rng.randrange(1, 64) for _ in range(rng.randrange(4, 12))], "class": rng.randrange(3), "number": i}
        for i in range(count)
    ]


def padded(values, fill=0):
    width = max(map(len, values))
    return torch.tensor([v + [fill] * (width - len(v)) for v in values])


def collate(rows):
    ids = padded([row["tokens"] for row in rows])
    return {"input_ids": ids, "attention_mask": (ids > 0).long(), "labels": torch.tensor([r["class"] for r in rows])}


def collate_chunks(rows):
    """A row for each three tokens of a sample."""
    chunks = [(row["tokens"][i : i + 3], row["class"]) for row in rows for i in range(0, len(row["tokens"]), 3)]
    return collate([{"tokens": tokens, "class": label} for tokens, label in chunks])


def collate_tuple(rows):
    batch = collate(rows)
    return batch["input_ids"], batch["attention_mask"], batch["labels"]


def collate_tags(rows, every=2):
    """Every second row has a few tags, and the first token may have one."""
    tags = [
        [t % 3 if r["number"] % every == 0 and k in (0, 3) else -100 for k, t in enumerate(r["tokens"])] for r in rows
    ]
    return {**collate(rows), "labels": padded(tags, -100)}


def scores(model, inputs):
    return model(input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"]).logits


class OwnLoss(Trainer):
    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        loss = functional.cross_entropy(scores(model, inputs), inputs["labels"])
        return loss * self.factor()

    def factor(self):
        return 1.0


class ChangingWeights(Trainer):
    """Re-weighting that begins late."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        weight = WEIGHTS if self.state.epoch >= 1 else None
        return functional.cross_entropy(scores(model, inputs), inputs["labels"], weight=weight)


class ChangesForm(Trainer):
    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        losses = functional.cross_entropy(scores(model, inputs), inputs["labels"], reduction="none")
        if self.state.global_step < 8:
            return losses.mean()
        weights = 1.0 / torch.bincount(inputs["labels"], minlength=3)[inputs["labels"]]
        return (losses * weights).sum() / weights.sum()


class Counter(OwnLoss):
    """A factor that each call of `training_step` advances."""

    num_calls = 0

    def training_step(self, *arguments, **keywords):
        self.num_calls += 1
        return super().training_step(*arguments, **keywords)

    def factor(self):
        return 1.0 + 0.3 * self.num_calls


class Teacher(OwnLoss):
    """A moving average of the weights, advanced in each call of `training_step`."""

    teacher = None

    def training_step(self, model, inputs, *arguments):
        now = {n: p.detach() for n, p in self.model.named_parameters() if "classifier" in n}
        old = self.teacher or {n: torch.zeros_like(p) for n, p in now.items()}
        self.teacher = {n: 0.7 * old[n] + 0.3 * p for n, p in now.items()}
        return super().training_step(model, inputs, *arguments)

    def factor(self):
        return 1.0 + sum(float(t.abs().mean()) for t in self.teacher.values())


class GathersByTorch(Trainer):
    """Negatives of all ranks, as in CLIP; the rows of this rank know theirs."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        rows = scores(model, inputs)
        others, begin = rows, 0
        if dist.is_initialized():
            sizes = [torch.zeros((), dtype=torch.int64) for _ in range(dist.get_world_size())]
            dist.all_gather(sizes, torch.tensor(len(rows)))
            parts = [rows.new_zeros(max(sizes), rows.shape[1]) for _ in sizes]
            mine = rows.new_zeros(max(sizes), rows.shape[1])
            mine[: len(rows)] = rows.detach()
            dist.all_gather(parts, mine)
            parts = [part[:n] for part, n in zip(parts, sizes, strict=True)]
            parts[dist.get_rank()] = rows
            begin = int(sum(sizes[: dist.get_rank()]))
            others = torch.cat(parts)
        return functional.cross_entropy(rows @ others.T, torch.arange(len(rows)) + begin)


class GathersByAccelerate(Trainer):
    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        rows = scores(model, inputs)
        others = self.accelerator.gather(rows)
        begin = self.accelerator.process_index * len(rows)
        return functional.cross_entropy(rows @ others.T, torch.arange(len(rows)) + begin)


class OwnStep(Trainer):
    """Computes its loss by itself."""

    def training_step(self, model, inputs, num_items_in_batch=None):
        model.train()
        inputs = self._prepare_inputs(inputs)
        loss = functional.cross_entropy(scores(model, inputs), inputs["labels"])
        loss = loss / self.args.gradient_accumulation_steps
        self.accelerator.backward(loss)
        return loss.detach()


class ByProgress(OwnLoss):
    def factor(self):
        return 1.0 + self.state.global_step / self.state.max_steps


class ByRate(OwnLoss):
    def factor(self):
        return 1.0 + self.lr_scheduler.get_last_lr()[0] + self.optimizer.param_groups[0]["lr"]


class ByCallback(OwnLoss):
    def factor(self):
        return self.of_callback


class Sets(TrainerCallback):
    def on_train_begin(self, args, state, control, **kwargs):
        trainer.of_callback = 1.5


class Tuples(Trainer):
    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        ids, mask, labels = inputs
        return functional.cross_entropy(model(input_ids=ids, attention_mask=mask).logits, labels)


class Ready(Trainer):
    """A loader of ready batches."""

    def get_train_dataloader(self):
        rows = list(self.train_dataset)
        batches = [collate(rows[i : i + 4]) for i in range(0, len(rows), 4)]
        return torch.utils.data.DataLoader(batches, batch_size=None, shuffle=False)


class Noisy(OwnLoss):
    """Noise that is no dropout."""

    def factor(self):
        return 1.0 + torch.rand(())


class Tight(OwnLoss):
    """The whole micro-batch does not fit on one of several devices."""

    def compute_loss(self, model, inputs, *arguments, **keywords):
        if args.num_gpus > 1 and len(inputs["labels"]) > 2:
            raise torch.OutOfMemoryError("out of memory, as planted")
        return super().compute_loss(model, inputs, *arguments, **keywords)


class CountingCollator:
    """Each call changes what it gives next."""

    def __init__(self):
        self.num_calls = 0

    def __call__(self, rows):
        self.num_calls += 1
        return collate(rows)


class Hooked(OwnLoss):
    """A hook on a gradient that is not linear."""

    def create_optimizer(self, *arguments):
        self.model.classifier.weight.register_hook(lambda gradient: gradient.clamp(-0.02, 0.02))
        return super().create_optimizer(*arguments)


KINDS = {
    "chunks": (OwnLoss, collate_chunks),
    "stock_chunks": (Trainer, collate_chunks),
    "changing_weights": (ChangingWeights, collate),
    "changes_form": (ChangesForm, collate),
    "counter": (Counter, collate),
    "teacher": (Teacher, collate),
    "few_tags": (Trainer, collate_tags),
    "rare_tags": (Trainer, lambda rows: collate_tags(rows, every=5)),
    "gathers_by_torch": (GathersByTorch, collate),
    "gathers_by_accelerate": (GathersByAccelerate, collate),
    "own_step": (OwnStep, collate),
    "by_progress": (ByProgress, collate),
    "by_rate": (ByRate, collate),
    "by_callback": (ByCallback, collate),
    "tuples": (Tuples, collate_tuple),
    "ready": (Ready, collate),
    "hooked": (Hooked, collate),
    "noisy": (Noisy, collate),
    "tight": (Tight, collate),
    "counting": (OwnLoss, CountingCollator()),
}


def run(job):
    global trainer
    kind, _, accumulation = job.rpartition("_")
    own, collator = KINDS[kind]
    torch.manual_seed(3)
    model_class = BertForTokenClassification if "tags" in kind else BertForSequenceClassification
    model = model_class(BertConfig(num_labels=3, **BERT))
    torch.nn.init.normal_(model.classifier.weight, std=0.5)
    config = TrainingArguments(
        str(out / "checkpoints"),
        per_device_train_batch_size=4,
        gradient_accumulation_steps=int(accumulation),
        num_train_epochs=2,
        max_grad_norm=1e9,
        remove_unused_columns=False,
        **SGD,
    )
    trainer = own(model=model, args=config, train_dataset=make_rows(24), data_collator=collator, callbacks=[Sets()])
    said = Said()
    logging.getLogger("unsloth_multigpu").addHandler(said)
    trainer.train()
    logging.getLogger("unsloth_multigpu").removeHandler(said)
    report = ump.get_multi_gpu_status().report
    facts = {
        **logged(trainer, "grad_norm", "loss"),
        "said": said.records,
        "first_step": dict(report.first_step) if report else {},
        "inexact": report.inexact if report else "",
        "num_calls": getattr(trainer, "num_calls", 0) + getattr(collator, "num_calls", 0),
    }
    write_outcome(out, job, facts, model.named_parameters())


trainer = None
out = Path(args.out)
out.mkdir(parents=True, exist_ok=True)
for job in args.jobs.split(","):
    run(job)
