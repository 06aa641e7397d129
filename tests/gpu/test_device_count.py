"""What `plan` says a rank needs, against the peaks of trainings on CUDA devices in host memory."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.helpers.fake_cuda import cards, needs_device
from tests.helpers.run import light_with_bits, run_well
from tests.helpers.tiny import build_tiny
from unsloth_multigpu.shard.memory import RESERVE

COUNTED = Path(__file__).with_name("counted.py")
pytestmark = [needs_device, pytest.mark.slow, pytest.mark.thorough, pytest.mark.timeout(1800)]
# bitsandbytes' optimizers do not train what accelerate has sharded.
KINDS = {
    "full": ("ddp", "sharded"),
    "full sgd checkpointing rows=4": ("ddp", "sharded"),
    "full 8bit rows=4": ("ddp",),
    "lora rows=4": ("ddp", "sharded"),
    "lora checkpointing": ("ddp",),
    "4bit checkpointing": ("ddp", "sharded"),
    "moe full": ("ddp", "sharded"),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from transformers import MixtralConfig, MixtralForCausalLM

    pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed")
    folder = tmp_path_factory.mktemp("count")
    build_tiny(folder / "dense", hidden_size=256, num_layers=4, vocab_size=300)
    config = MixtralConfig(
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=300,
        num_local_experts=4,
    )
    MixtralForCausalLM(config).save_pretrained(folder / "moe")
    return folder


@pytest.mark.parametrize("kind", KINDS)
def test_count_is_within_a_tenth_of_the_peak(kind: str, folder: Path) -> None:
    model = folder / ("moe" if "moe" in kind else "dense")
    command = [COUNTED, kind, model, folder / "peak"]
    sizes = [24 * 2**30, 12 * 2**30]
    variables = {
        **cards(2, memory=",".join(f"{index}={size}" for index, size in enumerate(sizes))),
        **light_with_bits("datasets", "rich", "triton"),
        "UNSLOTH_MULTIGPU_CHECK_FIRST_STEP": "off",
    }
    plan = run_well(["-m", "unsloth_multigpu", "plan", "--json", "--gpus", "2", *command], folder, variables)
    found = json.loads(plan.out)
    assert ([device["total_bytes"] for device in found["devices"]], found["device_bytes"]) == (sizes, min(sizes))
    rows = {row["mode"]: row["total"] - sum(row["overhead"].values()) for row in found["forecasts"]}
    for mode in KINDS[kind]:
        shard = {"UNSLOTH_MULTIGPU_SHARD": "on" if mode == "sharded" else "off"}
        run_well(command, folder, {**variables, **shard})
        peaks = [json.loads((folder / f"peak.{rank}").read_text())["peak"] for rank in range(2)]
        print(f"{kind}, {mode}: counted {rows[mode]:,}, peaks {peaks}, {rows[mode] / max(peaks):.3f}")
        assert rows[mode] == pytest.approx(max(peaks), rel=0.1), (kind, mode)
        # So that none is said to fit that does not.
        assert max(peaks) <= rows[mode] / (1 - RESERVE)
