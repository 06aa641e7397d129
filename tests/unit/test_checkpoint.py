"""What makes a checkpoint complete, which are deleted, and which one a training resumes from."""

import hashlib
import os
import random
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import numpy
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from tests.helpers.board import manager_of
from tests.helpers.trainer import FakeTrainer
from unsloth_multigpu.checkpoint.manifest import (
    MANIFEST,
    PART_FOLDER,
    Manifest,
    check,
    clear_parts,
    put_in_place,
    read_manifest,
    saving_in,
    seal,
)
from unsloth_multigpu.checkpoint.resume import Resume, check_asked, find_newest
from unsloth_multigpu.checkpoint.save import Checkpoints
from unsloth_multigpu.errors import ResumeError, SaveError, SetupError
from unsloth_multigpu.group.random_state import draw_seed, seeded_draws
from unsloth_multigpu.options import MultiGPUConfig
from unsloth_multigpu.part import GradientExchange
from unsloth_multigpu.seam import instance_attribute
from unsloth_multigpu.wire.context import RunContext
from unsloth_multigpu.wire.heartbeat import HeartbeatPage

FACTS = {"max_steps": 10, "seed": 42}


def make(output_dir, step, **other):
    folder = output_dir / f"checkpoint-{step}"
    (folder / "adapter").mkdir(parents=True)
    (folder / "optimizer.pt").write_bytes(b"moments" * 9)
    (folder / "adapter" / "weights.bin").write_bytes(b"weights" * 9)
    given = {"run_id": "run", "world_size": 2, "is_resumable": True, "facts": FACTS, **other}
    seal(folder, Manifest(step=step, cursor={"epoch": 0, "steps": step}, **given))
    return folder


def cut(path):
    path.write_bytes(path.read_bytes()[:-1])


def flip(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 4
    path.write_bytes(content)


@pytest.mark.parametrize("name", ["optimizer.pt", MANIFEST])
@pytest.mark.parametrize("damage", [cut, Path.unlink, flip])
def test_damaged_file_is_named(tmp_path, name, damage):
    folder = make(tmp_path, 1)
    assert check(folder) is None
    damage(folder / name)
    assert name in (check(folder) or "")


def test_all_is_on_the_disk_before_a_name_says_so(tmp_path, monkeypatch):
    done = []

    def noted(function, place):
        def call(*args):
            path = args[place]
            path = os.readlink(f"/proc/self/fd/{path}") if isinstance(path, int) else path
            done.append(f"{function.__name__} {os.path.relpath(path, tmp_path)}")
            function(*args)

        return call

    for function, place in ((os.fsync, 0), (os.replace, 1), (os.rename, 1)):
        monkeypatch.setattr(os, function.__name__, noted(function, place))
    put_in_place(make(tmp_path / "part", 1), tmp_path / "checkpoint-1")
    part = "part/checkpoint-1"
    files = ("", "/adapter", "/adapter/weights.bin", "/optimizer.pt")
    assert sorted(done[:4]) == [f"fsync {part}{path}" for path in files]
    sealing = [f"fsync {part}/.{MANIFEST}", f"replace {part}/{MANIFEST}", f"fsync {part}"]
    assert done[4:] == [*sealing, "rename checkpoint-1", "fsync ."]


def test_older_folder_is_replaced(tmp_path):
    make(tmp_path, 1, run_id="older")
    put_in_place(make(tmp_path / PART_FOLDER, 1), tmp_path / "checkpoint-1")
    assert sealed(tmp_path / "checkpoint-1").run_id == "run"
    assert [p.name for p in tmp_path.iterdir()] == ["checkpoint-1"]


def test_killed_saves_are_cleared_or_finished(tmp_path):
    parts = tmp_path / PART_FOLDER
    make(parts, 1)  # Sealed; killed before it got its name,
    make(tmp_path, 1, run_id="older").rename(parts / "replaced-checkpoint-1")  # and after the older one was moved.
    (make(parts, 2) / MANIFEST).unlink()  # Killed while it was written,
    make(tmp_path, 2, run_id="older").rename(parts / "replaced-checkpoint-2")
    clear_parts(tmp_path)
    stored = {p.name: sealed(p).run_id for p in tmp_path.iterdir()}
    assert stored == {"checkpoint-1": "run", "checkpoint-2": "older"}
    assert clear_parts(tmp_path / "not there")


def sealed(folder):
    return read_manifest(folder) or pytest.fail(f"{folder} has no manifest")


def test_what_a_living_process_saves_is_left_alone(tmp_path):
    parts = tmp_path / PART_FOLDER
    (make(parts, 1) / MANIFEST).unlink()
    make(parts, 2)  # It lacks its last rename only, which its process is about to make,
    make(tmp_path, 2, run_id="older").rename(parts / "replaced-checkpoint-2")  # having moved the older one.
    before = sorted(tmp_path.rglob("*"))
    with saving_in(tmp_path) as is_alone:
        assert is_alone
        assert not clear_parts(tmp_path)
    assert sorted(tmp_path.rglob("*")) == before
    assert clear_parts(tmp_path)
    assert [p.name for p in tmp_path.iterdir()] == ["checkpoint-2"]
    assert sealed(tmp_path / "checkpoint-2").run_id == "run"


def test_newest_complete_checkpoint_is_found(tmp_path, caplog):
    for step in (2, 9, 10, 11):
        make(tmp_path, step)
    flip(tmp_path / "checkpoint-11" / "adapter" / "weights.bin")
    (tmp_path / "checkpoint-10" / MANIFEST).write_text("{")
    assert find_newest(tmp_path, FACTS) == tmp_path / "checkpoint-9"
    changed, unreadable = (line.removeprefix(f"{tmp_path}/") for line in caplog.messages)
    assert changed == "checkpoint-11 is skipped: adapter/weights.bin was changed after it was written"
    assert unreadable == "checkpoint-10 is skipped: unsloth_multigpu.json cannot be read"
    assert find_newest(tmp_path / "nothing", FACTS) is None


def test_checkpoint_of_another_training_is_passed_over(tmp_path, caplog):
    make(tmp_path, 4, facts={**FACTS, "max_steps": 5})
    make(tmp_path, 3, is_resumable=False)
    make(tmp_path, 2, run_id="other")
    (make(tmp_path, 1) / MANIFEST).unlink()
    assert find_newest(tmp_path, FACTS) == tmp_path / "checkpoint-2"
    reasons = [line.partition(": ")[2] for line in caplog.messages]
    assert reasons == ["max_steps was 5, now it is 10", "it has no optimizer (save_only_model=True)"]
    assert find_newest(tmp_path, FACTS, "run") is None
    assert "it has no unsloth_multigpu.json" in caplog.messages[-1]
    # What the script asks for by resume_from_checkpoint=True is whatever is there.
    assert find_newest(tmp_path) == tmp_path / "checkpoint-4"
    make(tmp_path, 5, facts={**FACTS, "samples": 7})
    caplog.clear()
    find_newest(tmp_path, FACTS)
    assert caplog.messages[0].endswith("samples was 7, now it is None")


def test_checkpoint_without_manifest_is_used_when_asked_for(tmp_path, caplog):
    (make(tmp_path, 7) / MANIFEST).unlink()
    assert find_newest(tmp_path) == tmp_path / "checkpoint-7"
    for step in (7, 8):  # There is no checkpoint 8, which Hugging Face tells.
        check_asked(tmp_path / f"checkpoint-{step}")
    said = [line.partition(", ")[2] for line in caplog.messages]
    assert said == ["so it cannot be checked for completeness"] * 2


def test_incomplete_checkpoint_that_is_asked_for_is_an_error(tmp_path):
    make(tmp_path, 5)
    folder = make(tmp_path, 6)
    (folder / "optimizer.pt").write_bytes(b"")
    told = r"cannot resume from .*checkpoint-6: optimizer.pt has 0 bytes of 63"
    with pytest.raises(ResumeError, match=told) as caught:
        check_asked(folder)
    assert "Use " in caught.value.hint
    assert "checkpoint-5" in caught.value.hint
    with pytest.raises(ResumeError, match="has no optimizer"):
        check_asked(make(tmp_path, 8, is_resumable=False))


def rank_of(attempts=(0, 0), **options):
    """The manager of the first of two ranks, which exchange nothing but their attempts."""
    manager = manager_of(None, 0, 2, MultiGPUConfig(**options))
    manager.check_same = lambda facts: None
    manager.gather_json = lambda value: [[attempt, "key"] for attempt in attempts]
    manager.broadcast_json = lambda value: value
    manager.lead = lambda key, what, work, *, timeout_s: work()
    return manager


def resume_of(*attempts, **options):
    context = RunContext(run_id="run" if attempts else None, attempt=next(iter(attempts), 0))
    resume = Resume(None, rank_of(attempts or (0, 0), **options), None, {}, 0, context, None)
    resume.facts = FACTS
    return resume


@pytest.mark.parametrize(
    ("attempts", "step"),
    # A node that has just joined counts from 0; the first attempt looks for nothing.
    [((1, 1), 2), ((0, 1), 2), ((0, 0), None)],
)
def test_restart_goes_on_from_what_the_run_itself_has_saved(tmp_path, attempts, step):
    make(tmp_path, 2)
    make(tmp_path, 3, run_id="other")
    ours = resume_of(*attempts)
    ours.choose(str(tmp_path))
    found = None if step is None else str(tmp_path / f"checkpoint-{step}")
    assert ours.arguments.get("resume_from_checkpoint") == found


def asking(how, folder, *, is_sharded=False, **options):
    """A training that looks for a checkpoint, in one of the ways to ask for one."""
    ours = resume_of(resume="auto" if how == "auto" else "off", **options)
    if how != "auto":
        ours.arguments["resume_from_checkpoint"] = True if how == "newest" else folder
    ours.is_sharded = is_sharded
    return ours


@pytest.mark.parametrize("how", ["auto", "newest", "named"])
@pytest.mark.parametrize(
    ("stored", "theirs", "ours", "refused", "hint"),
    [
        ({"is_sharded": True}, {"is_sharded": True}, {}, SetupError, "shard='on'"),
        ({"is_sharded": False}, {}, {"is_sharded": True}, SetupError, "shard='off'"),
        ({"world_size": 3}, {}, {"global_batch": "scale"}, ResumeError, "Set num_gpus=3"),
    ],
)
def test_training_does_not_resume_in_another_mode(tmp_path, how, stored, theirs, ours, refused, hint):
    make(tmp_path, 2, is_sharded=not stored.get("is_sharded", True))
    folder = make(tmp_path, 3, **stored)
    # Not passed over for an older one, either.
    by = r"checkpoint-3 was written by (ranks that each held .*\(sharded\)|3 rank)"
    with pytest.raises(refused, match=by) as told:
        asking(how, folder, **ours).choose(str(tmp_path))
    assert hint in told.value.hint
    same = asking(how, folder, **theirs)
    same.choose(str(tmp_path))
    assert str(same.arguments["resume_from_checkpoint"]) == str(folder)


def test_seeds_of_places_stay_those_that_checkpoints_were_trained_with():
    for place in ((42, 0, 3), (0,), (2**40, 1, 0)):
        digest = hashlib.blake2b(repr(place).encode(), digest_size=8).digest()
        assert draw_seed(*place) == int.from_bytes(digest, "little") >> 1


class Saving(FakeTrainer):
    """It saves after its third step, once the weights of all ranks are equal."""

    def __init__(self, folder, *files):
        super().__init__()
        self.folder, self.files = folder, files
        self.state.global_step, self.state.epoch = 3, 0.5
        self.args.gradient_accumulation_steps = 1  # As the loop has it.
        self.meanwhile, self.is_equal = lambda: None, False

    def _get_output_dir(self, trial=None):
        return str(self.folder)

    def save(self, model, trial):
        assert self.is_equal
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


def checkpoints(trainer, rank):
    accumulation = partial(instance_attribute, trainer.args, "gradient_accumulation_steps", 4)
    passes = SimpleNamespace(accumulation_of_script=accumulation)
    steps = SimpleNamespace(proof=SimpleNamespace(values=dict), loader=None, passes=passes)
    exchange = GradientExchange(trainer, rank)
    exchange.before_read = lambda: setattr(trainer, "is_equal", True)
    resume = Resume(trainer, rank, steps, {}, 0, RunContext(), exchange)
    return Checkpoints(trainer, rank, steps, exchange, resume, HeartbeatPage(None, 0))


NEEDED = ["trainer_state.json", "optimizer.pt", "model.safetensors"]


@pytest.mark.parametrize("missing", ["", *NEEDED])
def test_checkpoint_that_lacks_what_a_training_needs_is_none_to_go_on_from(tmp_path, missing):
    files = {*NEEDED, "training_args.bin"} - {missing}
    trainer = Saving(tmp_path, *files)
    checkpoints(trainer, rank_of())._save(trainer.save, None)
    stored = sealed(tmp_path / "checkpoint-3")
    assert stored.is_resumable == (not missing)
    assert stored.files.keys() == files
    assert (trainer.saved_accumulation, trainer.args.gradient_accumulation_steps) == (4, 1)


def test_training_goes_on_with_the_random_state_that_an_evaluation_leaves_behind(tmp_path):
    trainer = Saving(tmp_path, *NEEDED)
    ours = checkpoints(trainer, rank_of())
    rows = DataLoader(range(4))

    def evaluate(*, saves):
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


def test_repeated_evaluation_that_ends_the_training_lets_no_step_follow(tmp_path):
    trainer = FakeTrainer()
    trainer._maybe_log_save_evaluate = lambda *_: setattr(trainer.control, "should_training_stop", True)
    ours = Resume(trainer, None, None, {}, 0, RunContext(), None)
    ours._is_evaluation_due, ours._folder = True, tmp_path
    ours.overrides()["_load_rng_state"](lambda checkpoint: None, tmp_path)
    assert ours.overrides()["get_batch_samples"](pytest.fail) == ([], None)


def test_save_that_fails_leaves_nothing(tmp_path, monkeypatch):
    trainer = Saving(tmp_path)
    monkeypatch.setattr("shutil.disk_usage", lambda folder: SimpleNamespace(free=1024 * (folder == tmp_path)))
    told = rf"checkpoint-3 could not be saved, earlier .*; the disk of {tmp_path} has 1,024 bytes free: .* No space"
    with pytest.raises(OSError, match=told):
        checkpoints(trainer, rank_of())._save(trainer.save, None)
    assert not list(tmp_path.iterdir())


def test_two_runs_do_not_write_one_checkpoint(tmp_path):
    trainer, other = Saving(tmp_path, *NEEDED), Saving(tmp_path, *NEEDED)
    other.meanwhile = lambda: pytest.fail("It writes.")

    def save_as_well():
        with pytest.raises(SaveError, match="another run is saving in"):
            checkpoints(other, rank_of())._save(other.save, None)

    trainer.meanwhile = save_as_well
    checkpoints(trainer, rank_of())._save(trainer.save, None)
    assert sealed(tmp_path / "checkpoint-3").files.keys() == set(NEEDED)
    assert check(tmp_path / "checkpoint-3") is None


def test_what_a_killed_save_left_is_not_mixed_in(tmp_path):
    # Its process lived when this run began.
    left = make(tmp_path / PART_FOLDER, 3)
    (left / MANIFEST).unlink()
    trainer = Saving(tmp_path, *NEEDED)
    checkpoints(trainer, rank_of())._save(trainer.save, None)
    assert sealed(tmp_path / "checkpoint-3").files.keys() == set(NEEDED)
    assert [p.name for p in tmp_path.iterdir()] == ["checkpoint-3"]


def test_trainer_that_saves_to_another_place_leaves_no_folder(tmp_path):
    trainer = Saving(tmp_path)
    checkpoints(trainer, rank_of())._save(lambda model, trial: (tmp_path / "mine").touch(), None)
    assert [p.name for p in tmp_path.iterdir()] == ["mine"]
    # Into the final folder, by itself.
    save = lambda model, trial: [make(tmp_path, 3), (tmp_path / "checkpoint-3" / MANIFEST).unlink()]  # noqa: E731
    checkpoints(trainer, rank_of())._save(save, None)
    assert sealed(tmp_path / "checkpoint-3").files.keys() == {"optimizer.pt", "adapter/weights.bin"}
    assert sorted(p.name for p in tmp_path.iterdir()) == ["checkpoint-3", "mine"]


def draws():
    return [random.random(), float(numpy.random.rand()), float(torch.rand(())), float(numpy.random.randn())]


def loads(model, *missing):
    """What transformers is told after a load that has not found some names."""
    told = []
    args = SimpleNamespace(load_best_model_at_end=True)
    resume = Resume(SimpleNamespace(model=model, args=args), None, None, {}, 0, RunContext(), None)
    resume.overrides()["_issue_warnings_after_load"](told.append, SimpleNamespace(missing_keys=missing))
    return told


def test_training_does_not_go_on_without_its_weights():
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    with pytest.raises(SetupError, match=r"without 2 of 4 trained weights, such as 0\.weight"):
        loads(model, "0.weight", "0.bias")
    model[0].requires_grad_(False)
    assert len(loads(model, "0.weight", "0.bias")) == 1  # Frozen ones are those of the script.
    model._keys_to_ignore_on_save = ["1.bias"]
    assert len(loads(model, "1.bias")) == 1  # transformers does not write it, and ties it.
    assert len(loads(model)) == 1
    shared = nn.ModuleDict({"embed": nn.Linear(2, 2, bias=False), "head": nn.Linear(2, 2, bias=False)})
    shared["head"].weight = shared["embed"].weight
    assert len(loads(shared, "embed.weight")) == 1  # One name of a shared weight is enough.
    with pytest.raises(SetupError, match=r"without 1 of 1 trained weights, such as embed\.weight"):
        loads(shared, "embed.weight", "head.weight")
