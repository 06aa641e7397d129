"""What ends a run, and what the user then reads: one message with the cause, the exit code, and nothing left behind."""

import re
import signal
import subprocess
from pathlib import Path

import pytest

from tests.helpers.run import BARE, finish, orphans, start, wait_until

SCRIPTS = Path(__file__).parent / "scripts"


def start_ranks(folder, *faults):
    # The folder's name in the command line marks the processes of this run.
    (folder / "temporary").mkdir(exist_ok=True)
    return start([SCRIPTS / "dies.py", folder, *faults], folder, {"TMPDIR": str(folder / "temporary")})


def assert_nothing_is_left(folder):
    wait_until(lambda: not orphans(str(folder)), 30.0, "end of all processes")
    assert not list((folder / "temporary").glob("unsloth_multigpu_*"))


def attempts_of(text):
    """What the user reads of each attempt but the last, with the exit code that it would have had, and of the last."""
    *failed, last = re.split(r"\. Starting all ranks again \(\d+\)\.\n\[exit code (\d+)\]\n", text)
    return list(zip(failed[::2], map(int, failed[1::2]), strict=True)), last


# Fault -> the exit code, and what is said.
DEATHS = {
    "kill@1": (137, "rank 1 was killed by SIGKILL after step 1; the usual cause is that the machine ran out"),
    "exit@0": (1, "rank 0 left with exit code 0 after step 1, while other ranks were training"),
}
MORE = {
    "raise@0": (1, "rank 0 failed after step 1: ValueError: planted in step 2"),
    "os_exit@1": (1, "rank 1 left with exit code 0 after step 1, while other ranks were training"),
}


@pytest.mark.parametrize("deaths", [DEATHS, pytest.param({**DEATHS, **MORE}, marks=pytest.mark.thorough)], ids=len)
def test_death_of_a_rank_is_named_and_all_ranks_are_started_again(tmp_path, deaths):
    run = finish(start_ranks(tmp_path, *deaths))
    assert run.code == 0, run.err
    failed, last = attempts_of(run.err)
    assert [code for _, code in failed] == [code for code, _ in deaths.values()]
    for (text, _), (fault, (_, message)) in zip(failed, deaths.items(), strict=True):
        assert f"\nunsloth_multigpu: {message}" in text
        if fault == "raise@0":
            assert_is_shown_once_and_first(text)
    assert "unsloth_multigpu: rank" not in last
    # Gloo of some torch releases prints there, too.
    assert [line for line in run.out.splitlines() if not line.startswith("[Gloo]")] == [f"done {len(deaths)}"]
    assert_nothing_is_left(tmp_path)


def assert_is_shown_once_and_first(text):
    assert text.count("ValueError: planted in step 2") == 2  # Its traceback, and the line that names the rank.
    assert text.count("Traceback (most recent call last)") == 1
    assert "gloo" not in text.partition("Traceback")[2]


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 64 KiB."""
    disk = tmp_path / "disk"
    disk.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", disk], capture_output=True).returncode:
        pytest.skip("no right to mount a small file system")
    yield disk
    subprocess.run(["umount", disk], check=True)


def test_failed_training_says_why(tmp_path, small_disk):
    run = finish(start([SCRIPTS / "fails.py", small_disk], cwd=tmp_path, env=BARE))
    (raised, full), last = attempts_of(run.err)

    # What a callback does behind a step is after it.
    assert "unsloth_multigpu: rank 1 failed after step 2: ValueError: planted in step 2" in raised[0]
    assert_is_shown_once_and_first(raised[0])
    assert "No space left on device" in full[0]
    assert "unsloth_multigpu: rank 0 failed" in full[0]
    assert [code for _, code in (raised, full)] == [1, 1]

    by_dtype = 'parameters by dtype: rank 0 has {"float32": 2}, rank 1 has {"bfloat16": 2}'
    assert f"The ranks are about to train different runs. {by_dtype}; sampled evaluation rows: rank 0 has" in last
    assert '; sampled rows: rank 0 has "' in last
    assert "Hint: Give shuffles, splits and generators of your own" in last
    assert "[exit code 77]" in last
    assert "An optimizer step of 1 sample(s) cannot be shared by 2 ranks." in last
    assert "Hint: Set num_gpus=1 (of all nodes together), or raise per_device_train_batch_size" in last
    assert " failed before the first step: ConfigError: An optimizer step of 1 sample(s)" in last
    assert run.code == 64
    assert "after training" not in run.out
    assert_nothing_is_left(tmp_path)


def test_killed_supervisor_leaves_no_rank(tmp_path):
    run = finish(start_ranks(tmp_path, "kill_supervisor@0"))
    assert run.code == -signal.SIGKILL
    # Its folder is swept by the next one.
    wait_until(lambda: not orphans(str(tmp_path)), 30.0, "end of all processes")


@pytest.mark.thorough
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signal_ends_all_ranks(tmp_path, number):
    process = start_ranks(tmp_path, "sleep@1")
    wait_until((tmp_path / "sleeping").exists, 120.0, "second step")
    process.send_signal(number)
    run = finish(process)
    assert run.code == -number
    assert f"stopped by {number.name}" in run.err
    assert "Traceback" not in run.err
    assert "death signal" not in run.err
    assert run.seconds < 25.0  # A script that handles the signal has 30 s.
    assert_nothing_is_left(tmp_path)
