"""What makes a checkpoint whole, which are let go, and which one a training resumes from."""

from __future__ import annotations

import errno
import fcntl
import json
import logging
import os
import random
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any

import numpy
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader

from tests.helpers.step import Reference
from tests.helpers.trainer import FakeTrainer
from unsloth_multigpu.checkpoint.choice import Found, Wanted, check_asked, find_mode, find_newest
from unsloth_multigpu.checkpoint.claim import MARK, lock_of, take
from unsloth_multigpu.checkpoint.manifest import (
    MANIFEST,
    PART_FOLDER,
    Manifest,
    Saved,
    check,
    clear_parts,
    put_in_place,
    read_manifest,
    rotate,
    seal,
    superfluous,
)
from unsloth_multigpu.checkpoint.mode import refuse_sharded, was_sharded
from unsloth_multigpu.checkpoint.resume import Resume
from unsloth_multigpu.checkpoint.save import Checkpoints
from unsloth_multigpu.errors import DistributedError, ResumeError, SaveError, SetupError
from unsloth_multigpu.group.random_state import draw_seed, drawn_from, seeded_draws
from unsloth_multigpu.options import MultiGPUConfig
from unsloth_multigpu.seam import instance_attribute
from unsloth_multigpu.step.balance import Balancer
from unsloth_multigpu.step.cost import CostModel
from unsloth_multigpu.step.deal import Balance
from unsloth_multigpu.step.sampler import StepSampler
from unsloth_multigpu.step.step import StepShape
from unsloth_multigpu.step.stream import StepStream
from unsloth_multigpu.wire.context import RunContext

FACTS = {"max_steps": 10, "seed": 42}
FILES = [
    "config.json",
    "generation_config.json",
    "model.safetensors",
    "optimizer.pt",
    "rng_state.pth",
    "scheduler.pt",
    "trainer_state.json",
    "training_args.bin",
]


def manifest(step: int = 1, **other: Any) -> Manifest:
    given = {"run_id": "run", "world_size": 2, "is_resumable": True, "facts": FACTS, "planner": {}}
    return Manifest(step=step, cursor={"epoch": 0, "steps": step}, **{**given, **other})


def make(output_dir: Path, step: int, **other: Any) -> Path:
    folder = output_dir / f"checkpoint-{step}"
    (folder / "adapter").mkdir(parents=True)
    (folder / "optimizer.pt").write_bytes(b"moments" * 9)
    (folder / "adapter" / "weights.bin").write_bytes(b"weights" * 9)
    seal(folder, manifest(step, **other))
    return folder


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of a Trainer, sealed."""
    from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=32, num_key_value_heads=2, **sizes))
    folder = tmp_path_factory.mktemp("whole")
    args = TrainingArguments(str(folder), max_steps=1, report_to=[], use_cpu=True, disable_tqdm=True)
    rows = [{"input_ids": [1, 2, 3], "labels": [1, 2, 3]}] * 8
    Trainer(model=model, args=args, train_dataset=rows).train()  # type: ignore[arg-type]
    seal(folder / "checkpoint-1", manifest())
    return folder / "checkpoint-1"


def test_whole_checkpoint_is_whole(whole: Path) -> None:
    assert check(whole) is None
    assert sorted(p.name for p in whole.iterdir()) == sorted([*FILES, MANIFEST])
    stored = read_manifest(whole)
    assert stored is not None
    assert sorted(stored.files) == FILES
    assert stored.facts == FACTS


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 4
    path.write_bytes(content)


@pytest.mark.parametrize("name", [*FILES, MANIFEST])
@pytest.mark.parametrize("damage", ["cut", "emptied", "removed", "flipped"])
def test_damaged_file_is_named(whole: Path, tmp_path: Path, name: str, damage: str) -> None:
    folder = shutil.copytree(whole, tmp_path / "checkpoint-1")
    path = folder / name
    if damage == "cut":
        path.write_bytes(path.read_bytes()[:-1])
    elif damage == "emptied":
        path.write_bytes(b"")
    elif damage == "removed":
        path.unlink()
    else:
        flip(path)
    assert name in (check(folder) or "")


@settings(max_examples=50, deadline=None)
@given(st.data())
def test_no_flipped_bit_of_a_manifest_goes_unseen(data: st.DataObject) -> None:
    with TemporaryDirectory() as folder:
        path = make(Path(folder), 1) / MANIFEST
        content = bytearray(path.read_bytes())
        bit = data.draw(st.integers(0, len(content) * 8 - 1))
        content[bit // 8] ^= 1 << bit % 8
        path.write_bytes(content)
        assert MANIFEST in str(check(path.parent))


def test_added_files_do_not_matter(tmp_path: Path) -> None:
    folder = make(tmp_path, 1)
    (folder / "notes.txt").write_text("mine")
    assert check(folder) is None
    seal(folder, manifest())  # The older manifest is no file of it.
    assert check(folder) is None


def test_another_format_is_not_guessed(tmp_path: Path) -> None:
    from unsloth_multigpu.checkpoint import manifest as checkpoint

    folder = make(tmp_path, 1)
    body = {**json.loads((folder / MANIFEST).read_text())["manifest"], "format": 2}
    (folder / MANIFEST).write_text(json.dumps({"crc32": checkpoint._crc_of(body), "manifest": body}))
    assert "has format 2" in str(check(folder))


SAVED = st.lists(
    st.builds(Saved, st.integers(0, 30), st.floats(0, 5), st.booleans(), st.booleans()),
    max_size=8,
    unique_by=lambda s: s.step,
)


@given(SAVED, st.none() | st.integers(0, 5), st.sets(st.integers(0, 30), max_size=3))
def test_rotation_keeps_what_it_must(saved: list[Saved], limit: int | None, keep: set[int]) -> None:
    gone = superfluous(saved, limit, keep)
    left = [s for s in saved if s.step not in gone]
    assert not keep & set(gone)
    assert len(gone) == len(set(gone)) == len(saved) - len(left)
    assert any(s.is_whole for s in left) or not any(s.is_whole for s in saved)
    assert any(s.is_whole and s.is_enough for s in left) or not any(s.is_whole and s.is_enough for s in saved)
    if not limit:
        assert not gone
    elif len(left) > limit:
        # Only what must stay is left.
        assert all(s.step in keep or s.is_whole for s in left)
        assert sum(s.step not in keep for s in left) <= 1
    else:
        assert len(left) == min(limit, len(saved))


def test_oldest_goes_first(tmp_path: Path) -> None:
    assert superfluous([Saved(200, 1.0, True), Saved(10, 9.0, True), Saved(20, 19.0, True)], 2, {20}) == [200]
    # Times that are all the same say nothing.
    assert superfluous([Saved(200, 1.1, True), Saved(10, 1.2, True), Saved(20, 1.0, True)], 2, set()) == [10]
    for step in (1, 2, 3):
        make(tmp_path, step)
    (tmp_path / "checkpoint-3" / "optimizer.pt").write_bytes(b"")
    rotate(tmp_path, 1, {3})
    assert sorted(p.name for p in tmp_path.iterdir()) == ["checkpoint-2", "checkpoint-3"]


@pytest.mark.parametrize(
    ("limit", "saves_only_model", "left"),
    # It goes before the others that a training can resume from, too: 4 and 5 must not push out 2.
    [(1, False, [2, 5]), (2, False, [2, 5]), (1, True, [5]), (2, True, [4, 5])],
)
def test_last_checkpoint_to_resume_from_stays(
    tmp_path: Path, limit: int, saves_only_model: bool, left: list[int]
) -> None:
    for step in (1, 2):
        make(tmp_path, step)
    for step in (4, 5):
        make(tmp_path, step, is_resumable=False)
    rotate(tmp_path, limit, {5}, saves_only_model=saves_only_model)
    assert sorted(p.name for p in tmp_path.iterdir()) == [f"checkpoint-{step}" for step in left]


def test_checkpoint_that_is_half_removed_counts_no_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folders = [make(tmp_path, step) for step in (1, 2)]
    monkeypatch.setattr(shutil, "rmtree", lambda *_, **__: None)  # Killed before it is done.
    rotate(tmp_path, 1, {2})
    assert [check(folder) for folder in folders] == [f"{MANIFEST} is missing", None]


def test_all_is_on_the_disk_before_a_name_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[str] = []

    def noted(function: Any, place: int) -> Any:
        def call(*args: Any) -> None:
            path = args[place]
            path = os.readlink(f"/proc/self/fd/{path}") if isinstance(path, int) else path
            done.append(f"{function.__name__} {os.path.relpath(path, tmp_path)}")
            function(*args)

        return call

    for function, place in ((os.fsync, 0), (os.replace, 1), (os.rename, 1)):
        monkeypatch.setattr(os, function.__name__, noted(function, place))
    put_in_place(make(tmp_path / "part", 1), tmp_path / "checkpoint-1")
    part = "part/checkpoint-1"
    assert sorted(done[:4]) == sorted(
        f"fsync {part}{path}" for path in ("/adapter/weights.bin", "/optimizer.pt", "/adapter", "")
    )
    assert done[4:] == [
        f"fsync {part}/.{MANIFEST}",
        f"replace {part}/{MANIFEST}",
        f"fsync {part}",
        "rename checkpoint-1",
        "fsync .",
    ]


def test_older_folder_is_replaced(tmp_path: Path) -> None:
    make(tmp_path, 1, run_id="older")
    put_in_place(make(tmp_path / PART_FOLDER, 1), tmp_path / "checkpoint-1")
    stored = read_manifest(tmp_path / "checkpoint-1")
    assert stored is not None
    assert stored.run_id == "run"
    assert [p.name for p in tmp_path.iterdir()] == ["checkpoint-1"]


def test_killed_saves_are_cleared_or_finished(tmp_path: Path) -> None:
    parts = tmp_path / PART_FOLDER
    make(parts, 1)  # Sealed; killed before it got its name,
    make(tmp_path, 1, run_id="older").rename(parts / "replaced-checkpoint-1")  # and after the older one was moved.
    (make(parts, 2) / MANIFEST).unlink()  # Killed while it was written,
    make(tmp_path, 2, run_id="older").rename(parts / "replaced-checkpoint-2")
    clear_parts(tmp_path)
    stored = {p.name: read_manifest(p) for p in tmp_path.iterdir()}
    assert {name: found and found.run_id for name, found in stored.items()} == {
        "checkpoint-1": "run",
        "checkpoint-2": "older",
    }
    assert clear_parts(tmp_path / "not there") == []


def inodes(folder: Path) -> dict[str, int]:
    return {str(path.relative_to(folder)): path.stat().st_ino for path in folder.rglob("*")}


def test_what_a_living_process_saves_is_left_alone(tmp_path: Path) -> None:
    parts = tmp_path / PART_FOLDER
    (make(parts, 1) / MANIFEST).unlink()
    make(parts, 2)  # It lacks its last rename only, which its process is about to make,
    make(tmp_path, 2, run_id="older").rename(parts / "replaced-checkpoint-2")  # having moved the older one.
    for step in (3, 4):  # Of a process that was killed; the file of its lock is there.
        make(parts, step)
        lock_of(parts / f"checkpoint-{step}").touch()
    (parts / "checkpoint-4" / MANIFEST).unlink()
    (parts / "token-1").touch()
    claims = [take(parts / f"checkpoint-{step}", is_for_writing=True) for step in (1, 2)]
    before = inodes(parts)
    assert clear_parts(tmp_path) == ["checkpoint-1", "checkpoint-2"]
    left = inodes(parts)
    assert left == {name: inode for name, inode in before.items() if "checkpoint-1" in name or "checkpoint-2" in name}
    assert sorted(p.name for p in tmp_path.iterdir()) == [PART_FOLDER, "checkpoint-3"]
    for claim in claims:
        assert claim is not None
        claim.release()
    assert clear_parts(tmp_path) == []
    assert sorted(p.name for p in tmp_path.iterdir()) == ["checkpoint-2", "checkpoint-3"]
    assert (read_manifest(tmp_path / "checkpoint-2") or manifest(0)).run_id == "run"


def test_run_that_begins_says_what_it_leaves_alone(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    claim = take(tmp_path / PART_FOLDER / "checkpoint-4", is_for_writing=True)
    assert claim is not None
    ours, _ = resume_of()
    with caplog.at_level(logging.WARNING, "unsloth_multigpu"):
        ours._find_writers(tmp_path)
        assert f"another run is saving {tmp_path / 'checkpoint-4'}" in caplog.text
        caplog.clear()
        claim.release()
        ours._find_writers(tmp_path)
    assert not caplog.text
    assert not list(tmp_path.iterdir())


def test_claim_ends_with_the_process_that_has_it(tmp_path: Path) -> None:
    part = tmp_path / PART_FOLDER / "checkpoint-1"
    code = (
        "import pathlib, sys; from unsloth_multigpu.checkpoint.claim import take;"
        "claim = take(pathlib.Path(sys.argv[1]), is_for_writing=True);"
        "claim.mark(); print('taken', flush=True); input()"
    )
    command = [sys.executable, "-c", code, str(part)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "taken\n"
        assert [take(part, is_for_writing=is_for_writing) for is_for_writing in (True, False)] == [None, None]
        assert clear_parts(tmp_path) == ["checkpoint-1"]
        assert (part / MARK).is_file()
        process.kill()
        process.wait()
        assert clear_parts(tmp_path) == []
        assert not list(tmp_path.iterdir())


def test_what_is_of_others_is_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    parts, refused = tmp_path / PART_FOLDER, lock_of(tmp_path / PART_FOLDER / "checkpoint-1")
    for step in (1, 2):
        (make(parts, step) / MANIFEST).unlink()
    federated = take(parts / "rounds", is_for_writing=True)
    assert federated is not None
    (parts / "round-3").mkdir()
    real_open = os.open

    def open_own(path: Any, *args: Any, **kwargs: Any) -> int:
        if path == refused:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        return real_open(path, *args, **kwargs)

    with monkeypatch.context() as elsewhere:
        elsewhere.setattr(os, "open", open_own)
        assert clear_parts(tmp_path) == []
    assert sorted(p.name for p in parts.iterdir()) == [".rounds.lock", "checkpoint-1", "round-3"]
    assert f"{parts / 'checkpoint-1'} cannot be cleared and stays: [Errno 13] Permission denied" in caplog.text
    federated.release()


def test_lock_whose_file_was_removed_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    part, flock, removed = tmp_path / "parts" / "checkpoint-1", fcntl.flock, []

    def remove_then_lock(descriptor: int, operation: int) -> None:
        if not removed:  # Who had it released it, after it was opened here.
            lock_of(part).unlink()
            part.parent.rmdir()
            removed.append(descriptor)
        flock(descriptor, operation)

    monkeypatch.setattr(fcntl, "flock", remove_then_lock)
    claim = take(part, is_for_writing=True)
    assert removed
    assert claim is not None
    assert take(part, is_for_writing=False) is None
    claim.release()
    removed.clear()
    part.parent.mkdir()
    lock_of(part).touch()
    assert take(part, is_for_writing=False) is not None
    assert not lock_of(part).exists()


def test_lock_of_another_run_stays(tmp_path: Path) -> None:
    part = tmp_path / "parts" / "checkpoint-1"
    first = take(part, is_for_writing=True)
    shutil.rmtree(part.parent)  # By hand.
    second = take(part, is_for_writing=True)
    assert first is not None
    assert second is not None
    first.release()
    assert take(part, is_for_writing=True) is None
    second.release()
    assert not list(tmp_path.iterdir())


def test_lock_is_taken_where_a_file_has_no_lasting_number(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os.path, "samestat", lambda *_: False)
    claim = take(tmp_path / "parts" / "checkpoint-1", is_for_writing=True)
    assert claim is not None
    assert take(tmp_path / "parts" / "checkpoint-1", is_for_writing=True) is None
    claim.release()


WANTED = Wanted(2, grows_with_ranks=False)
OURS = Wanted(2, grows_with_ranks=False, facts=FACTS)


def test_newest_whole_checkpoint_is_found(tmp_path: Path) -> None:
    for step in (2, 9, 10, 11):
        make(tmp_path, step)
    flip(tmp_path / "checkpoint-11" / "adapter" / "weights.bin")
    (tmp_path / "checkpoint-10" / MANIFEST).write_text("{")
    found = find_newest(tmp_path, OURS)
    assert found.step == 9
    assert [line.removeprefix(f"{tmp_path}/") for line in found.lines] == [
        "checkpoint-11 is passed over: adapter/weights.bin was changed after it was written",
        "checkpoint-10 is passed over: unsloth_multigpu.json cannot be read",
    ]
    assert find_newest(tmp_path, OURS, at_most=8).step == 2
    assert find_newest(tmp_path / "nothing", OURS) == Found(None, ())


def test_checkpoint_of_another_training_is_passed_over(tmp_path: Path) -> None:
    make(tmp_path, 4, facts={**FACTS, "max_steps": 5})
    make(tmp_path, 3, is_resumable=False)
    make(tmp_path, 2, run_id="other")
    (make(tmp_path, 1) / MANIFEST).unlink()
    found = find_newest(tmp_path, OURS)
    assert found.step == 2
    assert [line.partition(": ")[2] for line in found.lines] == [
        "max_steps was 5, now it is 10",
        "it holds no optimizer (save_only_model=True)",
    ]
    found = find_newest(tmp_path, Wanted(2, grows_with_ranks=False, facts=FACTS, run_id="run"), at_most=2)
    assert found.step is None
    assert "it has no unsloth_multigpu.json" in found.lines[0]
    # What the script asks for by resume_from_checkpoint=True is whatever is there.
    assert find_newest(tmp_path, WANTED).step == 4
    make(tmp_path, 5, facts={**FACTS, "samples": 7})
    assert find_newest(tmp_path, OURS).lines[0].endswith("samples was 7, now it is None")


def test_checkpoint_without_manifest_is_used_when_asked_for(tmp_path: Path) -> None:
    (make(tmp_path, 7) / MANIFEST).unlink()
    for found in (find_newest(tmp_path, WANTED).lines, check_asked(tmp_path / "checkpoint-7", WANTED)):
        assert [line.partition(": ")[2] for line in found] == ["whether it is whole cannot be checked"]
    assert check_asked(tmp_path / "checkpoint-8", WANTED) == ()


def test_torn_checkpoint_that_is_asked_for_is_an_error(tmp_path: Path) -> None:
    make(tmp_path, 5)
    folder = make(tmp_path, 6)
    (folder / "optimizer.pt").write_bytes(b"")
    with pytest.raises(ResumeError, match=r"checkpoint-6 is not whole: optimizer.pt has 0 bytes of 63") as caught:
        check_asked(folder, WANTED)
    assert "Use " in caught.value.hint
    assert "checkpoint-5" in caught.value.hint
    with pytest.raises(ResumeError, match="holds no optimizer"):
        check_asked(make(tmp_path, 8, is_resumable=False), WANTED)


def test_larger_steps_need_the_same_number_of_ranks(tmp_path: Path) -> None:
    folder = make(tmp_path, 5)
    wanted = Wanted(3, grows_with_ranks=True, facts=FACTS)
    with pytest.raises(ResumeError, match=r"written by 2 rank\(s\), now there are 3") as caught:
        find_newest(tmp_path, wanted)
    assert "num_gpus=2" in caught.value.hint
    with pytest.raises(ResumeError, match="now there are 3"):
        check_asked(folder, wanted)
    assert find_newest(tmp_path, Wanted(3, grows_with_ranks=False, facts=FACTS)).step == 5


def test_nodes_with_disks_of_their_own_agree_on_the_newest_that_all_have(tmp_path: Path) -> None:
    have = [(2, 4, 6), (2, 3, 4, 5), (1, 2, 4, 6)]
    for node, steps in enumerate(have):
        for step in steps:
            make(tmp_path / str(node), step)
    meeting, texts, found = threading.Barrier(3), [""] * 3, [None, None, None]

    def run(rank: int) -> None:
        def gather_texts(text: str) -> list[str]:
            texts[rank] = text
            meeting.wait()
            everyone = list(texts)
            meeting.wait()
            return everyone

        manager: Any = SimpleNamespace(identity=SimpleNamespace(rank=rank), gather_texts=gather_texts)
        ours = Resume(None, manager, None, {}, 0, RunContext())  # type: ignore[arg-type]
        ours.writers = [0, 1, 2]
        found[rank] = ours._newest(tmp_path / str(rank), OURS)

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert found == [4, 4, 4]


class Rank:
    """The manager of one of two ranks, whose exchanges are what a test says."""

    def __init__(self, rank: int = 0, said: dict[str, str] | None = None, **options: Any) -> None:
        self.identity = SimpleNamespace(rank=rank, world_size=2, local_world_size=2)
        self.config = MultiGPUConfig(**options)
        self.said = {} if said is None else said
        self.attempts = [[0], [0]]
        self.check_same = lambda facts: None
        self.publish = self.said.__setitem__

    def gather_texts(self, text: str) -> list[str]:
        return [text, ""]

    def gather_int64(self, values: list[int]) -> list[list[int]]:
        return self.attempts

    def wait_for(self, key: str, what: str, *, timeout_s: float) -> str:
        return self.said[key]


def resume_of(trainer: Any = None, **options: Any) -> tuple[Any, Rank]:
    rank = Rank(**options)
    steps: Any = SimpleNamespace(proof=SimpleNamespace(values=dict), balancer=SimpleNamespace(), loader=None)
    return Resume(trainer, rank, steps, {}, 0, RunContext()), rank  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("attempts", "step"),
    # A node that has just joined counts from 0; the first attempt looks for nothing.
    [([[1], [1]], 2), ([[0], [1]], 2), ([[0], [0]], None)],
)
def test_restart_goes_on_from_what_the_run_itself_has_saved(
    tmp_path: Path, attempts: list[list[int]], step: int | None
) -> None:
    make(tmp_path, 2)
    make(tmp_path, 3, run_id="other")
    ours, rank = resume_of()
    ours.context = RunContext(run_id="run", attempt=attempts[0][0])
    rank.attempts = attempts
    arguments: dict[str, Any] = {}
    ours.choose(str(tmp_path), arguments, FACTS)
    found = None if step is None else str(tmp_path / f"checkpoint-{step}")
    assert arguments.get("resume_from_checkpoint") == found


def test_checkpoint_says_whether_its_training_was_sharded(tmp_path: Path) -> None:
    ours = checkpoints(trainer := Saving(tmp_path, *NEEDED), Rank())
    ours._resume.is_sharded = True
    ours._save(trainer.save, None)
    stored = read_manifest(tmp_path / "checkpoint-3")
    # What an engine writes that leaves the files of one process.
    assert was_sharded(tmp_path / "checkpoint-3", stored) is True
    assert was_sharded(tmp_path / "checkpoint-3", None) is False


@pytest.mark.parametrize(
    ("names", "was"),
    [
        (["optimizer.pt", "model.safetensors"], False),
        (["optimizer.bin", "pytorch_model_fsdp.bin", "model.safetensors"], True),
        (["optimizer_0/.metadata", "pytorch_model_fsdp_0/.metadata"], True),
        (["optimizer_dcp/.metadata", "model.safetensors"], True),
        (["model.safetensors"], None),
    ],
)
def test_files_tell_what_an_earlier_manifest_does_not(tmp_path: Path, names: list[str], was: bool | None) -> None:
    for name in names:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    seal(tmp_path, manifest())
    stored = read_manifest(tmp_path)
    body = json.loads((tmp_path / MANIFEST).read_text())["manifest"]
    assert stored == Manifest(**{**vars(stored), "is_sharded": body.pop("is_sharded")})
    assert was_sharded(tmp_path, stored) is was


@pytest.mark.parametrize("how", ["auto", "newest", "named"])
@pytest.mark.parametrize("was", [True, False])
def test_training_does_not_resume_the_other_way(tmp_path: Path, was: bool, how: str) -> None:
    make(tmp_path, 2, is_sharded=not was)
    folder = make(tmp_path, 3, is_sharded=was)
    arguments = {"auto": {}, "newest": {"resume_from_checkpoint": True}, "named": {"resume_from_checkpoint": folder}}
    ours, _ = resume_of(resume="auto" if how == "auto" else "off")
    ours.is_sharded = not was
    # Not passed over for an older one, either.
    with pytest.raises(SetupError, match=r"checkpoint-3 was written by .*\(sharded\).*") as refused:
        ours.choose(str(tmp_path), dict(arguments[how]), FACTS)
    assert f"shard='{'on' if was else 'off'}'" in refused.value.hint
    assert "load the model from that folder" in refused.value.hint
    ours.is_sharded = was
    chosen = dict(arguments[how])
    ours.choose(str(tmp_path), chosen, FACTS)
    assert str(chosen["resume_from_checkpoint"]) == str(folder)


def test_way_is_that_of_the_checkpoint_that_would_be_resumed_from(tmp_path: Path) -> None:
    assert find_mode(tmp_path / "none", FACTS) is None
    make(tmp_path, 1, is_sharded=True, world_size=8)
    make(tmp_path, 2, facts={"max_steps": 9}, is_sharded=False)
    make(tmp_path, 3, is_resumable=False, is_sharded=False)
    (make(tmp_path, 4, is_sharded=False) / "optimizer.pt").write_bytes(b"cut")
    flip(make(tmp_path, 5, is_sharded=False) / MANIFEST)
    (tmp_path / "checkpoint-6").mkdir()
    assert find_mode(tmp_path, FACTS) == (tmp_path / "checkpoint-1", True)
    # An earlier version's, without the field.
    newest = make(tmp_path, 7)
    assert find_mode(tmp_path, FACTS) == (newest, False)
    (make(tmp_path, 8) / "optimizer.pt").rename(tmp_path / "checkpoint-8" / "optimizer.bin")
    seal(tmp_path / "checkpoint-8", manifest(8))
    assert find_mode(tmp_path, FACTS) == (tmp_path / "checkpoint-8", True)


def test_checkpoint_of_an_engine_that_writes_as_one_process_does_is_not_guessed(tmp_path: Path) -> None:
    folder = make(tmp_path, 3)
    ours, _ = resume_of()
    ours.is_sharded, ours.files_tell = True, False
    ours.choose(str(tmp_path), {"resume_from_checkpoint": folder}, FACTS)
    ours.files_tell = True
    with pytest.raises(SetupError, match="not sharded"):
        ours.choose(str(tmp_path), {"resume_from_checkpoint": folder}, FACTS)


@pytest.mark.parametrize("asked", [True, "checkpoint-3"])
def test_one_process_that_is_not_steered_refuses_parts_as_well(tmp_path: Path, asked: Any) -> None:
    trainer: Any = FakeTrainer()
    trainer.args.output_dir = str(tmp_path)
    arguments = {"resume_from_checkpoint": asked if asked is True else str(tmp_path / asked)}
    refuse_sharded(trainer, {"resume_from_checkpoint": None})
    refuse_sharded(trainer, arguments)  # What is not there, the Trainer names.
    make(tmp_path, 2, is_sharded=False)
    make(tmp_path, 3, is_sharded=True)
    with pytest.raises(SetupError, match="checkpoint-3 was written by") as refused:
        refuse_sharded(trainer, arguments)
    assert "on two GPUs or more" in refused.value.hint


@pytest.mark.parametrize(("per_rank", "num_different"), [(True, 2), (False, 1)])
def test_rank_that_the_checkpoint_does_not_know_draws_as_the_seed_per_rank_says(
    tmp_path: Path, per_rank: bool, num_different: int
) -> None:
    found = set()
    for rank in (2, 3):
        args = SimpleNamespace(process_index=rank, world_size=4, seed=5)
        trainer = SimpleNamespace(args=args, state=SimpleNamespace(global_step=6))
        with seeded_draws(0):
            resume_of(trainer, rank=rank, seed_per_rank=per_rank)[0]._load_random_state(pytest.fail, str(tmp_path))
            found.add(str(draws()))
    assert len(found) == num_different


@pytest.mark.parametrize("is_skipped", [True, False])
def test_stream_goes_on_unless_the_script_lets_it_begin_again(is_skipped: bool) -> None:
    stream: Any = StepStream.__new__(StepStream)
    went_on: list[Any] = []
    stream.go_on = lambda cursor, num_skipped: went_on.append((cursor, num_skipped))
    args = SimpleNamespace(ignore_data_skip=not is_skipped)
    ours, _ = resume_of(SimpleNamespace(args=args, state=SimpleNamespace(global_step=6), model=None))
    ours._manifest, ours._folder = manifest(6), Path("none")
    ours._steps.loader = SimpleNamespace(dataset=stream, batch_sampler=None)
    ours.on_train_begin(args, None, None)
    assert went_on == [({"epoch": 0, "steps": 6}, 6)] * is_skipped


class Saving(FakeTrainer):
    """It saves after its third step."""

    def __init__(self, folder: Path, *files: str) -> None:
        super().__init__()
        self.folder, self.files = folder, files
        self.state.global_step, self.state.epoch = 3, 0.5
        self.saved_draws: list[float] = []
        self.saved_accumulation = 0
        self.args.gradient_accumulation_steps = 1  # As the loop has it.
        self.meanwhile: Callable[[], Any] = lambda: None

    def _get_output_dir(self, trial: Any = None) -> str:
        return str(self.folder)

    def save(self, model: Any, trial: Any) -> None:
        folder = Path(self._get_output_dir(), "checkpoint-3")
        for number, name in enumerate(self.files):
            if number == len(self.files) - 1:
                self.meanwhile()
            folder.mkdir(parents=True, exist_ok=True)  # As each part of the Trainer that writes does.
            (folder / name).write_bytes(b"content")
        self.saved_draws = draws()
        self.saved_accumulation = self.args.gradient_accumulation_steps
        if not self.files:
            raise OSError(28, "No space left on device")


def checkpoints(trainer: Any, rank: Rank) -> Checkpoints:
    steps: Any = SimpleNamespace(
        proof=SimpleNamespace(values=dict),
        balancer=SimpleNamespace(state_dict=dict),
        num_accumulated=4,
        loader=None,
        accumulation_of_script=lambda: instance_attribute(trainer.args, "gradient_accumulation_steps", 4),
    )
    return Checkpoints(trainer, rank, steps, None, Resume(trainer, rank, steps, {}, 0, RunContext()))  # type: ignore[arg-type]


NEEDED = ["trainer_state.json", "optimizer.pt", "model.safetensors"]


@pytest.mark.parametrize("missing", ["", *NEEDED])
def test_checkpoint_that_lacks_what_a_training_needs_is_none_to_go_on_from(tmp_path: Path, missing: str) -> None:
    files = {*NEEDED, "training_args.bin"} - {missing}
    trainer = Saving(tmp_path, *files)
    checkpoints(trainer, Rank())._save(trainer.save, None)
    stored = read_manifest(tmp_path / "checkpoint-3")
    assert stored is not None
    assert stored.is_resumable == (not missing)
    assert stored.files.keys() == files
    assert (trainer.saved_accumulation, trainer.args.gradient_accumulation_steps) == (4, 1)


def test_training_goes_on_with_the_random_state_that_an_evaluation_leaves_behind(tmp_path: Path) -> None:
    trainer = Saving(tmp_path, *NEEDED)
    ours = checkpoints(trainer, Rank())
    rows = DataLoader(range(4))

    def evaluate(*, saves: bool) -> None:
        for number, _ in enumerate(rows):
            if number == 2 and saves:  # A signal has come.
                draws()
                ours._save(trainer.save, None)

    with seeded_draws(3):
        list(rows)
        expected = draws()
    for saves in (False, True):
        with seeded_draws(3):
            ours._evaluate(evaluate, saves=saves)
            assert (trainer.saved_draws if saves else draws()) == expected


def test_file_in_the_way_of_a_checkpoint_is_moved_aside_and_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "checkpoint-3").write_text("mine")
    trainer = Saving(tmp_path, *NEEDED)
    checkpoints(trainer, Rank())._save(trainer.save, None)
    assert read_manifest(tmp_path / "checkpoint-3") is not None
    aside = tmp_path / "checkpoint-3.replaced"
    assert caplog.messages == [f"{tmp_path / 'checkpoint-3'} was a file, which is {aside} now"]
    assert (aside.read_text(), len(list(tmp_path.iterdir()))) == ("mine", 2)


def test_save_that_fails_leaves_nothing_and_is_told_to_the_other_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = Saving(tmp_path)
    monkeypatch.setattr("shutil.disk_usage", lambda folder: SimpleNamespace(free=1024 * (folder == tmp_path)))
    told = (
        rf"checkpoint-3 could not be saved, earlier .*; the disk of {tmp_path} has 1,024 bytes free: .* No space left"
    )
    with pytest.raises(OSError, match=told):
        checkpoints(trainer, Rank())._save(trainer.save, None)
    assert not list(tmp_path.iterdir())

    def fail() -> None:
        raise OSError(28, "No space left on device")

    said: dict[str, str] = {}
    with pytest.raises(OSError, match="No space"):
        checkpoints(trainer, Rank(0, said))._in_writers("name", tmp_path, fail)
    with pytest.raises(DistributedError, match="rank 0 failed to save"):
        checkpoints(trainer, Rank(1, said))._in_writers("name", tmp_path, fail)


def refuse_locks(error: int) -> Callable[[int, int], None]:
    def flock(descriptor: int, operation: int) -> None:
        raise OSError(error, os.strerror(error))

    return flock


def test_run_that_begins_while_another_saves_does_not_touch_it(tmp_path: Path) -> None:
    trainer = Saving(tmp_path, *NEEDED)
    living: list[list[str]] = []
    trainer.meanwhile = lambda: living.append(clear_parts(tmp_path))
    checkpoints(trainer, Rank())._save(trainer.save, None)
    assert living == [["checkpoint-3"]]
    assert [p.name for p in tmp_path.iterdir()] == ["checkpoint-3"]
    stored = read_manifest(tmp_path / "checkpoint-3")
    assert stored is not None
    assert stored.is_resumable
    assert stored.files.keys() == set(NEEDED)
    assert sorted(p.name for p in (tmp_path / "checkpoint-3").iterdir()) == sorted([*NEEDED, MANIFEST])


@pytest.mark.parametrize("error", [errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS])
def test_file_system_without_locks_keeps_no_run_from_saving(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: int
) -> None:
    monkeypatch.setattr(fcntl, "flock", refuse_locks(error))
    trainer = Saving(tmp_path, *NEEDED)
    checkpoints(trainer, Rank())._save(trainer.save, None)
    assert [p.name for p in tmp_path.iterdir()] == ["checkpoint-3"]
    assert check(tmp_path / "checkpoint-3") is None


@pytest.mark.parametrize("how", ["another run", "removed", "emptied", "replaced"])
def test_folder_that_was_taken_away_is_not_sealed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    monkeypatch.setattr(fcntl, "flock", refuse_locks(errno.ENOLCK))
    make(tmp_path, 2)
    trainer = Saving(tmp_path, "model.safetensors", "trainer_state.json", "rng_state.pth")
    trainer.args.save_total_limit = 1
    part = tmp_path / PART_FOLDER / "checkpoint-3"

    def take_away() -> None:
        if how == "another run":
            clear_parts(tmp_path)
        elif how == "emptied":  # `rmtree` that meets a file which was written while it removes the others.
            for path in part.iterdir():
                path.unlink()
        else:
            shutil.rmtree(part)
            if how == "replaced":
                part.mkdir()
                (part / MARK).write_text("of another run")

    trainer.meanwhile = take_away
    with pytest.raises(
        SaveError, match=r"checkpoint-3 could not be saved, earlier .* was removed or emptied"
    ) as caught:
        checkpoints(trainer, Rank())._save(trainer.save, None)
    assert "give each its own" in caught.value.hint
    assert {p.name for p in tmp_path.iterdir()} == {"checkpoint-2", PART_FOLDER}
    assert check(tmp_path / "checkpoint-2") is None
    assert part.is_dir()  # It may be the other run's.


def test_folder_that_is_taken_away_when_it_is_sealed_gets_no_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def seal_then_lose(folder: Path, sealed: Manifest) -> None:
        seal(folder, sealed)
        shutil.rmtree(folder)
        folder.mkdir()

    monkeypatch.setattr("unsloth_multigpu.checkpoint.save.seal", seal_then_lose)
    trainer = Saving(tmp_path, *NEEDED)
    with pytest.raises(SaveError, match="was removed or emptied"):
        checkpoints(trainer, Rank())._save(trainer.save, None)
    assert not (tmp_path / "checkpoint-3").exists()


def test_error_that_comes_of_the_missing_folder_is_said_to_be_of_that(tmp_path: Path) -> None:
    trainer = Saving(tmp_path, *NEEDED)

    def lose() -> None:
        shutil.rmtree(tmp_path / PART_FOLDER)
        raise FileNotFoundError(errno.ENOENT, "No such file or directory")

    trainer.meanwhile = lose
    with pytest.raises(SaveError, match="was removed or emptied") as caught:
        checkpoints(trainer, Rank())._save(trainer.save, None)
    assert isinstance(caught.value.__cause__, FileNotFoundError)
    assert not list(tmp_path.iterdir())


def test_two_runs_do_not_write_one_checkpoint(tmp_path: Path) -> None:
    trainer, other = Saving(tmp_path, *NEEDED), Saving(tmp_path, *NEEDED)
    other.meanwhile = lambda: pytest.fail("It writes.")

    def save_as_well() -> None:
        with pytest.raises(SaveError, match="another run is saving it at this moment"):
            checkpoints(other, Rank())._save(other.save, None)

    trainer.meanwhile = save_as_well
    checkpoints(trainer, Rank())._save(trainer.save, None)
    stored = read_manifest(tmp_path / "checkpoint-3")
    assert stored is not None
    assert stored.files.keys() == set(NEEDED)
    assert check(tmp_path / "checkpoint-3") is None


def test_what_a_killed_save_left_is_not_mixed_in(tmp_path: Path) -> None:
    # Its process lived when this run began.
    left = make(tmp_path / PART_FOLDER, 3)
    (left / MANIFEST).unlink()
    (left / MARK).touch()
    trainer = Saving(tmp_path, *NEEDED)
    checkpoints(trainer, Rank())._save(trainer.save, None)
    stored = read_manifest(tmp_path / "checkpoint-3")
    assert stored is not None
    assert stored.files.keys() == set(NEEDED)
    assert [p.name for p in tmp_path.iterdir()] == ["checkpoint-3"]


def test_no_rank_writes_before_the_folder_is_claimed(tmp_path: Path) -> None:
    trainer, rank = Saving(tmp_path, *NEEDED), Rank()
    order: list[Any] = []
    part = tmp_path / PART_FOLDER / "checkpoint-3"

    def gather_texts(text: str) -> list[str]:
        order.append((part / MARK).is_file() and take(part, is_for_writing=False) is None)
        return [text, ""]

    rank.gather_texts = gather_texts  # type: ignore[method-assign]
    trainer.meanwhile = lambda: order.append("writes")
    checkpoints(trainer, rank)._save(trainer.save, None)
    assert order[:2] == [True, "writes"]


def test_trainer_that_saves_to_another_place_leaves_no_folder(tmp_path: Path) -> None:
    trainer = Saving(tmp_path)
    checkpoints(trainer, Rank())._save(lambda model, trial: (tmp_path / "mine").touch(), None)
    assert [p.name for p in tmp_path.iterdir()] == ["mine"]
    # Into the final folder, by itself.
    save: Any = lambda model, trial: [make(tmp_path, 3), (tmp_path / "checkpoint-3" / MANIFEST).unlink()]  # noqa: E731
    checkpoints(trainer, Rank())._save(save, None)
    stored = read_manifest(tmp_path / "checkpoint-3")
    assert stored is not None
    assert stored.files.keys() == {"optimizer.pt", "adapter/weights.bin"}
    assert sorted(p.name for p in tmp_path.iterdir()) == ["checkpoint-3", "mine"]


def draws() -> list[float]:
    return [random.random(), float(numpy.random.rand()), float(torch.rand(())), float(numpy.random.randn())]


def test_draws_of_a_step_depend_on_its_place_alone() -> None:
    with seeded_draws(draw_seed(42, 0, 3)):
        first = draws()
    draws()
    with seeded_draws(draw_seed(42, 0, 3)):
        assert draws() == first
    with seeded_draws(draw_seed(42, 0, 4)):
        assert not set(draws()) & set(first)


def shape(rank: int) -> StepShape:
    return StepShape(rank, 2, 1, regroup=True, seed=7, rank_seed=7 + rank)


@pytest.mark.parametrize("is_stream", [False, True])
def test_each_step_of_each_epoch_draws_for_itself_on_each_rank(is_stream: bool) -> None:
    def drawn(rank: int, epoch: int) -> list[float]:
        reference = Reference(range(6), batch_size=2, collate_fn=list)  # type: ignore[arg-type]
        if is_stream:
            stream = StepStream(reference, shape(rank), lambda rows: random.random())
            stream.set_epoch(epoch)
            return [step.micro_batches[0].inputs for step in stream]
        sampler = StepSampler(reference, shape(rank), list)  # type: ignore[arg-type]
        sampler.set_epoch(epoch)
        return [index.seed for (index,) in sampler]

    places = [(rank, epoch) for rank in range(2) for epoch in range(2)]
    found = [drawn(*place) for place in places]
    assert [drawn(*place) for place in places] == found
    assert len({number for numbers in found for number in numbers}) == 4 * 3


def test_order_of_a_resumed_epoch_is_that_epochs_alone() -> None:
    reference = Reference(range(40), batch_size=40, shuffle=True)  # type: ignore[arg-type]
    sampler = StepSampler(reference, shape(0), list)  # type: ignore[arg-type]
    orders = [str(list(sampler))]
    state = sampler.order_state
    orders += [str(list(sampler))]
    sampler.resumed_order_state = state
    orders += [str(list(sampler)), str(list(sampler))]
    orders = [order.partition("seed=")[0] for order in orders]
    assert orders[2] == orders[0]
    assert len(set(orders)) == 3


def test_draws_of_a_step_leave_the_generators_alone() -> None:
    with seeded_draws(1):
        untouched = [draws(), draws()]
    with seeded_draws(1):
        mine = [draws()]
        with pytest.raises(KeyError), seeded_draws(2):  # noqa: PT012
            draws()
            raise KeyError
        assert [*mine, draws()] == untouched


def test_order_is_drawn_again_from_its_state() -> None:
    class Order:
        def __iter__(self) -> Any:
            return iter(torch.randperm(9).tolist())

    with seeded_draws(5):
        order, state = drawn_from(None, Order())
        after = draws()
    with seeded_draws(6):
        assert drawn_from(json.loads(json.dumps(state)), Order())[0] == order
        assert draws() != after
    with seeded_draws(5):
        assert drawn_from(None, [1, 2]) == ([1, 2], None)


def balancer(world_size: int = 2, **options: Any) -> Balancer:
    manager: Any = SimpleNamespace(
        config=MultiGPUConfig(**options), identity=SimpleNamespace(rank=0, world_size=world_size)
    )
    trainer = SimpleNamespace(model=torch.nn.Linear(2, 2), args=SimpleNamespace(device=torch.device("cpu")))
    made = Balancer(trainer, manager)
    made.balance = Balance(CostModel(32.0, 0.0), (1.0,) * world_size)
    return made


def test_planner_goes_on_with_what_was_measured() -> None:
    before = balancer()
    before.balance = Balance(CostModel(7.25, 3.5), (1.0, 0.125))
    before.num_steps = 40
    state = json.loads(json.dumps(before.state_dict()))
    again = balancer()
    again._go_on_from(state)
    assert again.balance == before.balance
    assert again.num_steps == 40
    # Speeds belong to their ranks.
    again = balancer(3)
    again._go_on_from(state)
    assert again.balance is not None
    assert (again.balance.cost.overhead_tokens, again.balance.cost.floor_tokens) == (7.25, 3.5)
    assert again.balance.speeds == (1.0, 1.0, 1.0)
    assert not Balancer(again._trainer, again._manager).state_dict()
