"""Feeds a plain Trainer from every kind of data source and writes which samples each step saw.

Usage: data.py N OUT [NAMES], with NAMES in commas: only these.
"""

import functools
import sys
import uuid
from pathlib import Path

import unsloth_multigpu as ump

num_ranks = int(sys.argv[1])
# Three ranks compare the first step of each with one process, which takes as long as the others together.
ump.enable_multi_gpu(num_gpus=num_ranks, check_first_step="auto" if num_ranks > 2 else "off")

import datasets
import torch
from common import RANK, Calls, MeanLoss, OwnOrder, Record, Stream, arguments, logged, rows_in, write_facts
from own_losses import BERT
from tiny_llama import collate, collate_end_to_end, tiny_llama
from transformers import BertForMaskedLM, Trainer, TrainingArguments
from transformers.trainer_utils import EvalLoopOutput

from unsloth_multigpu.deal import balance
from unsloth_multigpu.deal.plan import CostModel

out = Path(sys.argv[2])
ROWS = [{"input_ids": [1 + i, *range(2, 3 + i * 7 % 13)]} for i in range(22)]

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


class OwnGenerator(Trainer):
    """A loader that shuffles by a generator of the script's, as it is."""

    def get_train_dataloader(self):
        generator = torch.Generator().manual_seed(5)
        options = {"num_workers": self.args.dataloader_num_workers, "generator": generator, "shuffle": True}
        return torch.utils.data.DataLoader(ROWS, batch_size=3, collate_fn=collate, **options)


class EvaluatesByHand(Trainer):
    """A user's trainer with an evaluation of its own, which a callback hears."""

    def evaluate(self, *args, **kwargs):
        self.log(metrics := mean_by_hand(self, self.get_eval_dataloader()))
        self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, metrics)
        self.control.should_training_stop = self.state.global_step == 3
        return metrics


class OwnLoop(Trainer):
    """A user's trainer that reads the rows in a loop of its own, which the Trainer calls."""

    def evaluation_loop(self, dataloader, description, **options):
        return EvalLoopOutput(None, None, mean_by_hand(self, dataloader), len(dataloader.dataset))


class OwnGatheringLoop(Trainer):
    """The same for several ranks."""

    def evaluation_loop(self, dataloader, description, **options):
        return EvalLoopOutput(None, None, {"eval_rows": gathered_by_hand(self, dataloader)}, len(dataloader.dataset))


def rows_of(loader):
    """First tokens of each batch, which number the rows."""
    return [batch["input_ids"][:, 0].tolist() for batch in loader]


def numbers_of(inputs):
    """First tokens of the rows, which number them."""
    return [int(row[0]) for row in rows_in(inputs)]


@torch.no_grad()
def losses_by_hand(trainer, loader):
    return [float(trainer.model(**trainer._prepare_inputs(batch))["loss"]) for batch in loader]


def mean_by_hand(trainer, loader):
    losses = losses_by_hand(trainer, loader)
    return {"eval_loss": sum(losses) / len(losses)}


def gathered_by_hand(trainer, loader):
    """As a script for several ranks reads its rows."""
    rows = [n for batch in loader for n in trainer.accelerator.gather_for_metrics(batch["input_ids"][:, 0])]
    return sorted(map(int, rows))


def read_by_hand(name):
    """Loaders for evaluations that a script reads before, in and after a training, among evaluations of the Trainer."""
    heard, in_steps = [], {"eval_strategy": "steps", "max_steps": 4}
    build_it = functools.partial(build, name, eval_data=ROWS[:11])
    trainer = build_it(eval_steps=2, **in_steps)
    # Reads the rows of an evaluation again when it is over.
    trainer.add_callback(Calls(on_evaluate=lambda *_, eval_dataloader, **__: heard.append(rows_of(eval_dataloader))))
    loader, test_loader = trainer.get_eval_dataloader(), trainer.get_test_dataloader(ROWS[:8])
    facts = {
        "length": [len(loader), len(test_loader)],
        "rows": [rows_of(loader), rows_of(test_loader)],
        # The recipe of question answering: a loader is asked for and handed to the loop.
        "handed": trainer.evaluation_loop(loader, "Evaluation").metrics["eval_loss"],
        "gathered": gathered_by_hand(trainer, trainer.get_eval_dataloader()),
    }
    trainer.train()
    facts |= {"heard": heard, "behind": losses_by_hand(trainer, trainer.get_eval_dataloader())}
    own = build_it(EvaluatesByHand, eval_steps=1, **in_steps)
    own.train()
    facts["own"] = [h["eval_loss"] for h in own.state.log_history if "eval_loss" in h]
    facts["own_loop"] = build_it(OwnLoop).evaluate()["eval_loss"]
    facts["own_gathering_loop"] = build_it(OwnGatheringLoop).evaluate()["eval_rows"]
    kept = build_it(dataloader_num_workers=1, dataloader_persistent_workers=True)
    facts["kept"] = [[kept.evaluate()["eval_loss"], rows_of(kept.get_eval_dataloader())] for _ in range(2)]
    write_facts(out / name, facts)


def looked_at(name, **options):
    """A callback takes a batch of its own in each epoch, on one rank alone, as one that shows samples does."""
    trainer, seen = build(name, **options), []

    def look(*_, **__):
        if RANK == 0:
            loader = trainer.get_train_dataloader()
            batch = next(iter(loader))
            length = None if trainer.args.max_steps > 0 else len(loader)
            seen.append([isinstance(batch, dict), length, batch["input_ids"].tolist()])

    trainer.add_callback(Calls(on_epoch_begin=look))
    train(name, trainer, lambda: {"seen": seen})


def scheduled(name):
    """The script counts the steps of its schedule by the loader, before the training."""
    trainer = build(name)
    loader = trainer.get_train_dataloader()
    epochs, accumulated = int(trainer.args.num_train_epochs), trainer.args.gradient_accumulation_steps
    num_steps = epochs * -(-len(loader) // accumulated)
    optimizer = trainer.optimizer = torch.optim.AdamW(trainer.model.parameters(), lr=1e-2)
    trainer.lr_scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: max(0.0, 1 - step / num_steps))
    batches = [batch["input_ids"].tolist() for batch in loader]
    train(name, trainer, lambda: {"num_steps": num_steps, "batches": batches})


def evaluated(name):
    """A model whose loss is a mean, evaluated before its training too, in a folder of another name on each rank."""
    given = {"model": bert, "collator": collate_masked, "eval_data": ROWS[:12], "eval_strategy": "epoch"}
    trainer = build(uuid.uuid4().hex, **given)
    trainer.compute_metrics = lambda prediction: {"rank": RANK}
    heard, before = [], trainer.evaluate()["eval_loss"]
    trainer.add_callback(Calls(on_evaluate=lambda *_, metrics, **__: heard.append(metrics["eval_rank"])))

    def more():
        after = trainer.evaluate()["eval_loss"]
        return {"eval_loss": [before, after], "heard": heard, "dir": trainer.args.output_dir}

    train(name, trainer, more)


def collate_masked(rows):
    """Every third token is to be found: rows with different numbers of labels."""
    batch = collate(rows)
    position = torch.arange(batch["input_ids"].shape[1])
    batch["labels"] = batch["labels"].masked_fill(position % 3 != 0, -100)
    return batch


def bert():
    """It takes loss arguments and averages its loss all the same."""
    torch.manual_seed(0)
    return BertForMaskedLM(BERT)


def collate_to_32(rows):
    """Every row as long as the longest that there could be."""
    batch = collate(rows)
    return {n: torch.nn.functional.pad(v, (0, 32 - v.shape[1]), value=-100 * (n == "labels")) for n, v in batch.items()}


def small_model():
    torch.manual_seed(0)
    return tiny_llama(hidden_size=16, num_layers=1)


def build(name, kind=Trainer, data=None, model=small_model, collator=collate, eval_data=None, **settings):
    settings = {"num_train_epochs": 2, "learning_rate": 1e-2, "per_device_eval_batch_size": 3, **settings}
    args, data = arguments(out / name, 3, 2, **settings), Rows() if data is None else data
    return kind(model=model(), args=args, train_dataset=data, data_collator=collator, eval_dataset=eval_data)


def train(name, trainer, more=dict, **options):
    computed = []
    record = Record(trainer, lambda inputs: computed.append(inputs["input_ids"].numel()) or numbers_of(inputs))
    trainer.train(**options)
    facts = {
        "steps": record.steps,
        "computed_tokens": sum(computed),
        **logged(trainer, "grad_norm", "loss", "learning_rate"),
        "tokens_seen": trainer.state.num_input_tokens_seen,
        "weights": [float(p.detach().double().sum()) for p in trainer.model.parameters()],
        **more(),
    }
    write_facts(out / name, facts)


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


def evaluate(name, num_rows, kind=Trainer, **settings):
    """Evaluates and predicts rows in batches of 4, without a training."""
    settings = {"eval_data": ROWS[:num_rows], "per_device_eval_batch_size": 4, **settings}
    trainer = build(name, kind, **settings)
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
    write_facts(out / name, facts)


def resumed(name, whole, **given):
    checkpoint = str(out / whole / "checkpoint-3")
    train(name, build(whole, **given), resume_from_checkpoint=checkpoint)


INPUTS = {"include_for_metrics": ["inputs"]}
EVALUATED = {
    "eval_drop": {"num_rows": 22, "dataloader_drop_last": True},
    # One whole batch is fewer than ranks.
    "eval_drop_few": {"num_rows": 6, "dataloader_drop_last": True},
    "eval_drop_all": {"num_rows": 3, "dataloader_drop_last": True},
    "eval_inputs": {"num_rows": 10, **INPUTS},
    "eval_inputs_end_to_end": {"num_rows": 9, "collator": collate_end_to_end, **INPUTS},
    "eval_short": {"num_rows": 7, "kind": Seq2SeqGather, **INPUTS},
    "eval_stream": {"num_rows": 22, "eval_data": Stream(ROWS), **INPUTS},
    "eval_own_loader": {"num_rows": 11, "kind": OwnEvalLoader, **INPUTS},
    "eval_own_batches": {"num_rows": 18, "kind": OwnBatches, **INPUTS},
}
is_new = "train_sampling_strategy" in TrainingArguments.__dataclass_fields__
by_length = {"train_sampling_strategy": "group_by_length"} if is_new else {"group_by_length": True}
hf_dataset = datasets.Dataset.from_list(ROWS)
hf_stream = hf_dataset.to_iterable_dataset().shuffle(seed=3, buffer_size=8)
saves = {"save_strategy": "steps", "save_steps": 3}
saved_stream = {"data": hf_stream, "max_steps": 6, **saves}
TRAINED = {
    "plain": {"include_num_input_tokens_seen": "all"},
    "workers": {"dataloader_num_workers": 2, "dataloader_prefetch_factor": 2},
    # This sampler draws from torch's own generator, as the evaluation before its second epoch does.
    "grouped": {"eval_data": ROWS[:6], "eval_strategy": "epoch", **by_length},
    "drop_last": {"dataloader_drop_last": True},
    "own_sampler": {"kind": OwnOrder},
    "mean_loss": {"kind": MeanLoss},
    "own_generator_workers": {"kind": OwnGenerator, "dataloader_num_workers": 2},
    "masked_lm": {"model": bert, "collator": collate_masked},
    "hf_dataset": {"data": hf_dataset},
    "silent": {"data": Silent()},
    "fixed_width": {"collator": collate_to_32},
    "end_to_end": {"collator": collate_end_to_end},
    "streaming": {"data": Stream(ROWS), "max_steps": 6},
    "hf_streaming": {"data": hf_stream, "max_steps": 6},
    "stream_whole": saved_stream,
    "whole": saves,
}
others = (evaluated, scheduled, read_by_hand, looked_at)
JOBS = {
    **{name: functools.partial(evaluate, **given) for name, given in EVALUATED.items()},
    **{name: lambda name: train(name, build(name, **TRAINED[name])) for name in TRAINED},
    **{job.__name__: job for job in others},
    "looked_at_stream": functools.partial(looked_at, data=Stream(ROWS), max_steps=6),
    "stream_resumed": functools.partial(resumed, whole="stream_whole", **saved_stream),
    "resumed": functools.partial(resumed, whole="whole", **saves),
}
for name in sys.argv[3].split(",") if sys.argv[3:] else JOBS:
    JOBS[name](name)
