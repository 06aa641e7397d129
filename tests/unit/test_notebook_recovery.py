"""Trainers after a cell that ended in the middle of a training: what is taken off them, and whose weights count."""

import contextlib
import functools

import pytest
import torch
from torch import nn

from tests.helpers.trainer import FakeTrainer
from unsloth_multigpu.errors import DistributedError
from unsloth_multigpu.notebook.recovery import Trainings
from unsloth_multigpu.part import Part
from unsloth_multigpu.seam import Steered
from unsloth_multigpu.train.loop import Loop


def note_ended(trainings, number, trainer):
    """A training that ended well."""
    loop = Loop(trainer, [])
    trainings.note(number, loop)
    with loop.steering():
        pass


class Ours(Part):
    """Stands on a method that the script has replaced, and on others."""

    place = "feed"
    keeps = ("args.gradient_accumulation_steps",)

    @contextlib.contextmanager
    def around(self):
        self._trainer.args.gradient_accumulation_steps = 1
        yield

    def overrides(self):
        return dict.fromkeys(("training_step", "get_train_dataloader", "call_event"), lambda original, *_: original)


class CutOff(Loop):
    """An exception strikes while it is just letting go."""

    is_cut = True

    def let_go(self):
        if self.is_cut:
            self.is_cut = False
            raise KeyboardInterrupt
        super().let_go()


def test_trainer_that_was_cut_off_is_as_before():
    trainer, trainings = FakeTrainer(gradient_accumulation_steps=4), Trainings()
    trainer.training_step = own = functools.partial(str, "the script's")
    trainer.callback_handler.callbacks = ["the script's"]
    loop = CutOff(trainer, [Ours(trainer, None)])
    trainings.note(0, loop)
    with pytest.raises(KeyboardInterrupt), loop.steering():  # noqa: PT012
        trainer.is_in_train = True
        # For a moment only, which the exception has cut off.
        trainer._get_output_dir = Steered(str, trainer._get_output_dir)
    assert trainer.training_step is not own
    assert len(trainer.callback_handler.callbacks) == 2

    trainings.retire()
    assert trainer.training_step is own
    assert not {"get_train_dataloader", "_get_output_dir"} & vars(trainer).keys()
    assert "call_event" not in vars(trainer.callback_handler)
    assert trainer.args.gradient_accumulation_steps == 4
    assert trainer.callback_handler.callbacks == ["the script's"]
    assert not trainer.is_in_train


def test_trainer_whose_training_ended_well_keeps_what_the_script_put_on_it():
    trainer, trainings = FakeTrainer(gradient_accumulation_steps=4), Trainings()
    note_ended(trainings, 0, trainer)
    trainer.training_step = lambda: "put there later"
    trainer.args.gradient_accumulation_steps = 2
    trainings.retire()
    assert trainer.training_step() == "put there later"
    assert trainer.args.gradient_accumulation_steps == 2


def test_model_trains_in_a_new_wrapper_after_a_backward_that_was_cut_off(lone_group):
    trainer, trainings = FakeTrainer(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))), Trainings()
    note_ended(trainings, 0, trainer)
    old = nn.parallel.DistributedDataParallel(trainer.model)
    trainer.model_wrapped, trainer.accelerator._models = old, [old]
    fired = []

    def stop(*_):
        fired.append(1)
        raise KeyboardInterrupt

    handle = trainer.model[0].register_full_backward_hook(stop)
    with pytest.raises(KeyboardInterrupt):
        old(torch.ones(1, 2)).sum().backward()
    handle.remove()

    trainings.retire()
    assert trainer.model_wrapped is trainer.model
    assert trainer.accelerator._models == []
    assert all(p.grad is None for p in trainer.model.parameters())
    new = nn.parallel.DistributedDataParallel(trainer.model)
    for _ in range(2):
        new(torch.ones(1, 2)).sum().backward()  # The old wrapper's hooks would mark parameters a second time.
    assert fired


def test_wrapper_of_a_plain_loop_says_that_its_group_is_gone(lone_group):
    model, trainings = nn.Linear(2, 2), Trainings()
    wrapper = nn.parallel.DistributedDataParallel(model)
    wrapper(torch.ones(1, 2))  # A backward is expected.
    trainings.retire()
    with pytest.raises(DistributedError, match="unwrap_model"):
        wrapper(torch.ones(1, 2))
    model(torch.ones(1, 2)).sum().backward()
    assert not trainings, "it is no Trainer"
