"""A signal to stop: all ranks stop at one step, what they have is saved, and the script hears of it."""

import json
import signal
import time
from pathlib import Path

import pytest

from tests.helpers.outcome import largest_difference
from tests.helpers.run import BARE, finish, orphans, start, wait_until
from unsloth_multigpu.wire.child import find_marked
from unsloth_multigpu.wire.event import REPEAT_S

SCRIPT = Path(__file__).parent / "scripts" / "preempt.py"
TWO_RANKS = {"UNSLOTH_MULTIGPU_NUM_GPUS": "2"}
GRACE_S = 60.0  # Of the script.


def steps(folder):
    return {int((folder / f"step_{rank}").read_text() or 0) for rank in range(2)}


def wait_for(folder, name, process):
    wait_until(lambda: (folder / name).exists() or process.poll() is not None, 120.0, name)
    assert process.poll() is None, finish(process).err


def run_stopped(folder, place, number, *arguments, **variables):
    """What is left when a signal has come at a place of the script."""
    process = start(arguments, folder, {**BARE, "MARK": str(folder), **variables})
    wait_for(folder, place, process)
    process.send_signal(number)
    return finish(process)


def saved_step(folder):
    (checkpoint,) = (folder / "checkpoints").glob("checkpoint-*")
    names = {path.name for path in checkpoint.iterdir()}
    assert {"model.safetensors", "optimizer.pt", "scheduler.pt", "trainer_state.json", "rng_state_1.pth"} <= names
    step = json.loads((checkpoint / "trainer_state.json").read_text())["global_step"]
    assert checkpoint.name == f"checkpoint-{step}"
    return step


def test_sigterm_in_an_evaluation_saves_the_step_before_it_and_starts_nothing_again(tmp_path):
    options = ["--evaluate", "--resume", "auto", "--max-restarts", "1"]
    run = run_stopped(tmp_path, "evaluating", signal.SIGTERM, SCRIPT, *options, **TWO_RANKS)
    assert run.code == -signal.SIGTERM, run.err
    assert run.seconds < GRACE_S
    assert steps(tmp_path) == {saved_step(tmp_path)} == {2}
    assert not (tmp_path / "evaluated").exists()
    assert "SIGTERM: the ranks finish their step, save and stop, within 60 s (grace_s)" in run.err
    assert "stopped by SIGTERM after step 2. The same command resumes from" in run.err
    assert f"{tmp_path}/checkpoints/checkpoint-2" in run.err
    assert "Starting all ranks again" not in run.err
    assert "Traceback" not in run.err
    # The exit handlers of rank 0 came to their end, and nothing of the script behind train() was run.
    assert (tmp_path / "goodbye").exists()
    assert not list(tmp_path.glob("after_training_*"))
    assert not find_marked(f"MARK={tmp_path}")


def test_ctrl_c_reaches_the_script_as_keyboard_interrupt_at_a_meeting_of_the_ranks(tmp_path):
    options = ["--strategy", "local_sgd:every_steps=4", "--save", "steps", "--catch"]
    run = run_stopped(tmp_path, "step_1", signal.SIGINT, SCRIPT, *options, **TWO_RANKS)
    assert run.code == 0, run.err
    assert {(tmp_path / f"interrupted_{rank}").read_text() for rank in range(2)} == {str(saved_step(tmp_path))}
    assert saved_step(tmp_path) % 4 == 0
    stopped = f"stopped by SIGINT after step {saved_step(tmp_path)}."
    assert f"{stopped} To resume from " in run.err
    assert len(list(tmp_path.glob("after_training_*"))) == 2


def test_ranks_of_torchrun_agree_by_their_store(tmp_path):
    torchrun = ["-m", "torch.distributed.run", "--nproc-per-node", "2"]
    run = run_stopped(tmp_path, "step_1", signal.SIGTERM, *torchrun, SCRIPT, "--save", "steps")
    assert run.code != 0
    assert steps(tmp_path) == {saved_step(tmp_path)}
    assert f"stopped by SIGTERM after step {saved_step(tmp_path)}, checkpoint={tmp_path}" in run.err
    assert not list(tmp_path.glob("after_training_*"))
    assert not find_marked(f"MARK={tmp_path}")


STUCK = """
import unsloth_multigpu as ump
ump.enable_multi_gpu(num_gpus=2, grace_s=GRACE, max_restarts=1, hang_timeout_s=0)
import os, pathlib, signal, time
from unsloth_multigpu import plugin
from unsloth_multigpu.wire.heartbeat import Phase
signal.signal(signal.SIGTERM, signal.SIG_IGN)
rank = os.environ["RANK"]
plugin._session.beat.mark(Phase.COMPUTE, step=7)
pathlib.Path("stuck_" + rank).touch()
if rank == "1":
    os.kill(os.getpid(), signal.SIGSTOP)
time.sleep(3600)
"""


@pytest.mark.parametrize("number", [signal.SIGINT, pytest.param(signal.SIGUSR1, marks=pytest.mark.thorough)])
def test_second_signal_and_the_end_of_grace_s_end_ranks_that_are_stuck(tmp_path, number):
    """One rank is stopped, the other does not listen to SIGTERM; neither comes to the end of its step."""
    is_repeated = number == signal.SIGINT
    (tmp_path / "stuck.py").write_text(STUCK.replace("GRACE", "60" if is_repeated else "1"))
    err = tmp_path / "err"
    with err.open("w") as file:
        process = start([tmp_path / "stuck.py"], tmp_path, BARE, stderr=file)
        for rank in range(2):
            wait_for(tmp_path, f"stuck_{rank}", process)
        begin_s = time.monotonic()
        process.send_signal(number)
        if is_repeated:
            # Two within a moment are one.
            wait_until(lambda: "A second signal stops them at once" in err.read_text(), 30.0, "answer")
            answered_s = time.monotonic()
            wait_until(lambda: time.monotonic() - answered_s > 2 * REPEAT_S, 20.0, "time of a second Ctrl-C")
            process.send_signal(number)
        run = finish(process)
    assert time.monotonic() - begin_s < 45.0  # Without the second signal it takes 60 s.
    assert run.code == -number
    text = err.read_text()
    late = (
        "stopped by SIGUSR1 after step 7: the ranks did not stop within grace_s=1 s and were ended. Nothing was saved."
    )
    assert ("all ranks were ended at once." if is_repeated else late) in text
    assert "Traceback" not in text
    assert not orphans(str(tmp_path))


# Killed before a new step: the checkpoint is that after the evaluation, which is not made again.
MORE_STOPS = {"killed:8": 137, "evaluation:12": -signal.SIGTERM}


@pytest.mark.parametrize("more", [{}, pytest.param(MORE_STOPS, marks=pytest.mark.thorough)], ids=len)
def test_evaluation_that_a_stop_leaves_out_or_interrupts_is_made_when_the_training_resumes(tmp_path, more):
    script = SCRIPT.with_name("stopped.py")

    def begun(name, stop):
        (tmp_path / name).mkdir(exist_ok=True)
        return start([script, stop], tmp_path / name, BARE)

    whole, first = begun("whole", "none:0"), begun("stopped", "step:7")
    runs = [finish(whole), finish(first)]
    runs += [finish(begun("stopped", stop)) for stop in (*more, "none:0")]
    assert [run.code for run in runs] == [0, -signal.SIGTERM, *more.values(), 0], [run.err for run in runs]
    assert "stopped by SIGTERM after step 8" in runs[1].err
    assert "the evaluation after step 8, which a stop prevented or interrupted, runs now" in runs[2].err
    assert not any("after step 8, which" in run.err for run in runs[3:])
    assert ("stopped by SIGTERM after step 12" in runs[-2].err) == bool(more)
    states = [
        json.loads((tmp_path / name / "checkpoints/trainer_state.json").read_text()) for name in ("whole", "stopped")
    ]
    # Early stopping has counted each evaluation once, and the last one ends the training before another step.
    assert [state["global_step"] for state in states] == [12, 12]
    losses = [[line["eval_loss"] for line in state["log_history"] if "eval_loss" in line] for state in states]
    assert losses[0] == losses[1]
    assert len(losses[0]) == 3
    for folder in ("last", "checkpoints/checkpoint-12"):
        files = [tmp_path / name / folder / "model.safetensors" for name in ("whole", "stopped")]
        assert largest_difference(*files) == 0
