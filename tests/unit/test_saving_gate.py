"""One writer for every file: what rank 0 does, what the others do meanwhile, and what they are told."""

from __future__ import annotations

import contextlib
import errno
import functools
import pickle
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from unsloth_multigpu.checkpoint.manifest import PART_FOLDER
from unsloth_multigpu.errors import ConfigError, DistributedError, RankTimeoutError
from unsloth_multigpu.group import saves
from unsloth_multigpu.group.outcome import error_of
from unsloth_multigpu.group.saves import Saves
from unsloth_multigpu.hooks.saving import SaveGate, saving_patches
from unsloth_multigpu.options import MultiGPUConfig
from unsloth_multigpu.wire.identity import RankIdentity

LIMIT_S = 0.2
Write = Callable[..., Any]


class FakeManager:
    """Keys and values that all ranks of a test share. No wait of a test takes longer than `10 * LIMIT_S`."""

    config = MultiGPUConfig(timeout_s=LIMIT_S)

    def __init__(self, store: dict[str, str], rank: int, num_ranks: int) -> None:
        self._store = store
        self.has_left = False
        self.identity = RankIdentity(rank, rank, num_ranks, num_ranks, "torchrun")
        self.saves = Saves(self)  # type: ignore[arg-type]

    def is_abandoned(self) -> bool:
        return self.has_left

    def publish(self, key: str, value: str = "") -> None:
        self._store[key] = value

    def delete(self, key: str) -> None:
        del self._store[key]

    def is_published(self, key: str) -> bool:
        return key in self._store

    def read(self, key: str) -> str | None:
        return self._store.get(key)


class Ranks:
    """A gate and a note of the calls that got through, for each rank. Ranks take their turns in one thread."""

    def __init__(self, num_ranks: int = 2) -> None:
        self.gates = [SaveGate(rank, functools.partial(self._manager_of, rank)) for rank in range(num_ranks)]
        self.renew()
        self.calls: list[list[str]] = [[] for _ in range(num_ranks)]

    def renew(self) -> None:
        """New managers with an empty store, as after a notebook's cell that failed."""
        self.store: dict[str, str] = {}
        num_ranks = len(self.gates)
        self.managers: list[FakeManager | None] = [FakeManager(self.store, r, num_ranks) for r in range(num_ranks)]

    def _manager_of(self, rank: int) -> Any:
        return self.managers[rank]

    def saver(self, rank: int, name: str = "save", *, everywhere: bool = False, result: Any = None) -> Write:
        """A saver as a patch leaves it: `(model, path)` notes the call and returns or raises `result`."""

        def save(model: object, path: Any = None, **kwargs: Any) -> Any:
            self.calls[rank].append(name)
            if isinstance(result, BaseException):
                raise result
            return result(model, path) if callable(result) else result

        save.__qualname__ = name
        gate = self.gates[rank]
        return functools.partial(gate.after_rank_0 if everywhere else gate.once, save)


@pytest.fixture
def ranks(monkeypatch: pytest.MonkeyPatch) -> Ranks:
    monkeypatch.setattr(saves, "OWN_PATH_GRACE_S", 0.05)
    monkeypatch.setattr(saves, "MEET_LIMIT_S", 0.0)
    return Ranks()


def test_rank_does_not_wait_for_rank_0_that_has_left_the_cell(ranks: Ranks) -> None:
    manager = ranks.managers[1]
    assert manager is not None
    manager.has_left = True
    with pytest.raises(DistributedError, match="rank 0 has left the cell"):
        ranks.saver(1)("model", "out")
    ranks.renew()
    ranks.saver(0)("model", "out")
    manager = ranks.managers[1]
    assert manager is not None
    manager.has_left = True
    ranks.saver(1)("model", "out")  # What it saved before it left is there.
    assert ranks.calls == [["save"], []]


@pytest.mark.parametrize("everywhere", [False, True])
def test_other_rank_waits_until_the_file_is_there(ranks: Ranks, tmp_path: Path, everywhere: bool) -> None:
    path = tmp_path / "file"
    seen: list[bool] = []

    def write(model: object, _path: object) -> None:
        thread.start()
        time.sleep(1.5 * LIMIT_S)  # An export may take longer than a rank that does not come at all.
        path.touch()

    def other() -> None:
        ranks.saver(1, everywhere=everywhere)("model", path)
        seen.append(path.exists())

    thread = threading.Thread(target=other)
    ranks.saver(0, everywhere=everywhere, result=write)("model", path)
    thread.join(timeout=10)
    assert seen == [True]


def test_path_is_the_same_in_every_spelling(ranks: Ranks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    ranks.saver(0)("model", "out")
    ranks.saver(1)("model", save_directory=tmp_path / "sub" / ".." / "out")
    assert ranks.calls == [["save"], []]


@pytest.mark.parametrize("name", ["save_directory", "output_dir", "fname", "dataset_path", "path_or_buf", "repo_id"])
def test_path_may_be_a_keyword(ranks: Ranks, name: str) -> None:
    for rank in (0, 1):
        ranks.saver(rank)("model", **{name: "out"})
    assert ranks.calls == [["save"], []]


# Savers that call other savers.


def test_nested_savers_count_as_one(ranks: Ranks) -> None:
    for rank in (0, 1):
        inner = ranks.saver(rank, "inner")
        ranks.saver(rank, "outer", result=inner)("model", "out")
        # The next save is not mistaken for the nested one.
        inner("model", "out")
    assert ranks.calls == [["outer", "inner", "inner"], []]


# What goes wrong.


class Strange(Exception):
    """Cannot be made without its own arguments, by whatever class derives from it."""

    def __new__(cls, code: int) -> Strange:
        return super().__new__(cls, code)


@pytest.mark.parametrize(
    ("error", "kinds"),
    [
        (OSError(errno.ENOSPC, "No space left on device", "out"), OSError),
        (subprocess.CalledProcessError(3, ["x"], "out"), subprocess.CalledProcessError),
        (ConfigError("no", hint="None."), ConfigError),
        (Strange(3), Exception),
        (type("Own", (ZeroDivisionError,), {})("of the script"), ZeroDivisionError),
    ],
)
def test_failure_of_rank_0_is_of_its_class_on_the_others(ranks: Ranks, error: Exception, kinds: type) -> None:
    with pytest.raises(kinds):
        ranks.saver(0, result=error)("model", "out")
    with pytest.raises(kinds, match="rank 0 failed in save") as raised:
        ranks.saver(1)("model", "out")
    told = raised.value
    assert isinstance(told, DistributedError)
    assert told.of_rank_0 == f"{type(error).__name__}: {error}"
    assert type(told).__name__ == "DistributedError"  # In a report the cause is rank 0's.
    for field in ("errno", "returncode"):
        assert getattr(told, field, None) == getattr(error, field, None)
    again = pickle.loads(pickle.dumps(told))
    assert str(again) == str(told)


@pytest.mark.parametrize(
    ("module", "name"),
    [
        ("antigravity", "Error"),
        ("os", "path.join"),
        ("builtins", "SystemExit"),
        (__name__, "Ranks.renew"),
    ],
)
def test_name_of_a_class_imports_nothing_and_finds_exceptions_only(module: str, name: str) -> None:
    told = error_of({"error": "x", "kinds": [[module, name]]}, "save")
    assert type(told) is DistributedError
    assert "antigravity" not in sys.modules


def test_token_is_not_published(ranks: Ranks) -> None:
    def init_hf_repo(trainer: object, token: str | None = None) -> None:
        if ranks.calls[0]:
            raise ConnectionError("offline")
        ranks.calls[0].append("init")

    for _ in range(2):
        for gate in ranks.gates:
            with contextlib.suppress(ConnectionError):
                gate.learn_of_rank_0(init_hf_repo, "trainer", "hf_secret")
    manager = ranks.managers[0]
    assert manager is not None
    assert "init_hf_repo" in str(vars(manager))
    assert "hf_secret" not in str(vars(manager))


def test_save_that_rank_0_never_makes_ends_in_a_timeout(ranks: Ranks) -> None:
    with pytest.raises(RankTimeoutError, match=rf"rank 1 waited {LIMIT_S} seconds for rank 0 in save") as error:
        ranks.saver(1)("model", "out")
    assert "Hint: Save on all ranks" in str(error.value)
    assert ranks.calls == [[], []]


# The meeting before a save.


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Notes for each meeting whether rank 0 would have waited; it does not."""
    found: list[bool] = []

    def wait_until(condition: Callable[[], bool], deadline_s: float) -> bool:
        found.append(deadline_s - time.monotonic() > 10.0)
        return condition()

    monkeypatch.setattr(saves, "wait_until", wait_until)
    monkeypatch.setattr(FakeManager, "config", MultiGPUConfig(timeout_s=60.0))
    monkeypatch.setattr(saves, "MEET_LIMIT_S", 60.0)
    return found


def test_rank_0_waits_once_where_it_saves_alone(ranks: Ranks, waits: list[bool]) -> None:
    for path in ("a", "b", "c"):
        ranks.saver(0)("model", path)
    ranks.saver(0)("model", "another place")
    assert waits == [True, False, False, True]


def test_rank_0_does_not_wait_for_a_rank_that_waits_elsewhere_or_has_left(ranks: Ranks, waits: list[bool]) -> None:
    manager = ranks.managers[1]
    assert manager is not None
    # One place in the code: it would not wait a second time if rank 1 had been missed there.
    for path in ("a", "b", "c"):
        with manager.saves.visit("save(later)"):
            ranks.saver(0)("model", path)
        if path == "b":
            manager.saves.leave()
    for path in ("d", "e"):
        ranks.saver(0)("model", path)
    assert waits == [True] * 5


def test_unfinished_checkpoints_are_not_rotated(tmp_path: Path) -> None:
    from transformers import trainer

    assert hasattr(trainer, "rotate_checkpoints") != hasattr(trainer.Trainer, "_rotate_checkpoints")
    seen: list[Any] = []

    def rotate_checkpoints(output_dir: Any, save_total_limit: int | None = None) -> None:
        seen.append(output_dir)

    def rotate_by_method(self: object, use_mtime: bool = False, output_dir: Any = None) -> None:
        seen.append(output_dir)

    patches = {p.target: p for p in saving_patches(SaveGate(0, pytest.fail)) if "rotate_checkpoints" in p.target}
    function, method = patches.values()
    for folder in (tmp_path, str(tmp_path), tmp_path / PART_FOLDER, str(tmp_path / PART_FOLDER)):
        function.wrap(rotate_checkpoints, folder, 2)
        function.wrap(rotate_checkpoints, output_dir=folder)
        method.wrap(rotate_by_method, None, True, folder)
    assert seen == [tmp_path] * 3 + [str(tmp_path)] * 3
