"""Models, weights and data of plain loops: what is chosen, what is named how, and which samples are whose."""

from __future__ import annotations

import logging
import os
import sys
import types
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DataParallel, DistributedDataParallel

import unsloth_multigpu as ump
from unsloth_multigpu import plugin
from unsloth_multigpu.errors import ConfigError, LaunchError, SetupError
from unsloth_multigpu.group.lone import warn_of_lone_steps
from unsloth_multigpu.group.manager import DDPManager
from unsloth_multigpu.launch.rank import leave_group
from unsloth_multigpu.options import MultiGPUConfig
from unsloth_multigpu.plain import api as plain
from unsloth_multigpu.plain.loader import EpochPlan, distributed_loader, num_workers_per_rank
from unsloth_multigpu.plain.wrap import (
    _has_failed,
    choose_strategy,
    current_identity,
    one_device_reason,
    wrap_model,
)
from unsloth_multigpu.plugin import Session
from unsloth_multigpu.wire.identity import SINGLE_PROCESS, RankIdentity


def net(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Linear(3, 2))


def same(left, right):
    pairs = zip(left.state_dict().values(), right.state_dict().values(), strict=True)
    return all(torch.equal(a, b) for a, b in pairs)


class Named(nn.Module):
    """A model whose only child is really called "module"."""

    def __init__(self):
        super().__init__()
        self.module = nn.Linear(2, 2)


# Which wrapper.


@pytest.mark.parametrize(
    ("asked", "is_rank", "num_devices", "reason", "chosen"),
    [
        ("auto", True, 1, None, "ddp"),
        ("auto", True, 4, "quantised", "ddp"),
        ("auto", False, 4, None, "data_parallel"),
        ("auto", False, 4, "quantised", "none"),
        ("auto", False, 1, None, "none"),
        ("ddp", True, 1, "quantised", "ddp"),
        ("data_parallel", False, 2, None, "data_parallel"),
        ("none", True, 1, None, "none"),
        ("none", False, 4, None, "none"),
    ],
)
def test_strategy_follows_the_place(asked, is_rank, num_devices, reason, chosen):
    assert choose_strategy(asked, is_rank=is_rank, num_devices=num_devices, one_device_reason=reason) == chosen


@pytest.mark.parametrize(
    ("asked", "is_rank", "num_devices", "reason", "message"),
    [
        ("ddp", False, 4, None, "no rank of a process group"),
        ("data_parallel", True, 4, None, "each rank has one device"),
        ("data_parallel", False, 1, None, "this process uses 1 GPU"),
        ("data_parallel", False, 4, "its weights are quantised", "its weights are quantised"),
    ],
)
def test_strategy_that_is_not_possible_raises(asked, is_rank, num_devices, reason, message):
    with pytest.raises(SetupError, match=message):
        choose_strategy(asked, is_rank=is_rank, num_devices=num_devices, one_device_reason=reason)


def test_unknown_strategy_names_the_known():
    with pytest.raises(ConfigError, match="strategy='dp'; expected 'auto' or 'ddp' or 'data_parallel' or 'none'"):
        ump.wrap_model_multi_gpu(net(), strategy="dp")


def unsloth_like():
    model = net()
    forward = types.FunctionType((lambda self, x: x).__code__, {"__name__": "unsloth.models.llama"})
    model[0].forward = types.MethodType(forward, model[0])
    return model


def with_attribute(name, value):
    model = net()
    setattr(model, name, value)
    return model


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        (net(), None),
        (with_attribute("is_loaded_in_4bit", False), None),
        (with_attribute("is_loaded_in_4bit", True), "its weights are quantised"),
        (with_attribute("hf_device_map", {"": 0}), "its device map has placed it"),
        (unsloth_like(), "Unsloth's functions and buffers belong to one device"),
    ],
)
def test_reason_for_one_device(model, reason):
    assert one_device_reason(model) == reason


def test_parameters_of_bitsandbytes_are_known_inside_a_model():
    params4bit = type("Params4bit", (nn.Parameter,), {})
    model = net()
    model[0].weight = params4bit(torch.zeros(3, 4))
    assert one_device_reason(model) == "its weights are quantised"


def test_one_process_with_one_device_gets_the_model_itself():
    model = net()
    assert ump.wrap_model_multi_gpu(model) is model


@pytest.mark.parametrize(("model", "kind", "num_warnings"), [(net(), DataParallel, 0), (unsloth_like(), nn.Module, 1)])
def test_one_process_with_several_devices_warns_where_it_uses_one(model, kind, num_warnings, monkeypatch, caplog):
    monkeypatch.setattr("unsloth_multigpu.plain.wrap.num_single_process_devices", lambda *_: 2)
    wrapped = wrap_model(model, DDPManager(SINGLE_PROCESS, MultiGPUConfig()))
    assert isinstance(wrapped, kind)
    assert ump.unwrap_model(wrapped) is model
    warnings = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
    expected = ["this process uses 1 of 2 GPUs: Unsloth's functions and buffers belong to one device; "]
    assert [w.replace("enable_multi_gpu() uses all", "") for w in warnings] == expected[:num_warnings]


def test_wrapping_twice_is_wrapping_once():
    wrapped = DataParallel(net())
    assert ump.wrap_model_multi_gpu(wrapped) is wrapped
    assert ump.wrap_model_multi_gpu(wrapped, strategy="data_parallel") is wrapped
    with pytest.raises(ConfigError, match="strategy='ddp', but the model is wrapped with 'data_parallel' already"):
        ump.wrap_model_multi_gpu(wrapped, strategy="ddp")


@pytest.mark.parametrize(
    "options",
    [
        {"sync": "local_sgd"},
        {"enable_ddp": False},
        {"grad_compression": "fp16"},
        {"balance": "tokens"},
        {"max_tokens_per_micro_batch": 64},
        {"rank_speeds": (1.0,)},
        {"micro_batch_overhead_tokens": 64},
        {"micro_batch_floor_tokens": 64},
        {"resume": "auto"},
        {"on_nan": "skip"},
        {"inexact": "raise"},
    ],
)
def test_option_that_only_a_trainer_follows_is_refused(options, monkeypatch):
    monkeypatch.setattr(plugin, "_session", Session(MultiGPUConfig(**options), SINGLE_PROCESS, console=None))
    (name,) = options
    with pytest.raises(SetupError, match=f"{name}=.* needs a transformers.Trainer"):
        ump.wrap_model_multi_gpu(net())
    model = net()
    assert ump.wrap_model_multi_gpu(model, strategy="none") is model


@pytest.mark.parametrize("options", [{"verify_every": 0}, {"on_nan": "off"}, {"inexact": "warn"}])
def test_value_that_asks_for_nothing_is_taken_in_a_plain_loop(options, monkeypatch):
    monkeypatch.setattr(plugin, "_session", Session(MultiGPUConfig(**options), SINGLE_PROCESS, console=None))
    model = net()
    assert ump.wrap_model_multi_gpu(model) is model


def test_group_of_the_script_makes_a_rank_without_a_launcher(lone_group):
    assert current_identity({}) == RankIdentity(0, 0, 1, 1, launcher="group")
    wrapped = ump.wrap_model_multi_gpu(net(), find_unused_parameters=True)
    assert isinstance(wrapped, DistributedDataParallel)
    assert wrapped.find_unused_parameters
    assert ump.wrap_model_multi_gpu(wrapped) is wrapped
    assert not ump.wrap_model_multi_gpu(net(), strategy="ddp").find_unused_parameters
    with pytest.raises(SetupError, match="nothing to train together"):
        ump.wrap_model_multi_gpu(net().requires_grad_(False))


def test_identity_is_the_launchers_or_alone():
    launched = {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
    assert current_identity(launched).rank == 1
    assert current_identity({}) == SINGLE_PROCESS
    with pytest.raises(LaunchError):
        current_identity({**launched, "RANK": "2"})


# Names of weights.


def test_unwrap_takes_wrappers_off_in_any_order(lone_group):
    model = net()
    assert ump.unwrap_model(model) is model
    assert ump.unwrap_model(torch.compile(DistributedDataParallel(model))) is model
    assert ump.unwrap_model(DistributedDataParallel(torch.compile(model))) is model
    assert ump.unwrap_model(DataParallel(torch.compile(DataParallel(model)))) is model
    named = Named()
    assert ump.unwrap_model(named) is named


def test_saved_names_are_those_of_the_model(tmp_path, lone_group):
    model = net()
    model[0] = torch.compile(model[0])
    wrappers = [lambda m: m, DataParallel, torch.compile, lambda m: torch.compile(DistributedDataParallel(m))]
    for i, wrap in enumerate(wrappers):
        ump.save_state_dict(wrap(model), tmp_path / f"{i}.pt")
        stored = torch.load(tmp_path / f"{i}.pt", weights_only=True)
        assert list(stored) == list(net().state_dict())
    ump.save_state_dict(DataParallel(Named()), tmp_path / "named.pt")
    assert sorted(torch.load(tmp_path / "named.pt", weights_only=True)) == ["module.bias", "module.weight"]


@pytest.mark.parametrize("prefix", ["", "module.", "_orig_mod.", "module._orig_mod.", "_orig_mod.module."])
@pytest.mark.parametrize("wrap", [lambda m: m, DataParallel, torch.compile], ids=["bare", "parallel", "compiled"])
def test_weights_with_any_prefix_are_read_into_any_wrapper(prefix, wrap, tmp_path):
    torch.save({prefix + name: value for name, value in net(1).state_dict().items()}, tmp_path / "w.pt")
    model = net()
    ump.load_state_dict(wrap(model), tmp_path / "w.pt")
    assert same(model, net(1))


@pytest.mark.parametrize("prefix", ["", "module.", "module._orig_mod."])
def test_child_that_is_called_module_survives(prefix, tmp_path):
    saved = Named()
    torch.save({prefix + name: value for name, value in saved.state_dict().items()}, tmp_path / "w.pt")
    model = Named()
    ump.load_state_dict(DataParallel(model), tmp_path / "w.pt")
    assert same(model, saved)


def test_weights_of_a_compiled_part_are_read(tmp_path):
    saved = net(1)
    saved[0] = torch.compile(saved[0])
    torch.save(DataParallel(saved).state_dict(), tmp_path / "w.pt")
    model = net()
    ump.load_state_dict(model, tmp_path / "w.pt")
    assert same(model, net(1))


def renamed(state):
    state["3.weight"] = state.pop("2.weight")


def reshaped(state):
    state["2.weight"] = torch.zeros(5, 3)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (renamed, r"missing: 2.weight; unexpected: 3.weight\."),
        (reshaped, r"shapes: 2.weight is \(5, 3\) and here \(2, 3\)\."),
        (dict.clear, "missing: 0.bias, 0.weight, 1.bias, 1.num_batches_tracked, 1.running_mean and 4 more"),
    ],
)
def test_weights_of_another_model_change_nothing(change, message, tmp_path):
    state = dict(net(1).state_dict())
    change(state)
    torch.save({f"module.{name}": value for name, value in state.items()}, tmp_path / "w.pt")
    model = net()
    with pytest.raises(ConfigError, match=message):
        ump.load_state_dict(model, tmp_path / "w.pt")
    assert same(model, net())


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is no file of weights: "),
        (b"no weights", "is no file of weights: "),
        (net(), "is no file of weights: Weights only load failed"),
        ([1], "holds a list; expected tensors by name"),
    ],
    ids=["empty", "text", "module", "list"],
)
def test_file_without_weights_is_named(content, message, tmp_path):
    path = tmp_path / "w.pt"
    if isinstance(content, bytes):
        path.write_bytes(content)
    else:
        torch.save(content, path)
    with pytest.raises(ConfigError, match=message):
        ump.load_state_dict(net(), path)


def test_save_opens_the_group_where_nobody_has(tmp_path, monkeypatch):
    opened = []
    manager = SimpleNamespace(identity=SINGLE_PROCESS, open_group=lambda: opened.append(True))
    monkeypatch.setattr(plain, "_manager", lambda: manager)
    ump.save_state_dict(net(), tmp_path / "w.pt")
    assert opened == [True]


def test_group_is_ended_with_the_process_unless_others_may_be_gone(monkeypatch):
    ended = []
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "destroy_process_group", lambda: ended.append(True))
    monkeypatch.delattr(sys, "last_value", raising=False)
    leave_group(_has_failed)
    monkeypatch.setattr(sys, "last_value", ValueError(), raising=False)
    leave_group(_has_failed)
    assert ended == [True]


def test_rank_that_trains_by_itself_is_told_so_at_its_first_step(monkeypatch, caplog):
    for has_group, num_told in [(False, 1), (True, 0)]:
        monkeypatch.setattr(dist, "is_initialized", lambda has_group=has_group: has_group)
        caplog.clear()
        warn_of_lone_steps()
        optimizer = torch.optim.SGD(net().parameters())
        optimizer.step()
        optimizer.step()
        assert ["nothing is shared" in line for line in caplog.messages] == [True] * num_told


def test_model_that_cannot_be_moved_is_told_its_place():
    model = nn.Linear(2, 2, device="meta")
    model.hf_device_map = {"": 1}
    with pytest.raises(SetupError, match="lies on meta and belongs on cpu, but its device map has placed it"):
        wrap_model(model, DDPManager(SINGLE_PROCESS, MultiGPUConfig(device="cpu")), "none")


def test_failed_save_leaves_the_old_file_and_nothing_else(tmp_path, monkeypatch):
    path = tmp_path / "new" / "folder" / "w.pt"
    done, rename = [], Path.replace
    monkeypatch.setattr(os, "fsync", lambda _: done.append("flushed"))
    monkeypatch.setattr(Path, "replace", lambda draft, name: (done.append("named"), rename(draft, name)))
    ump.save_state_dict(net(), path)
    assert done == ["flushed", "named"]
    before = path.read_bytes()

    def full(state, file):
        file.write(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(torch, "save", full)
    with pytest.raises(OSError, match="No space left"):
        ump.save_state_dict(net(1), path)
    assert path.read_bytes() == before
    assert [p.name for p in path.parent.iterdir()] == ["w.pt"]


# Which samples are whose.


def place(rank=0, world_size=1):
    return RankIdentity(rank, rank, world_size, world_size, launcher="torchrun" if world_size > 1 else "none")


def loaders(num_samples, batch_size, world_size, **options):
    settings = {"global_batch": "keep", "shuffle": True, "seed": 0, "collate_fn": list, **options}
    return [
        distributed_loader(range(num_samples), batch_size, place(rank, world_size), **settings)
        for rank in range(world_size)
    ]


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_each_sample_is_in_one_step_of_one_rank(world_size):
    for batch_size in range(world_size, 10):
        for num_samples in range(world_size, 30):
            plan = EpochPlan(num_samples, batch_size, world_size)
            steps = [[plan.share(i, rank) for rank in range(world_size)] for i in range(plan.num_steps)]
            assert [p for step in steps for share in step for p in share] == list(range(num_samples))
            assert all(share for step in steps for share in step)
            assert all(max(map(len, step)) - min(map(len, step)) <= 1 for step in steps)
            # As in one process, but for a last step of fewer samples than ranks.
            sizes = [sum(map(len, step)) for step in steps]
            assert sizes[:-1] == [batch_size] * (len(sizes) - 1)
            assert sizes[-1] < batch_size + world_size
            for i in range(plan.num_steps):
                assert sum(plan.loss_weight(i, rank) for rank in range(world_size)) == pytest.approx(world_size)


def test_left_over_samples_join_the_last_step():
    # One process would do 8 + 8 + 1.
    plan = EpochPlan(17, 8, 3)
    assert [[len(plan.share(i, r)) for r in range(3)] for i in range(plan.num_steps)] == [[2, 3, 3], [3, 3, 3]]


def test_loss_weight_gives_the_gradient_of_one_process():
    torch.manual_seed(0)
    samples, weight = torch.randn(11, 4), torch.randn(4, requires_grad=True)
    plan = EpochPlan(11, 6, 4)

    def gradient(rows):
        return torch.autograd.grad((samples[list(rows)] @ weight).square().mean(), weight)[0]

    for step in range(plan.num_steps):
        shares = [plan.share(step, rank) for rank in range(4)]
        assert len(set(map(len, shares))) == 2
        averaged = sum(plan.loss_weight(step, r) * gradient(share) for r, share in enumerate(shares)) / 4
        torch.testing.assert_close(averaged, gradient([i for share in shares for i in share]))


def test_ranks_share_the_steps_of_one_process():
    (alone,) = loaders(22, 6, 1)
    ranks = loaders(22, 6, 2)
    assert [len(r) for r in ranks] == [len(alone)] * 2 == [4, 4]
    for _ in range(2):
        assert [a + b for a, b in zip(*ranks, strict=True)] == list(alone)


def test_every_iteration_is_the_next_epoch():
    (loader,) = loaders(40, 40, 1)
    epochs = [next(iter(loader)) for _ in range(3)]
    assert len({tuple(e) for e in epochs}) == 3
    assert all(sorted(e) == list(range(40)) for e in epochs)
    loader.set_epoch(1)
    assert [next(iter(loader)) for _ in range(2)] == epochs[1:]
    assert next(iter(loaders(40, 40, 1, seed=5)[0])) != epochs[0]
    assert next(iter(loaders(40, 40, 1, shuffle=False)[0])) == list(range(40))


def test_random_state_of_the_script_does_not_matter():
    torch.manual_seed(1)
    first = next(iter(loaders(30, 30, 1)[0]))
    torch.manual_seed(2)
    assert next(iter(loaders(30, 30, 1)[0])) == first


def test_scale_gives_each_rank_the_batch():
    ranks = loaders(32, 4, 4, global_batch="scale", shuffle=False)
    assert [next(iter(r)) for r in ranks] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11], [12, 13, 14, 15]]
    assert {len(r) for r in ranks} == {2}


def test_drop_last_leaves_out_what_does_not_fill_a_step():
    ranks = loaders(23, 6, 2, drop_last=True, shuffle=False)
    assert sorted(i for r in ranks for batch in r for i in batch) == list(range(18))
    assert [len(r) for r in loaders(5, 6, 2, drop_last=True)] == [0, 0]


def test_weight_is_that_of_the_batch_that_was_yielded(caplog):
    # Workers are steps ahead.
    loader = loaders(15, 4, 2, num_workers=1)[0]
    assert [(len(batch), loader.loss_weight) for batch in loader] == [(2, 1.0), (2, 1.0), (2, 1.0), (1, 2 / 3)]
    assert caplog.messages[-1].startswith("the last step of an epoch is 3 = 1 + 2 samples: multiply the loss")
    loaders(12, 5, 2)
    assert caplog.messages[-1].startswith("a step is 5 = 2 + 3 samples")
    # Rank 0 alone tells: in one line of each call.
    assert [record.levelno for record in caplog.records] == [logging.WARNING] * 2
    caplog.clear()
    loaders(16, 4, 2)
    assert caplog.messages == []


def test_options_of_the_session_are_followed(monkeypatch):
    def steps(**options):
        monkeypatch.setattr(plugin, "_session", Session(MultiGPUConfig(**options), place(1, 2), console=None))
        return [len(batch) for batch in ump.distributed_loader(range(24), 4, collate_fn=list)]

    assert steps() == [2] * 6
    assert steps(global_batch="scale") == [4] * 3
    assert steps(batch_size_per_gpu=3) == [3] * 4
    with pytest.raises(ConfigError, match=r"global_batch='keep', but .* has batch_size_per_gpu=3"):
        ump.distributed_loader(range(24), 4, collate_fn=list, global_batch="keep")
    assert [len(b) for b in ump.distributed_loader(range(24), 4, collate_fn=list, global_batch="scale")] == [4] * 3
    steps(global_batch="scale")
    assert [len(b) for b in ump.distributed_loader(range(24), 4, collate_fn=list, global_batch="keep")] == [2] * 6


@pytest.mark.parametrize(
    ("num_workers", "local_world_size", "num_cores", "expected"),
    [(8, 1, 2, 8), (8, 4, 16, 4), (2, 4, 16, 2), (8, 4, 2, 1), (0, 4, 2, 0)],
)
def test_workers_are_as_many_as_there_are_cores_for(num_workers, local_world_size, num_cores, expected):
    assert num_workers_per_rank(num_workers, local_world_size, num_cores) == expected


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"batch_size": 1}, "A batch of 1 sample.* cannot be shared by 2 ranks"),
        ({"num_samples": 1}, "A data set of 1 sample.* cannot be shared by 2 ranks"),
        ({"batch_size": 0}, "batch_size=0; expected a whole number"),
        ({"batch_size": "8", "global_batch": "scale"}, "batch_size='8'; expected a whole number"),
        ({"global_batch": "divide"}, "global_batch='divide'; expected 'keep' or 'scale'"),
        ({"sampler": [1]}, "got sampler, which it makes itself"),
    ],
)
def test_argument_that_cannot_be_used_is_named(arguments, message):
    settings = {"num_samples": 8, "batch_size": 4, "world_size": 2, **arguments}
    with pytest.raises(ConfigError, match=message):
        loaders(**settings)


def test_stream_is_refused():
    class Stream(torch.utils.data.IterableDataset):
        def __iter__(self):
            return iter(range(8))

    with pytest.raises(ConfigError, match="Stream has no length"):
        ump.distributed_loader(Stream(), 4)


def test_loader_is_a_torch_loader():
    rows = [(torch.full((2,), float(i)), i) for i in range(6)]
    loader = ump.distributed_loader(rows, 4, shuffle=False, pin_memory=False)
    assert isinstance(loader, torch.utils.data.DataLoader)
    x, y = next(iter(loader))
    assert x.shape == (4, 2)
    assert y.tolist() == [0, 1, 2, 3]
