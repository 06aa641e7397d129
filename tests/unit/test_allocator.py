"""The allocator's settings that Unsloth makes, where and as it makes them."""

import importlib.util
import json
import platform
import subprocess
import sys

import pytest

from unsloth_multigpu import accelerator
from unsloth_multigpu.accelerator import ALLOCATOR_VARIABLES, allocator_variables
from unsloth_multigpu.launch.launcher import rank_environment
from unsloth_multigpu.options import MultiGPUConfig

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
