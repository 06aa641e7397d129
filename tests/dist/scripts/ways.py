"""Scripts reach a training, and look into it, in ways of their own. Each rank writes what came of each."""

import functools
import json
import os

import unsloth_multigpu as ump

ump.enable_multi_gpu()

import torch
from common import Line, arguments, points
from transformers import Trainer, TrainerCallback
from transformers.trainer import Trainer as Defining

RANK = int(os.environ.get("RANK", "0"))
ROWS = points(13)


class Stream(torch.utils.data.IterableDataset):
    def __iter__(self):
        return iter(ROWS)


class Looks(TrainerCallback):
    """What a callback reads of the loader and of the arguments."""

    def on_train_begin(self, args, state, control, train_dataloader=None, **kwargs):
        data = train_dataloader.dataset
        self.seen = {
            "is the script's": data is self.data,
            "first batch": next(iter(train_dataloader))["x"].shape[0],
            "accumulation": args.gradient_accumulation_steps,
        }
        if not isinstance(data, Stream):
            self.seen |= {"row": data[0]["x"].tolist(), "rows": len(data), "batches": len(train_dataloader)}


class Changes(TrainerCallback):
    def on_epoch_end(self, args, state, control, **kwargs):
        args.gradient_accumulation_steps = 1


def make(*callbacks, data=ROWS, cls=Trainer, **given):
    args = arguments("out", 2, 2, **{"max_steps": 4, "learning_rate": 0.1, "optim": "sgd", **given})
    return cls(Line(), args, train_dataset=data, callbacks=list(callbacks))


def train(*args, **kwargs):
    trainer = make(*args, **kwargs)
    trainer.train()
    return {"steps": trainer.state.global_step, "weights": trainer.model.layer.weight.flatten().tolist()}


def looks(data):
    callback = Looks()
    callback.data = data
    trainer = make(callback, data=data)
    trainer.train()
    behind = [trainer.callback_handler.train_dataloader.dataset is data, trainer.args.gradient_accumulation_steps]
    return {**callback.seen, "behind train()": behind}


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
    def train(self):
        return self._inner_training_loop(batch_size=2, args=self.args)


def own_loop():
    trainer = make(cls=OwnTrain, max_steps=1)
    aside = len(trainer.get_train_dataloader())
    trainer.train()
    return {"aside": aside, "in its loop": len(trainer.callback_handler.train_dataloader)}


class TwoLoaders(Trainer):
    def get_train_dataloader(self):
        loaders = [torch.utils.data.DataLoader(part, batch_size=2) for part in (ROWS[:6], ROWS[6:])]
        return Chained([self.accelerator.prepare(loader) for loader in loaders])


class PastDDP(Trainer):
    def compute_loss(self, model, inputs, *args, **kwargs):
        return self.model(**inputs)["loss"]


class Chained:
    def __init__(self, loaders):
        self.loaders = loaders

    def __iter__(self):
        for loader in self.loaders:
            yield from loader

    def __len__(self):
        return sum(len(loader) for loader in self.loaders)


def cases():
    yield "plain", train
    yield "closure", functools.partial(wrapped, closure)
    yield "replaced", functools.partial(wrapped, replaced)
    yield "own", own_loop
    yield "look", functools.partial(looks, ROWS)
    yield "look at a stream", functools.partial(looks, Stream())
    yield "changed", functools.partial(train, Changes(), max_steps=9)
    yield "two loaders", functools.partial(train, cls=TwoLoaders)
    yield "past DDP", functools.partial(train, cls=PastDDP)


if __name__ == "__main__":
    found = {}
    for name, case in cases():
        try:
            found[name] = case()
        except ump.MultiGPUError as error:
            found[name] = {"error": type(error).__name__, "text": str(error)}
    with open(f"found_{RANK}.json", "w") as file:
        json.dump(found, file, indent=1)
