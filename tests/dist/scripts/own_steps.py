"""Methods of a Trainer that scripts override, and hooks. Used by own_code.py."""

import torch
from own_losses import Kind, OwnLoss, class_losses, collate_tokens, collator, llama, scores
from torch.nn import functional
from transformers import Trainer


class Counter(OwnLoss):
    """A factor that each call of `training_step` advances."""

    num_calls = 0

    def training_step(self, *arguments, **keywords):
        self.num_calls += 1
        return super().training_step(*arguments, **keywords)

    def factor(self):
        return 1.0 + 0.3 * self.num_calls


class Late(Counter):
    """A factor from the sixth call on: in one process in step 3, which is not compared."""

    # Rank 0 has that of one process.
    first_sum = 0.0

    def compute_loss(self, model, inputs, *arguments, **keywords):
        self.first_sum = self.first_sum or float(inputs["input_ids"].sum())
        return super().compute_loss(model, inputs, *arguments, **keywords)

    def factor(self):
        return 1.0 if self.num_calls < 6 else 2.0


class HardFirst(Trainer):
    """Rows with the largest losses come first in the next epoch."""

    losses = ()

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        losses = class_losses(model, inputs)
        self.losses = {**dict(self.losses), **dict(zip(inputs["number"].tolist(), losses.tolist(), strict=True))}
        return losses.mean()

    def _get_train_sampler(self, *args):
        outer, count = self, len(self.train_dataset)

        class HardestRows(torch.utils.data.Sampler):
            def __len__(self):
                return count

            def __iter__(self):
                held = dict(outer.losses)
                return iter(sorted(range(count), key=lambda i: -held.get(i, 0.0)))

        return HardestRows()


class OwnStep(Trainer):
    """Computes its loss by itself."""

    def training_step(self, model, inputs, num_items_in_batch=None):
        model.train()
        inputs = self._prepare_inputs(inputs)
        loss = functional.cross_entropy(scores(model, inputs), inputs["labels"])
        loss = loss / self.args.gradient_accumulation_steps
        self.accelerator.backward(loss)
        return loss.detach()


class OwnBackward(Trainer):
    """Knows nothing of accelerate."""

    def training_step(self, model, inputs, num_items_in_batch=None):
        loss = functional.cross_entropy(scores(model, inputs), inputs["labels"])
        loss = loss / self.args.gradient_accumulation_steps
        loss.backward()
        return loss.detach()


class DividedTokens(Trainer):
    """A model that would take the step's count, which this loss does not hand on."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        return model(**inputs).loss / self.current_gradient_accumulation_steps


class Auxiliary(Trainer):
    """A sum over the tokens of the step with a mean of the micro-batch beside it, as TRL writes it."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        logits, labels = scores(model, inputs)[:, :-1], inputs["labels"][:, 1:]
        loss = functional.cross_entropy(logits.transpose(1, 2), labels, reduction="sum") / num_items_in_batch
        if self.args.average_tokens_across_devices:
            loss = loss * self.accelerator.num_processes
        return loss + 0.1 * logits.logsumexp(-1).pow(2).mean() / self.current_gradient_accumulation_steps


class PreparesTokens(Trainer):
    def _prepare_inputs(self, inputs):
        inputs = dict(super()._prepare_inputs(inputs))
        inputs["input_ids"] = (inputs["input_ids"] * 3 + 1) % 64
        return inputs


class Batches(Trainer):
    def get_batch_samples(self, epoch_iterator, num_batches, device):
        batches, num_items = super().get_batch_samples(epoch_iterator, num_batches, device)
        return [{**batch, "labels": (batch["labels"] + 1) % 3, "added": 1} for batch in batches], num_items

    def _prepare_inputs(self, inputs):
        inputs = dict(inputs)
        assert inputs.pop("added") == 1
        return super()._prepare_inputs(inputs)


class FewerBatches(Trainer):
    def get_batch_samples(self, epoch_iterator, num_batches, device):
        batches, num_items = super().get_batch_samples(epoch_iterator, num_batches, device)
        return batches[1:], num_items


class Clips(Trainer):
    """Clips past what counts writes."""

    def training_step(self, model, inputs, num_items_in_batch=None):
        loss = super().training_step(model, inputs, num_items_in_batch)
        for parameter in model.parameters():
            parameter.grad.data.clamp_(-0.02, 0.02)
        return loss


class MixesInPlace(OwnLoss):
    """Rows of a loss that nobody else knows are not exchanged between micro-batches."""

    def training_step(self, model, inputs, num_items_in_batch=None):
        inputs["labels"].copy_(inputs["labels"].roll(1, 0))
        return super().training_step(model, inputs, num_items_in_batch)


def of_tokens(trainer, **settings):
    return Kind(trainer, llama, lambda: collate_tokens, settings)


KINDS = {
    "counter": Kind(Counter),
    "late": Kind(Late),
    "hard_first": Kind(HardFirst, collate=lambda: collator(labels="class", number="number")),
    "own_step": Kind(OwnStep),
    "own_backward": Kind(OwnBackward),
    "hears": Kind(),
    "divided_tokens": of_tokens(DividedTokens),
    "auxiliary": of_tokens(Auxiliary),
    "prepares_tokens": Kind(PreparesTokens),
    "batches": Kind(Batches),
    "fewer_batches": Kind(FewerBatches),
    "clips": Kind(Clips),
    "mixes_in_place": Kind(MixesInPlace),
    "grows": of_tokens(Trainer, max_steps=16),
}
