"""A rank's page: phases that the guard marks, and what its supervisor reads of it; what a rank draws."""

import os
import sys
import time
from itertools import product
from types import SimpleNamespace
from unittest.mock import MagicMock

import pytest
import torch
from transformers import TrainerCallback

from tests.helpers.board import manager_of
from tests.helpers.trainer import FakeTrainer
from unsloth_multigpu.train.loop import Loop
from unsloth_multigpu.train.progress import CallbackPhase, PhaseMarks, Progress
from unsloth_multigpu.wire.heartbeat import Heartbeat, HeartbeatPage, Phase, read_beats


@pytest.mark.parametrize("arguments", [(), ("CallbackArgs",)])
def test_compiler_marks_its_time(monkeypatch, arguments):
    page, begins, ends = HeartbeatPage(None, 0), [], []
    of_starts = {"register_start_callback": begins.append, "remove_start_callback": begins.remove}
    of_ends = {"register_end_callback": ends.append, "remove_end_callback": ends.remove}
    handler = SimpleNamespace(start_callbacks=begins, **of_starts, **of_ends)
    monkeypatch.setitem(sys.modules, "torch._dynamo.callback", SimpleNamespace(callback_handler=handler))
    trainer = FakeTrainer()
    with Loop(trainer, [PhaseMarks(trainer, page)]).steering():
        for _ in range(2):
            trainer.get_batch_samples(iter([]), 1, None)
        page.mark(Phase.COMPUTE)
        (begin,), (end,) = begins, ends
        begin(*arguments)
        assert page.phase == Phase.COMPILE
        begin(*arguments)
        end(*arguments)
        assert page.phase == Phase.COMPUTE
        begin(*arguments)
        page.mark(Phase.UPDATE)  # The main thread has gone on.
        end(*arguments)
        assert page.phase == Phase.UPDATE
    assert begins == ends == []


class Noting(FakeTrainer):
    """Notes what the page says where it is called."""

    def __init__(self, page):
        super().__init__()
        self.page = page
        self.seen = []

    def note(self, name):
        self.seen.append((name, self.page.phase, self.page.micro_batch))

    def get_batch_samples(self, *_):
        self.note("samples")

    def training_step(self, *_):
        self.note("step")

    def _maybe_log_save_evaluate(self):
        self.note("log")


class OfTheScript(TrainerCallback):
    """Stands before ours, as a script's callbacks do. What it does may take long."""

    def __init__(self, trainer):
        self._trainer = trainer

    def on_step_end(self, *_, **__):
        self._trainer.event("on_log")  # As by `Trainer.log`.
        self._trainer.note(f"callback behind step {self._trainer.page.step}")


def test_training_is_marked_phase_by_phase():
    page = HeartbeatPage(None, 0)
    trainer = Noting(page)
    trainer.add_callback(OfTheScript(trainer))
    page.mark(step=7)
    with Loop(trainer, [CallbackPhase(page), PhaseMarks(trainer, page)]).steering():
        assert (page.phase, page.step) == (Phase.SETUP, 0)
        for num_micro_batches, is_last in ((2, False), (1, True)):
            trainer.get_batch_samples()
            for _ in range(num_micro_batches):
                trainer.training_step()
            trainer.note("update")
            trainer.event("on_optimizer_step")
            trainer.state.global_step += 1
            trainer.control.should_save = trainer.control.should_training_stop = is_last
            trainer.event("on_step_end")
            trainer._maybe_log_save_evaluate()
        assert page.phase == Phase.SAVE
        trainer.event("on_epoch_end")
        assert page.phase == Phase.ENDED
    assert (page.phase, page.step) == (Phase.SCRIPT, 2)
    assert [(name, phase.name, passes) for name, phase, passes in trainer.seen] == [
        ("samples", "SETUP", 0),
        ("step", "WARM_UP", 0),
        ("step", "WARM_UP", 1),
        ("update", "WARM_UP", 2),  # Who reads a number here waits for all that the device was asked to do.
        ("callback behind step 1", "CALLBACKS", 0),
        ("log", "UPDATE", 0),
        ("samples", "DATA", 0),
        ("step", "COMPUTE", 0),
        ("update", "UPDATE", 1),
        ("callback behind step 2", "CALLBACKS", 0),
        ("log", "SAVE", 0),
    ]
    trainer.get_batch_samples()
    assert page.phase == Phase.SCRIPT


def test_each_rank_draws_its_own_numbers_also_behind_a_resume():
    trainer, drawn = FakeTrainer(seed=7), set()
    for rank, trainer.state.global_step in product((2, 3), (0, 6)):
        progress = Progress(trainer, manager_of(None, rank, 4), *[None] * 5)
        progress.on_train_begin(trainer.args, trainer.state, trainer.control)
        drawn.add(float(torch.rand(())))
    assert len(drawn) == 4


def test_page_says_where_each_rank_is(tmp_path):
    pages = [HeartbeatPage(tmp_path, rank) for rank in (0, 11)]
    pages[0].mark(Phase.COMPUTE, step=7, micro_batch=3)
    begin = time.monotonic()
    pages[1].mark(step=2**40)
    pages[1].pulse(12)
    beats = read_beats(tmp_path)
    assert (beats[0].step, beats[0].phase, beats[0].micro_batch, beats[0].collective) == (7, Phase.COMPUTE, 3, -1)
    assert (beats[11].step, beats[11].phase, beats[11].collective) == (2**40, Phase.SCRIPT, 12)
    assert begin <= beats[11].progress_s <= beats[11].alive_s <= time.monotonic()


def test_longest_work_is_told_and_callbacks_are_none(tmp_path, monkeypatch):
    """A device may have all of a step still to do where the main thread reads its first number of it."""
    clock = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    page = HeartbeatPage(tmp_path, 0)

    def after(seconds, *phase, **place):
        clock[0] += seconds
        page.mark(*phase, **place)
        return read_beats(tmp_path)[0].longest_s

    def step(*works_s, callbacks_s=50.0):
        after(0, Phase.DATA)
        after(callbacks_s, Phase.COMPUTE)
        for i, work_s in enumerate(works_s):
            after(0, micro_batch=i)
            after(work_s)
        after(0, Phase.UPDATE, micro_batch=len(works_s))
        after(2.0, is_done=True)
        return after(callbacks_s, Phase.UPDATE, step=page.step + 1, micro_batch=0)

    assert after(30.0, Phase.SETUP) == 0.0
    assert step(40.0, 3.0) == 40.0  # Kernels are compiled.
    assert [step(1.0, 5.0) for _ in range(4)] == [40.0, 40.0, 40.0, 5.0]
    assert step(1.0) == 5.0
    assert step(0.1, 0.1, callbacks_s=90.0) == 5.0
    after(0, Phase.COMPUTE)
    after(0.5, Phase.COMPILE)
    after(70.0, Phase.COMPUTE)  # torch.compile has a limit of its own.
    assert after(6.0, Phase.UPDATE, micro_batch=1) == 6.0
    assert after(7.0) == 7.0


def test_restarted_rank_begins_before_the_first_step(tmp_path):
    first = HeartbeatPage(tmp_path, 0)
    first.mark(Phase.COMPUTE, step=7)
    first.pulse(9)
    HeartbeatPage(tmp_path, 0)
    beat = read_beats(tmp_path)[0]
    assert beat == Heartbeat(progress_s=beat.progress_s, pid=os.getpid())


def test_page_is_written_at_once_and_passed_over_while_it_is_made(tmp_path):
    """A reader that saw zeros for a moment would take the rank for hung."""
    page = HeartbeatPage(tmp_path, 0)
    page._memory = MagicMock()
    page.mark(Phase.COMPUTE, step=5)
    page.pulse(2)
    assert [any(call.args[1]) for call in page._memory.__setitem__.call_args_list] == [True, True]
    (tmp_path / "beat_rank_1").touch()
    assert list(read_beats(tmp_path)) == [0]
