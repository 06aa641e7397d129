"""What ends a run, and what the user then reads: one message with the cause, the exit code, and nothing left behind."""

import json
import os
import pty
import signal
import subprocess
from pathlib import Path

import pytest

from tests.helpers.run import finish, orphans, run_python, start, wait_until

SCRIPT = Path(__file__).parent / "scripts" / "tiny_train.py"


def train(folder, *options):
    # The folder's name in the command line marks the processes of this run.
    return start([SCRIPT, "--out", folder / "log.json", *options], cwd=folder)


def assert_nothing_is_left(folder):
    wait_until(lambda: not orphans(str(folder)), 5.0, "end of all processes")
    assert not list(Path("/tmp").glob(f"unsloth_multigpu_{os.getpid()}_*"))


@pytest.mark.parametrize("rank", [0, 1])
def test_exception_is_shown_once_and_first(tmp_path, rank):
    run = finish(train(tmp_path, "--fault", f"raise@{rank}:2"))
    assert run.code == 1
    assert run.err.count("ValueError: planted in step 2") == 2  # Its traceback, and the line that names the rank.
    assert run.err.count("Traceback (most recent call last)") == 1
    assert f"unsloth_multigpu: rank {rank} failed after step 1: ValueError: planted in step 2." in run.err
    assert f"{tmp_path}/logs/rank_N.log" in run.err
    assert "gloo" not in run.err.partition("Traceback")[2]
    assert_nothing_is_left(tmp_path)


@pytest.mark.parametrize(
    ("fault", "code", "message"),
    [
        ("kill@1:2", 137, "rank 1 was killed by SIGKILL after step 1; the usual cause is that the machine ran out"),
        ("kill@0:2", 137, "rank 0 was killed by SIGKILL after step 1"),
        ("segv@1:2", 139, "rank 1 was killed by SIGSEGV after step 1"),
        ("exit@1:2", 1, "rank 1 left with exit code 0 after step 1, while other ranks were training"),
        ("exit@0:2", 1, "rank 0 left with exit code 0 after step 1, while other ranks were training"),
        ("os_exit@1:2", 1, "rank 1 left with exit code 0 after step 1, while other ranks were training"),
    ],
)
def test_death_of_a_rank_is_named(tmp_path, fault, code, message):
    run = finish(train(tmp_path, "--fault", fault))
    assert message in run.err
    assert run.code == code
    assert "after training" not in run.out
    assert_nothing_is_left(tmp_path)


def test_killed_supervisor_leaves_no_rank(tmp_path):
    run = finish(train(tmp_path, "--fault", "kill_supervisor@0:2"))
    assert run.code == -signal.SIGKILL
    assert_nothing_is_left(tmp_path)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signal_ends_all_ranks(tmp_path, number):
    process = train(tmp_path, "--fault", "sleep@1:2")
    wait_until((tmp_path / "sleeping").exists, 120.0, "second step")
    process.send_signal(number)
    run = finish(process)
    assert run.code == -number
    assert f"stopped by {number.name}" in run.err
    assert "Traceback" not in run.err
    assert "death signal" not in run.err
    assert run.seconds < 10.0
    assert_nothing_is_left(tmp_path)


def test_too_few_samples_for_the_ranks_is_an_error_with_a_hint(tmp_path):
    run = finish(train(tmp_path, "--batch-size", "1"))
    assert run.code == 64
    assert "An optimizer step of 1 sample(s) cannot be shared by 2 ranks." in run.err
    assert "Hint: Raise per_device_train_batch_size" in run.err


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 64 KiB."""
    disk = tmp_path / "disk"
    disk.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", disk], capture_output=True).returncode:
        pytest.skip("no right to mount a small file system")
    yield disk
    subprocess.run(["umount", disk], check=True)


def test_full_disk_while_saving_ends_the_run(tmp_path, small_disk):
    run = finish(train(tmp_path, "--save-in", small_disk))
    assert run.code == 1
    assert "No space left on device" in run.err
    assert "unsloth_multigpu: rank 0 failed" in run.err
    assert_nothing_is_left(tmp_path)


def test_ranks_with_different_data_are_refused(tmp_path):
    run = finish(train(tmp_path, "--divergent"))
    assert run.code == 77
    assert "The ranks are about to train different runs. sampled rows: rank 0 has" in run.err
    assert "Hint: Give shuffles and splits a seed" in run.err


def test_two_jobs_at_once_do_not_meet(tmp_path):
    first, second = train(tmp_path, "--fault", "sleep@1:2"), None
    try:
        wait_until((tmp_path / "sleeping").exists, 120.0, "second step of the first job")
        second = finish(train(tmp_path))
    finally:
        first.send_signal(signal.SIGTERM)
        finish(first)
    assert second.code == 0, second.err
    assert "log_dir is in use by another job" in second.err
    assert (tmp_path / "logs" / "rank_1.log").exists()
    assert json.loads((tmp_path / "log.json").read_text())["log"]


def test_failed_run_is_started_again_as_often_as_asked(tmp_path):
    script = tmp_path / "fails_once.py"
    script.write_text(
        "import unsloth_multigpu as ump\n"
        "ump.enable_multi_gpu(num_gpus=2, max_restarts=1)\n"
        "import os, pathlib, torch, torch.distributed as dist\n"
        "dist.init_process_group('gloo')\n"
        "dist.all_reduce(torch.ones(1))\n"
        "if os.environ['RANK'] == '1' and not pathlib.Path('failed').exists():\n"
        "    pathlib.Path('failed').touch()\n"
        "    raise ValueError('first time')\n"
        "print('done', os.environ['TORCHELASTIC_RESTART_COUNT'])\n"
    )
    run = run_python([script], cwd=tmp_path)
    assert run.code == 0, run.err
    assert "rank 1 failed before the first step: ValueError: first time. Starting all ranks again (1)." in run.err
    assert "done 1" in run.out


def test_rank_0_owns_the_terminal(tmp_path):
    script = tmp_path / "asks.py"
    script.write_text(
        "import unsloth_multigpu as ump\n"
        "ump.enable_multi_gpu(num_gpus=2)\n"
        "import os, sys\n"
        "rank = os.environ['RANK']\n"
        "print('streams', rank, sys.stdin.isatty(), sys.stdout.isatty(), sys.stderr.isatty())\n"
        "if rank == '0':\n"
        "    print('answer', input('name? '))\n"
    )
    master, terminal = pty.openpty()
    process = start([script], cwd=tmp_path, stdin=terminal, stdout=terminal, stderr=terminal, start_new_session=True)
    os.close(terminal)
    os.write(master, b"Ada\n")
    shown = b""
    while True:
        try:
            shown += os.read(master, 4096)
        except OSError:
            break
    os.close(master)
    assert finish(process).code == 0
    text = shown.decode()
    assert "streams 0 True True True" in text
    assert "answer Ada" in text
    assert "streams 1" not in text
    assert "streams 1 False False False" in (tmp_path / "logs" / "rank_1.log").read_text()


def test_rendezvous_listens_on_loopback_only(tmp_path):
    script = tmp_path / "listens.py"
    script.write_text(
        "import unsloth_multigpu as ump\n"
        "ump.enable_multi_gpu(num_gpus=2)\n"
        "import os, psutil, torch, torch.distributed as dist\n"
        "dist.init_process_group('gloo')\n"
        "dist.all_reduce(torch.ones(1))\n"
        "for process in (psutil.Process(), psutil.Process().parent()):\n"
        "    for c in process.net_connections():\n"
        "        if c.status == 'LISTEN': print('listens on', c.laddr.ip)\n"
        "dist.barrier()\n"
    )
    run = run_python([script], cwd=tmp_path)
    assert run.code == 0, run.err
    addresses = {line.split()[-1] for line in run.out.splitlines() if line.startswith("listens on")}
    assert addresses <= {"127.0.0.1", "::1"}
    assert addresses
