"""What `unsloth-multigpu run NAME` starts."""

import pytest

from unsloth_multigpu.cli.program_lookup import find_program
from unsloth_multigpu.errors import ConfigError


def _command(folder, name):
    path = folder / name
    path.write_text("#!/usr/bin/python3\n")
    path.chmod(0o755)
    return path


def test_a_name_is_looked_up_on_path(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    path = _command(tmp_path, "my-train")
    assert find_program(["my-train", "x.yaml"], "run") == [str(path), "x.yaml"]


def test_trl_trains_in_the_rank():
    assert find_program(["trl", "sft", "--a", "b"], "verify") == ["-m", "trl.scripts.sft", "--a", "b"]


def test_llamafactory_trains_in_the_rank(tmp_path, monkeypatch):
    monkeypatch.setattr("sys.executable", str(tmp_path / "python"))
    _command(tmp_path, "llamafactory-cli")
    assert find_program(["llamafactory-cli", "train", "x.yaml"], "run") == ["-m", "llamafactory.launcher", "x.yaml"]
    with pytest.raises(ConfigError, match="processes of its own"):
        find_program(["llamafactory-cli", "export", "x.yaml"], "run")


@pytest.mark.parametrize("option", ["--num_processes=4", "--accelerate_config"])
def test_options_of_a_launcher_that_is_not_started_are_refused(option):
    with pytest.raises(ConfigError, match=f"{option} is an option of the launcher") as error:
        find_program(["trl", "dpo", "--a", "b", option], "run")
    assert error.value.hint.endswith("run --num-gpus 2 trl dpo ...")


@pytest.mark.parametrize(
    "program", [["torchrun"], ["llamafactory-cli"], ["-m", "torch.distributed.run", "a.py"], ["accelerate", "launch"]]
)
def test_launcher_is_refused(tmp_path, monkeypatch, program):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr("sys.executable", str(tmp_path / "python"))
    _command(tmp_path, program[0])
    with pytest.raises(ConfigError, match=rf"{program[program[0] == '-m']} starts processes of its own"):
        find_program(program, "run")


def test_a_module_with_the_name_of_a_launchers_command_is_the_users():
    assert find_program(["-m", "tune", "--a"], "run") == ["-m", "tune", "--a"]


def test_a_missing_program_is_named():
    with pytest.raises(ConfigError, match=r"no file 'no-such-thing\.py'"):
        find_program(["no-such-thing.py"], "run")
