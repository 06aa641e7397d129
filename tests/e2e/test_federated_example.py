"""The example of a federation runs as it is, offline, with real Unsloth LoRA in two CPU slots."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest

from tests.helpers.run import LIGHT, ROOT, run_well

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

if sys.version_info < (3, 11):
    pytest.skip("Flower 1.41 needs Python 3.11 or newer", allow_module_level=True)

EXAMPLE = ROOT / "examples" / "federated_lora.py"
ENV = {"PYTHONPATH": str(ROOT), **LIGHT}
# Four of the ten clients' topics are enough here.
OPTIONS = ["--num-gpus", "2", "--clients", "4", "--rounds", "2", "--batch-size", "16", "--max-workers", "2"]


@pytest.mark.thorough
def test_clients_with_different_topics_learn_one_adapter(tmp_path: Path) -> None:
    run = run_well([EXAMPLE, *OPTIONS], tmp_path, ENV)
    assert "clients=4 slots=2" in run.out
    rounds = re.findall(r"^ +(\d) +[\d.]+ +\d+ +2 cl \d+% +2 cl \d+% +([\d.]+) +([\d.]+) ", run.out, re.M)
    assert [number for number, _, _ in rounds] == ["1", "2"]
    losses = [float(eval_loss) for _, _, eval_loss in rounds]
    before, after = map(float, re.findall(r"([\d.]+) without it, ([\d.]+) with it", run.out)[0])
    assert before > losses[0] > losses[1]
    # What was saved is what the clients evaluated: they weigh by texts, the example by tokens.
    assert after == pytest.approx(losses[-1], abs=0.02)

    adapter = tmp_path / "outputs" / "federated_lora" / "adapter"
    assert json.loads((adapter / "adapter_config.json").read_text())["r"] == 8
    # The base model was loaded once per slot, not once per round or client.
    for slot in (0, 1):
        assert (tmp_path / "logs" / f"slot_{slot}.log").read_text().count("LlamaForCausalLM on") == 1
