"""Trains with methods of a Trainer that scripts override, and writes gradient norms, weights and what was said.

Usage: own_steps.py --num-gpus N --out DIR
"""

import argparse
import json
import logging
import os
import random
from pathlib import Path

import unsloth_multigpu as ump

parser = argparse.ArgumentParser()
parser.add_argument("--num-gpus", type=int, required=True)
parser.add_argument("--out", type=Path, required=True)
args = parser.parse_args()

ump.enable_multi_gpu(num_gpus=args.num_gpus)

import torch
from common import Said
from safetensors.torch import save_file
from torch.nn import functional
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    LlamaConfig,
    LlamaForCausalLM,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

rank = int(os.environ.get("RANK", "0"))
SIZES = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 64}


def make_rows(count, seed=5):
    rng = random.Random(seed)
    return [
        {"input_ids": [rng.randrange(1, 64) for _ in range(rng.randrange(3, 12))], "class": rng.randrange(3)}
        for _ in range(count)
    ]


def collate_classes(rows):
    width = max(len(row["input_ids"]) for row in rows)
    ids = torch.tensor([row["input_ids"] + [0] * (width - len(row["input_ids"])) for row in rows])
    labels = torch.tensor([row["class"] for row in rows])
    return {"input_ids": ids, "attention_mask": (ids > 0).long(), "labels": labels}


def collate_tokens(rows):
    batch = collate_classes(rows)
    return {**batch, "labels": batch["input_ids"].masked_fill(batch["input_ids"] == 0, -100)}


def logits_of(model, inputs):
    return model(input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"]).logits


class DividedMean(Trainer):
    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        loss = functional.cross_entropy(logits_of(model, inputs), inputs["labels"])
        return loss / self.current_gradient_accumulation_steps


class DividedTokens(Trainer):
    """A model that would take the step's count, which this loss does not hand on."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        return model(**inputs).loss / self.current_gradient_accumulation_steps


class Auxiliary(Trainer):
    """A sum over the tokens of the step with a mean of the micro-batch beside it, as TRL writes it."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        logits, labels = logits_of(model, inputs)[:, :-1], inputs["labels"][:, 1:]
        loss = functional.cross_entropy(logits.transpose(1, 2), labels, reduction="sum") / num_items_in_batch
        if self.args.average_tokens_across_devices:
            loss = loss * self.accelerator.num_processes
        return loss + 0.1 * logits.logsumexp(-1).pow(2).mean() / self.current_gradient_accumulation_steps


class PreparesTokens(Trainer):
    def _prepare_inputs(self, inputs):
        inputs = dict(super()._prepare_inputs(inputs))
        inputs["input_ids"] = (inputs["input_ids"] * 3 + 1) % 64
        return inputs


class PreparesLabels(Trainer):
    """A mean over tokens that it chooses by a count of its calls: parts weigh by what is left."""

    num_calls = 0

    def _prepare_inputs(self, inputs):
        inputs = dict(super()._prepare_inputs(inputs))
        self.num_calls += 1
        inputs["labels"] = inputs["labels"].masked_fill(inputs["input_ids"] % 3 == 0, -100)
        return inputs

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        logits, labels = logits_of(model, inputs)[:, :-1], inputs["labels"][:, 1:]
        return functional.cross_entropy(logits.transpose(1, 2), labels)


class Batches(Trainer):
    def get_batch_samples(self, epoch_iterator, num_batches, device):
        batches, num_items = super().get_batch_samples(epoch_iterator, num_batches, device)
        return [{**batch, "labels": (batch["labels"] + 1) % 3} for batch in batches], num_items


class FewerBatches(Trainer):
    def get_batch_samples(self, epoch_iterator, num_batches, device):
        batches, num_items = super().get_batch_samples(epoch_iterator, num_batches, device)
        return batches[1:], num_items


class HandsOn(Trainer):
    """A step that times, logs and leaves out what the model does not take."""

    def training_step(self, model, inputs, num_items_in_batch=None):
        inputs = {name: value for name, value in self._prepare_inputs(inputs).items() if name != "row"}
        return super().training_step(model, inputs, num_items_in_batch)


class ClipsValues(Trainer):
    def training_step(self, model, inputs, num_items_in_batch=None):
        loss = super().training_step(model, inputs, num_items_in_batch)
        torch.nn.utils.clip_grad_value_(model.parameters(), 0.02)
        return loss


class ClipsData(Trainer):
    """The same past what counts writes."""

    def training_step(self, model, inputs, num_items_in_batch=None):
        loss = super().training_step(model, inputs, num_items_in_batch)
        for parameter in model.parameters():
            parameter.grad.data.clamp_(-0.02, 0.02)
        return loss


class Adversarial(Trainer):
    """Moves the embedding along its gradient, and adds the gradient that is there."""

    def training_step(self, model, inputs, num_items_in_batch=None):
        loss = super().training_step(model, inputs, num_items_in_batch)
        weight = next(p for name, p in model.named_parameters() if "word_embeddings" in name)
        before = weight.data.clone()
        weight.data.add_(weight.grad / (weight.grad.norm() + 1e-9))
        moved = self.compute_loss(model, self._prepare_inputs(inputs), num_items_in_batch=num_items_in_batch)
        self.accelerator.backward(moved / self.args.gradient_accumulation_steps)
        weight.data.copy_(before)
        return loss


class MixesRows(Trainer):
    def training_step(self, model, inputs, num_items_in_batch=None):
        return super().training_step(model, {**inputs, "labels": inputs["labels"].roll(1, 0)}, num_items_in_batch)


class MixesInPlace(Trainer):
    def training_step(self, model, inputs, num_items_in_batch=None):
        inputs["labels"].copy_(inputs["labels"].roll(1, 0))
        return super().training_step(model, inputs, num_items_in_batch)


class MixesWhole(MixesRows):
    """Rows of a loss that nobody else knows are not exchanged between micro-batches."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        return functional.cross_entropy(logits_of(model, inputs), inputs["labels"])


class Selects(Trainer):
    """Learns from the worse half of a micro-batch."""

    def training_step(self, model, inputs, num_items_in_batch=None):
        inputs = self._prepare_inputs(inputs)
        with torch.no_grad():
            losses = functional.cross_entropy(logits_of(self.model, inputs), inputs["labels"], reduction="none")
        worst = losses.topk(max(1, len(losses) // 2)).indices
        return super().training_step(model, {k: v[worst] for k, v in inputs.items()}, num_items_in_batch)


class Grows(TrainerCallback):
    def __init__(self, rows):
        self.rows = rows

    def on_epoch_end(self, args, state, control, **kwargs):
        self.rows.extend(make_rows(5, seed=int(state.epoch) + 20))


def train(name, kind, accumulation, *, tokens=False, count=22, grows=False, **settings):
    torch.manual_seed(3)
    if tokens:
        model = LlamaForCausalLM(LlamaConfig(**SIZES, num_key_value_heads=2))
    else:
        dropout = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
        model = BertForSequenceClassification(BertConfig(num_labels=3, **SIZES, **dropout))
        torch.nn.init.normal_(model.classifier.weight, std=0.5)
    config = TrainingArguments(
        str(args.out / "checkpoints"),
        per_device_train_batch_size=4,
        gradient_accumulation_steps=accumulation,
        learning_rate=0.05,
        optim="sgd",
        lr_scheduler_type="constant",
        max_grad_norm=1e9,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        seed=7,
        disable_tqdm=True,
        remove_unused_columns=False,
        **{"num_train_epochs": 1, **settings},
    )
    rows, collate = make_rows(count), collate_tokens if tokens else collate_classes
    callbacks = [Grows(rows)] if grows else []
    trainer = kind(model=model, args=config, train_dataset=rows, data_collator=collate, callbacks=callbacks)
    said, error = Said(), ""
    logging.getLogger("unsloth_multigpu").addHandler(said)
    try:
        trainer.train()
    except ump.MultiGPUError as problem:
        error = f"{problem} {problem.hint}"
    logging.getLogger("unsloth_multigpu").removeHandler(said)
    steps = [h for h in trainer.state.log_history if "grad_norm" in h]
    facts = {"grad_norm": [h["grad_norm"] for h in steps], "loss": [h["loss"] for h in steps], "error": error}
    facts["warnings"] = [text for level, text in said.records if level == "WARNING"]
    facts["said"] = [text for _, text in said.records]
    if rank == 0:
        (args.out / f"{name}.json").write_text(json.dumps(facts))
        weights = {n: p.detach().contiguous().clone() for n, p in model.named_parameters()}
        save_file(weights, str(args.out / f"{name}.safetensors"))


args.out.mkdir(parents=True, exist_ok=True)
train("divided_mean_4", DividedMean, 4, count=32)
train("divided_mean_3", DividedMean, 3, count=22)
train("divided_tokens_4", DividedTokens, 4, count=32, tokens=True)
train("auxiliary_4", Auxiliary, 4, count=32, tokens=True)
train("auxiliary_3", Auxiliary, 3, count=24, tokens=True)
train("prepares_tokens", PreparesTokens, 1)
train("prepares_labels", PreparesLabels, 1, tokens=True)
train("batches", Batches, 3)
train("hands_on", HandsOn, 3)
train("hands_on_tokens", HandsOn, 3, tokens=True)
train("clips_1", ClipsValues, 1)
train("adversarial_1", Adversarial, 1)
train("mixes_whole", MixesWhole, 2, count=24)
train("mixes_in_last", MixesWhole, 2, count=19)
train("grows", Trainer, 1, grows=True, tokens=True, max_steps=16)
train("clips_2", ClipsValues, 2)
train("clips_data_2", ClipsData, 2)
train("adversarial_2", Adversarial, 2)
train("mixes", MixesRows, 1)
train("mixes_in_place", MixesInPlace, 1)
train("selects", Selects, 1)
if args.num_gpus > 1:
    train("fewer_batches", FewerBatches, 2)
