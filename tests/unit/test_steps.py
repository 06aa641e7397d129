"""What is put on one trainer for the time of a training, and which trainings are refused; without other ranks."""

from types import SimpleNamespace

import pytest
import torch

from tests.helpers.board import session_of
from tests.helpers.refused import refused
from tests.helpers.trainer import FakeTrainer
from unsloth_multigpu.deal.deal import MicroBatch, Piece, Step
from unsloth_multigpu.errors import SetupError
from unsloth_multigpu.group.waits import Waits
from unsloth_multigpu.hooks.trainer_patches import TrainerHooks
from unsloth_multigpu.option_type import Scope, options_of
from unsloth_multigpu.options import MultiGPUConfig
from unsloth_multigpu.session import Session
from unsloth_multigpu.step.feed import StepFeed
from unsloth_multigpu.step.sequence import layers_of
from unsloth_multigpu.train.loop import Loop
from unsloth_multigpu.train.trainer import DDPTrainer, gets_batches_of_one_process
from unsloth_multigpu.wire.heartbeat import HeartbeatPage
from unsloth_multigpu.wire.identity import SINGLE_PROCESS, RankIdentity

ONE_OF_TWO = RankIdentity(0, 0, 2, 2, "unsloth_multigpu")
WAITS = Waits()


class Losing(FakeTrainer):
    """It makes as many loaders as a test wants, in a run of two processes."""

    def __init__(self, num_loaders=1, **args):
        super().__init__(**{"gradient_accumulation_steps": 4, "average_tokens_across_devices": False, **args})
        self._num_loaders = num_loaders
        self.accelerator.num_processes = 2

    def get_train_dataloader(self):
        for number in range(self._num_loaders):
            self.accelerator.prepare_data_loader(number)


def manager_of(identity, **options):
    # It cannot meet anybody: every exchange with other ranks would raise.
    return SimpleNamespace(config=MultiGPUConfig(**options), identity=identity, waits=WAITS)


def feed(trainer, identity=SINGLE_PROCESS, **options):
    return StepFeed(trainer, manager_of(identity, **options), HeartbeatPage(None, 0))


def fed(trainer, steps):
    return Loop(trainer, [steps]).steering()


def step_of(*pieces):
    losses = [torch.tensor(10.0**i) for i in range(len(pieces))]
    micro_batches = [MicroBatch({"loss": loss}, piece) for loss, piece in zip(losses, pieces, strict=True)]
    return Step(micro_batches, [3] * len(pieces))


@pytest.mark.parametrize(("strategy", "is_averaged"), [("ddp", True), ("local_sgd", False)])
def test_tokens_are_counted_over_the_ranks_that_meet_whatever_the_script_has_set(strategy, is_averaged):
    trainer = Losing(average_tokens_across_devices=not is_averaged)
    with fed(trainer, feed(trainer, strategy=strategy)):
        assert trainer.args.average_tokens_across_devices is is_averaged
    assert trainer.args.average_tokens_across_devices is not is_averaged


class Squaring(Losing):
    """Its loss is one weight times the input."""

    def training_step(self, model, inputs, num_items_in_batch=None):
        loss = self.compute_loss(model, inputs)
        loss.backward()
        return loss.detach()

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        return model.weight.sum() * inputs["loss"]


def test_gradient_of_fp16_weights_overflows_where_that_of_one_process_does():
    trainer = Squaring(model=torch.nn.Linear(1, 1, bias=False).half())
    with fed(trainer, feed(trainer, ONE_OF_TWO)):
        step = step_of(Piece((0, 1, 2)))
        # Times the ranks it would be too large before DDP divides by them.
        step.micro_batches[0].inputs["loss"] = torch.tensor(40_000.0, dtype=torch.float16)
        largest = []
        trainer.model.weight.register_hook(lambda gradient: largest.append(gradient.max()))
        trainer.training_step(trainer.model, step, 5)
    assert largest == [40_000.0]


def test_step_without_tokens_to_divide_by_is_an_error():
    trainer = Losing()
    with fed(trainer, feed(trainer)), pytest.raises(SetupError, match="Losing counted no tokens in a step"):
        trainer.get_batch_samples(iter([step_of(Piece((0,)))]), 1, "cpu")


@pytest.mark.parametrize("num_loaders", [0, 2])
def test_trainer_must_prepare_one_loader(num_loaders):
    trainer = Losing(num_loaders)
    with fed(trainer, feed(trainer)), pytest.raises(SetupError, match=f"prepared {num_loaders} data loaders; expected"):
        trainer.get_train_dataloader()


@pytest.mark.parametrize("facts", [{"is_deepspeed_enabled": True}, {"generates": True}, {"num_processes": 1}])
def test_trainer_that_is_not_dealt_for_does_not_count_as_one_process(facts):
    trainer = Losing(**({"steps_per_generation": 2} if "generates" in facts else {}))
    assert gets_batches_of_one_process(Losing(), 2)
    trainer.is_deepspeed_enabled = "is_deepspeed_enabled" in facts
    trainer.accelerator.num_processes = facts.get("num_processes", 2)
    assert not gets_batches_of_one_process(trainer, 2)


def steered(trainer, identity=ONE_OF_TWO, **options):
    return DDPTrainer(trainer, session_of(manager_of(identity, **options)))


@pytest.mark.parametrize(
    ("args", "num_processes", "message"),
    [
        ({}, 1, r"was built for 1 process\(es\), the run has 2 ranks"),
        ({"auto_find_batch_size": True}, 2, "auto_find_batch_size=True lets one rank shrink"),
        ({"train_sampling_strategy": "batch_rebalance"}, 2, "'batch_rebalance' chooses the samples of each rank"),
    ],
)
def test_training_in_which_ranks_would_go_ways_of_their_own_is_refused(args, num_processes, message):
    trainer = Losing()
    vars(trainer.args).update(args)
    trainer.accelerator.num_processes = num_processes
    with pytest.raises(SetupError, match=message):
        steered(trainer).run(pytest.fail)


class Maker:
    """As a trainer of TRL that makes its loader."""

    def get_train_dataloader(self):
        return [1]


def test_trainer_of_trl_with_a_loader_of_its_own_is_refused_where_samples_are_to_be_dealt(monkeypatch):
    monkeypatch.setattr(Maker, "__module__", "trl.trainer.online_dpo_trainer")
    own = type("OwnLoader", (Maker, Losing), {})
    for options in ({}, {"resume": "auto", "on_nan": "skip", "inexact": "raise"}):
        assert not steered(own(), SINGLE_PROCESS, **options)._deals_steps()
    for identity, options in ((ONE_OF_TWO, {}), (SINGLE_PROCESS, {"balance": "tokens"})):
        with pytest.raises(SetupError, match="Maker builds batches of its own"):
            steered(own(), identity, **options)._deals_steps()


def test_option_of_the_planner_is_refused_for_a_trainer_that_generates_samples():
    name = "max_tokens_per_micro_batch"
    of_planner = {n for n, row in options_of(MultiGPUConfig).items() if Scope.PLANNER in row.scopes}
    assert of_planner == {"balance", name}  # `balance` deals what was generated.
    # GRPO and RLOO have this argument.
    trainer = Losing(steps_per_generation=2)
    told = f"{name}=64 divides samples by length, but Losing generates its samples"
    with refused(SetupError, told, "Leave it out for this trainer."):
        steered(trainer, **{name: 64})._deals_steps()
    assert not steered(trainer)._deals_steps()


@pytest.mark.parametrize("world_size", [1, 2])
def test_search_is_refused_on_several_ranks(world_size):
    identity = RankIdentity(0, 0, world_size, world_size, "unsloth_multigpu")
    patches = TrainerHooks(Session(MultiGPUConfig(), identity, console=None)).patches()
    found = [patch for patch in patches if patch.target.endswith(".hyperparameter_search")]
    assert len(found) == (world_size > 1)
    for patch in found:
        with pytest.raises(SetupError, match="does not work on several ranks: only one process chooses the trials"):
            patch.wrap(lambda *_: None, None)


def test_trial_is_not_steered_and_refuses_what_would_steer_it():
    def run(**options):
        session = Session(MultiGPUConfig(**options), SINGLE_PROCESS)
        return session.run_training(None, lambda: "trained", {"trial": object()})

    assert run() == "trained"
    with pytest.raises(SetupError, match="resume='auto' has no effect on the trials of hyperparameter_search"):
        run(resume="auto")


class Model(torch.nn.Module):
    def __init__(self, layers, num_heads=4):
        super().__init__()
        self.layers = torch.nn.ModuleList(layers)
        self.config = SimpleNamespace(_attn_implementation="sdpa", num_attention_heads=num_heads)

    def get_decoder(self):
        return self


class Fast(torch.nn.Linear):
    def forward(self, hidden):
        return hidden


Fast.forward.__module__ = "unsloth.models.llama"


@pytest.mark.parametrize(
    ("model", "what"),
    [
        (torch.nn.Linear(1, 1), "Linear is not a transformers model with decoder layers"),
        (Model([Fast(1, 1)]), "Unsloth computes attention by code of its own"),
        (Model([torch.nn.Linear(1, 1)], num_heads=3), "sequence_parallel=2 does not divide 3 attention heads"),
    ],
)
def test_model_whose_attention_is_not_shared_is_refused(model, what):
    layers = [torch.nn.Linear(1, 1), torch.nn.Linear(1, 1)]
    assert layers_of(Model(layers), 2) == layers
    with refused(SetupError, what):
        layers_of(model, 2)
