"""`unsloth-multigpu verify` on whole scripts: right ones agree, wrong ones are named, and nothing is left behind."""

from __future__ import annotations

import io
import json
import shutil
import signal
import statistics
from pathlib import Path

import pytest

from tests.helpers.run import BARE, Finished, finish, orphans, run_command, start, wait_until
from unsloth_multigpu.cli.screen import Screen
from unsloth_multigpu.step.comparison import times_in_words
from unsloth_multigpu.tools.verify.receipt import show

SCRIPT = Path(__file__).parent / "scripts" / "verify_me.py"


def verify(folder: Path, *arguments: object, code: int = 77) -> Finished:
    """Runs it in a folder of its own, with temporary files beside it, and to this exit code."""
    if not (folder / "train.py").exists():
        shutil.copy(SCRIPT, folder / "train.py")
    shutil.copy(SCRIPT.with_name("tiny_llama.py"), folder)
    run = run_command("verify", *arguments, folder=folder, env=BARE)
    assert run.code == code, run.err
    return run


def shown(receipt: dict) -> str:
    """The table of a receipt."""
    stream = io.StringIO()
    show(Screen(stream), receipt)
    return stream.getvalue()


def left(folder: Path) -> list[str]:
    """Every file and folder in it, but those that are there on purpose and temporary ones of libraries."""
    files = sorted(p.relative_to(folder) for p in folder.rglob("*"))
    expected = ("train.py", "tiny_llama.py", "__pycache__", "scratch")
    return [str(p) for p in files if p.parts[0] not in expected]


@pytest.mark.slow
def test_right_script_agrees_and_does_not_go_on(tmp_path):
    # A line that is a comment is no line.
    (tmp_path / "train.py").write_text("# enable_multi_gpu()\n" + SCRIPT.read_text())
    # The third step ends an epoch with one sample for all ranks; the others compute a filler.
    # Beside the weights, such updates are small.
    options = ["--json", "--steps", 4, "--no-dropout", "--num-gpus", 2]
    run = verify(tmp_path, *options, "train.py", "--dropout", "0.3", "--lr", 1e-5, code=0)
    found = json.loads(run.out)
    assert "One process and 2 ranks agree over 4 steps." in shown(found)
    assert found["agree"] is True
    assert (found["reasons"], found["sources"], found["schema_version"]) == ([], [], 3)
    assert [step["num_samples"] for step in found["steps"]] == [[9, 9], [9, 9], [1, 1], [9, 9]]
    assert all(step["grad_norm"][0] > 0 and step["grad_norm_difference"] < 1e-5 for step in found["steps"])
    assert all(weight["relative"] < 1e-4 for weight in found["weights"])
    assert [found["runs"][name]["world_size"] for name in ("one", "many")] == [1, 2]
    assert left(tmp_path) == []
    # Both gradients of each step from the same weights, by the ranks' own comparison, and the times of both.
    compared = [step["compared"] for step in found["steps"]]
    assert [each["step"] for each in compared] == [1, 2, 3, 4]
    assert all(each["is_exact"] and each["difference"] < 1e-6 for each in compared)
    one_s, ranks_s = found["one_process_s"], found["ranks_s"]
    assert one_s == pytest.approx(statistics.median(each["one_process_s"] for each in compared))
    assert ranks_s == pytest.approx(statistics.median(each["dealt_s"] for each in compared))
    assert times_in_words(one_s, ranks_s, 2) in shown(found)
    # On the screen is what verify does, and not what the script prints.
    said = [line.split(" took ")[0] for line in run.err.splitlines()]
    assert said == ["verify: 4 steps on one process", "verify: 4 steps on 2 ranks"]


@pytest.mark.slow
def test_gradient_of_a_wrong_scale_is_named_with_its_step(tmp_path):
    run = verify(tmp_path, "--steps", 2, "--json", "train.py", "--fault", "scaled")
    found = json.loads(run.out)
    assert "ONE PROCESS AND 2 RANKS DO NOT AGREE: step 2: gradient norm" in shown(found)
    assert "Look for code in the script that depends on the rank" in shown(found)
    assert found["agree"] is False
    assert found["steps"][1]["loss_difference"] < 1e-4
    assert 5e-3 < found["steps"][1]["grad_norm_difference"] < 2e-2
    # Both passes of the ranks see that there are ranks: only another run shows it.
    assert found["steps"][1]["compared"]["is_exact"]


@pytest.mark.thorough
@pytest.mark.slow
def test_loss_that_ranks_cannot_share_is_found_from_the_same_weights(tmp_path):
    run = verify(tmp_path, "--json", "--steps", 2, "train.py", "--fault", "counter", "--dropout", "0.3")
    draws = "dropout: draws random numbers, which differ between ranks and one process. To avoid it: --no-dropout"
    found = json.loads(run.out)
    assert draws in shown(found)
    same_weights = "the gradient from the same weights, as one process and as dealt, differs by"
    assert any(same_weights in reason for reason in found["reasons"])
    assert not found["steps"][0]["compared"]["is_exact"]


@pytest.mark.thorough
@pytest.mark.slow
def test_rank_with_other_weights_is_found_whatever_the_script_says(tmp_path):
    # Nor where it has gone before its line starts the ranks.
    line = "import os\nos.makedirs('below', exist_ok=True)\nos.chdir('below')\n"
    line += "from unsloth_multigpu import enable_multi_gpu\nenable_multi_gpu(verify_every=0)\n"
    (tmp_path / "train.py").write_text(line + SCRIPT.read_text())
    run = verify(tmp_path, "--steps", 2, "train.py", "--fault", "one_rank")
    assert "DivergenceError" in run.err
    assert "verify: 2 steps on 2 ranks ended with exit code 77." in run.err


def test_script_that_trains_nothing_is_told_so(tmp_path):
    run = verify(tmp_path, "train.py", "--fault", "no_training", code=69)
    said = "error: train.py --fault no_training ended without a training that verify could record. The end of "
    assert said in run.err
    assert "Hint: It must call train()" in run.err


def test_exit_code_of_the_script_is_passed_on(tmp_path):
    (tmp_path / "train.py").write_text("import sys\nprint('words')\nsys.exit(3)\n")
    run = verify(tmp_path, "train.py", code=3)
    assert "words\n" in run.err
    assert run.err.endswith("verify: 5 steps on one process ended with exit code 3.\n")
    assert run.out == ""


@pytest.mark.thorough
def test_stuck_and_stopped_runs_are_ended(tmp_path):
    (tmp_path / "train.py").write_text("import time\nprint('here', flush=True)\ntime.sleep(600)\n")
    run = verify(tmp_path, "--timeout-s", 5, "train.py", code=124)
    assert "did not reach its end within timeout_s=5 seconds" in run.err
    assert "The end of its output:\n" in run.err
    # By SIGTERM, which the whole run must hear of.
    (tmp_path / "train.py").write_text("import time\nopen('here', 'w').close()\ntime.sleep(600)\n")
    command = ["-m", "unsloth_multigpu", "verify", "train.py"]
    process = start(command, tmp_path, {"TMPDIR": str(tmp_path / "scratch")})
    wait_until((tmp_path / "here").exists, 60, "the script")
    process.send_signal(signal.SIGTERM)
    assert finish(process).code == 128 + signal.SIGTERM
    assert orphans(str(tmp_path)) == []
    assert list((tmp_path / "scratch").glob("unsloth_multigpu*")) == []
