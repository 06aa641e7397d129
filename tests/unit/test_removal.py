"""What rank 0 has saved is removed by rank 0: the journal, and what the other ranks do with their own calls."""

from __future__ import annotations

import functools
import os
import pickle
import shutil
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from unsloth_multigpu.checkpoint.manifest import PART_FOLDER
from unsloth_multigpu.errors import DistributedError
from unsloth_multigpu.hooks.journal import Entry, Journal, is_within, real_path, take_inventory
from unsloth_multigpu.hooks.removal import RemovalGuard, removal_patches
from unsloth_multigpu.hooks.saving import SaveGate
from unsloth_multigpu.patching import PatchRegistry
from unsloth_multigpu.wire.identity import RankIdentity

LIMIT_S = 0.3


class Ranks:
    """Two ranks in this process, with one store between them."""

    def __init__(self, per_node: int = 2, limit_s: float = LIMIT_S) -> None:
        self.store: dict[str, str] = {}
        managers = [self._manager(rank, per_node, limit_s) for rank in (0, 1)]
        self.gates = [SaveGate(rank, functools.partial(managers.__getitem__, rank)) for rank in (0, 1)]
        self.guards = [RemovalGuard(gate) for gate in self.gates]

    def _manager(self, rank: int, per_node: int, limit_s: float) -> Any:
        # What torch's store is sent arrives later, but before the answer to what it is asked next.
        sent: dict[str, str] = {}

        def is_published(key: str) -> bool:
            self.store |= sent
            sent.clear()
            return key in self.store

        return SimpleNamespace(
            identity=RankIdentity(rank, rank % per_node, 2, per_node, "torchrun"),
            config=SimpleNamespace(timeout_s=limit_s),
            publish=lambda key, value="": sent.__setitem__(key, value),
            is_published=is_published,
            wait_for=lambda key, what, *, timeout_s: self.store[key],
            is_abandoned=lambda: False,
        )

    def save(self, rank: int, path: Path) -> None:
        """As `model.save_pretrained(path)`."""

        def save(model: object, folder: Path) -> None:
            folder.mkdir(exist_ok=True)
            (folder / "weights").write_text("w")

        self.gates[rank].once(save)("model", path)

    def remove(self, rank: int, path: Path) -> None:
        self.guards[rank].as_one(shutil.rmtree, moves=False)(path)

    def call(self, rank: int, function: Any, *paths: Path) -> Any:
        return self.guards[rank].as_one(function, moves=len(paths) > 1)(*paths)


def test_late_removal_is_left_out(tmp_path: Path) -> None:
    ranks, final = Ranks(), tmp_path / "final"
    ranks.save(0, final)
    ranks.remove(1, final)
    ranks.call(1, os.remove, final / "weights")
    ranks.remove(1, tmp_path)
    assert (final / "weights").exists()
    ranks.save(1, final)  # Finds what rank 0 saved.


def test_removal_of_both_is_rank_0s(tmp_path: Path) -> None:
    ranks, final = Ranks(limit_s=20.0), tmp_path / "final"
    for rank in (0, 1):
        ranks.save(rank, final)
    waiting = threading.Thread(target=ranks.remove, args=(1, final))
    waiting.start()
    waiting.join(timeout=LIMIT_S / 4)
    assert waiting.is_alive()
    assert final.exists()
    ranks.remove(0, final)
    waiting.join(timeout=20)
    assert not waiting.is_alive()
    # And again, in the other order.
    for rank in (0, 1):
        ranks.save(rank, final)
    for rank in (0, 1):
        ranks.remove(rank, final)
    assert not final.exists()


@pytest.mark.parametrize("has_ended", [False, True])
def test_removal_of_rank_1_alone_is_an_error(tmp_path: Path, has_ended: bool) -> None:
    ranks, final = Ranks(), tmp_path / "final"
    for rank in (0, 1):
        ranks.save(rank, final)
    if has_ended:
        ranks.gates[0].end()
        ranks.gates[0].find_manager().is_published("")  # type: ignore[union-attr]
    reason = "has ended its part" if has_ended else "has not come to this call in timeout_s=0.3 s"
    with pytest.raises(DistributedError, match=f"rank 1 would remove what rank 0 saved.*{reason}") as error:
        ranks.remove(1, final)
    assert "Hint: Remove it on all ranks" in str(error.value)
    assert final.exists()


def test_own_files_go_at_once(tmp_path: Path) -> None:
    ranks, final = Ranks(), tmp_path / "final"
    ranks.save(0, final)
    own = final / "of_rank_1"
    own.touch()
    ranks.call(1, os.remove, own)
    assert not own.exists()
    with pytest.raises(FileNotFoundError):
        ranks.call(1, os.remove, own)


def test_file_of_the_same_name_on_another_node_is_its_own(tmp_path: Path) -> None:
    ranks, final = Ranks(per_node=1), tmp_path / "final"
    ranks.save(0, final)
    ranks.remove(1, final)
    assert final.exists()  # It is the same file: one disk for both nodes.
    (final / "weights").unlink()
    (final / "weights").write_text("of this node")
    ranks.remove(1, final)
    assert not final.exists()


def test_moves_are_followed(tmp_path: Path) -> None:
    ranks, aside, final = Ranks(), tmp_path / "aside", tmp_path / "final"
    for rank in (0, 1):
        ranks.save(rank, aside)
    for rank in (0, 1):
        ranks.call(rank, os.rename, aside, final)
    assert (final / "weights").exists()
    with pytest.raises(DistributedError, match="rank 1 would remove"):
        ranks.remove(1, final)
    # A file that rank 1 writes in place before a save that rank 0 has made already.
    ranks.save(0, final)
    own = tmp_path / "own"
    own.write_text("early")
    ranks.call(1, os.replace, own, final / "weights")
    assert (final / "weights").read_text() == "w"
    assert not own.exists()


def test_folder_that_vanishes_meanwhile_is_removed(tmp_path: Path) -> None:
    ranks, old = Ranks(), tmp_path / "old"
    old.mkdir()

    def remove_late(path: Path) -> None:
        shutil.rmtree(path)  # The other rank, a moment before.
        ranks.store[next(k for k in ranks.store if k.startswith("removed/"))[:-1] + "0"] = ""
        raise FileNotFoundError(path)

    remove_late.__name__ = "rmtree"
    ranks.call(1, remove_late, old)
    assert not old.exists()
    # Nobody else was at it: as in one process.
    with pytest.raises(FileNotFoundError):
        ranks.remove(0, tmp_path / "never there")


def test_model_that_is_gone_when_a_rank_comes_to_its_save_is_an_error(tmp_path: Path) -> None:
    ranks, final = Ranks(), tmp_path / "final"
    ranks.save(0, final)
    shutil.rmtree(final)
    with pytest.raises(DistributedError, match=r"final/weights is gone .* which rank 0 has not removed"):
        ranks.save(1, final)


def test_model_that_rank_0_has_removed_itself_is_no_error(tmp_path: Path) -> None:
    ranks, final = Ranks(), tmp_path / "final"
    ranks.save(0, final)
    ranks.remove(0, final)
    ranks.save(1, final)


def test_what_a_later_saver_clears_away_is_no_loss(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    ranks, final = Ranks(), tmp_path / "final"
    ranks.save(0, final)

    def convert(model: object, path: Path) -> None:
        ranks.remove(0, final)
        path.touch()

    ranks.gates[0].once(convert)("model", tmp_path / "converted")
    ranks.save(1, final)  # Comes late, and finds nothing to complain of.
    ranks.gates[0].end()
    assert caplog.messages == []


def test_loss_is_told_at_the_end(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    ranks = Ranks()
    for name in ("kept", "removed", "lost"):
        ranks.save(0, tmp_path / name)
    ranks.remove(0, tmp_path / "removed")
    shutil.rmtree(tmp_path / "lost")
    ranks.gates[0].end()
    (message,) = caplog.messages
    assert message.startswith(f"{tmp_path}/lost/weights was saved and is gone (with 0 other files)")


def test_journal_knows_what_should_be_there() -> None:
    journal, published = Journal(), {}
    manager: Any = SimpleNamespace(publish=published.__setitem__, is_published=published.__contains__)
    for path in ("/a/model", "/a/model/sub"):
        number = journal.begin(manager, Entry(f"save({path})", path))
        journal.end(manager, number, result=None, files={f"{path}/weights": (1, 2, 3)})
    assert journal.saved_in("/a").keys() == {"/a/model/weights", "/a/model/sub/weights"}
    assert journal.saved_in("/a/mod") == {}
    failed = journal.begin(manager, Entry("rmtree", "/a/model", is_removal=True))
    journal.end(manager, failed, error="PermissionError")
    assert len(journal.saved_in("/a")) == 2
    moved = journal.begin(manager, Entry("move", "/a/model/sub", "/b", is_removal=True))
    journal.end(manager, moved)
    assert journal.saved_in("/b") == {"/b/weights": (moved, (1, 2, 3))}
    assert set(published) == {f"saves/{n}{end}" for n in range(4) for end in ("", "/done")}


def test_paths_are_compared_without_links(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    assert real_path(tmp_path / "link" / "x") == str(tmp_path / "real" / "x")
    assert real_path(str(tmp_path / "link").encode()) == str(tmp_path / "link")
    folder = os.open(tmp_path / "link", os.O_RDONLY)
    try:
        assert real_path("x", folder) == str(tmp_path / "real" / "x")
    finally:
        os.close(folder)
    assert [is_within(path, "/a") for path in ("/a", "/a/b", "/ab", "/")] == [True, True, False, False]


def test_inventory_of_a_huge_folder_is_that_of_its_top(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from unsloth_multigpu.hooks import journal

    (tmp_path / "sub").mkdir()
    for name in ("a", "sub/b", "sub/c"):
        (tmp_path / name).touch()
    assert len(take_inventory(str(tmp_path))) == 3
    monkeypatch.setattr(journal, "_MAX_FILES", 2)
    assert list(take_inventory(str(tmp_path))) == [str(tmp_path / "a")]
    assert list(take_inventory(str(tmp_path / "a"))) == [str(tmp_path / "a")]


def test_patched_functions_work_are_pickled_and_come_off(tmp_path: Path) -> None:
    before = {name: vars(os)[name] for name in ("remove", "unlink", "rmdir", "rename", "replace")}
    registry = PatchRegistry(removal_patches(SaveGate(0, lambda: None)))
    registry.apply()
    try:
        assert os.remove is not before["remove"]
        assert pickle.loads(pickle.dumps(os.remove)) is os.remove
        (tmp_path / "a").touch()
        assert (tmp_path / "a").rename(tmp_path / "b") == tmp_path / "b"
        assert shutil.move(tmp_path / "b", str(tmp_path / "c")) == str(tmp_path / "c")
        (tmp_path / "c").unlink()
        (tmp_path / "d").unlink(missing_ok=True)
        shutil.rmtree(tmp_path)
        registry.verify()
    finally:
        registry.undo()
    assert {name: vars(os)[name] for name in before} == before


def test_unfinished_checkpoints_are_not_rotated(tmp_path: Path) -> None:
    from transformers import trainer

    assert hasattr(trainer, "rotate_checkpoints") != hasattr(trainer.Trainer, "_rotate_checkpoints")
    seen: list[Any] = []

    def rotate_checkpoints(output_dir: Any, save_total_limit: int | None = None) -> None:
        seen.append(output_dir)

    def rotate_by_method(self: object, use_mtime: bool = False, output_dir: Any = None) -> None:
        seen.append(output_dir)

    patches = {p.target: p for p in removal_patches(SaveGate(0, pytest.fail)) if "rotate_checkpoints" in p.target}
    function, method = patches.values()
    for folder in (tmp_path, str(tmp_path), tmp_path / PART_FOLDER, str(tmp_path / PART_FOLDER)):
        function.wrap(rotate_checkpoints)(folder, 2)
        function.wrap(rotate_checkpoints)(output_dir=folder)
        method.wrap(rotate_by_method)(None, True, folder)
    assert seen == [tmp_path] * 3 + [str(tmp_path)] * 3
