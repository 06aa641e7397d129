"""examples/ray_train.py on a local cluster of Ray: as one process trains, also after a worker was killed."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest
from safetensors.torch import load_file

from tests.helpers.injector import fail_at, records
from tests.helpers.run import LIGHT, ROOT, finish, orphans, run_well, start

pytestmark = [
    pytest.mark.slow,
    pytest.mark.thorough,
    pytest.mark.timeout(900),
    pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="Ray is not installed"),
]
EXAMPLE = ROOT / "examples" / "ray_train.py"
ENV = {"PYTHONPATH": str(ROOT), **LIGHT}


def test_workers_of_ray_train_as_one_process_also_after_one_was_killed(tmp_path: Path) -> None:
    faults = tmp_path / "faults"
    faults.mkdir()
    # A report of step 3 is taken only when Ray has kept the checkpoint of step 2: that one is there.
    killed = {**ENV, **fail_at("kill", 1, 4, folder=faults), "RAY_DEDUP_LOGS": "0"}
    # Ray starts eight processes of its own before the first worker.
    run = finish(start([EXAMPLE, "--workers", "2", "--folder", "ray"], tmp_path, killed), 700.0)
    said = f"{run.out[-4000:]}\n{run.err[-8000:]}"
    if "current node timed out during startup" in run.err:
        pytest.skip("Ray gives its own processes 30 s to start, and this machine did not let them")
    assert run.code == 0, said
    assert not orphans(str(EXAMPLE))
    run_well([EXAMPLE, "--workers", "0", "--folder", "one"], tmp_path, ENV)

    assert len(records(faults, 1, "injected")) == 1
    begins = [record["step"] for record in records(faults, 0, "begin")]
    assert len(begins) == 2, said
    assert begins[1] >= 2  # From the checkpoint that Ray has kept, and not from the start.
    text = run.out + run.err
    assert "samples per step: 8 = 2 ranks x 4 samples x 1 accumulation" in text
    assert text.count("SIGTERM ends this process without a save") == 2  # Once in each start.
    assert "hash strings differently" not in text
    assert "last checkpoint: " in run.out
    assert "step 4" in run.out

    norms = [json.loads((tmp_path / name / "gradient_norms.json").read_text()) for name in ("ray", "one")]
    assert norms[0] == pytest.approx(norms[1], rel=1e-5)
    weights = [load_file(tmp_path / name / "model" / "model.safetensors") for name in ("ray", "one")]
    assert weights[0].keys() == weights[1].keys()
    for name, tensor in weights[0].items():
        assert (tensor - weights[1][name]).abs().max() < 1e-5, name
    # Ray's checkpoint is whole: what the line seals, with the random state of both ranks.
    kept = sorted(path for path in (tmp_path / "ray" / "ray" / "ray_train").iterdir() if path.is_dir())
    names = {path.name for path in kept[-1].iterdir()}
    assert {"unsloth_multigpu.json", "model.safetensors", "optimizer.pt", "rng_state_0.pth", "rng_state_1.pth"} <= names
