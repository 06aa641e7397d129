"""What is trained may change: what a strategy beside DDP does then, and what costs nothing; without other ranks."""

from types import SimpleNamespace

import pytest
import torch

from tests.helpers.board import manager_of
from tests.helpers.trainer import FakeTrainer
from unsloth_multigpu.errors import SetupError
from unsloth_multigpu.options import MultiGPUConfig
from unsloth_multigpu.train.ddp import TrainedParameters, parameters_beside_the_model
from unsloth_multigpu.train.loop import Loop


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
