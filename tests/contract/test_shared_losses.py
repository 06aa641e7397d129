"""Losses that a script may write: shared by ranks they have the gradient of one process, or are said not to have it.

Ranks are simulated: a micro-batch is cut as `deal_step` does, each part is collated and computed by itself, and the
parts' gradients are put together with the weights that ranks use.
"""

from __future__ import annotations

import functools
import math
import os
import random
from dataclasses import dataclass

import pytest
import torch
from bitsandbytes.nn import Linear4bit
from bitsandbytes.nn import modules as bnb_modules
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.nn import functional
from transformers import Trainer, TrainingArguments

from unsloth_multigpu.step.deal import deal_step
from unsloth_multigpu.step.loss import find_loss_scale
from unsloth_multigpu.step.samples import draw_samples

NUM_CLASSES, WIDTH, BATCH = 7, 8, 6
EXACT = 1e-5
# 1,000 were run when the mechanism was written; the suite tries these.
NUM_EXAMPLES = int(os.environ.get("NUM_EXAMPLES", "150"))
CLASS_WEIGHTS = torch.tensor([1.0, 5.0, 10.0, 0.5, 2.0, 1.0, 3.0])


class TinyModel(torch.nn.Module):
    """Scores for each token, from the token and the mean of its row; padding is seen where `reads_padding`."""

    def __init__(self, *, reads_padding=False, norm=False):
        super().__init__()
        self.embed = torch.nn.Embedding(32, WIDTH)
        self.norm = torch.nn.BatchNorm1d(WIDTH) if norm else torch.nn.Identity()
        self.drop = torch.nn.Dropout(0.5)
        self.head = torch.nn.Linear(WIDTH, NUM_CLASSES)
        self.reads_padding = reads_padding
        self.num_forwards = 0
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, input_ids, attention_mask, **_):
        self.num_forwards += 1
        self.seen += 1
        states = self.embed(input_ids)
        mask = torch.ones_like(states[..., :1]) if self.reads_padding else attention_mask[..., None]
        row = (states * mask).sum(1) / mask.sum(1)
        return self.head(torch.tanh(states + self.norm(row)[:, None]))


class OwnTrainer(Trainer):
    """`loss` is called with the scores and the inputs."""

    loss = None
    num_calls = 0

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        self.num_calls += 1
        scores = model(inputs["input_ids"], inputs["attention_mask"])
        return self.loss(scores, inputs)


def rows_of(seed, *, ignored=0.3, unlabelled=0.0, equal=False):
    rng = random.Random(seed)
    rows = []
    for _ in range(48):
        size = 6 if equal else rng.randrange(2, 9)
        labels = [rng.randrange(NUM_CLASSES) for _ in range(size)]
        labels = [-100 if rng.random() < ignored else label for label in labels]
        labels[-1] = rng.randrange(NUM_CLASSES)
        labels = [-100] * size if rng.random() < unlabelled else labels
        rows.append(
            {
                "input_ids": [rng.randrange(1, 32) for _ in range(size)],
                "labels": labels,
                "row_weight": rng.uniform(0.1, 3.0),
                "token_weight": [rng.uniform(0.1, 3.0) for _ in range(size)],
                "target": rng.randrange(NUM_CLASSES),
            }
        )
    return rows


def collate(rows, *, names=("labels", "row_weight", "token_weight", "target")):
    width = max(len(r["input_ids"]) for r in rows)

    def padded(name, value):
        return torch.tensor([r[name] + [value] * (width - len(r[name])) for r in rows])

    ids = padded("input_ids", 0)
    batch = {"input_ids": ids, "attention_mask": (ids > 0).long()}
    every = {
        "labels": padded("labels", -100),
        "row_weight": torch.tensor([r["row_weight"] for r in rows]),
        "token_weight": padded("token_weight", 0.0),
        "target": torch.tensor([r["target"] for r in rows]),
    }
    return batch | {name: every[name] for name in names}


def token_losses(scores, inputs):
    return functional.cross_entropy(scores.transpose(1, 2), inputs["labels"], reduction="none")


def counted(inputs):
    return inputs["labels"].ne(-100)


def token_mean(scores, inputs):
    return functional.cross_entropy(scores.transpose(1, 2), inputs["labels"])


def row_losses(scores, inputs):
    return token_losses(scores, inputs).sum(1) / counted(inputs).sum(1).clamp(min=1)


def row_mean(scores, inputs):
    return row_losses(scores, inputs).mean()


def labelled_row_mean(scores, inputs):
    return (token_losses(scores, inputs).sum(1) / counted(inputs).sum(1)).nanmean()


def token_sum(scores, inputs):
    return token_losses(scores, inputs).sum()


def class_weighted(scores, inputs):
    return functional.cross_entropy(scores.transpose(1, 2), inputs["labels"], weight=CLASS_WEIGHTS)


def row_weighted(scores, inputs):
    weights = inputs["row_weight"]
    return (weights * row_losses(scores, inputs)).sum() / weights.sum()


def token_weighted(scores, inputs):
    weights = inputs["token_weight"] * counted(inputs)
    return (weights * token_losses(scores, inputs)).sum() / weights.sum()


def attended_mean(scores, inputs):
    return token_losses(scores, inputs).sum() / inputs["attention_mask"].sum()


def row_classes(scores, inputs):
    return functional.cross_entropy(scores[:, 0], inputs["target"], label_smoothing=0.1)


def contrastive(scores, inputs):
    rows = scores[:, 0]
    return functional.cross_entropy(rows @ rows.T, torch.arange(len(rows)))


def hardest_row(scores, inputs):
    return row_losses(scores, inputs).max()


TERMS = {
    f.__name__: f
    for f in (
        *(token_mean, row_mean, labelled_row_mean, token_sum, class_weighted, row_weighted, token_weighted),
        *(attended_mean, contrastive, hardest_row),
    )
}
FORMS = {
    "as it is": lambda x: x,
    "scaled": lambda x: 0.25 * x + 3.0,
    "flooded": lambda x: (x - 0.5).abs() + 0.5,
    "root": torch.sqrt,
    "focal": lambda x: (1 - torch.exp(-x)) ** 2 * x,
    "square": lambda x: x**2,
    "capped": lambda x: torch.clamp(x, max=50.0),
}


@dataclass(frozen=True)
class Result:
    """Relative difference of the shared gradient, and what was said of it."""

    difference: float
    misfit: object
    weighing: str


@functools.cache
def trainer_on_cpu(folder):
    args = TrainingArguments(
        folder, per_device_train_batch_size=BATCH, use_cpu=True, report_to=[], remove_unused_columns=False
    )
    return OwnTrainer(model=TinyModel(), args=args, train_dataset=rows_of(0), data_collator=collate)


def gradient(trainer, batch):
    trainer.model.zero_grad()
    trainer.model.train()
    trainer.model.drop.p = 0.0
    loss = trainer.compute_loss(trainer.model, dict(batch))
    loss.backward()
    return torch.cat([p.grad.reshape(-1).double() for p in trainer.model.parameters() if p.requires_grad])


def shared(folder, loss, *, seed=0, num_ranks=2, model=None, collator=collate, batch_rows=None, **options):
    """The loss of micro-batches behind the trial's rows, whole and shared."""
    torch.manual_seed(seed)
    trainer = trainer_on_cpu(folder)
    trainer.model, trainer.loss, trainer.train_dataset = model or TinyModel(), loss, rows_of(seed, **options)
    trainer.data_collator = collator
    loader = trainer.get_train_dataloader()
    scale = find_loss_scale(trainer, functools.partial(draw_samples, trainer, loader))
    rows = batch_rows or trainer.train_dataset[-BATCH:]
    whole = gradient(trainer, collator(rows))
    plan = deal_step([len(rows)], num_ranks, regroup=False)
    parts = [collator([rows[i] for i in piece.positions]) for share in plan for piece in share if not piece.is_filler]
    weights = [scale.weight(part) for part in parts]
    total = 1.0 if scale.weighing == "sum" else sum(weights)
    together = sum(w / total * gradient(trainer, part) for w, part in zip(weights, parts, strict=True) if w)
    difference = float((together - whole).norm() / whole.norm().clamp(min=1e-12))
    return Result(difference if math.isfinite(difference) else math.inf, scale.misfit, scale.weighing)


EXACT_LOSSES = {
    "token_mean": "tokens",
    "row_mean": "rows",
    "token_sum": "sum",
    "class_weighted": "class weights",
    "row_weighted": "sum of row_weight",
    "token_weighted": "labelled sum of token_weight",
    "attended_mean": "sum of attention_mask",
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield str(tmp_path_factory.mktemp("trainer"))
    torch.set_num_threads(before)


@pytest.mark.parametrize(("name", "weighing"), EXACT_LOSSES.items())
@pytest.mark.parametrize("num_ranks", [2, 3])
def test_weighted_mean_is_shared_exactly(folder, name, weighing, num_ranks):
    result = shared(folder, TERMS[name], num_ranks=num_ranks)
    assert result.difference < EXACT
    assert (result.misfit, result.weighing) == (None, weighing)


@pytest.mark.parametrize("name", ["labels", "target"])
def test_batch_without_labels_is_tried_as_well(folder, name):
    collator = functools.partial(collate, names=("target",))
    losses = {
        "labels": lambda scores, inputs: functional.cross_entropy(scores[:, 0], inputs["target"], reduction="sum"),
        "target": row_classes,
    }
    result = shared(folder, losses[name], collator=collator)
    assert result.difference < EXACT
    assert result.misfit is None


@pytest.mark.parametrize(
    "loss",
    [
        contrastive,
        hardest_row,
        lambda s, i: token_mean(s, i) + row_mean(s, i),
        *(lambda s, i, form=FORMS[name]: form(token_mean(s, i)) for name in ("flooded", "root", "focal", "square")),
    ],
    ids=["contrastive", "hardest", "two means", "flooded", "root", "focal", "square"],
)
def test_loss_that_cannot_be_shared_is_said_to_be_none(folder, loss):
    result = shared(folder, loss)
    assert result.misfit is not None
    assert result.misfit.problem


def test_model_that_reads_padding_or_other_rows_is_found(folder):
    assert shared(folder, token_mean, model=TinyModel(reads_padding=True)).misfit is not None
    assert shared(folder, token_mean, model=TinyModel(norm=True)).misfit is not None


def test_rows_without_a_label_are_no_reason_to_guess(folder):
    result = shared(folder, token_mean, unlabelled=0.5)
    assert (result.misfit, result.weighing) == (None, "tokens")
    assert result.difference < EXACT


def test_first_loss_of_zero_hides_nothing(folder):
    teacher = TinyModel().requires_grad_(False)

    def distilled(scores, inputs):
        teacher.load_state_dict(state)
        target = teacher(inputs["input_ids"], inputs["attention_mask"]).softmax(-1)
        losses = functional.kl_div(scores.log_softmax(-1), target, reduction="none").sum(-1) * inputs["attention_mask"]
        return losses.sum() / inputs["attention_mask"].sum()

    student = TinyModel()
    state = {name: value.clone() for name, value in student.state_dict().items()}
    student.drop.p = teacher.drop.p = 0.0
    trainer = trainer_on_cpu(folder)
    trainer.model, trainer.loss, trainer.train_dataset, trainer.data_collator = student, distilled, rows_of(0), collate
    draw = functools.partial(draw_samples, trainer, trainer.get_train_dataloader())
    scale = find_loss_scale(trainer, draw)
    assert (scale.misfit, scale.weighing) == (None, "sum of attention_mask")
    assert all(torch.equal(value, student.state_dict()[name]) for name, value in state.items() if name != "seen")


def test_trial_leaves_no_trace(folder):
    calls = []
    total = 0

    def counting(scores, inputs):
        nonlocal total
        total += 1
        calls.append(len(inputs["labels"]))
        trainer.history = [*getattr(trainer, "history", []), total]
        trainer.log({"own": 1.0})
        return token_mean(scores, inputs)

    trainer = trainer_on_cpu(folder)
    trainer.model, trainer.loss, trainer.train_dataset, trainer.data_collator = (
        TinyModel(),
        counting,
        rows_of(0),
        collate,
    )
    trainer.num_calls, before = 0, torch.get_rng_state()
    parameters = [p.clone() for p in trainer.model.parameters()]
    draw = functools.partial(draw_samples, trainer, trainer.get_train_dataloader())
    scale = find_loss_scale(trainer, draw)
    assert scale.weighing == "tokens"
    assert (trainer.num_calls, trainer.model.num_forwards, float(trainer.model.seen)) == (0, 0, 0.0)
    assert not hasattr(trainer, "history")
    assert not trainer.state.log_history
    assert torch.equal(torch.get_rng_state(), before)
    assert all(torch.equal(a, b) for a, b in zip(parameters, trainer.model.parameters(), strict=True))
    assert all(p.grad is None for p in trainer.model.parameters())


def test_trial_does_not_repack_weights_of_4_bits(folder, monkeypatch):
    # As a processor with AVX512-BF16 has it: outside of training the layer packs its weights again, permanently.
    monkeypatch.setattr(bnb_modules, "_convert_weight_packed_for_cpu", pytest.fail)
    model = TinyModel()
    model.norm = Linear4bit(WIDTH, WIDTH, compute_dtype=torch.float32, quant_type="nf4").to("cpu")
    model.norm.support_avx512bf16_for_cpu = True
    model.embed.requires_grad_(False)
    result = shared(folder, token_mean, model=model)
    assert (result.misfit, result.weighing) == (None, "tokens")


@pytest.mark.parametrize("batch", [1, 2, 5])
def test_trial_never_has_more_rows_than_a_micro_batch(folder, batch):
    def only_so_many(rows):
        assert len(rows) <= batch
        return collate(rows)

    trainer = trainer_on_cpu(folder)
    trainer.model, trainer.loss, trainer.train_dataset = TinyModel(), row_mean, rows_of(0)
    trainer.data_collator, trainer._train_batch_size = only_so_many, batch
    try:
        draw = functools.partial(draw_samples, trainer, trainer.get_train_dataloader())
        assert find_loss_scale(trainer, draw).misfit is None
        assert max(len(sample.whole["labels"]) for sample in draw()) == batch
    finally:
        trainer._train_batch_size = BATCH


terms = st.tuples(st.sampled_from(sorted(TERMS)), st.sampled_from(sorted(FORMS)), st.sampled_from([1.0, 0.3, -0.1]))


@settings(max_examples=NUM_EXAMPLES, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(
    parts=st.lists(terms, min_size=1, max_size=3),
    outer=st.sampled_from(sorted(FORMS)),
    seed=st.integers(0, 999),
    num_ranks=st.integers(2, 4),
    unlabelled=st.sampled_from([0.0, 0.0, 0.3]),
    equal=st.booleans(),
    reads_padding=st.sampled_from([False, False, False, True]),
)
def test_any_loss_is_shared_exactly_or_said_to_be_inexact(
    folder, parts, outer, seed, num_ranks, unlabelled, equal, reads_padding
):
    def loss(scores, inputs):
        made = sum(factor * FORMS[form](TERMS[term](scores, inputs)) for term, form, factor in parts)
        return FORMS[outer](made) if outer != "root" else FORMS[outer](made.abs() + 0.1)

    model = TinyModel(reads_padding=reads_padding)
    result = shared(folder, loss, seed=seed, num_ranks=num_ranks, model=model, unlabelled=unlabelled, equal=equal)
    assert result.misfit is not None or result.difference < EXACT, result
