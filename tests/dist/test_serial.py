"""The legacy serial path: two replicas in one process give the training of one device."""

import json
from pathlib import Path

import pytest
import torch

from tests.helpers.run import LIGHT, run_well
from tests.helpers.tiny import SMALLEST, build_tiny
from unsloth_multigpu.errors import SetupError
from unsloth_multigpu.legacy.serial import count_rows

SCRIPT = Path(__file__).parent / "scripts" / "serial.py"


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    folder = tmp_path_factory.mktemp("serial")
    model = build_tiny(folder / "model", **SMALLEST)
    run_well([SCRIPT, model, folder], folder, LIGHT)
    return json.loads((folder / "results.json").read_text())


@pytest.mark.parametrize("kind", ["lora", "sft_lora", "classifier", "bound"])
def test_replicas_train_as_one_device(results, kind):
    one, legacy = results[kind]["one"], results[kind]["legacy"]
    assert len(one["grad_norm"]) == 4
    assert legacy["grad_norm"] == pytest.approx(one["grad_norm"], rel=1e-5)
    assert legacy["loss"] == pytest.approx(one["loss"], rel=1e-5)
    assert results[kind]["apart"] < 1e-6


def test_report_counts_rows_shards_and_bytes(results):
    report = results["lora"]["report"]
    # 13 rows in two epochs; each micro-batch is two shards.
    assert (report["num_steps"], report["num_samples"], report["num_micro_batches"]) == (4, 26, 12)
    assert any("2 replicas compute one after the other on cpu, cpu" in line for line in results["log"])
    # A LoRA moves the bytes of what it trains alone.
    assert 0 < report["sent_bytes"] < results["classifier"]["report"]["sent_bytes"] / 10


def test_trainer_is_left_as_it_was(results):
    for kind in ("lora", "sft_lora"):
        one, legacy = results[kind]["one"], results[kind]["legacy"]
        assert (legacy["left"], legacy["callbacks"]) == (one["left"], one["callbacks"]) == ([], one["callbacks"])


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("dpo", "cannot train DPOTrainer, whose loss may depend on several rows"),
        ("hooked", "cannot train weights with hooks"),
        ("schedule_free", "cannot train a schedule-free optimizer, which keeps other weights for an evaluation"),
    ],
)
def test_what_cannot_be_split_is_refused(results, kind, message):
    assert message in results["refused"][kind]
    assert "Hint: Leave enable_ddp=False" in results["refused"][kind]


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        ({"ids": torch.ones(2, 3), "pixels": torch.ones(9, 4)}, r"this one is a dict of \['2', '9'\]"),
        ({"ids": torch.ones(2, 3), "nested": {"x": torch.ones(2)}}, r"dict of \['2', 'dict'\]"),
        (torch.ones(2), "this one is a Tensor"),
    ],
)
def test_batch_without_common_rows_is_refused(inputs, message):
    with pytest.raises(SetupError, match=message):
        count_rows(inputs)
