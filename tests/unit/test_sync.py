"""A strategy beside DDP in a Trainer: when ranks meet, what becomes of the Trainer, and of a layer that is unfrozen."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from tests.helpers.board import manager_of
from tests.helpers.trainer import FakeTrainer
from unsloth_multigpu.errors import SetupError
from unsloth_multigpu.options import MultiGPUConfig
from unsloth_multigpu.strategies.strategy_exchange import Exchange
from unsloth_multigpu.train.ddp import TrainedParameters, parameters_beside_the_model
from unsloth_multigpu.train.loop import Loop


@pytest.mark.parametrize("control", ["should_save", "should_evaluate", "should_training_stop", None])
def test_ranks_meet_before_weights_are_read(control):
    flags = dict.fromkeys(("should_save", "should_evaluate", "should_training_stop"), False)
    asked = SimpleNamespace(**{name: name == control for name in flags})
    met = []
    trainer, exchange = exchange_of(nn.Linear(3, 2), strategy="local_sgd")
    trainer.state, trainer.control = SimpleNamespace(global_step=3, max_steps=8, epoch=1.0, num_train_epochs=2), asked
    exchange.sync = SimpleNamespace(synchronize=lambda: met.append("met"))
    exchange.on_step_end(None, None, asked)
    exchange.on_epoch_end(None, None, asked)
    assert met == ["met"] * (2 if control else 0)
    trainer.state.epoch = 1.5
    exchange.on_epoch_end(None, None, asked)  # The best checkpoint may be loaded next.
    assert len(met) == (3 if control else 1)


def exchange_of(model, **options):
    trainer = FakeTrainer(model)
    exchange = Exchange(trainer, manager_of(None, config=MultiGPUConfig(**options)))
    return trainer, exchange


def test_exchange_steers_one_model_also_where_the_training_fails():
    trainer, exchange = exchange_of(nn.Linear(3, 2), strategy="local_sgd")
    with pytest.raises(KeyError), Loop(trainer, [exchange]).steering():  # noqa: PT012
        assert not trainer.args.average_tokens_across_devices
        frozen = nn.Linear(3, 2).requires_grad_(False)
        for model in (trainer.model, frozen):
            assert trainer.accelerator.prepare_model(model) is model
        with pytest.raises(SetupError, match="A Linear is trained in addition to the Trainer's model"):
            trainer.accelerator.prepare_model(nn.Linear(3, 2))
        raise KeyError
    assert (trainer.callback_handler.callbacks, trainer.args.average_tokens_across_devices) == ([], True)
    assert "training_step" not in vars(trainer)


class Half(FakeTrainer):
    """Its first layer is frozen."""

    def __init__(self):
        super().__init__(torch.nn.Sequential(torch.nn.Linear(1, 1), torch.nn.Linear(1, 1)))
        self.model[0].requires_grad_(False)
        self.optimizer = torch.optim.SGD(self.model[1].parameters())

    def step(self):
        """A step of the loop."""
        self.event("on_step_begin")
        self.model(torch.ones(1, 1)).sum().backward()
        self.event("on_pre_optimizer_step")
        self.state.global_step += 1


def followed(trainer, strategy="allreduce"):
    # It cannot meet anybody: every exchange with other ranks would raise.
    manager = manager_of(None, 0, 2, MultiGPUConfig(strategy=strategy))
    known = [p for p in trainer.model.parameters() if p.requires_grad]
    exchange = SimpleNamespace(parameters=known if strategy != "ddp" else None)
    return Loop(trainer, [TrainedParameters(trainer, manager, exchange, 0)]).steering()


@pytest.mark.parametrize(
    ("strategy", "told"),
    [
        ("allreduce", r"0\.weight became trainable after step 1, but strategy='allreduce'"),
        ("ddp", "the script's own DDP"),
    ],
)
def test_what_knows_its_parameters_refuses_more_of_them_and_goes_on_with_fewer(strategy, told):
    trainer = Half()
    with followed(trainer, strategy):
        trainer.step()
        trainer.model[0].weight.requires_grad_(True)
        with pytest.raises(SetupError, match=told):
            trainer.step()
    trainer = Half()
    with followed(trainer, strategy):
        trainer.step()
        trainer.model[1].bias.requires_grad_(False)
        trainer.step()


def test_parameters_that_only_the_optimizer_has_are_found():
    trainer = Half()
    assert parameters_beside_the_model(trainer) == []
    scale = torch.nn.Parameter(torch.ones(2))
    trainer.optimizer.add_param_group({"params": [scale]})
    # What LOMO and others give their optimizer so that it has something.
    trainer.optimizer.add_param_group({"params": [torch.zeros(1)]})
    ((name, found),) = parameters_beside_the_model(trainer)
    assert name == "parameter 0 of the optimizer's group 1, which is not in the model"
    assert found is scale
