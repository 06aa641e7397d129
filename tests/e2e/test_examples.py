"""The examples run as they are, offline."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.helpers.run import LIGHT, ROOT, run_python, run_well
from tests.helpers.tiny import build_tiny, topics

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

EXAMPLES = ROOT / "examples"
# Two CPU ranks on every machine, so that the figures are those of fp32.
ENV = {"PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""}


def test_quick_start_shows_that_ranks_and_one_process_agree(tmp_path: Path) -> None:
    run = run_well([EXAMPLES / "ddp_quick_start.py", "--steps", "10", "--batch-size", "6"], tmp_path, {**ENV, **LIGHT})
    assert re.search(r"1 process +2 ranks\n", run.out)
    assert "The runs agree" in run.out
    assert run.out.count("step 10/10") == 2  # Once without the plugin, once with it.
    learned = re.findall(r"  before: +(\d+) of 20 right, .*\n  after: +(\d+) of 20 right, ", run.out)
    assert len(learned) == 2
    for before, after in learned:
        assert (int(before), int(after) >= 10) == (0, True), run.out
    assert "samples per step: 6 = 2 ranks x 3 samples x 1 accumulation" in run.err


@pytest.mark.thorough
def test_quick_start_fails_where_the_runs_differ(tmp_path: Path) -> None:
    # Each rank takes the whole batch: another training, which the example must not call the same.
    env = {**ENV, **LIGHT, "UNSLOTH_MULTIGPU_GLOBAL_BATCH": "scale"}
    (tmp_path / "texts.txt").write_text("\n".join(topics(12, max_words=30)))
    options = ["--model", build_tiny(tmp_path / "model"), "--dataset", "texts.txt", "--steps", "2", "--batch-size", "4"]
    run = run_python([EXAMPLES / "ddp_quick_start.py", *options], tmp_path, env)
    assert run.code == 1, f"{run.out[-2000:]}\n{run.err[-4000:]}"
    assert "THE RUNS DO NOT AGREE" in run.out
    assert "differ by more than rounding explains" in run.err


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["plain_transformers", "dpo"])
def test_example_trains_on_every_device(name: str, tmp_path: Path) -> None:
    run = run_well([EXAMPLES / f"{name}.py"], tmp_path, ENV)
    assert run.out.count("2 ranks") == 1
    assert (tmp_path / "outputs" / name / "adapter" / "adapter_model.safetensors").exists()


@pytest.mark.thorough
def test_embeddings_find_more_texts_than_before(tmp_path: Path) -> None:
    pytest.importorskip("sentence_transformers", reason="sentence-transformers is not installed")
    run = run_well([EXAMPLES / "embeddings.py"], tmp_path, ENV)
    ((before, now),) = re.findall(r"^2 ranks\. .* (\d+)% before, (\d+)% now$", run.out, re.M)
    assert int(now) > int(before)
    assert "equal gradient" in run.err


@pytest.mark.thorough
def test_plain_loop_learns_the_same_on_two_ranks(tmp_path: Path) -> None:
    outputs = []
    for world_size, options in ((1, []), (2, ["--num-gpus", "2"])):
        run = run_well([EXAMPLES / "plain_pytorch.py", "--epochs", "1", *options], tmp_path, ENV)
        assert run.out.count(f"141 steps per epoch, world_size={world_size} device=cpu") == 1
        outputs.append([float(loss) for loss in re.findall(r"\d\.\d{4}$", run.out, re.M)])
    assert len(outputs[0]) == 2
    assert outputs[0][0] == outputs[0][1]  # What was saved is what was trained.
    assert outputs[1] == pytest.approx(outputs[0], abs=1e-3)
