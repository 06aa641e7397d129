"""A rank's device as other libraries take it: its number, device maps that name another one, and the allocator."""

import importlib.util
import json
import logging
import os
import platform
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from unsloth_multigpu import accelerator, session
from unsloth_multigpu.accelerator import ALLOCATOR_VARIABLES, KINDS, allocator_variables, backend_of, kind_of
from unsloth_multigpu.errors import ConfigError
from unsloth_multigpu.hooks.unsloth_patches import Placement, local_device_map
from unsloth_multigpu.launch.launcher import rank_environment
from unsloth_multigpu.options import MultiGPUConfig
from unsloth_multigpu.patching import PatchRegistry
from unsloth_multigpu.wire.identity import RankIdentity

SECOND_OF_TWO = RankIdentity(1, 1, 2, 2, "slurm")


@pytest.fixture
def land(monkeypatch):
    """Lets torch claim so many CUDA devices, and lands the patches of this rank in the real accelerate."""
    for name in ("ACCELERATE_BYPASS_DEVICE_MAP", "NCCL_P2P_DISABLE", "NCCL_IB_DISABLE", "PYTORCH_ALLOC_CONF"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    registries = []

    def land(num_devices):
        import accelerate.state  # noqa: F401

        monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda *_: torch.device("cuda"))
        monkeypatch.setattr(torch.accelerator, "device_count", lambda: num_devices)
        monkeypatch.setattr(torch.accelerator, "set_device_index", lambda _: None)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: num_devices)
        opened = session.Session(MultiGPUConfig(), SECOND_OF_TWO)
        patches = [patch for patch in session._patches(opened) if patch.target.startswith("accelerate.")]
        registries.append(PatchRegistry(patches))
        registries[-1].apply()

    yield land
    for registry in registries:
        registry.undo()


@pytest.mark.parametrize(("num_devices", "device"), [(1, 0), (2, 1)])
def test_barrier_is_on_the_device_of_the_rank(land, monkeypatch, num_devices, device):
    """SLURM binds one card to each task: the second rank of a machine has no card 1."""
    from accelerate.state import DistributedType, PartialState

    land(num_devices)
    asked = []
    monkeypatch.setattr(dist, "barrier", lambda *_, **given: asked.append(given))
    state = PartialState.__new__(PartialState)
    monkeypatch.setattr(PartialState, "_shared_state", {})
    vars(state).clear()
    vars(state).update(distributed_type=DistributedType.MULTI_GPU, num_processes=2, local_process_index=1)
    state.wait_for_everyone()
    assert asked == [{"device_ids": [device]}]
    vars(state).update(distributed_type=DistributedType.NO, num_processes=1)
    state.wait_for_everyone()
    assert len(asked) == 1


@pytest.mark.parametrize("is_supported", [True, False])
def test_cards_that_cannot_be_connected_get_accelerates_variables(land, monkeypatch, caplog, is_supported):
    import accelerate.state

    monkeypatch.setattr(accelerate.state, "check_cuda_p2p_ib_support", lambda: is_supported)
    monkeypatch.setenv("NCCL_IB_DISABLE", "0")  # The user's stays.
    land(2)
    with caplog.at_level(logging.WARNING, "unsloth_multigpu"):
        for _ in range(2):
            assert accelerate.state.check_cuda_p2p_ib_support() is is_supported
    set_now = {name: os.environ.get(name) for name in ("NCCL_P2P_DISABLE", "NCCL_IB_DISABLE")}
    assert set_now == {"NCCL_P2P_DISABLE": None if is_supported else "1", "NCCL_IB_DISABLE": "0"}
    assert [r.getMessage().count("NCCL_P2P_DISABLE=1") for r in caplog.records] == ([] if is_supported else [1])


def test_accelerate_asks_before_it_refuses(land, monkeypatch):
    """Its state asks the function that is patched, and refuses only where the variables are missing."""
    import accelerate.state
    from accelerate.state import PartialState

    monkeypatch.setattr(accelerate.state, "check_cuda_p2p_ib_support", lambda: False)
    monkeypatch.setattr(PartialState, "_shared_state", {})
    monkeypatch.setattr(PartialState, "_prepare_backend", lambda *_, **__: (None, None))

    def on_a_card(state):
        state.device = SimpleNamespace(type="cuda")

    monkeypatch.setattr(PartialState, "set_device", on_a_card)
    with pytest.raises(NotImplementedError, match="RTX 4000"):
        PartialState()
    PartialState._shared_state.clear()
    land(2)
    PartialState()


HERE = {"": 1}
AUTOMATIC = ("auto", "balanced", "balanced_low_0", "sequential", "unsloth", "cuda", {"": "auto"})
ONE_CARD = (0, "0", "cuda:0", {"": 0}, {"": "cuda:0"}, {"model": 0, "lm_head": 0})
OF_THE_RANK = (1, "cuda:1", {"": "cuda:1"})  # Of a script that reads LOCAL_RANK.
OFF_CARD = ("cpu", {"": "cpu"}, {"": "meta"}, {"model": "cpu", "lm_head": "disk"})


def test_backend_and_kind_of_a_device_lead_to_each_other():
    assert [kind_of(backend_of(kind)) for kind in KINDS] == list(KINDS)
    assert (backend_of("cpu"), kind_of("gloo")) == ("gloo", None)


def test_map_of_one_card_means_the_ranks_own():
    for device_map in (*AUTOMATIC, *ONE_CARD, *OF_THE_RANK):
        assert local_device_map(device_map, "cuda", 1) == HERE, device_map
    for device_map in OFF_CARD:
        assert local_device_map(device_map, "cuda", 1) == device_map
    for card in (0, "cuda"):  # Parts that are kept off the card stay there.
        parts = local_device_map({"model": card, "a": "cpu", "b": "disk"}, "cuda", 1)
        assert parts == {"model": 1, "a": "cpu", "b": "disk"}


@pytest.mark.parametrize(
    "device_map",
    [
        {"model.layers.0": 0, "model.layers.1": 1},
        {"model.layers.0": "cuda:0", "model.layers.1": "cuda:1", "lm_head": "cpu"},
        {"": 2},
        "cuda:3",
    ],
)
def test_map_of_other_cards_is_an_error(device_map):
    with pytest.raises(ConfigError) as error:
        local_device_map(device_map, "cuda", 1)
    assert f"device_map={device_map!r}" in str(error.value)
    assert "Hint: Leave device_map out." in str(error.value)
    if isinstance(device_map, dict) and len(device_map) > 1:
        assert "shard='on' divides it" in str(error.value)


def test_map_by_which_a_model_would_be_split_is_told(caplog):
    def told(device_map, rank=0):
        patch = Placement("cuda", 1, rank, num_ranks=2).patches()[0]
        caplog.clear()
        assert patch.wrap(lambda **kwargs: kwargs, device_map=device_map) == {"device_map": HERE}
        return f"device_map={device_map!r} does not split" in caplog.text and "shard='auto'" in caplog.text

    assert all(told(name) for name in ("auto", "balanced", "balanced_low_0", "sequential", "unsloth"))
    assert not any(told(one_card) for one_card in ("cuda", 0, {"": 0}, {"": "cuda:1"}))
    assert not told("auto", rank=1)


@pytest.mark.parametrize("device_map", ["balanced", {"model.layers.0": 0, "model.layers.1": "cuda:3"}])
def test_map_that_splits_a_model_leaves_that_to_shards(device_map, caplog):
    caplog.set_level("INFO", logger="unsloth_multigpu")
    patch = Placement("cuda", 1, num_ranks=4, shards=True).patches()[0]
    assert patch.wrap(lambda **kwargs: kwargs, device_map=device_map) == {"device_map": HERE}
    assert "FSDP2 divides each layer between the ranks" in caplog.text
    with pytest.raises(ConfigError):
        patch.wrap(lambda **kwargs: kwargs, device_map={"model.layers.0": 0, "lm_head": "cpu", "model.layers.1": 3})


NEW = {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}
OLD = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True,roundup_power2_divisions:[32:256,64:128,256:64,>:32]"}


@pytest.fixture
def versions(monkeypatch):
    installed = {"torch": "2.13.0+cu130", "unsloth_zoo": "2026.10.9"}
    monkeypatch.setattr(accelerator, "installed_version", installed.get)
    monkeypatch.setattr(platform, "release", lambda: "6.8.0-45-generic")
    return installed


@pytest.mark.parametrize(("torch", "expected"), [("2.9.1", OLD), ("2.10.0", NEW), ("3.0", NEW), ("2.10.0+rocm7.0", {})])
def test_variable_is_the_one_that_torch_reads(versions, torch, expected):
    versions["torch"] = torch
    assert allocator_variables({}) == expected


def test_nothing_is_set_where_it_would_fail_or_is_set(versions, monkeypatch):
    for environment in ({"UNSLOTH_VLLM_STANDBY": "1"}, *({name: ""} for name in ALLOCATOR_VARIABLES)):
        assert allocator_variables(environment) == {}
    monkeypatch.setattr(platform, "release", lambda: "5.15.167.4-microsoft-standard-WSL2")
    assert allocator_variables({}) == {}


@pytest.mark.parametrize(("device", "expected"), [("auto", NEW), ("cpu", {})])
def test_launcher_hands_it_to_ranks(versions, tmp_path, device, expected):
    told = rank_environment(MultiGPUConfig(device=device), 2, tmp_path, tmp_path, "run", {})
    assert {name: told[name] for name in ALLOCATOR_VARIABLES if name in told} == expected


@pytest.mark.thorough
def test_it_is_what_the_installed_unsloth_sets():
    if importlib.util.find_spec("unsloth_zoo") is None:
        pytest.skip("unsloth_zoo is not installed")
    program = """
import json, os, unsloth
print("SET", json.dumps({n: v for n, v in os.environ.items() if n.startswith("PYTORCH_") and "ALLOC_CONF" in n}))
"""
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    line = next(line for line in run.stdout.splitlines() if line.startswith("SET "))
    assert json.loads(line[4:]) == allocator_variables({})
