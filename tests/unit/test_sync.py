"""A strategy other than DDP in a Trainer: when ranks meet, and what becomes of the Trainer."""

from types import SimpleNamespace

import pytest
from torch import nn

from tests.helpers.trainer import FakeTrainer
from unsloth_multigpu.errors import SetupError
from unsloth_multigpu.group.waits import Waits
from unsloth_multigpu.options import MultiGPUConfig
from unsloth_multigpu.strategies.strategy_exchange import Exchange
from unsloth_multigpu.train.loop import Loop


@pytest.mark.parametrize("control", ["should_save", "should_evaluate", "should_training_stop", None])
def test_ranks_meet_before_weights_are_read(control):
    flags = dict.fromkeys(("should_save", "should_evaluate", "should_training_stop"), False)
    asked = SimpleNamespace(**{name: name == control for name in flags})
    met = []
    _, exchange = exchange_of(nn.Linear(3, 2), strategy="local_sgd")
    exchange.sync = SimpleNamespace(synchronize=lambda: met.append("met"))
    exchange.on_step_end(None, None, asked)
    exchange.on_epoch_end(None, None, asked)
    assert met == ["met"] * (2 if control else 0)


class Saving(FakeTrainer):
    """Notes what was done before it saved."""

    saved_after = None

    def _save_checkpoint(self, model, trial):
        self.saved_after = list(model)


def exchange_of(model, **options):
    trainer = Saving(model)
    exchange = Exchange(trainer, SimpleNamespace(config=MultiGPUConfig(**options), waits=Waits()))
    return trainer, exchange


def test_exchange_steers_one_model_also_where_the_training_fails():
    trainer, exchange = exchange_of(nn.Linear(3, 2), strategy="local_sgd")
    met = []
    exchange.sync = SimpleNamespace(synchronize=lambda: met.append("met"))
    with pytest.raises(KeyError), Loop(trainer, [exchange]).steering():  # noqa: PT012
        assert not trainer.args.average_tokens_across_devices
        trainer._save_checkpoint(met, None)
        frozen = nn.Linear(3, 2).requires_grad_(False)
        for model in (trainer.model, frozen):
            assert trainer.accelerator.prepare_model(model) is model
        with pytest.raises(SetupError, match="A Linear is trained in addition to the Trainer's model"):
            trainer.accelerator.prepare_model(nn.Linear(3, 2))
        raise KeyError
    assert trainer.saved_after == ["met"]
    assert (trainer.callback_handler.callbacks, trainer.args.average_tokens_across_devices) == ([], True)
    assert "_save_checkpoint" not in vars(trainer)
