"""What is trained may change: what a strategy beside DDP does then, and what costs nothing; without other ranks."""

from types import SimpleNamespace

import pytest
import torch

from tests.helpers.trainer import FakeTrainer
from unsloth_multigpu.errors import SetupError
from unsloth_multigpu.options import MultiGPUConfig
from unsloth_multigpu.train.loop import Loop
from unsloth_multigpu.train.trainable import TrainedParameters, parameters_beside_the_model
from unsloth_multigpu.wire.identity import RankIdentity


class Half(FakeTrainer):
    """Its first layer is frozen."""

    def __init__(self):
        super().__init__(torch.nn.Sequential(torch.nn.Linear(1, 1), torch.nn.Linear(1, 1)))
        self.model[0].requires_grad_(False)
        self.optimizer = torch.optim.SGD(self.model[1].parameters())

    def training_step(self, model, inputs, num_items_in_batch=None):
        model(inputs).sum().backward()
        self.state.global_step += 1


def followed(trainer, strategy="allreduce", parameters=None):
    # It cannot meet anybody: every exchange with other ranks would raise.
    identity = RankIdentity(0, 0, 2, 2, "unsloth_multigpu")
    manager = SimpleNamespace(config=MultiGPUConfig(strategy=strategy), identity=identity)
    known = [p for p in trainer.model.parameters() if p.requires_grad] if parameters is None else parameters
    exchange = SimpleNamespace(parameters=known) if strategy != "ddp" else None
    return Loop(trainer, [TrainedParameters(trainer, manager, exchange, 0)]).steering()


def test_strategy_that_knows_the_parameters_refuses_more_of_them_at_once():
    trainer = Half()
    with followed(trainer):
        trainer.training_step(trainer.model, torch.ones(1, 1))
        trainer.model[0].weight.requires_grad_(True)
        with pytest.raises(SetupError, match=r"0\.weight became trainable after step 1, but strategy='allreduce'"):
            trainer.training_step(trainer.model, torch.ones(1, 1))
    assert trainer.state.global_step == 1


def test_strategy_goes_on_with_fewer():
    trainer = Half()
    with followed(trainer):
        trainer.training_step(trainer.model, torch.ones(1, 1))
        trainer.model[1].bias.requires_grad_(False)
        trainer.training_step(trainer.model, torch.ones(1, 1))
    assert trainer.state.global_step == 2


def test_accumulated_gradients_are_not_left_behind_by_a_change_within_a_step():
    trainer = Half()
    trainer.accelerator.sync_gradients = False  # The loop makes a step of several calls.
    with followed(trainer, parameters=list(trainer.model.parameters())):
        trainer.training_step(trainer.model, torch.ones(1, 1))
        trainer.model[0].weight.requires_grad_(True)
        with pytest.raises(SetupError, match=r"0\.weight became trainable or frozen within step 2"):
            trainer.training_step(trainer.model, torch.ones(1, 1))


def test_ddp_of_the_script_is_not_made_again():
    trainer = Half()
    with followed(trainer, strategy="ddp"):
        trainer.training_step(trainer.model, torch.ones(1, 1))
        trainer.model[0].weight.requires_grad_(True)
        with pytest.raises(SetupError, match="the script's own DDP"):
            trainer.training_step(trainer.model, torch.ones(1, 1))


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
