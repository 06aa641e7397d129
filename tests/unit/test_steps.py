"""What is put on one trainer for the time of a training, and which trainings are refused; without other ranks."""

from types import SimpleNamespace

import pytest
import torch
from torch._dynamo.testing import CompileCounter
from torch.utils.data import DataLoader

from tests.helpers.trainer import FakeTrainer
from unsloth_multigpu.errors import SetupError
from unsloth_multigpu.group.waits import Waits
from unsloth_multigpu.option_type import Scope, options_of
from unsloth_multigpu.options import MultiGPUConfig
from unsloth_multigpu.step.cost import CostModel
from unsloth_multigpu.step.deal import Balance, Piece
from unsloth_multigpu.step.feed import StepFeed
from unsloth_multigpu.step.step import MicroBatch, Step, StepShape, collate_step
from unsloth_multigpu.step.stream import StepStream
from unsloth_multigpu.train.loop import Loop
from unsloth_multigpu.train.progress import Progress, exit_code
from unsloth_multigpu.train.trainer import DDPTrainer, counts_as_one_process
from unsloth_multigpu.wire.heartbeat import HeartbeatPage
from unsloth_multigpu.wire.identity import SINGLE_PROCESS, RankIdentity

ONE_OF_TWO = RankIdentity(0, 0, 2, 2, "unsloth_multigpu")
WAITS = Waits(lambda: torch.device("cpu"))


class Losing(FakeTrainer):
    """Its loss is the input, and tells a metric as TRL's losses do."""

    def __init__(self, num_loaders=1, **args):
        super().__init__(**{"gradient_accumulation_steps": 4, "average_tokens_across_devices": False, **args})
        self.gathered, self._num_loaders = [], num_loaders
        for name in ("gather", "gather_for_metrics", "reduce"):
            setattr(self.accelerator, name, self.gathered.append)
        self.accelerator.num_processes = 2

    def get_train_dataloader(self):
        for number in range(self._num_loaders):
            self.accelerator.prepare_data_loader(number)

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        self.accelerator.gather(inputs["loss"])
        return inputs["loss"]


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
    return Step(micro_batches, len(pieces), [3] * len(pieces))


@pytest.mark.parametrize(("strategy", "is_averaged"), [("ddp", True), ("local_sgd", False)])
def test_tokens_are_counted_over_the_ranks_that_meet_whatever_the_script_has_set(strategy, is_averaged):
    trainer = Losing(average_tokens_across_devices=not is_averaged)
    with fed(trainer, feed(trainer, strategy=strategy)):
        assert trainer.args.average_tokens_across_devices is is_averaged
    assert trainer.args.average_tokens_across_devices is not is_averaged


def test_filler_counts_nothing_and_a_loss_meets_no_other_rank():
    trainer = Losing()
    steps = feed(trainer, ONE_OF_TWO)
    with fed(trainer, steps):
        step = step_of(Piece((0, 1, 2)), Piece((0,), share=0.0, is_filler=True))
        # As many times as DDP divides by.
        assert trainer.training_step(trainer.model, step, 5) == 2.0
        assert trainer.gathered == []
        trainer.accelerator.gather("between two steps")
    assert trainer.gathered == ["between two steps"]
    assert (steps.passes.num_samples, steps.passes.num_micro_batches) == (3, 2)


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


@pytest.mark.parametrize("is_filler", [True, False])
def test_batches_that_a_script_returns_are_taken(is_filler):
    trainer = Losing()
    trainer.get_batch_samples = lambda batches, num, device: ([{**b, "more": b["labels"] + 1} for b in batches], 3)
    inputs = {"loss": torch.ones(()), "labels": torch.tensor([7])}
    step = Step([MicroBatch(inputs, Piece((0,), is_filler=is_filler))], 1)
    with fed(trainer, feed(trainer)):
        ((step,), _) = trainer.get_batch_samples(iter([step]), 1, "cpu")
    (micro_batch,) = step.micro_batches
    # A filler is counted without labels, and computed with them.
    assert micro_batch.inputs["labels"].tolist() == [7]
    assert micro_batch.inputs["more"].tolist() == ([-99] if is_filler else [8])


@pytest.mark.parametrize("regroup", [True, False])
def test_tokens_and_labels_of_a_filler_are_none(regroup):
    pieces = [Piece((0, 1)), Piece((0,), share=0.0, is_filler=True, is_muted=regroup)]
    rows = [[torch.tensor([3, 4]), torch.tensor([5, 6])], [torch.tensor([3, 4])]]

    def collate(rows):
        ids = torch.stack(rows)
        return {"input_ids": ids, "labels": ids.clone()}

    step = collate_step(pieces, rows, 2, collate)
    assert step["input_ids"].tolist() == [3, 4, 5, 6]
    # A mean over no labels is not a number.
    assert step.micro_batches[1].inputs["labels"].tolist() == ([[-100, -100]] if regroup else [[3, 4]])


def test_step_without_tokens_to_divide_by_is_an_error():
    trainer = Losing()
    with fed(trainer, feed(trainer)), pytest.raises(SetupError, match="Losing counted no tokens in a step"):
        trainer.get_batch_samples(iter([step_of(Piece((0,)))]), 1, "cpu")


@pytest.mark.parametrize("num_loaders", [0, 2])
def test_trainer_must_prepare_one_loader(num_loaders):
    trainer = Losing(num_loaders)
    with fed(trainer, feed(trainer)), pytest.raises(SetupError, match=f"prepared {num_loaders} data loaders; expected"):
        trainer.get_train_dataloader()


def test_callback_of_micro_batches_is_named_where_one_process_is_only_guarded(caplog):
    class Hears:
        def on_substep_end(self, args, state, control, **kwargs):
            raise AssertionError("a step is one item of the loop")

    trainer = Losing()
    trainer.add_callback(Hears())
    steps = feed(trainer)
    steps._manager.check_same = lambda facts: None
    steps.passes.compute_loss = trainer.compute_loss
    steps._dealt(DataLoader(range(8), batch_size=2), StepShape(0, 1, 4, False))
    assert "Hears.on_substep_end is not called" in caplog.text


def test_loader_asked_for_behind_the_beginning_leaves_the_loops_as_it_is():
    trainer, asked = Losing(), []
    trainer.get_train_dataloader = lambda: asked.append(trainer.args.gradient_accumulation_steps) or "the script's"
    steps = feed(trainer, ONE_OF_TWO)
    with fed(trainer, steps):
        trainer.args.gradient_accumulation_steps = 1  # As for the loop, which has its loader.
        steps.loader = before = object()
        steps.begin(None)
        assert trainer.get_train_dataloader() == "the script's"
        assert (steps.loader, trainer.args.gradient_accumulation_steps) == (before, 1)
    assert asked == [4]


@pytest.mark.parametrize("facts", [{"is_deepspeed_enabled": True}, {"generates": True}, {"num_processes": 1}])
def test_trainer_that_is_not_dealt_for_does_not_count_as_one_process(facts):
    trainer = Losing(**({"steps_per_generation": 2} if "generates" in facts else {}))
    assert counts_as_one_process(Losing(), 2)
    trainer.is_deepspeed_enabled = "is_deepspeed_enabled" in facts
    trainer.accelerator.num_processes = facts.get("num_processes", 2)
    assert not counts_as_one_process(trainer, 2)


def steered(trainer, **options):
    return DDPTrainer(trainer, manager_of(ONE_OF_TWO, **options), None, HeartbeatPage(None, 0))


@pytest.mark.parametrize(
    ("args", "num_processes", "message"),
    [
        ({}, 1, r"was built for 1 process\(es\), the run has 2 ranks"),
        ({"auto_find_batch_size": True}, 2, "auto_find_batch_size=True lets one rank shrink"),
        ({"train_sampling_strategy": "batch_rebalance"}, 2, "'batch_rebalance' deals samples to ranks itself"),
    ],
)
def test_training_in_which_ranks_would_go_ways_of_their_own_is_refused(args, num_processes, message):
    trainer = Losing()
    vars(trainer.args).update(args)
    trainer.accelerator.num_processes = num_processes
    with pytest.raises(SetupError, match=message):
        steered(trainer).run(pytest.fail)


def test_weights_are_compared_at_the_next_meeting_where_ranks_were_apart_when_it_was_time():
    trainer, checked = Losing(), []
    trainer.optimizer = torch.optim.SGD(trainer.model.parameters())
    replicas = SimpleNamespace(
        is_due=lambda step: step == 3, check=lambda model, step, beside: checked.append((step, beside))
    )
    exchange = SimpleNamespace()
    ours = Progress(trainer, manager_of(ONE_OF_TWO, strategy="local_sgd"), None, replicas, exchange, None)
    for step in range(1, 9):
        exchange.are_replicas_equal = step % 4 == 0
        ours.on_step_end(trainer.args, SimpleNamespace(global_step=step), None)
    assert checked == [(4, [])]


@pytest.mark.parametrize(("code", "shown"), [(None, 0), (0, 0), (3, 3), ("no data", 1)])
def test_exit_code_is_the_one_that_python_ends_with(code, shown):
    assert exit_code(SystemExit(code)) == shown


class Maker:
    """As a trainer of TRL that makes its loader."""

    def get_train_dataloader(self):
        return [1]


def test_trainer_of_trl_with_a_loader_of_its_own_is_refused(monkeypatch):
    monkeypatch.setattr(Maker, "__module__", "trl.trainer.online_dpo_trainer")
    own = type("OwnLoader", (Maker, Losing), {})
    manager = SimpleNamespace(config=MultiGPUConfig(), identity=ONE_OF_TWO, waits=WAITS)
    with pytest.raises(SetupError, match="Maker builds batches of its own"):
        DDPTrainer(own(), manager, None, HeartbeatPage(None, 0))._deals_steps()


def test_trainer_of_trl_in_one_process_keeps_its_batches_unless_samples_are_to_be_dealt(monkeypatch):
    monkeypatch.setattr(Maker, "__module__", "trl.trainer.online_dpo_trainer")
    own = type("OwnLoader", (Maker, Losing), {})
    for options in ({}, {"resume": "auto", "on_nan": "skip", "inexact": "raise"}):
        manager = SimpleNamespace(config=MultiGPUConfig(**options), identity=SINGLE_PROCESS, waits=WAITS)
        assert not DDPTrainer(own(), manager, None, HeartbeatPage(None, 0))._deals_steps()
    manager = SimpleNamespace(config=MultiGPUConfig(balance="tokens"), identity=SINGLE_PROCESS, waits=WAITS)
    with pytest.raises(SetupError, match="Maker builds batches of its own"):
        DDPTrainer(own(), manager, None, HeartbeatPage(None, 0))._deals_steps()


OF_THE_PLANNER = {
    "balance": "tokens",
    "max_tokens_per_micro_batch": 64,
}


# `balance` deals what was generated.
@pytest.mark.parametrize("name", OF_THE_PLANNER.keys() - {"balance"})
def test_option_of_the_planner_is_refused_for_a_trainer_that_generates_samples(name):
    assert OF_THE_PLANNER.keys() == {n for n, row in options_of(MultiGPUConfig).items() if Scope.PLANNER in row.scopes}
    # GRPO and RLOO have this argument.
    trainer = Losing(steps_per_generation=2)
    config = MultiGPUConfig(**{name: OF_THE_PLANNER[name]})
    steered = DDPTrainer(
        trainer, SimpleNamespace(config=config, identity=ONE_OF_TWO, waits=WAITS), None, HeartbeatPage(None, 0)
    )
    with pytest.raises(
        SetupError, match=f"^{name}=.* deals samples by their length, but .* makes its samples"
    ) as error:
        steered._deals_steps()
    assert error.value.hint == "Leave it out for this trainer."
    other = SimpleNamespace(config=MultiGPUConfig(), identity=ONE_OF_TWO, waits=WAITS)
    assert not DDPTrainer(trainer, other, None, HeartbeatPage(None, 0))._deals_steps()


class Pass(torch.utils.data.DataLoader):
    """The reference of a stream, as accelerate prepares it."""

    def set_epoch(self, epoch):
        """Its order does not depend on it."""


class Numbers(torch.utils.data.IterableDataset):
    def __init__(self, num_rows):
        self.num_rows = num_rows

    def __iter__(self):
        return iter(range(self.num_rows))


class CountedNumbers(Numbers):
    def __len__(self):
        return self.num_rows


def stream_of(rows, num_accumulated):
    shape = StepShape(0, 1, num_accumulated, regroup=False)
    return StepStream(Pass(rows, batch_size=2, collate_fn=list), shape, list)


def rows_of(step):
    return [row for micro_batch in step.micro_batches for row in micro_batch.inputs]


def test_rows_left_over_by_a_stream_are_in_the_first_step_of_its_next_pass():
    stream = stream_of(Numbers(10), 2)
    passes = [list(stream) for _ in range(3)]
    assert [[rows_of(step) for step in steps] for steps in passes] == [[[0, 1, 2, 3], [4, 5, 6, 7]]] * 3
    left_over = [[step.left_over and rows_of(step.left_over) for step in steps] for steps in passes]
    assert left_over == [[None, None], [[8, 9], None], [[8, 9], None]]


def test_rows_left_over_by_a_stream_with_a_length_are_a_step():
    stream = stream_of(CountedNumbers(10), 2)
    assert stream.num_steps() == 3
    for _ in range(2):
        steps = list(stream)
        assert [rows_of(step) for step in steps] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
        assert all(step.left_over is None for step in steps)


def test_stream_that_resumes_in_a_later_pass_is_read_in_its_order():
    class Turned(Numbers):
        def __iter__(self):
            return iter([(i + self.epoch) % 4 for i in range(4)])

    rows = Turned(4)
    rows.epoch = 0
    stream = stream_of(rows, 2)
    rows.epoch = 1
    stream.set_epoch(1)
    assert [rows_of(step) for step in stream] == [[1, 2, 3, 0]]


def test_stream_without_length_and_without_a_whole_step_is_refused():
    with pytest.raises(SetupError, match=r"after 1 micro-batch\(es\), fewer than gradient_accumulation_steps=2"):
        list(stream_of(Numbers(2), 2))
    assert [rows_of(step) for step in stream_of(CountedNumbers(2), 2)] == [[0, 1]]


@pytest.mark.thorough
@pytest.mark.parametrize(("is_planned", "num_compilations"), [(True, 3), (False, 7)])
def test_numbers_of_rows_are_not_compiled_for_each_by_itself(is_planned, num_compilations):
    """Rows that vary, marked as Unsloth marks them; 1 and what the first two had are always compiled for."""
    trainer = Losing()

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
    with fed(trainer, steps):
        for i, rows in enumerate((4, 4, 2, 7, 1, 3, 12, 5)):
            mask = torch.ones(rows, 16 + 8 * i, dtype=torch.int64)
            step = Step([MicroBatch({"attention_mask": mask}, Piece((0,)))], 2)
            (step,), _ = trainer.get_batch_samples(iter([step]), 1, None)
            masked(torch.randn(rows, 16 + 8 * i, 4), step.micro_batches[0].inputs["attention_mask"])
    torch._dynamo.reset()
    assert compiled.frame_count == num_compilations
