"""Which commands of a rank are launchers, and what is let pass."""

import os
import subprocess
import sys

import pytest

from unsloth_multigpu.errors import SetupError
from unsloth_multigpu.launch.child_launcher import launchers_refused, refuse_launcher

RANK = {"RANK": "0", "WORLD_SIZE": "2"}


@pytest.mark.parametrize(
    "command",
    [
        "torchrun --nproc-per-node 2 train.py",
        "CUDA_VISIBLE_DEVICES=0,1 /venv/bin/torchrun train.py",
        "accelerate launch train.py",
        "accelerate-launch train.py",
        "/venv/bin/python -X dev -u -m torch.distributed.run train.py",
        "python3.11 -m accelerate.commands.accelerate_cli launch train.py",
        "python -m accelerate.commands.launch train.py",
        "python /venv/bin/accelerate launch train.py",
        "deepspeed train.py",
    ],
)
def test_launcher_is_known_by_name_module_or_file(command):
    with pytest.raises(SetupError, match="a launcher in each rank"):
        refuse_launcher(command, RANK)
    # Whoever takes the variables of a rank away means a helper.
    refuse_launcher(command, {"PATH": "/bin"})


@pytest.mark.parametrize(
    "command",
    ["", "ls torchrun", "accelerate env", "python train.py torchrun", "python -c x -m torch.distributed.run", "python"],
)
def test_other_commands_pass(command):
    refuse_launcher(command, RANK)


def test_launch_in_this_process_is_known_by_the_variables_of_what_it_starts(monkeypatch):
    command, child = f"{sys.executable} train.py", {**RANK, "TORCHELASTIC_RUN_ID": "1"}
    with pytest.raises(SetupError, match="a launcher in each rank"):
        refuse_launcher(command, child)
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "1")
    refuse_launcher(command, child)


def test_only_a_rank_that_has_not_trained_refuses_and_all_is_put_back(monkeypatch):
    before, begun = (subprocess.Popen.__init__, os.system), []
    for name, value in RANK.items():
        monkeypatch.setenv(name, value)
    with launchers_refused(lambda: bool(begun)):
        starts = (subprocess.run, os.system, lambda text: subprocess.run([os.fsencode(word) for word in text.split()]))
        for start in starts:
            with pytest.raises(SetupError, match=r"about to start 'torchrun /none/a\.py': a launcher in each") as it:
                start("torchrun /none/a.py")
            assert "unsloth-multigpu run /none/a.py ..." in it.value.hint
        # A command for a shell is split as a shell does.
        for command in ("\n  torchrun a.py", "accelerate  \\\n launch a.py", '"torchrun" a.py', "torchrun 'a.py"):
            with pytest.raises(SetupError, match="a launcher in each rank"):
                os.system(command)
        assert subprocess.run([sys.executable, "-c", ""], check=True).returncode == os.system("true") == 0
        begun.append(True)
        with pytest.raises(FileNotFoundError):
            subprocess.run(["torchrun"], env={**RANK, "PATH": ""}, check=True)
    assert (subprocess.Popen.__init__, os.system) == before
