"""Pods of Kubeflow Trainer: what a process there refuses and waits for; and the recipes of docs/cluster.md."""

import os
import re
import socket
import subprocess
from pathlib import Path
from unittest.mock import Mock, call

import pytest
import yaml

from tests.helpers.run import ROOT
from unsloth_multigpu.__main__ import split_program
from unsloth_multigpu.errors import ConfigError, LaunchError
from unsloth_multigpu.launch import nodes
from unsloth_multigpu.launch.nodes import address_towards, await_name
from unsloth_multigpu.option_type import flag, options_of
from unsloth_multigpu.options import ENV_PREFIX, MultiGPUConfig, command_options
from unsloth_multigpu.start import check_cluster

MEETING = {"rdzv_endpoint": "host:1", "rdzv_id": "job"}


@pytest.fixture(autouse=True)
def no_variables(monkeypatch):
    for name in list(os.environ):
        if name.startswith((ENV_PREFIX, "PET_")):
            monkeypatch.delenv(name)


@pytest.mark.parametrize(
    ("name", "value", "option", "given"),
    [
        ("PET_NNODES", "2", "nnodes=1: each node would train by itself", {"nnodes": 2, **MEETING}),
        ("PET_NNODES", "1:4", "nnodes=1: each node would train by itself", {"nnodes": 3, **MEETING}),
        ("PET_NPROC_PER_NODE", "4", "num_gpus=None: all devices of the machine would train", {"num_gpus": 1}),
    ],
)
def test_pod_that_would_train_by_itself_is_refused(name, value, option, given, monkeypatch):
    monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match=f"{name}='{value}' is set, and {option}") as error:
        check_cluster(MultiGPUConfig())
    assert f"Set {ENV_PREFIX}{next(iter(given)).upper()}" in str(error.value)
    # What was given counts, whatever the cluster says.
    check_cluster(MultiGPUConfig(**given))


@pytest.mark.parametrize("ranks", ["", "auto", "gpu", "cuda"])
def test_pod_that_is_alone_trains(ranks, monkeypatch):
    monkeypatch.setenv("PET_NNODES", "1")
    monkeypatch.setenv("PET_NPROC_PER_NODE", ranks)
    check_cluster(MultiGPUConfig())


def test_name_of_a_machine_that_starts_later_is_waited_for(monkeypatch):
    unknown = socket.gaierror(socket.EAI_NONAME, "unknown")
    resolve = Mock(side_effect=[unknown, unknown, unknown, ()])
    monkeypatch.setattr(nodes, "_resolve", resolve)
    monkeypatch.setattr(nodes, "_NAME_POLL_S", 0.01)
    await_name("llama-node-0-0.llama", 29500, 5.0)
    assert resolve.call_args_list == [call("llama-node-0-0.llama", 29500)] * 4
    monkeypatch.setattr(nodes, "_resolve", Mock(side_effect=unknown))
    await_name("nowhere", 1, 0.05)
    with pytest.raises(LaunchError, match="rdzv_endpoint: this machine has no route to 'nowhere': unknown"):
        address_towards("nowhere", 1)


RECIPES = sorted((ROOT / "examples" / "cluster").iterdir())
PAGE = (ROOT / "docs" / "cluster.md").read_text(encoding="utf-8")
# Those that the scheduler sets and the script itself reads.
OF_THE_SCRIPT = {"SLURM_CPUS_PER_TASK", "SLURM_JOB_ID", "SKYPILOT_NUM_NODES", "SKYPILOT_NODE_IPS", "SKYPILOT_TASK_ID"}
SHELL = [path for path in RECIPES if path.suffix in (".sh", ".sbatch")]


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.name)
def test_page_links_the_file_in_a_line_of_its_own(path):
    # The site shows the file there: tests/unit/test_package.py.
    assert f"\n[examples/cluster/{path.name}](../examples/cluster/{path.name})\n" in PAGE


@pytest.mark.parametrize("path", SHELL, ids=lambda path: path.name)
def test_shell_script_is_sound(path):
    checked = subprocess.run(["bash", "-n", path], capture_output=True, text=True)
    assert (checked.returncode, checked.stderr) == (0, "")


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.name)
def test_names_in_a_recipe_exist(path):
    text = path.read_text(encoding="utf-8")
    for name in re.findall(rf"{ENV_PREFIX}(\w+)", text):
        assert name.lower() in options_of(MultiGPUConfig)
    # What is in a comment counts too: a reader believes it.
    source = (ROOT / "unsloth_multigpu" / "wire" / "identity.py").read_text(encoding="utf-8")
    for name in set(re.findall(r"\b(?:SLURM|SKYPILOT)_[A-Z_]+", text)) - OF_THE_SCRIPT:
        assert f'"{name}"' in source, name
    for command in re.findall(r"unsloth-multigpu run ([^\n]*)", text.replace("\\\n", "")):
        assert_flags_exist(["run", *command.replace('"$@"', "train.py").split()])


def assert_flags_exist(arguments):
    own, program = split_program(arguments)
    flags = [argument.partition("=")[0] for argument in own[1:] if argument.startswith("--")]
    assert set(flags) <= {flag(name) for name in command_options("run")}
    assert program == ["train.py"]


def load(name):
    return yaml.safe_load((ROOT / "examples" / "cluster" / name).read_text(encoding="utf-8"))


def test_trainjob_has_the_fields_of_kubeflow_and_starts_our_command():
    job = load("kubeflow.yaml")
    assert (job["apiVersion"], job["kind"]) == ("trainer.kubeflow.org/v1alpha1", "TrainJob")
    assert job["spec"]["runtimeRef"] == {"name": "torch-distributed"}
    trainer = job["spec"]["trainer"]
    fields = {"image", "command", "args", "env", "numNodes", "resourcesPerNode", "numProcPerNode"}
    assert set(trainer) <= fields
    program, name, *arguments = trainer["command"]
    assert (program, name) == ("unsloth-multigpu", "run")
    assert_flags_exist(["run", *arguments[:-1], Path(arguments[-1]).name])
    # Kubeflow refuses a job that sets those itself.
    assert not [variable for variable in trainer["env"] if variable["name"].startswith("PET_")]
    assert all(isinstance(variable["value"], str) for variable in trainer["env"])
    quantities = [value for part in trainer["resourcesPerNode"].values() for value in part.values()]
    assert all(isinstance(value, str) for value in quantities)


def test_recipe_gives_the_variables_that_the_page_lists():
    given = set(re.findall(r"\$\((PET_[A-Z_]+)\)", " ".join(load("kubeflow.yaml")["spec"]["trainer"]["command"])))
    section = PAGE.partition("## Options of several nodes")[2].partition("\n## ")[0]
    assert given == set(re.findall(r"`(PET_[A-Z_]+)`", section)) - {"PET_NPROC_PER_NODE"}
