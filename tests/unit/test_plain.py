"""Models, weights and data of plain loops: what is chosen, what is named how, and which samples are whose."""

import logging
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DataParallel, DistributedDataParallel

import unsloth_multigpu as ump
from tests.helpers.options import another_value
from unsloth_multigpu import plugin
from unsloth_multigpu.errors import ConfigError, SetupError
from unsloth_multigpu.option_type import Scope, options_of
from unsloth_multigpu.options import MultiGPUConfig
from unsloth_multigpu.plugin import Session
from unsloth_multigpu.program import Program, warn_of_unwrapped_steps
from unsloth_multigpu.step.accelerated import SharedBatches, rows_of_ranks
from unsloth_multigpu.wire.identity import SINGLE_PROCESS, RankIdentity


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Linear(3, 2))


def test_one_process_with_one_device_gets_the_model_itself():
    model = net()
    assert ump.wrap_model_multi_gpu(model) is model


@pytest.mark.parametrize("name", [n for n, row in options_of(MultiGPUConfig).items() if Scope.TRAINER in row.scopes])
def test_option_that_only_a_trainer_follows_is_refused(name, monkeypatch):
    config = MultiGPUConfig(**{name: another_value(name)})
    monkeypatch.setattr(plugin, "_session", Session(config, SINGLE_PROCESS))
    with pytest.raises(SetupError, match=f"{name}=.* needs a transformers.Trainer"):
        ump.wrap_model_multi_gpu(net())


def test_rank_gets_ddp_once(lone_group, monkeypatch):
    manager = SimpleNamespace(identity=place(0, 2), config=MultiGPUConfig(device="cpu"), open_group=lambda: None)
    session = SimpleNamespace(is_closed=False, manager=lambda: manager, program=Program())
    monkeypatch.setattr(plugin, "_session", session)
    wrapped = ump.wrap_model_multi_gpu(net(), find_unused_parameters=True)
    assert isinstance(wrapped, DistributedDataParallel)
    assert wrapped.find_unused_parameters
    assert ump.wrap_model_multi_gpu(wrapped) is wrapped
    assert not ump.wrap_model_multi_gpu(net()).find_unused_parameters
    with pytest.raises(SetupError, match=r"nothing to train\."):
        ump.wrap_model_multi_gpu(net().requires_grad_(False))


@pytest.mark.parametrize("has_launcher", [True, False])
def test_rank_without_the_line_is_refused(has_launcher, monkeypatch):
    for name, value in place(1, 2).variables().items() if has_launcher else ():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(dist, "is_initialized", lambda: not has_launcher)
    monkeypatch.setattr(dist, "get_world_size", lambda: 2)
    for call in (lambda: ump.wrap_model_multi_gpu(net()), lambda: ump.distributed_loader(range(4), 2)):
        with pytest.raises(SetupError, match="one of several ranks, and enable_multi_gpu\\(\\) was not called"):
            call()


def test_unwrap_takes_wrappers_off_in_any_order(lone_group):
    model = net()
    assert ump.unwrap_model(model) is model
    assert ump.unwrap_model(torch.compile(DistributedDataParallel(model))) is model
    assert ump.unwrap_model(DistributedDataParallel(torch.compile(model))) is model
    assert ump.unwrap_model(DataParallel(torch.compile(DataParallel(model)))) is model
    named = nn.ModuleDict({"module": nn.Linear(2, 2)})  # Its only child is really called "module".
    assert ump.unwrap_model(named) is named


def test_rank_that_trains_by_itself_is_told_so_at_its_first_step(monkeypatch, caplog):
    for has_group, num_told in [(False, 1), (True, 0)]:
        monkeypatch.setattr(dist, "is_initialized", lambda has_group=has_group: has_group)
        caplog.clear()
        warn_of_unwrapped_steps()
        optimizer = torch.optim.SGD(net().parameters())
        optimizer.step()
        optimizer.step()
        assert ["gradients are not synchronized" in line for line in caplog.messages] == [True] * num_told


def place(rank=0, world_size=1):
    return RankIdentity(rank, rank, world_size, world_size, launcher="torchrun" if world_size > 1 else "none")


def loaders(num_samples, batch_size, world_size, config=None, **options):
    """The loader of each rank."""
    found = []
    with pytest.MonkeyPatch.context() as patch:
        for rank in range(world_size):
            session = Session(config or MultiGPUConfig(), place(rank, world_size))
            patch.setattr(plugin, "_session", session)
            found.append(ump.distributed_loader(range(num_samples), batch_size, collate_fn=list, **options))
    return found


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_ranks_share_each_batch_of_an_accelerators_loader(world_size):
    for num_rows in range(1, 14):
        whole = torch.utils.data.BatchSampler(range(num_rows), 5, drop_last=False)
        seen = []
        shared = [SharedBatches(whole, rank, world_size, seen.append) for rank in range(world_size)]
        for parts, batch in zip(zip(*shared, strict=True), whole, strict=True):
            rows = rows_of_ranks(len(batch), world_size)
            assert max(rows) - min(rows) <= 1
            assert [i for part, num in zip(parts, rows, strict=True) for i in part[:num]] == batch
            # Who has none of them takes one that counts for nothing.
            assert [len(part) for part in parts] == [max(num, 1) for num in rows]
        assert {len(sampler) for sampler in shared} == {len(whole)}
        assert {sampler.num_drawn for sampler in shared} == {len(batch)}
        assert seen == [next(iter(whole))] * world_size


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_each_sample_counts_in_one_step_of_one_rank(world_size):
    for num_samples in range(world_size, 14):
        ranks = loaders(num_samples, 5, world_size, shuffle=False)
        whole = torch.utils.data.DataLoader(range(num_samples), 5, collate_fn=list)
        # `zip` reads a batch of each rank, whose weight its loader tells then.
        for step, batch in enumerate(zip(*ranks, strict=True)):
            weights = [loader.loss_weight for loader in ranks]
            assert sum(weights) == pytest.approx(world_size)
            counted = [i for part, weight in zip(batch, weights, strict=True) if weight for i in part]
            assert counted == list(whole)[step]
        assert step == len(whole) - 1


def test_every_iteration_is_the_next_epoch():
    (loader,) = loaders(40, 40, 1)
    epochs = [next(iter(loader)) for _ in range(3)]
    assert len({tuple(e) for e in epochs}) == 3
    assert all(sorted(e) == list(range(40)) for e in epochs)
    loader.set_epoch(1)
    assert [next(iter(loader)) for _ in range(2)] == epochs[1:]
    assert next(iter(loaders(40, 40, 1, seed=5)[0])) != epochs[0]
    assert next(iter(loaders(40, 40, 1, shuffle=False)[0])) == list(range(40))


@pytest.mark.parametrize(("batch_size", "options"), [(4, {"global_batch": "scale"}), (3, {"batch_size_per_gpu": 4})])
def test_each_rank_gets_the_batch_that_an_option_asks_for(batch_size, options):
    ranks = loaders(32, batch_size, 4, MultiGPUConfig(**options), shuffle=False)
    assert [next(iter(r)) for r in ranks] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11], [12, 13, 14, 15]]
    assert {len(r) for r in ranks} == {2}


def test_drop_last_leaves_out_what_does_not_fill_a_step():
    ranks = loaders(23, 6, 2, drop_last=True, shuffle=False)
    assert sorted(i for r in ranks for batch in r for i in batch) == list(range(18))
    assert [len(r) for r in loaders(5, 6, 2, drop_last=True)] == [0, 0]


def test_weight_is_that_of_the_batch_that_was_yielded(caplog):
    # Workers are steps ahead.
    loader = loaders(15, 4, 2, num_workers=1)[0]
    assert [(len(batch), loader.loss_weight) for batch in loader] == [(2, 1.0), (2, 1.0), (2, 1.0), (2, 4 / 3)]
    assert caplog.messages[-1].startswith("ranks have 2 + 1 samples in some steps: multiply the loss")
    loaders(12, 5, 2)
    assert caplog.messages[-1].startswith("ranks have 3 + 2 samples in some steps")
    # Rank 0 alone tells: in one line of each call.
    assert [record.levelno for record in caplog.records] == [logging.WARNING] * 2
    caplog.clear()
    loaders(16, 4, 2)
    assert caplog.messages == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"batch_size": 1}, "A step of 1 and a data set of 8 sample.* cannot be shared by 2 rank"),
        ({"num_samples": 1}, "A step of 4 and a data set of 1 sample.* cannot be shared by 2 rank"),
        ({"batch_size": 0}, "A step of 0 and a data set of 8 sample"),
    ],
)
def test_argument_that_cannot_be_used_is_named(arguments, message):
    settings = {"num_samples": 8, "batch_size": 4, "world_size": 2, **arguments}
    with pytest.raises(ConfigError, match=message):
        loaders(**settings)


def test_stream_is_refused():
    with pytest.raises(ConfigError, match="ChainDataset has no length"):
        ump.distributed_loader(torch.utils.data.ChainDataset([]), 4)
