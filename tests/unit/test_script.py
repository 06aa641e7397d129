"""The command that starts a program, also again: of programs that were started in each way, and of `run NAME`."""

import json
import os
import subprocess
import sys
import zipfile
from types import ModuleType, SimpleNamespace

import pytest

from tests.helpers.refused import refused
from tests.helpers.run import ROOT, run_well
from unsloth_multigpu.__main__ import find_program
from unsloth_multigpu.errors import ConfigError, SetupError
from unsloth_multigpu.start import relaunch_command

# Prints what it is and how it would be started again.
PROGRAM = """
import json, sys
import __main__
from unsloth_multigpu.start import relaunch_command
what = [sys.argv, list(sys.flags), sys.warnoptions, sys._xoptions, getattr(__main__, "__file__", None), __name__]
print(json.dumps({"what": what, "command": relaunch_command(sys.orig_argv, __main__, sys.executable)}))
"""
ARGUMENTS = ["a", "b c", "$x", "-m", "--flag=1", ""]


def run(program, cwd):
    return json.loads(run_well(program, cwd).out)


@pytest.fixture
def folder(tmp_path):
    """The program as a script, as a package, as a folder and as a zip file."""
    (tmp_path / "train.py").write_text(PROGRAM)
    (tmp_path / "pkg").mkdir()
    for name in ("__init__.py", "__main__.py", "mod.py"):
        (tmp_path / "pkg" / name).write_text("" if name == "__init__.py" else PROGRAM)
    with zipfile.ZipFile(tmp_path / "app.zip", "w") as archive:
        archive.writestr("__main__.py", PROGRAM)
    return tmp_path


@pytest.mark.parametrize(
    "program",
    [
        ["-X", "dev", "-W", "error", "train.py"],
        ["-Xdev", "-Werror", "-OO", "train.py"],
        ["--", "train.py"],
        ["-m", "pkg.mod"],
        ["-um", "pkg.mod"],
        ["-c", PROGRAM],
        ["-Bc", PROGRAM],
        ["pkg"],
        ["app.zip"],
        ["./pkg/../train.py"],
    ],
    ids=lambda program: " ".join(program).replace(PROGRAM, "CODE"),
)
def test_program_of_each_kind_starts_again_with_its_options(folder, program):
    """Runs the program, then the command that it gives for itself: both must be the same program."""
    first = run([*program, *ARGUMENTS], folder)
    assert first["command"] == [sys.executable, *program, *ARGUMENTS]
    assert run(first["command"][1:], folder)["what"] == first["what"]


def test_script_is_found_after_a_change_of_folder(folder, monkeypatch):
    (folder / "pkg" / "train.py").write_text("")  # Another one of that name is not taken.
    monkeypatch.chdir(folder / "pkg")
    main = ModuleType("__main__")
    main.__file__ = str(folder / "train.py")
    command = relaunch_command(["python", "-u", "train.py", "--flag"], main, "PY")
    assert command == ["PY", "-u", str(folder / "train.py"), "--flag"]


@pytest.mark.parametrize("arguments", [[], ["-"], ["/dev/stdin"]])
def test_piped_program_is_refused(arguments):
    code = PROGRAM.replace("print(", "raise SystemExit(") if not arguments else PROGRAM
    command = [sys.executable, *arguments]
    done = subprocess.run(command, cwd=ROOT, input=code, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert "SetupError: enable_multi_gpu() cannot start this program again" in done.stderr


def test_ipython_at_a_terminal_is_refused(monkeypatch):
    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(get_ipython=object))
    with pytest.raises(SetupError, match="cannot start this program again: it was typed at a prompt") as error:
        relaunch_command(["python", "/usr/bin/ipython"], ModuleType("__main__"), "PY")
    assert "use a notebook" in str(error.value)


def test_wrong_variables_are_told_in_the_last_lines_before_torch_is_imported(tmp_path):
    call = "import atexit, sys; atexit.register(lambda: print('torch' in sys.modules)); import unsloth_multigpu as ump"
    command = [sys.executable, "-c", f"{call}; ump.enable_multi_gpu()"]
    variables = {**os.environ, "RANK": "0", "WORLD_SIZE": "2"}
    done = subprocess.run(command, cwd=tmp_path, env=variables, capture_output=True, text=True, timeout=60)
    error, hint = done.stderr.splitlines()[-2:]
    assert (done.returncode, done.stdout, list(tmp_path.iterdir())) == (1, "False\n", [])
    names = "LOCAL_RANK, MASTER_ADDR, MASTER_PORT"
    assert error == f"unsloth_multigpu.errors.LaunchError: RANK and WORLD_SIZE=2 are set, but {names} is not."
    assert hint.startswith("Hint: Start with torchrun, or unset RANK and WORLD_SIZE so that unsloth_multigpu starts")


@pytest.fixture
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


@pytest.mark.usefixtures("place")
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
