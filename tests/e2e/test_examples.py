"""The examples run as they are, offline."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.helpers.run import ROOT, run_python
from tests.helpers.tiny import build_tiny, topics

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

EXAMPLES = ROOT / "examples"
# Two CPU ranks on every machine, so that the figures are those of fp32.
ENV = {"PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""}


def test_quick_start_shows_that_ranks_and_one_process_agree(tmp_path: Path) -> None:
    run = run_python([EXAMPLES / "ddp_quick_start.py", "--steps", "3", "--batch-size", "6"], tmp_path, ENV)
    assert run.code == 0, f"{run.out[-2000:]}\n{run.err[-4000:]}"
    assert re.search(r"1 process +2 ranks\n", run.out)
    assert "The runs agree" in run.out
    assert run.out.count("Generated: ") == 1
    assert run.out.count("step  3/3") == 2  # Once without the plugin, once with it.
    assert "samples per step: 6 = 2 ranks x 3 samples x 1 accumulation" in run.err


def test_quick_start_fails_where_the_runs_differ(tmp_path: Path) -> None:
    # Each rank takes the whole batch: another training, which the example must not call the same.
    env = {**ENV, "UNSLOTH_MULTIGPU_GLOBAL_BATCH": "scale"}
    (tmp_path / "texts.txt").write_text("\n".join(topics(12, max_words=30)))
    options = ["--model", build_tiny(tmp_path / "model"), "--dataset", "texts.txt", "--steps", "2", "--batch-size", "4"]
    run = run_python([EXAMPLES / "ddp_quick_start.py", *options], tmp_path, env)
    assert run.code == 1, f"{run.out[-2000:]}\n{run.err[-4000:]}"
    assert "THE RUNS DO NOT AGREE" in run.out
    assert "differ by more than rounding explains" in run.err


@pytest.mark.parametrize("name", ["plain_transformers", "dpo"])
def test_example_trains_on_every_device(name: str, tmp_path: Path) -> None:
    run = run_python([EXAMPLES / f"{name}.py"], tmp_path, ENV)
    assert run.code == 0, f"{run.out[-2000:]}\n{run.err[-4000:]}"
    assert run.out.count("2 ranks") == 1
    assert (tmp_path / "outputs" / name / "adapter" / "adapter_model.safetensors").exists()
