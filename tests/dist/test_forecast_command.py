"""`unsloth-multigpu forecast` on whole scripts: one rank is measured, and nothing is saved."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.helpers.run import BARE, Finished, run_command

SCRIPT = Path(__file__).parent / "scripts" / "verify_me.py"


def forecast(folder: Path, fault: str, *options: str) -> Finished:
    script = [SCRIPT, "--rows", "225", "--fault", fault]
    # Its loss, which is a script's own, hands on to transformers'.
    env = {**BARE, "UNSLOTH_MULTIGPU_LOSS_REDUCTION": "token_sum"}
    run = run_command("forecast", "--steps", "10", *options, "--", *script, folder=folder, env=env)
    assert not (folder / "saved").exists()
    assert [path.name for path in (folder / "out").glob("checkpoint*")] == []
    return run


def test_forecast_is_made_from_one_rank(tmp_path: Path) -> None:
    run = forecast(tmp_path, "", "--json", "--gpus", "2,4,16", "--device", "cpu")
    assert run.code == 0, run.err
    found = json.loads(run.out)
    assert [row["num_ranks"] for row in found["forecasts"]] == [1, 2, 4]
    assert found["refused"] == [16]  # Nine samples in a step.
    one, two, _ = found["forecasts"]
    assert one["total_s"] == pytest.approx(50 * one["step_s"])
    assert 0.5 * one["step_s"] < two["step_s"] < 1.5 * one["step_s"]
    assert found["num_timed_steps"] == 8
    assert found["link"]["name"] == "pcie"
    assert found["notes"][0].startswith("measured on a CPU")


@pytest.mark.thorough
def test_stream_has_no_forecast(tmp_path: Path) -> None:
    run = forecast(tmp_path, "stream", "--gpus", "2,8", "--link", "ethernet:25")
    assert run.code == 69
    assert "A forecast needs the tokens of each sample" in run.err
    assert "the lengths of a stream are unknown" in run.err
