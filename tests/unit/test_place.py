"""The sentence at the start: which devices train, and why this process trains alone."""

from types import SimpleNamespace

import pytest
import torch

from unsloth_multigpu.group import place
from unsloth_multigpu.group.manager import sends_over_host
from unsloth_multigpu.group.place import describe_lone_process, describe_ranks
from unsloth_multigpu.options import MultiGPUConfig
from unsloth_multigpu.wire.identity import RankIdentity

ALONE = "this process trains alone"


@pytest.mark.parametrize(
    ("num_visible", "options", "variables", "said"),
    [
        (1, {}, {}, f"1 GPU is visible: {ALONE}"),
        (1, {}, {"CUDA_VISIBLE_DEVICES": "0"}, f"1 GPU is visible (CUDA_VISIBLE_DEVICES='0'): {ALONE}"),
        (2, {"num_gpus": 1}, {}, f"2 GPUs are visible, num_gpus=1: {ALONE}"),
        (4, {"device": "cpu"}, {}, f"device='cpu': {ALONE}, on the CPU"),
        (2, {"enable_ddp": False}, {}, "enable_ddp=False: this process computes 2 replicas in turn"),
    ],
)
def test_process_that_trains_alone_says_why(num_visible, options, variables, said):
    assert describe_lone_process(num_visible, MultiGPUConfig(**options), variables) == said


def test_torch_without_cuda_is_named_where_no_gpu_is_visible(monkeypatch):
    for name in ("cuda", "hip", "xpu"):
        monkeypatch.setattr(torch.version, name, None, raising=False)
    said = describe_lone_process(0, MultiGPUConfig(), {})
    assert said.startswith(f"no GPU is visible, torch {torch.__version__} is built for the CPU only: this process")
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    assert describe_lone_process(0, MultiGPUConfig(), {}).startswith(f"no GPU is visible: {ALONE}")


@pytest.mark.parametrize(
    ("identity", "num_visible", "sharing", "said"),
    [
        (RankIdentity(0, 0, 2, 2, "notebook"), 2, "1", "2 ranks on 2 x Tesla T4 (14.7 GiB each)"),
        (RankIdentity(0, 0, 4, 2, "torchrun"), 2, "0", "4 ranks on 2 nodes, here on 2 x Tesla T4 (14.7 GiB each)"),
        (RankIdentity(0, 0, 2, 2, "slurm"), 1, "0", "2 ranks on 2 devices, rank 0 on Tesla T4 (14.7 GiB)"),
        (RankIdentity(0, 0, 2, 2, "unsloth_multigpu"), 1, "1", "2 ranks that share one GPU, on Tesla T4 (14.7 GiB)"),
    ],
)
def test_ranks_are_told_with_their_devices(monkeypatch, identity, num_visible, sharing, said):
    monkeypatch.setenv("NCCL_MULTI_RANK_GPU_ENABLE", sharing)
    card = SimpleNamespace(name="Tesla T4", total_memory=int(14.7 * 2**30))
    module = SimpleNamespace(device_count=lambda: num_visible, get_device_properties=lambda _: card)
    monkeypatch.setattr(place, "local_device", lambda *_: torch.device("cuda", 0))
    monkeypatch.setattr(torch, "get_device_module", lambda _: module)
    assert describe_ranks(identity, MultiGPUConfig()) == said


@pytest.mark.parametrize(
    ("num_visible", "sharing", "nccl", "over_host"),
    [(1, "1", (2, 29, 7), True), (1, "1", (2, 30, 1), False), (1, "0", (2, 29, 7), False), (2, "1", (2, 29, 7), False)],
)
def test_ranks_of_one_card_send_by_gloo_where_nccl_is_too_old(monkeypatch, num_visible, sharing, nccl, over_host):
    monkeypatch.setenv("NCCL_MULTI_RANK_GPU_ENABLE", sharing)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: num_visible)
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: nccl)
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: True)
    assert sends_over_host() is over_host
