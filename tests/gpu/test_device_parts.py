"""4-bit models in parts, on CUDA devices in host memory: faults, checkpoints, files, and how far memory goes."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest

from tests.helpers.fake_cuda import cards, needs_device
from tests.helpers.injector import faults_in
from tests.helpers.outcome import largest_difference
from tests.helpers.run import light, run_python
from tests.helpers.tiny import build_tiny
from unsloth_multigpu.tools.chaos.fault import Fault

SAVED = Path(__file__).with_name("saved_parts.py")
ADAPTER = "adapter_model.safetensors"
pytestmark = [needs_device, pytest.mark.slow]


def variables(num_ranks: int, **more: str) -> dict[str, str]:
    """Of a script that needs bitsandbytes. The planner measures, and no two runs measure the same."""
    hidden = light("datasets", "rich", "triton", "unsloth", "unsloth_zoo")
    hidden["HIDDEN_MODULES"] = ",".join(m for m in hidden["HIDDEN_MODULES"].split(",") if m != "bitsandbytes")
    options = {"SHARD": "on" if num_ranks > 1 else "off", "BALANCE": "off", **more}
    named = {f"UNSLOTH_MULTIGPU_{name}": value for name, value in options.items()}
    return {**hidden, **cards(num_ranks), **named}


def train(
    folder: Path,
    name: str,
    num_ranks: int,
    *arguments: Path,
    faults: tuple[Fault, ...] = (),
    code: int = 0,
    **more: str,
) -> str:
    """Leaves checkpoints, norms and the adapter in folder/name."""
    (folder / name).mkdir(exist_ok=True)
    planted = faults_in(folder / name, *faults) if faults else {}
    command = [SAVED, str(num_ranks), str(folder / "model"), folder / name, *arguments]
    run = run_python(command, folder, {**variables(num_ranks, **more), **planted})
    assert run.code == code, run.err
    return run.err


def norms(folder: Path, name: str) -> list[float]:
    found: list[float] = json.loads((folder / name / "norms_0.json").read_text())
    return found


def difference(folder: Path, one: str, two: str) -> float:
    return largest_difference(folder / one / "adapter" / ADAPTER, folder / two / "adapter" / ADAPTER)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With a model, and what one process has trained on it."""
    pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed")
    folder = tmp_path_factory.mktemp("parts")
    build_tiny(folder / "model", vocab_size=300)
    train(folder, "one", 1)
    return folder


@pytest.fixture(scope="module")
def killed(folder: Path) -> str:
    """What two ranks said of which one was killed."""
    return train(folder, "killed", 2, faults=(Fault("kill", 1, 5),), MAX_RESTARTS="1", RESUME="auto")


@pytest.mark.thorough
def test_killed_rank_costs_no_step_and_the_adapter_is_that_of_one_process(folder: Path, killed: str) -> None:
    assert "rank 1 was killed by SIGKILL after step 4" in killed
    assert "all ranks again (1)" in killed
    assert "/checkpoint-3\n" in killed
    assert norms(folder, "killed")[-5:] == pytest.approx(norms(folder, "one")[3:], rel=1e-5)
    assert difference(folder, "killed", "one") <= 1e-5
    assert {p.name for p in (folder / "killed" / "adapter").iterdir()} == {
        p.name for p in (folder / "one" / "adapter").iterdir()
    }


@pytest.mark.thorough
def test_full_disk_and_sigterm_cost_no_step(folder: Path, killed: str) -> None:
    faults = (Fault("disk_full", 0, 6, phase="save"), Fault("sigterm", 0, 4, attempt=1))
    options = {"MAX_RESTARTS": "1", "RESUME": "auto"}
    text = train(folder, "stopped", 2, faults=faults, code=-15, **options)
    assert "checkpoint-6 could not be saved, earlier checkpoints are" in text
    stopped = re.search(
        r"stopped by SIGTERM after step ([45])\. The same command resumes from .*/checkpoint-\1\.", text
    )
    assert stopped, text
    assert not (folder / "stopped" / "norms_0.json").exists()
    shutil.rmtree(folder / "stopped" / "adapter", ignore_errors=True)
    assert f"/checkpoint-{stopped[1]}\n" in train(folder, "stopped", 2, **options)
    # Each of them has been resumed from another checkpoint.
    assert difference(folder, "stopped", "killed") == 0


@pytest.mark.thorough
def test_three_ranks_go_on_from_the_checkpoint_of_two(folder: Path, killed: str) -> None:
    train(folder, "three", 3, folder / "killed" / "checkpoints" / "checkpoint-3")
    assert norms(folder, "three")[-5:] == pytest.approx(norms(folder, "one")[3:], rel=1e-5)
    assert difference(folder, "three", "one") <= 1e-5
