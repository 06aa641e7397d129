"""Trainings on CUDA devices in host memory: what CPU ranks cannot show, and what holds for them as well."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.fake_cuda import cards, needs_device
from tests.helpers.notebook import NotebookRun
from tests.helpers.outcome import largest_difference
from tests.helpers.run import BARE, ROOT, Finished, light, light_with_bits, run_python, run_well
from tests.helpers.tiny import build_tiny

SCRIPTS = ROOT / "tests" / "dist" / "scripts"
TRAINING = Path(__file__).with_name("training.py")
FOUR_BITS = Path(__file__).with_name("four_bits.py")
pytestmark = [needs_device, pytest.mark.slow]
# Tests of CPU ranks that run again on devices. test_nccl.py has a killed rank, a strategy and other numbers of ranks.
AGAIN = [
    ("test_strategies.py", "meets_in_every_step or outer_momentum"),
    ("test_resume.py", "goes_on_to_the_same_weights or other_numbers_of_ranks"),
]


@pytest.mark.thorough
@pytest.mark.parametrize(("file", "names"), AGAIN)
def test_what_holds_for_cpu_ranks_holds_on_devices(file: str, names: str) -> None:
    plugin = ("-p", "tests.helpers.on_device", "-p", "no:cacheprovider", "-n", "0", "-q", "-m", "")
    run = subprocess.run(
        [sys.executable, "-m", "pytest", *plugin, f"tests/dist/{file}", "-k", names],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stdout[-6000:]
    assert " passed" in run.stdout
    assert " skipped" not in run.stdout


@pytest.mark.thorough
def test_three_ranks_go_on_from_an_fp16_checkpoint_of_one_process(tmp_path: Path) -> None:
    """They skip the steps that it skips, also where the script has given the scale."""

    def train(num_ranks: int, kind: str) -> dict[str, list[float]]:
        out = tmp_path / str(num_ranks)
        out.mkdir()
        run_well([TRAINING, str(num_ranks), out, kind], tmp_path, {**BARE, **cards(num_ranks)})
        found: dict[str, list[float]] = json.loads((out / "fp16.json").read_text())
        return found

    one, many = train(1, "fp16"), train(3, f"fp16={tmp_path}/1/checkpoints_fp16/checkpoint-3")
    assert one["scales"][0] < 2.0**24  # The first step was skipped.
    assert many["scales"] == one["scales"][3:]
    norms = [float(norm) for norm in many["norms"]]
    assert norms == pytest.approx([float(norm) for norm in one["norms"][3:]], rel=1e-5, nan_ok=True)


def test_devices_that_cannot_share_a_step_are_left_out(tmp_path: Path) -> None:
    """Where nobody has asked for them, which tests/dist/test_faults.py does."""

    def train(num_devices: int) -> Finished:
        out = ["--out", tmp_path / f"{num_devices}.json", "--num-gpus", "0"]
        script = [SCRIPTS / "tiny_train.py", *out, "--batch-size", "2", "--rows", "8"]
        return run_well(script, tmp_path, {**BARE, **cards(num_devices)})

    train(1)
    assert "cannot be shared by 3 ranks. Starting again with 2 of 3 devices" in train(3).err
    logs = [json.loads((tmp_path / f"{n}.json").read_text())["log"] for n in (1, 3)]
    norms = [[row["grad_norm"] for row in log if "grad_norm" in row] for log in logs]
    assert norms[1] == pytest.approx(norms[0], rel=1e-5)


def run_in_parts(folder: Path, *arguments: str, in_cells: bool = False, **variables: str) -> tuple[str, str]:
    """What a script, or a notebook's cell, has ended with: "" = well; and what it said."""
    hidden = light_with_bits("datasets", "rich", "unsloth", "unsloth_zoo")
    # Activations are to be small beside the weights.
    arguments = (*arguments, json.dumps({"tokens": 8, "max_steps": 2}))
    if not in_cells:
        run = run_python([FOUR_BITS, *arguments], folder, {**hidden, **variables})
        return str(run.code or ""), run.err
    told = f"import sys\nsys.argv = {['', *arguments]}\n__file__ = {str(FOUR_BITS)!r}\n"
    with NotebookRun(folder, {**hidden, **variables}) as notebook:
        cell = notebook.run(told + FOUR_BITS.read_text(), timeout_s=600)
    return cell.error, f"{cell.value}\n{cell.text}"


@pytest.fixture(scope="module")
def whole_in_4_bits(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """A folder with a model, the same quantised, and an adapter that one device has trained on it; and its facts."""
    pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed")
    folder = tmp_path_factory.mktemp("whole")
    model = build_tiny(folder / "model", hidden_size=256, num_layers=24, vocab_size=300)
    code, text = run_in_parts(folder, "1", model, "one", **cards(1))
    assert not code, text
    return folder, json.loads((folder / "one" / "facts_0.json").read_text())


@pytest.mark.parametrize(
    ("name", "in_cells"),
    [
        ("model", False),
        pytest.param("one/packed", False, marks=pytest.mark.thorough),
        pytest.param("model", True, marks=pytest.mark.thorough),
    ],
)
def test_4_bit_model_that_no_card_holds_trains_in_parts(
    tmp_path: Path, whole_in_4_bits: tuple[Path, dict[str, Any]], name: str, in_cells: bool
) -> None:
    """Quantised while it is loaded, or before: of each weight a rank has its rows only, in all memories."""
    folder, whole = whole_in_4_bits
    weights = whole["weights"]
    limited: dict[str, Any] = {**cards(2, memory=str(int(1.15 * weights))), "in_cells": in_cells}
    if in_cells:
        refused, text = run_in_parts(tmp_path, "2", str(folder / name), "whole", **limited)
        assert refused
        assert "ran out of memory" in text
        assert "shard='on'" in text
    else:  # Each layer is gathered again for the comparison of the first step.
        limited["UNSLOTH_MULTIGPU_CHECK_FIRST_STEP"] = "off"
    error, text = run_in_parts(tmp_path, "2", str(folder / name), "parts", **limited, UNSLOTH_MULTIGPU_SHARD="on")
    assert not error, text
    ranks = [json.loads((tmp_path / "parts" / f"facts_{rank}.json").read_text()) for rank in range(2)]
    theirs, mine = (f / "adapter" / "adapter_model.safetensors" for f in (folder / "one", tmp_path / "parts"))
    assert largest_difference(theirs, mine, relative=True) <= 1e-4
    for rank in ranks:
        assert rank["said"] == whole["said"]
        assert "An adapter can be merged only into whole weights" in rank["refused"]
        assert rank["norms"] == pytest.approx(whole["norms"], rel=1e-5)
        assert rank["peak_loaded"] < 0.6 * weights
        # Its part with the constants; and a layer, whole and as its part, while it is divided.
        assert rank["prepared"] < 0.6 * weights
        assert rank["peak_prepared"] < (0.6 + 2 / 24) * weights
    assert sum(rank["host_loaded"] for rank in ranks) - 2 * whole["host_loaded"] < 1.3 * weights


def test_parts_in_the_hosts_memory_train_as_on_one_device(tmp_path: Path) -> None:
    """FSDP2 with a checkpoint: whole on one device, and in parts on two. test_nccl.py has parts on the devices."""
    model, norms = build_tiny(tmp_path / "model"), {}
    hidden = light("rich", "triton", "unsloth", "unsloth_zoo")
    for name, num_ranks, options in (
        ("whole", 1, {}),
        ("parts", 2, {"UNSLOTH_MULTIGPU_SHARD": "on", "UNSLOTH_MULTIGPU_SHARD_OFFLOAD": "1"}),
    ):
        job, out = "momentum_full:32x8x1", tmp_path / name
        command = [SCRIPTS / "shard.py", num_ranks, model, out, 3, job]
        run_well(command, tmp_path, {**hidden, **cards(num_ranks), **options})
        norms[name] = json.loads((out / job / "facts_0.json").read_text())["norms"]
        assert (out / job / "checkpoints" / "checkpoint-3").is_dir()
    assert norms["parts"] == pytest.approx(norms["whole"], rel=1e-5)
