"""What a trial of a loss has to see before it calls micro-batches shareable: all of the data, rows that meet, state."""

from __future__ import annotations

import functools
import os
import random

import pytest
import torch
from torch.nn import functional
from transformers import Trainer, TrainingArguments

from unsloth_multigpu.step.loss import COUNTS_CALLS, REMEMBERS, find_loss_scale
from unsloth_multigpu.step.samples import COLLATOR_REMEMBERS, draw_samples, spread_indices

NUM_CLASSES, WIDTH, BATCH = 3, 8, 4
CLASS_WEIGHTS = torch.tensor([1.0, 5.0, 10.0])


class Classifier(torch.nn.Module):
    """Scores of a row from the mean of its tokens; `mixing` says what it draws in training."""

    def __init__(self, mixing=""):
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.head = torch.nn.Embedding(32, WIDTH), torch.nn.Linear(WIDTH, NUM_CLASSES)
        self.mixing = mixing
        self.scale = None

    def forward(self, input_ids, attention_mask, labels=None):
        mask = attention_mask[..., None]
        states = (self.embed(input_ids) * mask).sum(1) / mask.sum(1)
        if self.training and self.mixing == "depth":
            states = states * (torch.rand(len(states), 1) < 0.7)
        elif self.training and self.mixing == "noise":
            states = states + 0.1 * torch.randn_like(states)
        elif self.mixing == "lazy":
            if self.scale is None:
                self.scale = states.detach().std()
            states = states / self.scale
        return self.head(states)


class OwnTrainer(Trainer):
    """`loss` is called with the trainer, the scores and the inputs."""

    loss = None
    base = None
    history: list[float] = []  # noqa: RUF012
    calls = 0

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        return self.loss(self, model(inputs["input_ids"], inputs["attention_mask"]), inputs)


def losses_of(scores, inputs):
    return functional.cross_entropy(scores, inputs["labels"], reduction="none")


def mean(trainer, scores, inputs):
    return functional.cross_entropy(scores, inputs["labels"])


def rows_of(num_rows, low=3, high=12):
    rng = random.Random(num_rows)
    return [
        {"input_ids": [rng.randrange(1, 32) for _ in range(rng.randrange(low, high))], "labels": rng.randrange(3)}
        for _ in range(num_rows)
    ]


def collate(rows):
    width = max(len(r["input_ids"]) for r in rows)
    ids = torch.tensor([r["input_ids"] + [0] * (width - len(r["input_ids"])) for r in rows])
    return {"input_ids": ids, "attention_mask": (ids > 0).long(), "labels": torch.tensor([r["labels"] for r in rows])}


def trainer_of(tmp_path, loss=mean, *, rows=None, collator=collate, model=None, batch=BATCH, accumulation=1):
    args = TrainingArguments(
        str(tmp_path),
        per_device_train_batch_size=batch,
        gradient_accumulation_steps=accumulation,
        use_cpu=True,
        report_to=[],
        remove_unused_columns=False,
    )
    rows, model = rows or rows_of(64), model or Classifier()
    trainer = OwnTrainer(model=model, args=args, train_dataset=rows, data_collator=collator)
    trainer.loss = loss
    return trainer


def scale_of(trainer):
    return find_loss_scale(trainer, functools.partial(draw_samples, trainer, trainer.get_train_dataloader()))


def weighted_by_hand(trainer, scores, inputs):
    weights = CLASS_WEIGHTS[inputs["labels"]]
    return (losses_of(scores, inputs) * weights).sum() / weights.sum()


def by_positives(trainer, scores, inputs):
    return losses_of(scores, inputs).sum() / inputs["labels"].eq(0).sum().clamp(min=1)


@pytest.mark.parametrize("batch", [2, 3, 4, 8])
@pytest.mark.parametrize("loss", [weighted_by_hand, by_positives])
def test_classes_that_lie_apart_in_the_data_are_seen(tmp_path, loss, batch):
    rows = sorted(rows_of(240), key=lambda row: row["labels"])
    assert scale_of(trainer_of(tmp_path, loss, rows=rows, batch=batch)).misfit is not None
    # A mean over rows stays one.
    scale = scale_of(trainer_of(tmp_path, rows=rows, batch=batch))
    assert (scale.misfit, scale.weighing) == (None, "rows")


@pytest.mark.parametrize("num_long", [200, 40])
def test_rows_of_other_lengths_that_come_later_are_seen(tmp_path, num_long):
    def padded_mean(trainer, scores, inputs):
        mask = inputs["attention_mask"].float()
        return (losses_of(scores, inputs)[:, None] * mask).sum() / mask.numel()

    rows = rows_of(400, 6, 7) + rows_of(num_long, 7, 30)
    assert scale_of(trainer_of(tmp_path, padded_mean, rows=rows)).misfit is not None


def test_micro_batch_that_is_larger_than_a_sample_is_tried_as_well(tmp_path):
    def hardest(trainer, scores, inputs):
        return losses_of(scores, inputs).topk(min(10, len(scores))).values.mean()

    assert scale_of(trainer_of(tmp_path, hardest, batch=16)).misfit is not None
    assert scale_of(trainer_of(tmp_path, mean, batch=16)).misfit is None


@pytest.mark.parametrize("length", [1, 31, 32, 33, 64, 1000])
def test_rows_are_read_from_all_over_the_data(length):
    looks = [spread_indices(length, skip) for skip in (0, 2, 4, 8)]
    for look in looks:
        assert len(set(look)) == len(look) == min(32, length)
        assert all(any(abs(i - j) <= length / 32 + 1 for j in look) for i in (0, length - 1))
    if length > 32:
        assert len({frozenset(look) for look in looks}) > 1


def mixing_collator(kind):
    def mix(rows):
        batch = collate(rows)
        labels = functional.one_hot(batch["labels"], NUM_CLASSES).float()
        part = 0.3 + 0.4 * random.random()
        if kind == "half" and random.random() < 0.5:
            part = 1.0
        partner = torch.randperm(len(rows)) if kind == "permuted" else torch.arange(len(rows)).roll(1)
        return {**batch, "labels": part * labels + (1 - part) * labels[partner]}

    return mix


@pytest.mark.parametrize("batch", [2, 4])
@pytest.mark.parametrize("kind", ["rolled", "permuted", "half"])
def test_collator_that_mixes_rows_is_found(tmp_path, kind, batch):
    def soft(trainer, scores, inputs):
        return functional.cross_entropy(scores, inputs["labels"])

    misfit = scale_of(trainer_of(tmp_path, soft, collator=mixing_collator(kind), batch=batch)).misfit
    assert "the collator mixes the rows" in misfit.problem


def masking_collator(kind):
    generator = torch.Generator().manual_seed(1)

    def mask(rows):
        batch = collate(rows)
        if kind == "each row":
            for i, row in enumerate(rows):
                for place in random.sample(range(len(row["input_ids"])), len(row["input_ids"]) // 3):
                    batch["input_ids"][i, place] = 1
            return batch
        if kind == "shuffles":
            order = torch.randperm(len(rows))
            return {name: value[order] for name, value in batch.items()}
        draws = torch.rand(batch["input_ids"].shape, generator=generator if kind == "own generator" else None)
        ids = batch["input_ids"].masked_fill((draws < 0.3) & batch["attention_mask"].bool(), 1)
        return {**batch, "input_ids": ids}

    return mask


@pytest.mark.parametrize("batch", [2, 4])
@pytest.mark.parametrize("kind", ["at once", "each row", "own generator", "shuffles"])
def test_collator_that_only_masks_is_not_said_to_mix(tmp_path, kind, batch):
    assert scale_of(trainer_of(tmp_path, collator=masking_collator(kind), batch=batch)).misfit is None


@pytest.mark.parametrize("batch", [2, 4])
@pytest.mark.parametrize("mixing", ["depth", "noise"])
def test_model_with_random_parts_of_each_row_is_not_said_to_be_inexact(tmp_path, mixing, batch):
    assert scale_of(trainer_of(tmp_path, model=Classifier(mixing), batch=batch)).misfit is None


def test_collator_may_take_columns_out_of_its_rows(tmp_path):
    def takes(rows):
        labels = torch.tensor([row.pop("labels") for row in rows])
        return {**collate([{**row, "labels": 0} for row in rows]), "labels": labels}

    assert scale_of(trainer_of(tmp_path, collator=takes, batch=4)).misfit is None


def test_collator_that_makes_its_generator_when_it_is_called_is_not_said_to_remember(tmp_path):
    class Draws:
        generator = None

        def __call__(self, rows):
            if self.generator is None:
                self.generator = torch.Generator().manual_seed(42)
            batch = collate(rows)
            drawn = torch.rand(batch["input_ids"].shape, generator=self.generator) < 0.3
            return {**batch, "input_ids": batch["input_ids"].masked_fill(drawn, 1)}

    assert scale_of(trainer_of(tmp_path, collator=Draws(), batch=4)).misfit is None


class Polluted:
    """Cuts all rows to the width of its first batch."""

    first = None

    def __call__(self, rows):
        if self.first is None:
            self.first = max(len(row["input_ids"]) for row in rows)
        return collate([{**row, "input_ids": row["input_ids"][: self.first]} for row in rows])


def test_trial_leaves_no_tensor_and_no_object_behind(tmp_path):
    def lazy(trainer, scores, inputs):
        loss = functional.cross_entropy(scores, inputs["labels"])
        if trainer.base is None:
            trainer.base = loss.detach().clone()
        trainer.history.append(float(loss))
        trainer.meter.count += 1
        type(trainer).calls += 1
        trainer.kept.mul_(2)
        trainer.criterion = torch.nn.Linear(1, 1)
        return loss / trainer.base

    class Meter:
        count = 0

    collator, model = Polluted(), Classifier("lazy")
    trainer = trainer_of(tmp_path, lazy, collator=collator, model=model)
    trainer.meter, trainer.kept = Meter(), torch.ones(2)
    scale_of(trainer)
    assert "base" not in vars(trainer)
    assert trainer.base is None
    assert model.scale is None
    assert (trainer.history, OwnTrainer.calls, trainer.meter.count, trainer.kept.tolist()) == ([], 0, 0, [1.0, 1.0])
    assert not hasattr(trainer, "criterion")
    assert "first" not in vars(collator)


def test_generator_of_a_collator_is_left_where_it_was(tmp_path):
    generator = torch.Generator().manual_seed(1)
    before = generator.get_state()

    def noisy(rows):
        return {**collate(rows), "noise": torch.rand(len(rows), generator=generator)}

    scale_of(trainer_of(tmp_path, collator=noisy))
    assert torch.equal(generator.get_state(), before)


@pytest.mark.parametrize("batch", [1, 4])
def test_loss_and_collator_that_remember_earlier_calls_are_found(tmp_path, batch):
    def lazy(trainer, scores, inputs):
        loss = functional.cross_entropy(scores, inputs["labels"])
        if trainer.base is None:
            trainer.base = loss.detach()
        return loss / trainer.base

    def annealed(trainer, scores, inputs):
        trainer.meter = getattr(trainer, "meter", 0) + 1
        return functional.cross_entropy(scores, inputs["labels"]) * min(1.0, trainer.meter / 30)

    assert scale_of(trainer_of(tmp_path, lazy, batch=batch)).misfit == REMEMBERS
    assert scale_of(trainer_of(tmp_path, model=Classifier("lazy"), batch=batch)).misfit == REMEMBERS
    assert scale_of(trainer_of(tmp_path, annealed, batch=batch, accumulation=2)).misfit == COUNTS_CALLS
    # One micro-batch in a step is one call on each rank.
    assert scale_of(trainer_of(tmp_path, annealed, batch=batch)).misfit is None
    assert scale_of(trainer_of(tmp_path, collator=Polluted(), batch=batch)).misfit.problem == COLLATOR_REMEMBERS


@pytest.mark.parametrize("reads", ["num_processes", "world_size"])
def test_loss_of_a_script_sees_the_number_of_processes_of_one_process(tmp_path, monkeypatch, reads):

    def scaled(trainer, scores, inputs):
        number = trainer.accelerator.num_processes if reads == "num_processes" else trainer.args.world_size
        monkeypatch.setenv("SEEN", f"{number}")
        return functional.cross_entropy(scores, inputs["labels"]) * number

    trainer = trainer_of(tmp_path, scaled)
    monkeypatch.setitem(vars(trainer.accelerator.state), "num_processes", 2)
    monkeypatch.setitem(vars(trainer.args.distributed_state), "num_processes", 2)
    assert (trainer.accelerator.num_processes, trainer.args.world_size) == (2, 2)
    assert scale_of(trainer).misfit is None
    assert os.environ["SEEN"] == "1"
    assert (trainer.accelerator.num_processes, trainer.args.world_size) == (2, 2)
