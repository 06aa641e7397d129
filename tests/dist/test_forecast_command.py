"""`unsloth-multigpu forecast` on whole scripts: one rank is measured, nothing is saved, and two ranks are compared."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.helpers.run import BARE, Finished, orphans, run_python

SCRIPT = Path(__file__).parent / "scripts" / "forecast_me.py"
FORECAST = ["-m", "unsloth_multigpu.cli.main", "forecast", "--steps", "10"]


def forecast(folder: Path, mode: str, *options: str) -> Finished:
    scratch = folder / "scratch"
    scratch.mkdir()
    run = run_python([*FORECAST, *options, "--", SCRIPT, mode], folder, {**BARE, "TMPDIR": str(scratch)})
    assert [path.name for path in scratch.iterdir() if path.name.startswith("unsloth_multigpu")] == []
    assert orphans(str(scratch)) == []
    assert not (folder / "saved").exists()
    assert [path.name for path in (folder / "out").glob("checkpoint*")] == []
    return run


@pytest.fixture(scope="module")
def checked(tmp_path_factory: pytest.TempPathFactory) -> tuple[Finished, Path]:
    """One rank, and the same steps on two."""
    folder = tmp_path_factory.mktemp("checked")
    options = ("--json", "--check", "2", "--clock", "cpu", "--gpus", "2,4,8")
    return forecast(folder, "list", *options), folder


def test_forecast_is_made_from_one_rank(checked: tuple[Finished, Path]) -> None:
    run, _ = checked
    assert run.code == 0, run.err
    found = json.loads(run.out)
    assert [row["num_ranks"] for row in found["forecasts"]] == [1, 2, 4]
    assert found["refused"] == [8]  # Six samples in a step.
    assert found["useful_up_to"] <= 6
    assert [row["num_ranks"] for row in found["curve"]] == [1, 2, 3, 4, 6]
    one, two, _ = found["forecasts"]
    assert one["total_s"] == pytest.approx(50 * one["step_s"])
    assert 0.5 * one["step_s"] < two["step_s"] < 1.5 * one["step_s"]
    assert found["measured"]["num_timed_steps"] == 8
    assert found["network"]["inner"]["source"].startswith("assumed; ")
    assert found["notes"][0].startswith("measured on a CPU")
    assert found["measured"]["num_samples"] == 6


def test_forecast_is_compared_with_two_ranks(checked: tuple[Finished, Path]) -> None:
    run, _ = checked
    check = json.loads(run.out)["check"]
    assert check["num_ranks"] == 2
    # A model this small says little of the time; examples/experiments/forecast_accuracy.py measures how good it is.
    assert 0.1 < check["ratio"] < 10.0
    first = check["first_step"]
    assert (first["ranks"], first["is_exact"]) == (2, True)
    assert first["one_process_s"] > 0 < first["dealt_s"]


@pytest.mark.thorough
def test_stream_says_what_was_assumed(tmp_path: Path) -> None:
    run = forecast(tmp_path, "stream", "--gpus", "2,8", "--link", "ethernet:25")
    assert run.code == 0, run.err
    assert "note: lengths of samples are those of the steps that were run, and samples are dealt in order" in run.out
    assert "ethernet:25 (3 GB/s: NCCL's own figures: 96 % of 25 Gbit/s, 14 us)" in run.out
    assert "the script has gone on" not in run.out + run.err


@pytest.mark.thorough
def test_scaled_batch_takes_more_samples_in_fewer_steps(tmp_path: Path) -> None:
    run = forecast(tmp_path, "scale", "--json", "--gpus", "2,64")
    assert run.code == 0, run.err
    found = json.loads(run.out)
    assert found["refused"] == []
    # max_steps stays what it is.
    assert [row["num_steps"] for row in found["forecasts"]] == [50, 50, 50]
    one, _, many = found["forecasts"]
    # One step has the seven steps of an epoch; no rank is faster by samples that another has as well.
    assert many["speed_up"] == pytest.approx(7 * one["step_s"] / many["step_s"])


@pytest.mark.thorough
def test_scaled_batch_makes_as_many_steps_as_the_run(tmp_path: Path) -> None:
    run = forecast(tmp_path, "epochs", "--json", "--gpus", "2,64")
    assert run.code == 0, run.err
    _, two, many = json.loads(run.out)["forecasts"]
    real = run_python([SCRIPT, "epochs"], tmp_path, {**BARE, "UNSLOTH_MULTIGPU_NUM_GPUS": "2"})
    # 14 micro-batches in an epoch: seven for each rank, four steps.
    assert f"the script has gone on after {two['num_steps']}\n" in real.out, real.err
    assert two["num_steps"] == 12
    # Each of 64 GPUs has one micro-batch in an epoch, most of them what others have as well.
    assert many["num_steps"] == 3
    assert many["efficiency"] < 14 / 64


@pytest.mark.thorough
def test_script_without_a_training_has_no_forecast(tmp_path: Path) -> None:
    run = run_python([*FORECAST, SCRIPT, "nothing"], tmp_path, BARE)
    assert run.code == 69
    assert "The script ended without a training that forecast could follow." in run.err
    assert "It must call train() of a transformers Trainer" in run.err
