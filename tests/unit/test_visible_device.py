"""Ranks whose device has another number than their place on the machine, and cards that cannot be connected."""

import logging
import os
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from unsloth_multigpu import session
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
