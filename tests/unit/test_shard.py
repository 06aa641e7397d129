"""What is decided about a sharded training before an engine has one."""

from __future__ import annotations

import logging
import os
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from tests.helpers.trainer import FakeTrainer
from unsloth_multigpu.errors import SetupError
from unsloth_multigpu.group.engine import Engine, check_versions, find_engine
from unsloth_multigpu.group.shards import (
    class_of,
    clip_parts,
    has_shards,
    is_entered_below,
    is_sharded,
    part_of,
    reshard,
    tried_pass,
    whole_of,
)
from unsloth_multigpu.group.waits import Waits
from unsloth_multigpu.hooks.shard import _stored_as_computed, ask_accelerate_to_shard, ask_unsloth_to_shard
from unsloth_multigpu.options import MultiGPUConfig
from unsloth_multigpu.shard.optimizer import trains_parts
from unsloth_multigpu.shard.sharding import check_is_offloaded, check_is_sharded, check_options
from unsloth_multigpu.train.trainer import DDPTrainer
from unsloth_multigpu.wire.heartbeat import HeartbeatPage
from unsloth_multigpu.wire.identity import RankIdentity

ONE_OF_TWO = RankIdentity(rank=0, local_rank=0, world_size=2, local_world_size=2, launcher="ours")
WAITS = Waits(lambda: torch.device("cpu"))


def with_fsdp(version: int) -> Any:
    trainer: Any = FakeTrainer()
    trainer.is_fsdp_enabled = True
    trainer.accelerator.state = SimpleNamespace(fsdp_plugin=SimpleNamespace(fsdp_version=version))
    return trainer


def test_plain_tensors_are_their_own_parts() -> None:
    model, tensor = torch.nn.Linear(2, 2), torch.ones(2)
    assert part_of(tensor) is tensor is whole_of(tensor)
    assert not is_sharded(tensor)
    assert not has_shards(model)
    assert class_of(model) is torch.nn.Linear
    reshard(model)


class Fails(torch.nn.Module):
    """Raises in the forward or in the backward pass, while it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.now = ""
        self.first, self.second = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        def raise_() -> None:
            raise ValueError(f"{self.now} fails")

        x = self.second(x)
        if self.now == "forward":
            raise_()
        if self.now == "backward":
            x.register_hook(lambda _: raise_())
        return self.first(x)


@pytest.mark.usefixtures("lone_group")
@pytest.mark.parametrize("now", ["forward", "backward", "before"])
def test_sharded_model_computes_as_before_after_a_pass_that_raised(now: str) -> None:
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(0)
    model, x = Fails(), torch.ones(3, 2)
    model(x).sum().backward()
    expected = [p.grad for p in model.parameters()]
    model.zero_grad()
    mesh = torch.distributed.init_device_mesh("cpu", (1,))
    fully_shard(model.second, mesh=mesh)
    fully_shard(model, mesh=mesh)
    model.now = now
    if not hasattr(model, "reset_iter_state"):
        pytest.skip("needs reset_iter_state, which torch 2.13 has")

    def try_it() -> None:
        with tried_pass(model):
            if now == "before":
                raise ValueError("before fails")
            model(x).sum().backward()

    with pytest.raises(ValueError, match=f"{now} fails"):
        try_it()
    assert all(type(p.data).__name__ == "DTensor" for p in model.parameters())
    model.now = ""
    for _ in range(2):
        with tried_pass(model):
            model(x).sum().backward()
        for p, gradient in zip(model.parameters(), expected, strict=True):
            assert gradient is not None
            torch.testing.assert_close(whole_of(cast("torch.Tensor", p.grad)), gradient)
            p.grad = None


@pytest.mark.usefixtures("lone_group")
@pytest.mark.parametrize("is_together", [False, True])
def test_module_that_is_called_without_its_sharded_model_is_known_by_the_error(is_together: bool) -> None:
    from torch.distributed.fsdp import fully_shard

    model, x = Fails(), torch.ones(3, 2)
    mesh = torch.distributed.init_device_mesh("cpu", (1,))
    fully_shard([model.first, model.second] if is_together else model.second, mesh=mesh)
    fully_shard(model, mesh=mesh)
    with pytest.raises(RuntimeError) as info:
        model(model.second(x))
    assert is_entered_below(info.value)
    assert not is_entered_below(RuntimeError("out of memory"))


def test_gradients_are_clipped_as_torch_does() -> None:
    gradients = [torch.full((3,), 2.0), torch.full((2,), -1.0)]
    mine, theirs = [g.clone() for g in gradients], [torch.nn.Parameter(g.clone()) for g in gradients]
    for parameter, gradient in zip(theirs, gradients, strict=True):
        parameter.grad = gradient.clone()
    norm = torch.nn.utils.get_total_norm(gradients)
    clip_parts(mine, 0.5, norm)
    torch.nn.utils.clip_grads_with_norm_(theirs, 0.5, norm)
    assert all(torch.equal(g, p.grad) for g, p in zip(mine, theirs, strict=True))
    clip_parts(mine, 100.0, norm)
    assert all(torch.equal(g, p.grad) for g, p in zip(mine, theirs, strict=True))


def test_engine_is_the_one_that_was_asked() -> None:
    assert find_engine(FakeTrainer()) is None  # type: ignore[arg-type]
    assert find_engine(with_fsdp(2)) is Engine.ACCELERATE
    assert find_engine(with_fsdp(1)) is None


def test_fsdp_1_is_left_alone_and_the_step_is_told(caplog: pytest.LogCaptureFixture) -> None:
    manager: Any = SimpleNamespace(config=MultiGPUConfig(), identity=ONE_OF_TWO, waits=WAITS)
    steered = DDPTrainer(with_fsdp(1), manager, None, HeartbeatPage(None, 0))
    with caplog.at_level(logging.WARNING):
        assert steered.run(lambda: "trained") == "trained"
    assert "An optimizer step sees 4 samples (2 ranks x 2), 2 times those of one process" in caplog.text
    assert "FSDP 2 (fsdp_config={'version': 2}) keeps it" in caplog.text


def test_ranks_that_share_a_sample_are_left_alone_and_nothing_is_asked_of_them(
    caplog: pytest.LogCaptureFixture,
) -> None:
    trainer: Any = FakeTrainer()
    trainer.args.context_parallel_size = 2
    manager: Any = SimpleNamespace(config=MultiGPUConfig(), identity=ONE_OF_TWO, waits=WAITS)
    with caplog.at_level(logging.WARNING):
        assert DDPTrainer(trainer, manager, None, HeartbeatPage(None, 0)).run(lambda: "trained") == "trained"
    assert "Unsloth's context parallelism is on: unsloth_multigpu leaves this training to it" in caplog.text
    manager = SimpleNamespace(config=MultiGPUConfig(shard="on"), identity=ONE_OF_TWO, waits=WAITS)
    with pytest.raises(SetupError, match="shard='on' needs DDP, but Unsloth's context parallelism is on"):
        DDPTrainer(trainer, manager, None, HeartbeatPage(None, 0)).run(lambda: None)


@pytest.mark.parametrize("options", [{"strategy": "ddp:grad_compression=fp16"}, {"strategy": "allreduce"}])
def test_options_of_ddp_are_refused_where_the_script_itself_shards(options: dict[str, Any]) -> None:
    with pytest.raises(SetupError, match="is not possible where FSDP2 of accelerate shards the model"):
        check_options(MultiGPUConfig(**options), Engine.ACCELERATE)
    check_options(MultiGPUConfig(), Engine.ACCELERATE)
    with pytest.raises(SetupError, match="the ranks of a notebook need whole weights"):
        check_options(MultiGPUConfig(), Engine.ACCELERATE, is_notebook=True)


def test_model_of_which_nothing_is_sharded_is_refused() -> None:
    with pytest.raises(SetupError, match="no weight of Linear is sharded: every rank holds all of it"):
        check_is_sharded(torch.nn.Linear(2, 2))
    with pytest.raises(SetupError, match="the model is made in train"):
        check_is_sharded(None)


def test_older_versions_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    check_versions("torch", "no-such-library")
    monkeypatch.setattr("unsloth_multigpu.group.engine.version", lambda _: "2.6.0")
    with pytest.raises(SetupError, match=r"shard='on' needs torch>=2.7, and 2.6.0 is installed"):
        check_versions("torch")


def test_arguments_of_the_script_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    monkeypatch.delitem(sys.modules, "unsloth", raising=False)
    args: Any = SimpleNamespace(fsdp=None, fsdp_config={"activation_checkpointing": True})
    ask_accelerate_to_shard(args)
    assert args.fsdp is True
    assert args.fsdp_config == {"version": 2, "reshard_after_forward": True, "activation_checkpointing": True}
    own: Any = SimpleNamespace(fsdp=True, fsdp_config={"version": 1})
    ask_accelerate_to_shard(own)
    assert own.fsdp_config == {"version": 1}
    monkeypatch.setitem(sys.modules, "unsloth", SimpleNamespace())
    theirs: Any = SimpleNamespace(fsdp=None, fsdp_config=None)
    ask_accelerate_to_shard(theirs)
    assert theirs.fsdp is None


def test_offload_is_asked_of_the_engine_and_not_against_the_script(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    import sys

    monkeypatch.delitem(sys.modules, "unsloth", raising=False)
    file = tmp_path / "fsdp.json"
    file.write_text('{"activation_checkpointing": true}')
    of_file: Any = SimpleNamespace(fsdp=None, fsdp_config=str(file))
    ask_accelerate_to_shard(of_file, offload=True)
    assert of_file.fsdp_config["activation_checkpointing"] is of_file.fsdp_config["cpu_offload"] is True
    own: Any = SimpleNamespace(fsdp="full_shard", fsdp_config={"reshard_after_forward": False})
    ask_accelerate_to_shard(own, offload=True)
    assert (own.fsdp, own.fsdp_config) == ("full_shard", {"reshard_after_forward": False, "cpu_offload": True})
    with pytest.raises(SetupError, match="fsdp_config of TrainingArguments says cpu_offload=False"):
        ask_accelerate_to_shard(cast(Any, SimpleNamespace(fsdp=True, fsdp_config={"cpu_offload": False})), offload=True)
    monkeypatch.delenv("UNSLOTH_FSDP2_CPU_OFFLOAD", raising=False)
    monkeypatch.setenv("UNSLOTH_FSDP2", "1")
    ask_unsloth_to_shard()
    assert "UNSLOTH_FSDP2_CPU_OFFLOAD" not in os.environ
    ask_unsloth_to_shard(offload=True)
    assert os.environ["UNSLOTH_FSDP2_CPU_OFFLOAD"] == "1"
    monkeypatch.setenv("UNSLOTH_FSDP2_CPU_OFFLOAD", "0")
    with pytest.raises(SetupError, match="shard_offload=True, but UNSLOTH_FSDP2_CPU_OFFLOAD='0'"):
        ask_unsloth_to_shard(offload=True)


def test_parts_that_an_engine_leaves_on_the_card_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = torch.nn.Linear(2, 2)
    check_is_offloaded(model, Engine.ACCELERATE)  # Nothing of it is sharded: that is refused elsewhere.
    monkeypatch.setattr("unsloth_multigpu.shard.sharding.is_sharded", lambda _: True)
    check_is_offloaded(model, Engine.ACCELERATE)
    monkeypatch.setattr("unsloth_multigpu.shard.sharding.part_of", lambda p: torch.empty(0, device="meta"))
    with pytest.raises(SetupError, match="accelerate keeps this rank's part of weight on meta"):
        check_is_offloaded(model, Engine.ACCELERATE)
    with pytest.raises(SetupError) as refused:
        check_is_offloaded(model, Engine.TRANSFORMERS)
    assert "fsdp_cpu_offload=True" in refused.value.hint


@pytest.mark.parametrize(
    ("given", "is_4bit", "stored"),
    [
        (torch.uint8, True, torch.bfloat16),
        (torch.float16, True, torch.float16),
        (torch.uint8, False, torch.uint8),
    ],
)
def test_4bit_weights_are_packed_in_a_type_that_can_be_sharded(
    monkeypatch: pytest.MonkeyPatch, given: torch.dtype, is_4bit: bool, stored: torch.dtype
) -> None:
    import sys

    monkeypatch.delitem(sys.modules, "unsloth", raising=False)
    config = SimpleNamespace(load_in_4bit=is_4bit, bnb_4bit_quant_storage=given, bnb_4bit_compute_dtype=torch.bfloat16)
    _stored_as_computed(lambda _: None)(config)
    assert config.bnb_4bit_quant_storage == stored


def chosen(
    monkeypatch: pytest.MonkeyPatch,
    device_gib: float,
    *,
    offload: bool = False,
    was_sharded: bool | None = None,
    num_ranks: int = 8,
    **options: Any,
) -> Any:
    """What `shard="auto"` becomes for a training that needs 19 GiB with DDP and 8.3 on 8 ranks, 1.9 of it its part."""
    from unsloth_multigpu.shard import choice
    from unsloth_multigpu.shard.memory import GIB, StepBytes, Training, forecast_of
    from unsloth_multigpu.shard.probe import Answer, Earlier

    training = Training("Llama", 8, 1, 0, "adamw_torch_fused", "", True, 1, 2048, 64, offload=offload)
    whole = StepBytes(15 * GIB, 15 * GIB, 0, GIB // 4, GIB // 2, 3 * GIB, 0)
    part = StepBytes(15 * GIB, 2 * GIB, int(1.8 * GIB), GIB // 32, GIB // 16, 5 * GIB, 0)
    rows = [forecast_of(whole, training, "ddp", num_ranks), forecast_of(part, training, "sharded", num_ranks)]
    earlier = None if was_sharded is None else Earlier("out/checkpoint-3", was_sharded)
    if earlier is not None:
        rows = [row for row in rows if (row.mode == "sharded") == was_sharded]
    answer = Answer(training, tuple(rows), (), int(device_gib * GIB), earlier)
    monkeypatch.setattr(choice, "ask", lambda command, environment, question: answer)
    return choice.choose(["python", "train.py"], {}, MultiGPUConfig(shard="auto", **options), num_ranks)


def test_auto_shards_where_the_model_does_not_fit_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    large, small = chosen(monkeypatch, 80), chosen(monkeypatch, 16)
    assert (large.shard, small.shard) == ("off", "on")
    assert "GiB of 80: not sharded" in large.reason
    assert "GiB of 16, sharded over 8 ranks" in small.reason
    assert small.allocated_bytes < 16 * 2**30
    with pytest.raises(SetupError, match=r"of 4\.0"):
        chosen(monkeypatch, 4)


def test_auto_keeps_the_way_of_the_checkpoint_that_is_resumed_from(monkeypatch: pytest.MonkeyPatch) -> None:
    parts = chosen(monkeypatch, 80, was_sharded=True)
    assert (parts.shard, chosen(monkeypatch, 80, was_sharded=False).shard) == ("on", "off")
    assert re.fullmatch(r"as out/checkpoint-3, sharded over 8 ranks needs .* GiB of 80: sharded", parts.reason)
    assert parts.allocated_bytes == chosen(monkeypatch, 16).allocated_bytes
    for device_gib, num_ranks, was_sharded in ((16, 8, False), (80, 1, True)):
        with pytest.raises(SetupError, match=r"keeps the mode of .*: as out/checkpoint-3, .* needs") as refused:
            chosen(monkeypatch, device_gib, was_sharded=was_sharded, num_ranks=num_ranks)
        assert f"shard='{'off' if was_sharded else 'on'}', resume='off'" in refused.value.hint


def test_auto_is_not_decided_on_each_of_several_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(SetupError, match="several nodes"):
        chosen(monkeypatch, 80, nnodes="2", rdzv_endpoint="host:1", rdzv_id="job")


def test_choice_reaches_the_ranks() -> None:
    from unsloth_multigpu.wire.context import RunContext, ShardChoice

    choice = ShardChoice("on", 5, "because")
    assert RunContext.read(choice.variables()).shard_choice == choice
    assert RunContext.read({}).shard_choice is None


def test_first_step_is_compared_with_the_forecast(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from unsloth_multigpu.shard.calibration import Calibration
    from unsloth_multigpu.wire.context import ShardChoice

    part: Any = Calibration(ShardChoice("on", 2**30, "sharded over 2 ranks"))
    args: Any = SimpleNamespace(device=torch.device("cuda", 0))
    module = SimpleNamespace(max_memory_allocated=lambda _: 3 * 2**29)
    monkeypatch.setattr(torch, "get_device_module", lambda _: module)
    for _ in range(2):
        part.on_step_end(args, None, None)
    (record,) = [r for r in caplog.records if "were allocated" in r.message]
    assert "1.5 GiB were allocated, 50% more than the 1.0 GiB of the forecast (sharded over 2 ranks)" in record.message


def test_one_process_is_not_told_of_a_larger_step(caplog: pytest.LogCaptureFixture) -> None:
    manager: Any = SimpleNamespace(config=MultiGPUConfig(), identity=RankIdentity(0, 0, 1, 1, "ours"), waits=WAITS)
    with caplog.at_level(logging.WARNING):
        DDPTrainer(with_fsdp(1), manager, None, HeartbeatPage(None, 0)).run(lambda: "trained")
    assert "leaves this training to it" in caplog.text
    assert "samples" not in caplog.text


def test_auto_counts_what_is_offloaded_on_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    memory = SimpleNamespace(total=64 * 2**30)
    monkeypatch.setattr("unsloth_multigpu.shard.choice.psutil.virtual_memory", lambda: memory)
    # 8.3 GiB of 7.6 that can be planned for, and 6.4 where 1.9 of them are on the host.
    with pytest.raises(SetupError, match=r"sharded over 8 ranks 8\.3") as refused:
        chosen(monkeypatch, 9)
    assert "and shard_offload=True" in refused.value.hint
    assert chosen(monkeypatch, 9, offload=True).shard == "on"
    memory.total = 8 * 2**30
    with pytest.raises(SetupError, match=r"8 ranks keep 1\.9 GiB each in the host's memory, of which there are 8"):
        chosen(monkeypatch, 9, offload=True)
    assert MultiGPUConfig(shard="auto", shard_offload=True).with_shard("on").shard_offload
    assert not MultiGPUConfig(shard="auto", shard_offload=True).with_shard("off").shard_offload


@pytest.mark.parametrize(
    ("name", "by_accelerate", "by_unsloth"),
    [
        ("adamw_torch_fused", True, True),
        ("sgd", True, True),
        ("adamw_8bit", False, True),
        ("paged_adamw_32bit", False, True),
        ("lion_8bit", False, False),
        ("rmsprop_bnb", False, False),
        ("adafactor", False, False),
    ],
)
def test_optimizer_that_cannot_train_parts_is_known_before_the_first_step(
    name: str, by_accelerate: bool, by_unsloth: bool
) -> None:
    assert trains_parts(name, with_unsloth=False) is by_accelerate
    assert trains_parts(name, with_unsloth=True) is by_unsloth
