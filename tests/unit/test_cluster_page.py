"""The recipes of docs/cluster.md: whole files that parse, use names that exist, and are linked."""

import re
import subprocess
from pathlib import Path

import pytest
import yaml

from unsloth_multigpu.cli.main import split_program
from unsloth_multigpu.option_type import flag, options_of
from unsloth_multigpu.options import ENV_PREFIX, MultiGPUConfig, command_options

ROOT = Path(__file__).parents[2]
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
