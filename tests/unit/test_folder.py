"""The folders of a run: who can read them, when they go, and what a second job gets."""

import os
import stat
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from unsloth_multigpu.errors import LaunchError
from unsloth_multigpu.wire import run
from unsloth_multigpu.wire.run import exclusive_log_dir, private_dir


@pytest.fixture
def tmp(tmp_path, monkeypatch):
    """The folder for temporary files, of this test alone."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def mode(path):
    return stat.S_IMODE(path.stat().st_mode)


def test_private_folder_is_readable_by_its_user_only_and_removed(tmp):
    with pytest.raises(KeyboardInterrupt), private_dir() as path:  # noqa: PT012
        assert (path.parent, mode(path)) == (tmp, 0o700)
        (path / "maps").mkdir()
        raise KeyboardInterrupt
    assert list(tmp.iterdir()) == []


def test_folder_of_a_killed_supervisor_is_swept(tmp):
    killed = "from unsloth_multigpu.wire.run import private_dir; import os\nwith private_dir(): os._exit(9)"
    subprocess.run([sys.executable, "-c", killed], env={**os.environ, "TMPDIR": str(tmp)}, timeout=60)
    (old,) = tmp.iterdir()
    (old / "events_rank_0.jsonl").touch()
    with private_dir() as path:
        assert list(tmp.iterdir()) == [path]


def test_sweep_leaves_living_supervisors_and_folders_of_others(tmp):
    (tmp / "unsloth_multigpu_doctor_x").mkdir()
    (tmp / "other").mkdir()
    before = set(tmp.iterdir())
    with private_dir() as living:
        with private_dir():
            assert living.exists()
        assert set(tmp.iterdir()) == {*before, living}


@pytest.mark.parametrize(
    ("function", "elsewhere"),
    [
        ("readlink", lambda path: "pid:[1]"),
        ("uname", lambda: os.uname_result(("Linux", "other-host", "6.1", "#1", "x86_64"))),
    ],
    ids=["another container", "another machine"],
)
def test_sweep_leaves_runs_whose_process_ids_mean_nothing_here(tmp, monkeypatch, function, elsewhere):
    with monkeypatch.context() as there:
        there.setattr(os, function, elsewhere)
        foreign = private_dir()
        path = foreign.__enter__()
    # Where it runs it lives.
    monkeypatch.setattr(run, "is_alive", lambda pid: False)
    with private_dir():
        assert path.exists()
    foreign.__exit__(None, None, None)
    assert list(tmp.iterdir()) == []


@pytest.mark.usefixtures("open_umask")
def test_logs_are_made_empty_and_private(tmp_path):
    log_dir = tmp_path / "a" / "logs"
    for _ in range(2):
        with exclusive_log_dir(log_dir, 3) as path:
            logs = sorted(path.glob("rank_*.log"))
            assert path == log_dir
            # Rank 0 has the terminal.
            assert [log.name for log in logs] == ["rank_1.log", "rank_2.log"]
            assert [(mode(log), log.read_text()) for log in logs] == [(0o600, "")] * 2
            logs[0].write_text("of an older run")
    assert (log_dir / "rank_1.log").exists()


def test_second_job_gets_a_folder_of_its_own(tmp_path, caplog):
    with exclusive_log_dir(tmp_path, 2) as first:
        (first / "rank_1.log").write_text("first job")
        with exclusive_log_dir(tmp_path, 2) as second:
            assert (second.parent, second.name[: len(f"job_{os.getpid()}")]) == (tmp_path, f"job_{os.getpid()}")
            assert (second / "rank_1.log").read_text() == ""
        assert (first / "rank_1.log").read_text() == "first job"
    assert "log_dir is in use by another job" in caplog.text
    # The first is done, and a third job has the folder for itself.
    with exclusive_log_dir(tmp_path, 2) as third:
        assert third == tmp_path


@pytest.mark.parametrize("inside", ["logs", "logs/deeper"])
def test_log_folder_that_cannot_be_made_is_an_error(tmp_path, monkeypatch, inside):
    (tmp_path / "logs").touch()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(LaunchError, match=f"log_dir='{tmp_path / inside}' cannot be written: ") as error:
        exclusive_log_dir(Path(inside), 2).__enter__()
    assert "Hint: Set log_dir to another folder." in str(error.value)
