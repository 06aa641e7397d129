"""Models of images and sound on two ranks: the training of one process, and its files.

A step of six rows is two micro-batches of three, which ranks compute whole, or one of six, which they share; the last
step has five. Of "mixed" some ranks have no picture in a step.
"""

from pathlib import Path

import pytest
from safetensors.torch import load_file

from tests.helpers.outcome import assert_trained_as_one, distance
from tests.helpers.run import light, run_well
from tests.helpers.tiny import build_tiny

SCRIPT = Path(__file__).parent / "scripts" / "multimodal.py"
SHARED = ["llava:6x1", "qwen2_vl:6x1", "mixed:6x1", "whisper:6x1"]
WHOLE = ["llava:3x2", "speech:3x2"]
JOBS = [*SHARED, *WHOLE]
# Batch norm reads the micro-batch.
NOT_SHARED = "speech:6x1"


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    path = tmp_path_factory.mktemp("multimodal")
    build_tiny(path / "model", hidden_size=32, num_layers=1, vocab_size=300)
    for num_ranks in (1, 2):
        command = [SCRIPT, num_ranks, path / "model", path / str(num_ranks), *JOBS, NOT_SHARED]
        run = run_well(command, path, light("rich", "triton"))
        (path / f"{num_ranks}.txt").write_text(run.err)
    return path


@pytest.mark.parametrize("job", JOBS)
def test_training_is_that_of_one_process(trained, job):
    one, first, second = assert_trained_as_one(trained / "1", trained / "2", job, weights=1e-5)
    assert len(one["grad_norm"]) == 2
    assert len(one["seen"]) == 11
    assert sorted(one["seen"]) == sorted(first["seen"] + second["seen"])
    assert min(len(first["seen"]), len(second["seen"])) >= 5


def without_buffers(path):
    """Statistics of batch norm are those of rank 0."""
    return {
        name: weight
        for name, weight in load_file(path).items()
        if weight.is_floating_point() and ".running_" not in name
    }


@pytest.mark.parametrize("job", JOBS)
def test_model_and_processor_are_saved_as_by_one_process(trained, job):
    one, two = (trained / name / job.replace(":", "_") for name in "12")
    files = sorted(path.name for path in one.iterdir())
    assert "model.safetensors" in files
    assert {"processor_config.json", "preprocessor_config.json", "tokenizer_config.json"} & {*files}
    assert files == sorted(path.name for path in two.iterdir())
    assert distance(*(without_buffers(folder / "model.safetensors") for folder in (one, two))) < 1e-5
    for path in one.glob("*.json"):
        assert path.read_text() == (two / path.name).read_text()


def test_first_step_is_compared_and_what_cannot_be_shared_is_said(trained):
    text = (trained / "2.txt").read_text()
    assert text.count("equal gradient, differs by") == len(JOBS)
    assert "drawn anew" not in text
    assert text.count("; not exactly the training of one process: first step: ") == 1
    assert "Set gradient_accumulation_steps=2" in text
