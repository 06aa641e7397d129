"""How real losses of transformers scale, and which of them let rows be exchanged between micro-batches."""

from __future__ import annotations

import functools
import random

import pytest
import torch
from accelerate import Accelerator
from transformers import (
    BertConfig,
    BertForMaskedLM,
    BertForSequenceClassification,
    BertForTokenClassification,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
    Trainer,
    TrainingArguments,
)

from tests.helpers.log_probs import LogProbs
from tests.helpers.tiny import build_tiny, preference_rows
from unsloth_multigpu.errors import SetupError
from unsloth_multigpu.step import trial
from unsloth_multigpu.step.loss import UNSEEN, find_loss_scale
from unsloth_multigpu.step.samples import draw_samples
from unsloth_multigpu.step.trial import LossTrial
from unsloth_multigpu.step.weighing import weight_of

SIZES = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 64}
BERT = BertConfig(num_labels=3, **SIZES)


class OwnClassifier(BertForSequenceClassification):
    """A model that a script wrote: its loss may do anything."""


class Counting(Trainer):
    """Collects figures in its loss, as TRL's trainers do."""

    def compute_loss(self, *args, **kwargs):
        self._metrics["train"].append(1.0)
        return super().compute_loss(*args, **kwargs)


class OwnLoss(Trainer):
    """A loss that a script wrote."""

    def __init__(self, *args, is_sum, **kwargs):
        super().__init__(*args, **kwargs)
        self.is_sum = is_sum

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        loss = model(**inputs)["loss"]
        return loss * inputs["labels"][:, 1:].ne(-100).sum() if self.is_sum else loss


class OwnMean(torch.nn.Module):
    """Takes no count; averages over the labels of the batch, or over rows of which each has its own mean."""

    def __init__(self, over):
        super().__init__()
        self.over = over
        self.embed, self.head = torch.nn.Embedding(64, 16), torch.nn.Linear(16, 64)

    def forward(self, input_ids, labels, attention_mask=None):
        logits = self.head(self.embed(input_ids))[:, :-1].transpose(1, 2)
        losses = torch.nn.functional.cross_entropy(logits, labels[:, 1:], reduction="none")
        counts = (labels[:, 1:] != -100).sum(1)
        return {"loss": losses.sum() / counts.sum() if self.over == "next tokens" else (losses.sum(1) / counts).mean()}


def token_labels(row):
    return [i % 3 for i in row]


def every_third(row):
    return [token if i % 3 == 0 else -100 for i, token in enumerate(row)]


ONE_LABEL = {"one class": lambda row: 1, "classes": lambda row: len(row) % 3, "regression": lambda row: len(row) / 9}


def rows_with(label_of):
    rng = random.Random(3)
    rows = [[rng.randrange(1, 64) for _ in range(rng.randrange(2, 30))] for _ in range(16)]
    return [{"input_ids": row, "labels": label_of(row)} for row in rows]


def collate(rows):
    width = max(len(r["input_ids"]) for r in rows)

    def padded(name, value):
        return torch.tensor([r[name] + [value] * (width - len(r[name])) for r in rows])

    ids = padded("input_ids", 0)
    batch = {"input_ids": ids, "attention_mask": (ids > 0).long()}
    is_list = isinstance(rows[0]["labels"], list)
    return {**batch, "labels": padded("labels", -100) if is_list else torch.tensor([r["labels"] for r in rows])}


def scale_of(tmp_path, model, label_of=None, rows=None, trainer_class=Trainer, collator=collate):
    torch.manual_seed(0)
    args = TrainingArguments(str(tmp_path), per_device_train_batch_size=8, use_cpu=True, report_to=[])
    trainer = trainer_class(model=model, args=args, train_dataset=rows or rows_with(label_of), data_collator=collator)
    return find_loss_scale(trainer, functools.partial(draw_samples, trainer, trainer.get_train_dataloader()))


def test_language_model_is_a_sum_over_the_steps_tokens(tmp_path):
    model = LlamaForCausalLM(LlamaConfig(num_key_value_heads=2, **SIZES))
    assert scale_of(tmp_path, model, list).is_token_normalised


@pytest.mark.parametrize(("labels", "is_proven"), [("classes", True), ("regression", True), ("one class", False)])
def test_classifier_is_a_mean_over_rows_that_count_alone(tmp_path, labels, is_proven):
    config = BertConfig(num_labels=1 if labels == "regression" else 3, **SIZES)
    scale = scale_of(tmp_path, BertForSequenceClassification(config), ONE_LABEL[labels])
    assert (scale.is_token_normalised, scale.weighing) == (False, "rows")
    assert scale.rows_are_independent is is_proven


@pytest.mark.parametrize("mix", ["batch norm", "router"])
def test_rows_that_meet_each_other_do_not_count_alone(tmp_path, mix):
    model = BertForSequenceClassification(BertConfig(num_labels=3, output_router_logits=mix == "router", **SIZES))
    if mix == "batch norm":
        model.classifier = torch.nn.Sequential(torch.nn.BatchNorm1d(16), model.classifier)
    assert not scale_of(tmp_path, model, ONE_LABEL["classes"]).rows_are_independent


def test_weights_of_a_micro_batch_are_its_rows_or_its_labels():
    labels = torch.tensor([[1, 2, -100, 4], [-100, 2, 3, -100]])
    inputs = {"labels": labels, "weights": labels.ne(2).float()}
    names = ("rows", "next tokens", "tokens", "sum", "sum of weights", "next labelled sum of weights")
    assert [weight_of(inputs, name) for name in names] == [2, 4, 5, 1, 6, 2]
    assert weight_of({"labels": torch.tensor([0, 2, -100])}, "class weights", (1.0, 5.0, 10.0)) == 11
    assert [weight_of({"labels": torch.tensor([0, 2, -100])}, name) for name in ("rows", "tokens")] == [3, 2]


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize(
    ("model", "label_of"), [(BertForTokenClassification, token_labels), (BertForMaskedLM, every_third)]
)
def test_mean_over_tokens_is_not_taken_for_one_over_rows(tmp_path, model, label_of, seed):
    torch.manual_seed(seed)  # Of the head: where all tokens have nearly the same loss, both means are nearly equal.
    scale = scale_of(tmp_path, model(BERT), label_of)
    assert not scale.is_token_normalised
    assert not scale.rows_are_independent


@pytest.mark.parametrize("label_of", [list, lambda row: [-100] * (len(row) - 2) + row[-2:]], ids=["all", "answers"])
@pytest.mark.parametrize("over", ["next tokens", "rows"])
def test_first_rows_of_equally_many_labels_do_not_hide_the_mean(tmp_path, over, label_of):
    torch.manual_seed(1)
    rows = [{**row, "input_ids": row["input_ids"][:12]} for row in rows_with(list) if len(row["input_ids"]) >= 12]
    rows = [{"input_ids": row["input_ids"], "labels": label_of(row["input_ids"])} for row in rows][:8]
    assert len(rows) == 8
    scale = scale_of(tmp_path, OwnMean(over), rows=rows)
    assert (scale.is_token_normalised, scale.weighing) == (False, over)


def collate_pairs(rows):
    """Questions are equally long, answers are padded: those of some parts are as wide as the whole, others are not."""
    labels = [torch.tensor(r["labels"]) for r in rows]
    ids = torch.tensor([r["input_ids"] for r in rows])
    padded = torch.nn.utils.rnn.pad_sequence(labels, batch_first=True, padding_value=-100)
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": padded}


@pytest.mark.parametrize("width", [3, 5])
def test_answers_padded_to_another_width_than_their_questions_are_shared(tmp_path, width):
    sizes = {"d_model": 16, "d_ff": 32, "d_kv": 8, "num_layers": 1, "num_heads": 2, "vocab_size": 64}
    torch.manual_seed(0)
    model = T5ForConditionalGeneration(T5Config(dropout_rate=0.0, decoder_start_token_id=0, **sizes))
    rows = [{"input_ids": [5 + i] * width, "labels": [6 + i] * (1 + i % width)} for i in range(9)]
    scale = scale_of(tmp_path, model, rows=rows, collator=collate_pairs)
    assert (scale.weighing, scale.misfit) == ("tokens", None)


@pytest.mark.parametrize(("is_sum", "weighing"), [(True, "sum"), (False, "next tokens")])
def test_loss_of_a_script_is_tried_where_the_model_takes_no_count(tmp_path, is_sum, weighing):
    torch.manual_seed(1)
    scale = scale_of(tmp_path, OwnMean("next tokens"), list, trainer_class=functools.partial(OwnLoss, is_sum=is_sum))
    assert (scale.weighing, scale.rows_are_independent) == (weighing, False)


def test_model_of_a_script_is_not_trusted(tmp_path):
    assert not scale_of(tmp_path, OwnClassifier(BERT), ONE_LABEL["classes"]).rows_are_independent


@pytest.mark.parametrize("coefficient", [1.0, 0.001])
def test_undivided_part_is_refused_however_small(tmp_path, coefficient):
    experts = {"num_local_experts": 2, "num_experts_per_tok": 1, "num_key_value_heads": 2}
    router = {"output_router_logits": True, "router_aux_loss_coef": coefficient}
    scale = scale_of(tmp_path, MixtralForCausalLM(MixtralConfig(**SIZES, **experts, **router)), list)
    assert "neither divided by them as a whole nor a mean" in scale.misfit.problem
    assert not scale.misfit.may_be_shared


class Picky(OwnMean):
    """Cannot do with one row, as a batch norm cannot."""

    def forward(self, input_ids, labels, attention_mask=None):
        if len(input_ids) < 2:
            raise ValueError("one row")
        return super().forward(input_ids, labels, attention_mask)


def test_part_that_raises_is_refused_where_sharded_ranks_cannot_go_on(tmp_path, monkeypatch):
    assert "(ValueError: one row)" in scale_of(tmp_path, Picky("rows"), list).misfit.problem
    monkeypatch.setattr(trial, "can_pass_again", lambda model: False)
    with pytest.raises(SetupError, match="by itself \\(ValueError: one row\\), and sharded ranks cannot go on") as info:
        scale_of(tmp_path, Picky("rows"), list)
    assert "leave shard out" in info.value.hint


class MeanOverAll(Trainer):
    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        return model(input_ids=inputs["input_ids"]).logits.logsumexp(-1).mean()


def test_loss_that_cannot_be_tried_is_known_by_its_name_or_refused(tmp_path, monkeypatch):
    """Whether a script's own loss is divided by the count can only be seen: a guess is off by the tokens of a step."""
    config = LlamaConfig(num_key_value_heads=2, **SIZES)
    unlabelled = rows_with(lambda row: [-100] * len(row))
    monkeypatch.setattr(Accelerator, "num_processes", 2)
    known = scale_of(tmp_path, LlamaForCausalLM(config), rows=unlabelled)
    assert (known.is_token_normalised, known.misfit) == (True, UNSEEN)
    with pytest.raises(SetupError, match=r"how MeanOverAll\.compute_loss is averaged: none of the rows"):
        scale_of(tmp_path, LlamaForCausalLM(config), rows=unlabelled, trainer_class=MeanOverAll)
    monkeypatch.setattr(Accelerator, "num_processes", 1)
    assert scale_of(tmp_path, LlamaForCausalLM(config), rows=unlabelled, trainer_class=MeanOverAll).misfit == UNSEEN


def test_loss_of_a_collator_that_draws_and_joins_rows_is_tried_whole(tmp_path):
    def joined(rows):
        ids = torch.tensor([[i for row in rows for i in row["input_ids"]]])
        kept = torch.rand(ids.shape) < 0.5
        return {"input_ids": ids, "labels": ids.masked_fill(~kept, -100), "lengths": torch.ones(len(rows))}

    torch.manual_seed(0)
    args = TrainingArguments(str(tmp_path), per_device_train_batch_size=4, use_cpu=True, report_to=[])
    model = LlamaForCausalLM(LlamaConfig(num_key_value_heads=2, **SIZES))
    trainer = MeanOverAll(model=model, args=args, train_dataset=rows_with(list), data_collator=joined)
    scale = find_loss_scale(trainer, functools.partial(draw_samples, trainer, trainer.get_train_dataloader()))
    assert (scale.is_token_normalised, str(scale.misfit)) == (False, "no batch could be compared with its parts")


def test_trial_leaves_no_trace(tmp_path):
    model = LlamaForCausalLM(LlamaConfig(num_key_value_heads=2, **SIZES))
    own = {"use_cpu": True, "report_to": [], "average_tokens_across_devices": False}
    args = TrainingArguments(str(tmp_path), per_device_train_batch_size=8, **own)
    trainer = Counting(model=model, args=args, train_dataset=rows_with(list), data_collator=collate)
    trainer._metrics = {"train": []}
    calls = functools.partial(draw_samples, trainer, trainer.get_train_dataloader())
    assert find_loss_scale(trainer, calls).is_token_normalised
    assert trainer._metrics == {"train": []}
    assert args.average_tokens_across_devices is False


@pytest.mark.parametrize("loss_type", ["aot", "aot_unpaired", "sigmoid"])
def test_dpo_that_sorts_rows_is_not_shared(tmp_path, monkeypatch, loss_type):
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl import DPOConfig, DPOTrainer

    monkeypatch.setattr("trl.trainer.utils._ChunkedLogProbFunction", LogProbs)
    path = build_tiny(tmp_path / "model", hidden_size=16, num_layers=1, vocab_size=400)
    args = DPOConfig(
        str(tmp_path), loss_type=[loss_type], per_device_train_batch_size=8, use_cpu=True, bf16=False, report_to=[]
    )
    trainer = DPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(path),
        args=args,
        train_dataset=Dataset.from_list(preference_rows(16)),
        processing_class=AutoTokenizer.from_pretrained(path),
    )
    samples = draw_samples(trainer, trainer.get_train_dataloader())
    # At the start policy and reference are the same, and the parts make up any of these losses.
    assert not LossTrial(trainer, trainer.compute_loss).fit(samples, None).problem
    assert (find_loss_scale(trainer, lambda: samples).misfit is None) == (loss_type == "sigmoid")
    with torch.no_grad():
        for parameter in trainer.model.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    assert bool(LossTrial(trainer, trainer.compute_loss).fit(samples, None).problem) == (loss_type != "sigmoid")
