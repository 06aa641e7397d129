"""Scripts reach a training, look into it and decide in it, in ways of their own. Each rank writes what came of each.

Usage: ways.py together|apart|uploads; "apart" are decisions of ranks that step by themselves.
"""

import functools
import os
import sys
import time

import unsloth_multigpu as ump

LIMITS = {"timeout_s": 60, "hang_timeout_s": 30}
if sys.argv[1] == "uploads":
    LIMITS = {"timeout_s": 20, "hang_timeout_s": 5}
ump.enable_multi_gpu(**LIMITS)

import torch
from common import RANK, Calls, Line, Stream, arguments, points, write_facts
from transformers import Trainer
from transformers.trainer import Trainer as Defining

DECIDED, ROWS = points(32), points(13)


def recorder(events):
    def on_log(_, state, *__, logs, **___):
        if "loss" in logs:
            events.append(["log", state.global_step])

    def on_evaluate(_, state, *__, metrics, **___):
        events.append(["evaluate", state.global_step, *(v for k, v in metrics.items() if k == "eval_drawn")])

    def on_save(_, state, *__, **___):
        events.append(["save", state.global_step])

    return Calls(on_log=on_log, on_evaluate=on_evaluate, on_save=on_save)


def sets(flag, step_of, event="on_step_end", lasts=False):
    """Sets `flag` at `event` of the step that `step_of` gives for the rank, None = never."""
    step = step_of(RANK)

    def decide(args, state, control, **kwargs):
        if step is not None and (state.global_step == step or (lasts and state.global_step > step)):
            setattr(control, flag, True)

    return Calls(**{event: decide})


class Draws(Trainer):
    """Adds a number of its own to an evaluation's, as transformers' example of question answering does."""

    def evaluate(self, *args, **kwargs):
        output = self.evaluation_loop(self.get_eval_dataloader(), "Evaluation", prediction_loss_only=True)
        metrics = {**output.metrics, "eval_drawn": RANK}
        self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, metrics)
        return metrics


def adds_late(added):
    """A library may add a callback when the training has begun."""
    late = Calls(on_train_begin=lambda *_, **__: late.trainer.add_callback(added))
    return late


def only(rank, step):
    return lambda mine: step if mine == rank else None


def decided(name, *callbacks, trainer_class=Trainer, **given):
    events = []
    settings = {"learning_rate": 0.1, "optim": "sgd", "logging_steps": 100, "max_steps": 8, **given}
    args = arguments(name, 4, **settings)
    callbacks = [recorder(events), *callbacks]
    trainer = trainer_class(Line(), args, train_dataset=DECIDED, eval_dataset=DECIDED[:4], callbacks=callbacks)
    for callback in callbacks:
        callback.trainer = trainer
    trainer.train()
    saved = sorted(p for p in os.listdir(name) if p.startswith("checkpoint-")) if os.path.isdir(name) else []
    weights = [round(w, 6) for w in trainer.model.layer.weight.flatten().tolist()]
    return {"steps": trainer.state.global_step, "events": events, "saved": saved, "weights": weights}


def follow(path):
    """Rank 0 comes to the callbacks of step 2 when rank 1 has begun step 4."""

    def begin(_, state, *__, **___):
        if RANK == 1 and state.global_step == 3:
            open(path, "w").close()

    def end(_, state, *__, **___):
        while RANK == 0 and state.global_step == 2 and not os.path.exists(path):
            pass

    return Calls(on_step_begin=begin, on_step_end=end)


def decisions():
    # The clock: rank 1 sees the limit a step before rank 0, or behind it.
    yield "clock-stop", [sets("should_training_stop", lambda rank: 4 - rank, lasts=True)], {"save_strategy": "steps"}
    yield "clock-save", [sets("should_save", lambda rank: 4 - rank)], {"save_strategy": "steps"}
    yield "clock-evaluate", [sets("should_evaluate", lambda rank: 4 - rank)], {}
    yield "clock-late", [sets("should_save", lambda rank: 3 + rank)], {}
    yield "epoch-stop", [sets("should_epoch_stop", only(0, 3))], {}
    yield "log", [sets("should_log", only(0, 3))], {}
    yield "evaluate", [sets("should_evaluate", only(0, 3))], {}
    yield "drawn", [sets("should_evaluate", only(0, 3))], {"trainer_class": Draws}
    yield "before-the-end", [sets("should_save", only(0, 2), "on_optimizer_step")], {}
    # The loop reads the flags one after the other, and callbacks are asked in between.
    chain = [
        sets("should_evaluate", only(0, 2), "on_log"),
        sets("should_save", only(0, 2), "on_evaluate"),
        sets("should_training_stop", only(0, 2), "on_save"),
    ]
    yield "chain", chain, {"logging_steps": 2}
    yield "epoch-end", [sets("should_save", only(0, 8), "on_epoch_end")], {"max_steps": 10}
    yield "added", [adds_late(sets("should_evaluate", only(0, 3)))], {}
    yield "rank-1", [sets("should_save", only(1, 3))], {}


def decisions_apart():
    yield "alike", [sets("should_evaluate", lambda rank: 3)], {"save_steps": 4, "save_strategy": "steps"}
    yield "rank-1", [sets("should_save", only(1, 3))], {}
    yield "clock", [sets("should_training_stop", lambda rank: 6 - rank, lasts=True)], {"max_steps": 24}
    yield "behind", [follow("rank_1_is_ahead"), sets("should_save", only(0, 2))], {}


def make(*callbacks, data=ROWS, cls=Trainer, **given):
    args = arguments("out", 2, 2, **{"max_steps": 4, "learning_rate": 0.1, "optim": "sgd", **given})
    return cls(Line(), args, train_dataset=data, callbacks=list(callbacks))


def train(*args, **kwargs):
    trainer = make(*args, **kwargs)
    trainer.train()
    return {"steps": trainer.state.global_step, "weights": trainer.model.layer.weight.flatten().tolist()}


def looks(data):
    """What a callback reads of the loader and of the arguments."""
    seen = {}

    def look(args, *_, train_dataloader, **__):
        found = train_dataloader.dataset
        seen["is the script's"] = found is data
        seen["first batch"] = next(iter(train_dataloader))["x"].shape[0]
        seen["accumulation"] = args.gradient_accumulation_steps
        if not isinstance(found, Stream):
            seen.update(row=found[0]["x"].tolist(), rows=len(found), batches=len(train_dataloader))

    trainer = make(Calls(on_train_begin=look), data=data)
    trainer.train()
    behind = [trainer.callback_handler.train_dataloader.dataset is data, trainer.args.gradient_accumulation_steps]
    return {**seen, "behind train()": behind}


def changes(args, *_, **__):
    args.gradient_accumulation_steps = 1


def wrapped(wrap):
    found = Defining.train
    Defining.train = wrap(found)
    try:
        return train()
    finally:
        Defining.train = found


def closure(found):
    def train(self, *args, **kwargs):
        return found(self, *args, **kwargs)

    return train


def replaced(found):
    def train(self, *args, **kwargs):
        return self._inner_training_loop(batch_size=2, args=self.args)

    return train


class OwnTrain(Trainer):
    train = replaced(None)


def own_loop():
    trainer = make(cls=OwnTrain, max_steps=1)
    aside = len(trainer.get_train_dataloader())
    trainer.train()
    return {"aside": aside, "in its loop": len(trainer.callback_handler.train_dataloader)}


class TwoLoaders(Trainer):
    def get_train_dataloader(self):
        loaders = [torch.utils.data.DataLoader(part, batch_size=2) for part in (ROWS[:6], ROWS[6:])]
        return [batch for loader in loaders for batch in self.accelerator.prepare(loader)]


class PastDDP(Trainer):
    def compute_loss(self, model, inputs, *args, **kwargs):
        return self.model(**inputs)["loss"]


class Uploads(Trainer):
    def _finish_current_push(self):
        time.sleep(30 if RANK == 0 else 0)


def with_options(**options):
    """Steps of an epoch of 24 rows in batches of 4."""
    ump.disable_multi_gpu()
    ump.enable_multi_gpu(**LIMITS, **options)
    trainer = Trainer(Line(), arguments("out", 4, num_train_epochs=1), train_dataset=points(24))
    trainer.train()
    ump.disable_multi_gpu()
    ump.enable_multi_gpu(**LIMITS)
    return trainer.state.global_step


def ways():
    yield "plain", train
    yield "closure", functools.partial(wrapped, closure)
    yield "replaced", functools.partial(wrapped, replaced)
    yield "own", own_loop
    yield "look", functools.partial(looks, ROWS)
    yield "look at a stream", functools.partial(looks, Stream(ROWS))
    yield "changed", functools.partial(train, Calls(on_epoch_end=changes), max_steps=9)
    yield "two loaders", functools.partial(train, cls=TwoLoaders)
    yield "scaled", functools.partial(with_options, global_batch="scale")
    yield "by 3", functools.partial(with_options, batch_size_per_gpu=3)
    yield "past DDP", functools.partial(train, cls=PastDDP)


if __name__ == "__main__":
    uploads = {"uploads": functools.partial(train, cls=Uploads, max_steps=1)}
    for_each, in_ways = {
        "together": (decisions(), ways()),
        "apart": (decisions_apart(), ()),
        "uploads": ((), uploads.items()),
    }[sys.argv[1]]
    found = {name: decided(name, *callbacks, **given) for name, callbacks, given in for_each}
    for name, way in in_ways:
        try:
            found[name] = way()
        except ump.MultiGPUError as error:
            found[name] = {"error": type(error).__name__, "text": str(error)}
    write_facts("found", found)
