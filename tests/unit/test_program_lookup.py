"""What `unsloth-multigpu run NAME` starts."""

import pytest

from tests.helpers.refused import refused
from unsloth_multigpu.cli.program_lookup import find_program
from unsloth_multigpu.errors import ConfigError


@pytest.fixture(autouse=True)
def place(tmp_path, monkeypatch):
    """The only folder with commands."""
    for name in ("my-train", "trl", "llamafactory-cli", "torchrun", "accelerate"):
        (tmp_path / name).write_text("#!/usr/bin/python3\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr("sys.executable", str(tmp_path / "python"))
    return tmp_path


@pytest.mark.parametrize(
    ("program", "started"),
    [
        ("my-train x.yaml", "{place}/my-train x.yaml"),
        ("trl sft --a b", "-m trl.scripts.sft --a b"),
        ("llamafactory-cli train x.yaml", "-m llamafactory.launcher x.yaml"),
        ("-m tune --a", "-m tune --a"),  # The user's, though a launcher's command has this name.
    ],
)
def test_a_command_is_looked_up_and_trains_in_the_rank(place, program, started):
    assert find_program(program.split(), "verify") == started.format(place=place).split()


@pytest.mark.parametrize(
    ("program", "message", "hint"),
    [
        ("torchrun", "torchrun starts processes of its own", "run train.py"),
        ("llamafactory-cli", "llamafactory-cli starts processes of its own", "run train.py"),
        ("llamafactory-cli export x.yaml", "llamafactory-cli starts processes of its own", "run train.py"),
        ("-m torch.distributed.run a.py", "torch.distributed.run starts processes of its own", "run train.py"),
        ("accelerate launch", "accelerate starts processes of its own", "run train.py"),
        ("trl dpo --a b --num_processes=4", "--num_processes=4 is an option of the launcher", "--num-gpus 2 trl dpo"),
        ("trl dpo --accelerate_config", "--accelerate_config is an option of the launcher", "--num-gpus 2 trl dpo"),
        ("no-such-thing.py", "no file 'no-such-thing.py'", "Check the path"),
    ],
)
def test_a_launcher_its_options_and_what_is_missing_are_refused(program, message, hint):
    with refused(ConfigError, message, hint):
        find_program(program.split(), "run")
