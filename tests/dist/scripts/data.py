"""Feeds a plain Trainer from every kind of data source and writes which samples each step saw.

Usage: data.py N OUT [NAMES], with NAMES in commas: only these.
"""

import json
import os
import sys
import uuid
from pathlib import Path

import unsloth_multigpu as ump

num_ranks = int(sys.argv[1])
# Three ranks compare the first step of each with one process, which takes as long as the others together.
ump.enable_multi_gpu(num_gpus=num_ranks, check_first_step="auto" if num_ranks > 2 else "off")

import datasets
import torch
from common import MeanLoss, OwnOrder, Record, arguments, logged
from tiny_llama import collate, collate_end_to_end, tiny_llama
from transformers import (
    BertConfig,
    BertForMaskedLM,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)
from transformers.trainer_utils import EvalLoopOutput

from unsloth_multigpu.deal import balance
from unsloth_multigpu.deal.plan import CostModel

rank = int(os.environ.get("RANK", "0"))
out = Path(sys.argv[2])
ROWS = [{"input_ids": [1 + i, *range(2, 3 + i * 7 % 13)]} for i in range(22)]
BERT = {
    **{"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 64},
    **{"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0},
}

# Nothing is measured, so that two runs make the same plans and end equal to the bit.
balance._ASSUMED["cpu"] = CostModel(overhead_tokens=4.0, floor_tokens=0.0)
balance.Balancer._measures = lambda self: False


class Rows(torch.utils.data.Dataset):
    lengths = tuple(len(row["input_ids"]) for row in ROWS)

    def __len__(self):
        return len(ROWS)

    def __getitem__(self, index):
        return ROWS[index]


class Silent(Rows):
    """Rows that do not say how long they are."""

    lengths = None


class Stream(torch.utils.data.IterableDataset):
    def __iter__(self):
        return iter(ROWS)


class OwnGenerator(Trainer):
    """A loader that shuffles by a generator of the script's, as it is."""

    def get_train_dataloader(self):
        generator = torch.Generator().manual_seed(5)
        options = {"num_workers": self.args.dataloader_num_workers, "generator": generator, "shuffle": True}
        return torch.utils.data.DataLoader(ROWS, batch_size=3, collate_fn=collate, **options)


class EvaluatesByHand(Trainer):
    """A user's trainer with an evaluation of its own, which a callback hears."""

    def evaluate(self, *args, **kwargs):
        losses = losses_by_hand(self, self.get_eval_dataloader())
        self.log(metrics := {"eval_loss": sum(losses) / len(losses)})
        self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, metrics)
        self.control.should_training_stop = self.state.global_step == 3
        return metrics


class OwnLoop(Trainer):
    """A user's trainer that reads the rows in a loop of its own, which the Trainer calls."""

    def evaluation_loop(self, dataloader, description, **options):
        losses = losses_by_hand(self, dataloader)
        return EvalLoopOutput(None, None, {"eval_loss": sum(losses) / len(losses)}, len(dataloader.dataset))


class OwnGatheringLoop(Trainer):
    """The same for several ranks."""

    def evaluation_loop(self, dataloader, description, **options):
        rows = [n for batch in dataloader for n in self.accelerator.gather_for_metrics(batch["input_ids"][:, 0])]
        return EvalLoopOutput(None, None, {"eval_rows": sorted(map(int, rows))}, len(dataloader.dataset))


class HearsLoader(TrainerCallback):
    """Reads the rows of an evaluation again when it is over."""

    def __init__(self):
        self.rows = []

    def on_evaluate(self, args, state, control, eval_dataloader=None, **kwargs):
        self.rows.append(rows_of(eval_dataloader))


def rows_with_labels(inputs):
    """First tokens of the rows, which number them. A filler has no label."""
    ids = inputs["input_ids"]
    labels = inputs.get("labels", ids)
    if "position_ids" in inputs:
        return [] if bool((labels == -100).all()) else ids[0][inputs["position_ids"][0] == 0].tolist()
    return [int(row[0]) for row, label in zip(ids, labels, strict=True) if not bool((label == -100).all())]


class LooksOnRank0(TrainerCallback):
    """Takes a batch of its own in each epoch, on one rank alone, as a callback that shows samples does."""

    def __init__(self):
        self.seen = []

    def on_epoch_begin(self, args, state, control, **kwargs):
        if rank == 0:
            loader = self.trainer.get_train_dataloader()
            batch = next(iter(loader))
            length = None if self.trainer.args.max_steps > 0 else len(loader)
            self.seen.append([isinstance(batch, dict), length, batch["input_ids"].tolist()])


def rows_of(loader):
    """First tokens of each batch, which number the rows."""
    return [batch["input_ids"][:, 0].tolist() for batch in loader]


@torch.no_grad()
def losses_by_hand(trainer, loader):
    return [float(trainer.model(**trainer._prepare_inputs(batch))["loss"]) for batch in loader]


def gathered_by_hand(trainer):
    """As a script for several ranks reads its rows."""
    loader = trainer.get_eval_dataloader()
    rows = [n for batch in loader for n in trainer.accelerator.gather_for_metrics(batch["input_ids"][:, 0])]
    return sorted(map(int, rows))


def read_by_hand(name):
    """Loaders for evaluations that a script reads before, in and after a training, among evaluations of the Trainer."""
    if not is_asked(name):
        return
    hears = HearsLoader()
    trainer = build(name, eval_data=ROWS[:11], eval_strategy="steps", eval_steps=2, max_steps=4)
    trainer.add_callback(hears)
    loader, test_loader = trainer.get_eval_dataloader(), trainer.get_test_dataloader(ROWS[:8])
    facts = {
        "length": [len(loader), len(test_loader)],
        "rows": [rows_of(loader), rows_of(test_loader)],
        # The recipe of question answering: a loader is asked for and handed to the loop.
        "handed": trainer.evaluation_loop(loader, "Evaluation").metrics["eval_loss"],
        "gathered": gathered_by_hand(trainer),
    }
    trainer.train()
    facts |= {"heard": hears.rows, "behind": losses_by_hand(trainer, trainer.get_eval_dataloader())}
    own = build(name, EvaluatesByHand, eval_data=ROWS[:11], eval_strategy="steps", eval_steps=1, max_steps=4)
    own.train()
    facts["own"] = [h["eval_loss"] for h in own.state.log_history if "eval_loss" in h]
    facts["own_loop"] = build(name, OwnLoop, eval_data=ROWS[:11]).evaluate()["eval_loss"]
    facts["own_gathering_loop"] = build(name, OwnGatheringLoop, eval_data=ROWS[:11]).evaluate()["eval_rows"]
    workers = {"dataloader_num_workers": 1, "dataloader_persistent_workers": True}
    kept = build(name, eval_data=ROWS[:11], **workers)
    for _ in range(2):
        facts.setdefault("kept", []).append([kept.evaluate()["eval_loss"], rows_of(kept.get_eval_dataloader())])
    (out / f"{name}_{rank}.json").write_text(json.dumps(facts))


def looked_at(name, **options):
    look = LooksOnRank0()
    trainer = look.trainer = build(name, **options)
    trainer.add_callback(look)
    train(name, trainer, lambda: {"seen": look.seen})


def scheduled(name):
    """The script counts the steps of its schedule by the loader, before the training."""
    trainer = build(name)
    loader = trainer.get_train_dataloader()
    epochs, accumulated = int(trainer.args.num_train_epochs), trainer.args.gradient_accumulation_steps
    num_steps = epochs * -(-len(loader) // accumulated)
    trainer.optimizer = torch.optim.AdamW(trainer.model.parameters(), lr=1e-2)
    trainer.lr_scheduler = torch.optim.lr_scheduler.LambdaLR(
        trainer.optimizer, lambda step: max(0.0, 1 - step / num_steps)
    )
    batches = [batch["input_ids"].tolist() for batch in loader]
    train(name, trainer, lambda: {"num_steps": num_steps, "batches": batches})


def collate_masked(rows):
    """Every third token is to be found: rows with different numbers of labels."""
    batch = collate(rows)
    position = torch.arange(batch["input_ids"].shape[1])
    batch["labels"] = batch["labels"].masked_fill(position % 3 != 0, -100)
    return batch


def bert():
    """It takes loss arguments and averages its loss all the same."""
    torch.manual_seed(0)
    return BertForMaskedLM(BertConfig(**BERT))


def collate_to_32(rows):
    """Every row as long as the longest that there could be."""
    batch = collate(rows)
    return {n: torch.nn.functional.pad(v, (0, 32 - v.shape[1]), value=-100 * (n == "labels")) for n, v in batch.items()}


def small_model():
    torch.manual_seed(0)
    return tiny_llama(hidden_size=16, num_layers=1)


def build(name, kind=Trainer, data=None, model=None, collator=collate, eval_data=None, **settings):
    settings = {"num_train_epochs": 2, "learning_rate": 1e-2, "per_device_eval_batch_size": 3, **settings}
    args = arguments(out / name, 3, 2, **settings)
    data = Rows() if data is None else data
    model = (model or small_model)()
    return kind(model=model, args=args, train_dataset=data, data_collator=collator, eval_dataset=eval_data)


def is_asked(name):
    return not sys.argv[3:] or name in sys.argv[3].split(",")


def train(name, trainer, more=lambda: {}, **options):
    if not is_asked(name):
        return
    computed = []
    record = Record(trainer, lambda inputs: computed.append(inputs["input_ids"].numel()) or rows_with_labels(inputs))
    trainer.train(**options)
    facts = {
        "steps": record.steps,
        "computed_tokens": sum(computed),
        **logged(trainer, "grad_norm", "loss", "learning_rate"),
        "tokens_seen": trainer.state.num_input_tokens_seen,
        "weights": [float(p.detach().double().sum()) for p in trainer.model.parameters()],
        **more(),
    }
    (out / f"{name}_{rank}.json").write_text(json.dumps(facts))


class Seq2SeqGather(Trainer):
    """Counts the last batch as a whole one, as Seq2SeqTrainer does."""

    def evaluation_loop(self, *args, **kwargs):
        self.gather_function = self.accelerator.gather
        return super().evaluation_loop(*args, **kwargs)


class OwnEvalLoader(Trainer):
    """A loader of the script's, as it is."""

    def get_eval_dataloader(self, eval_dataset=None):
        return torch.utils.data.DataLoader(self.eval_dataset, batch_size=4, collate_fn=collate)

    get_test_dataloader = get_eval_dataloader


class InTurns(torch.utils.data.BatchSampler):
    """Batches of 2 and of 5 rows in turn, in an order that is drawn from torch's own generator."""

    def __iter__(self):
        order = torch.randperm(len(self.sampler)).tolist()
        while order:
            for size in (2, 5):
                batch, order = order[:size], order[size:]
                yield from [batch] if batch else []

    def __len__(self):
        return sum(1 for i in range(len(self.sampler)) if i % 7 in (0, 2))


class OwnBatches(Trainer):
    """Evaluates batches of the script's own, which accelerate prepares."""

    def get_eval_dataloader(self, eval_dataset=None):
        batches = InTurns(torch.utils.data.SequentialSampler(self.eval_dataset), 5, drop_last=False)
        loader = torch.utils.data.DataLoader(self.eval_dataset, batch_sampler=batches, collate_fn=collate)
        return self.accelerator.prepare(loader)

    get_test_dataloader = get_eval_dataloader


def plain_lists(values):
    return list(map(plain_lists, values)) if isinstance(values, list) else values.tolist()


def evaluate(name, num_rows, kind=Trainer, data=None, **settings):
    """Evaluates and predicts rows in batches of 4, without a training."""
    if not is_asked(name):
        return
    eval_data = ROWS[:num_rows] if data is None else data
    trainer = build(name, kind, eval_data=eval_data, per_device_eval_batch_size=4, **settings)
    trainer.preprocess_logits_for_metrics = lambda logits, labels: logits[..., 0]
    facts, handed = {}, []

    def compute_metrics(handed_over):
        handed.append(handed_over)
        return {}

    trainer.compute_metrics = compute_metrics
    for _ in range(2):
        facts["eval_loss"] = trainer.evaluate().get("eval_loss")
    predicted = trainer.predict(trainer.eval_dataset)
    facts |= {kind: getattr(predicted, kind) for kind in ("predictions", "label_ids")}
    facts["inputs"] = handed[-1].inputs if handed else None
    facts = {key: plain_lists(v) if hasattr(v, "__len__") else v for key, v in facts.items()}
    (out / f"{name}_{rank}.json").write_text(json.dumps(facts))


evaluate("eval_drop", 22, dataloader_drop_last=True)
# One whole batch is fewer than ranks.
evaluate("eval_drop_few", 6, dataloader_drop_last=True)
evaluate("eval_drop_all", 3, dataloader_drop_last=True)
evaluate("eval_inputs", 10, include_for_metrics=["inputs"])
evaluate("eval_inputs_end_to_end", 9, include_for_metrics=["inputs"], collator=collate_end_to_end)
evaluate("eval_short", 7, kind=Seq2SeqGather, include_for_metrics=["inputs"])
evaluate("eval_stream", 22, data=Stream(), include_for_metrics=["inputs"])
evaluate("eval_own_loader", 11, kind=OwnEvalLoader, include_for_metrics=["inputs"])
evaluate("eval_own_batches", 18, kind=OwnBatches, include_for_metrics=["inputs"])
train("plain", build("plain", include_num_input_tokens_seen="all"))
train("workers", build("workers", dataloader_num_workers=2, dataloader_prefetch_factor=2))
# This sampler draws from torch's own generator, as the evaluation before its second epoch does.
evaluated_between = {"eval_data": ROWS[:6], "eval_strategy": "epoch"}
if "train_sampling_strategy" in TrainingArguments.__dataclass_fields__:
    train("grouped", build("grouped", train_sampling_strategy="group_by_length", **evaluated_between))
else:
    train("grouped", build("grouped", group_by_length=True, **evaluated_between))
train("drop_last", build("drop_last", dataloader_drop_last=True))
train("own_sampler", build("own_sampler", OwnOrder))
train("mean_loss", build("mean_loss", MeanLoss))
train("own_generator_workers", build("own_generator_workers", OwnGenerator, dataloader_num_workers=2))
train("masked_lm", build("masked_lm", model=bert, collator=collate_masked))
if is_asked("evaluated"):
    # A model whose loss is a mean, evaluated before its training too, in a folder of another name on each rank.
    evaluated = {"model": bert, "collator": collate_masked, "eval_data": ROWS[:12], "eval_strategy": "epoch"}
    trainer = build(uuid.uuid4().hex, **evaluated)
    trainer.compute_metrics = lambda prediction: {"rank": rank}
    heard, before = [], trainer.evaluate()["eval_loss"]
    hear = type(
        "Hear", (TrainerCallback,), {"on_evaluate": lambda *_, metrics, **__: heard.append(metrics["eval_rank"])}
    )
    trainer.add_callback(hear())
    train(
        "evaluated",
        trainer,
        lambda: {
            "eval_loss": [before, trainer.evaluate()["eval_loss"]],
            "heard": heard,
            "dir": trainer.args.output_dir,
        },
    )
scheduled("scheduled")
read_by_hand("read_by_hand")
looked_at("looked_at")
looked_at("looked_at_stream", data=Stream(), max_steps=6)
train("hf_dataset", build("hf_dataset", data=datasets.Dataset.from_list(ROWS)))
train("silent", build("silent", data=Silent()))
train("fixed_width", build("fixed_width", collator=collate_to_32))
train("end_to_end", build("end_to_end", collator=collate_end_to_end))
train("streaming", build("streaming", data=Stream(), max_steps=6))
hf_stream = datasets.Dataset.from_list(ROWS).to_iterable_dataset().shuffle(seed=3, buffer_size=8)
train("hf_streaming", build("hf_streaming", data=hf_stream, max_steps=6))
settings = {"max_steps": 6, "save_strategy": "steps", "save_steps": 3}
train("stream_whole", build("stream_whole", data=hf_stream, **settings))
checkpoint = str(out / "stream_whole" / "checkpoint-3")
train("stream_resumed", build("stream_whole", data=hf_stream, **settings), resume_from_checkpoint=checkpoint)
train("whole", build("whole", save_strategy="steps", save_steps=3))
train(
    "resumed",
    build("whole", save_strategy="steps", save_steps=3),
    resume_from_checkpoint=str(out / "whole/checkpoint-3"),
)
