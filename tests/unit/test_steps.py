"""What is put on one trainer for the time of a training, and which trainings are refused; without other ranks."""

from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from torch._dynamo.testing import CompileCounter

from unsloth_multigpu.config import MultiGPUConfig
from unsloth_multigpu.core.steps import StepFeed
from unsloth_multigpu.core.trainer import DDPTrainer, _exit_code
from unsloth_multigpu.data.cost import CostModel
from unsloth_multigpu.data.deal import Balance, Piece
from unsloth_multigpu.data.step import MicroBatch, Step, collate_step
from unsloth_multigpu.errors import SetupError
from unsloth_multigpu.fault.beat import BeatPage
from unsloth_multigpu.launch.identity import SINGLE_PROCESS, RankIdentity

ONE_OF_TWO = RankIdentity(0, 0, 2, 2, "unsloth_multigpu")


class FakeTrainer:
    """What is steered of a Trainer. Its loss is the input, and tells a metric as TRL's losses do."""

    def __init__(self, num_loaders=1, **args):
        args = {"gradient_accumulation_steps": 4, "average_tokens_across_devices": False, **args}
        self.args = SimpleNamespace(device=torch.device("cpu"), auto_find_batch_size=False, **args)
        self.model = torch.nn.Linear(1, 1)
        self.gathered, self._num_loaders = [], num_loaders
        exchanges = dict.fromkeys(("gather", "gather_for_metrics", "reduce"), self.gathered.append)
        self.accelerator = SimpleNamespace(
            prepare_data_loader=lambda loader: loader,
            no_sync=lambda model: nullcontext(),
            parallelism_config=None,
            num_processes=2,
            **exchanges,
        )
        self.is_fsdp_enabled = self.is_deepspeed_enabled = False
        self.compute_loss_func, self.model_accepts_loss_kwargs = None, True

    def get_train_dataloader(self):
        for number in range(self._num_loaders):
            self.accelerator.prepare_data_loader(number)

    def get_batch_samples(self, batches, num_batches, device):
        return list(batches), None

    def _prepare_inputs(self, inputs):
        return inputs

    def training_step(self, model, inputs, num_items):
        return self.compute_loss(model, inputs, num_items_in_batch=num_items)

    def compute_loss(self, model, inputs, num_items_in_batch=None):
        self.accelerator.gather(inputs["loss"])
        return inputs["loss"]


def manager_of(identity, **options):
    # It cannot meet anybody: every exchange with other ranks would raise.
    return SimpleNamespace(config=MultiGPUConfig(**options), identity=identity)


def feed(trainer, identity=SINGLE_PROCESS, **options):
    return StepFeed(trainer, manager_of(identity, **options), BeatPage(None, 0))


def step_of(*pieces):
    losses = [torch.tensor(10.0**i) for i in range(len(pieces))]
    return Step([MicroBatch({"loss": loss}, piece) for loss, piece in zip(losses, pieces, strict=True)], len(pieces))


def test_metrics_of_a_trainer_that_gathers_itself_are_not_merged_again():
    trainer = FakeTrainer()
    trainer._metrics = {"train": {"num_tokens": [100.0], "reward": [1.0, 2.0]}}
    feed(trainer).merge_metrics()
    assert trainer._metrics == {"train": {"num_tokens": [100.0], "reward": [1.0, 2.0]}}


@pytest.mark.parametrize(("sync", "is_averaged"), [("ddp", True), ("local_sgd", False)])
def test_tokens_are_counted_over_the_ranks_that_meet_whatever_the_script_has_set(sync, is_averaged):
    trainer = FakeTrainer(average_tokens_across_devices=not is_averaged)
    with feed(trainer, sync=sync).on_trainer():
        assert trainer.args.average_tokens_across_devices is is_averaged
    assert trainer.args.average_tokens_across_devices is not is_averaged


def test_filler_counts_nothing_and_a_loss_meets_no_other_rank():
    trainer = FakeTrainer()
    steps = feed(trainer, ONE_OF_TWO)
    with steps.on_trainer():
        step = step_of(Piece((0, 1, 2)), Piece((0,), share=0.0, is_filler=True))
        assert trainer.training_step(trainer.model, step, 5) == 1.0
        assert trainer.gathered == []
        trainer.accelerator.gather("between two steps")
    assert trainer.gathered == ["between two steps"]
    assert (steps.num_samples, steps.num_micro_batches) == (3, 2)


@pytest.mark.parametrize("regroup", [True, False])
def test_tokens_and_labels_of_a_filler_are_none(regroup):
    pieces = [Piece((0, 1)), Piece((0,), share=0.0, is_filler=True)]
    rows = [[torch.tensor([3, 4]), torch.tensor([5, 6])], [torch.tensor([3, 4])]]

    def collate(rows):
        ids = torch.stack(rows)
        return {"input_ids": ids, "labels": ids.clone()}

    step = collate_step(pieces, rows, 2, collate, regroup)
    assert step["input_ids"].tolist() == [3, 4, 5, 6]
    # A mean over no labels is not a number.
    assert step.micro_batches[1].inputs["labels"].tolist() == ([[-100, -100]] if regroup else [[3, 4]])


def test_step_without_tokens_to_divide_by_is_an_error():
    trainer = FakeTrainer()
    with feed(trainer).on_trainer(), pytest.raises(SetupError, match="FakeTrainer counted no tokens in a step"):
        trainer.get_batch_samples(iter([step_of(Piece((0,)))]), 1, "cpu")


@pytest.mark.parametrize("num_loaders", [0, 2])
def test_trainer_must_prepare_one_loader(num_loaders):
    trainer = FakeTrainer(num_loaders)
    with feed(trainer).on_trainer(), pytest.raises(SetupError, match=f"prepared {num_loaders} data loaders; expected"):
        trainer.get_train_dataloader()


def steered(trainer, **options):
    return DDPTrainer(trainer, manager_of(ONE_OF_TWO, **options), None, BeatPage(None, 0))


@pytest.mark.parametrize(
    ("args", "num_processes", "message"),
    [
        ({}, 1, r"was built for 1 process\(es\), the run has 2 ranks"),
        ({"auto_find_batch_size": True}, 2, "auto_find_batch_size=True lets one rank shrink"),
        ({"train_sampling_strategy": "batch_rebalance"}, 2, "'batch_rebalance' deals samples to ranks itself"),
    ],
)
def test_training_in_which_ranks_would_go_ways_of_their_own_is_refused(args, num_processes, message):
    trainer = FakeTrainer()
    vars(trainer.args).update(args)
    trainer.accelerator.num_processes = num_processes
    with pytest.raises(SetupError, match=message):
        steered(trainer).run(pytest.fail)


def test_weights_are_compared_at_the_next_meeting_where_ranks_were_apart_when_it_was_time():
    ours, checked = steered(FakeTrainer(), sync="local_sgd"), []
    ours.replicas = SimpleNamespace(is_due=lambda step: step == 3, check=lambda model, step: checked.append(step))
    for step in range(1, 9):
        ours.exchange.sync = SimpleNamespace(are_replicas_equal=step % 4 == 0)
        ours.prove_replicas(step)
    assert checked == [4]


@pytest.mark.parametrize(("code", "shown"), [(None, 0), (0, 0), (3, 3), ("no data", 1)])
def test_exit_code_is_the_one_that_python_ends_with(code, shown):
    assert _exit_code(SystemExit(code)) == shown


@pytest.mark.parametrize(("is_planned", "num_compilations"), [(True, 3), (False, 7)])
def test_numbers_of_rows_are_not_compiled_for_each_by_itself(is_planned, num_compilations):
    """Rows that vary, marked as Unsloth marks them; 1 and what the first two had are always compiled for."""
    trainer = FakeTrainer()

    def count_tokens(batches, num_batches, device):
        batches = list(batches)
        for batch in batches:
            torch._dynamo.mark_static(batch["attention_mask"], 0)
            torch._dynamo.mark_dynamic(batch["attention_mask"], 1)
        return batches, 1

    trainer.get_batch_samples = count_tokens
    steps = feed(trainer, ONE_OF_TWO)
    if is_planned:
        steps.balancer.balance = Balance(CostModel(), (1.0, 1.0))
    compiled = CompileCounter()
    torch._dynamo.reset()
    masked = torch.compile(lambda x, mask: (x * mask[:, :, None]).relu(), dynamic=True, backend=compiled)
    with steps.on_trainer():
        for i, rows in enumerate((4, 4, 2, 7, 1, 3, 12, 5)):
            mask = torch.ones(rows, 16 + 8 * i, dtype=torch.int64)
            step = Step([MicroBatch({"attention_mask": mask}, Piece((0,)))], 2)
            (step,), _ = trainer.get_batch_samples(iter([step]), 1, None)
            masked(torch.randn(rows, 16 + 8 * i, 4), step.micro_batches[0].inputs["attention_mask"])
    torch._dynamo.reset()
    assert compiled.frame_count == num_compilations
