"""Commands of other packages that train: `unsloth-multigpu run trl sft ...` on two ranks and as one process."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from tests.helpers.run import light, run_well
from tests.helpers.tiny import build_tiny, topics

HIDDEN = light("triton", "unsloth", "unsloth_zoo")
FIXED = "--report_to none --bf16 false --use_cpu true --logging_steps 1 --learning_rate 1e-3 --max_steps 2"
SIZES = "--per_device_train_batch_size 4 --gradient_accumulation_steps 2"


def test_command_of_trl_trains_as_one_process(tmp_path: Path) -> None:
    model, data = build_tiny(tmp_path / "model"), tmp_path / "data"
    data.mkdir()
    lines = [json.dumps({"text": text}) for text in topics(24, min_words=8, max_words=30)]
    (data / "train.jsonl").write_text("\n".join(lines))
    found: list[tuple[Any, Any]] = []
    for num_gpus in ("1", "2"):
        out = tmp_path / num_gpus
        own = ["--model_name_or_path", model, "--dataset_name", str(data), "--output_dir", str(out)]
        command = ["-m", "unsloth_multigpu", "run", "--num-gpus", num_gpus, "trl", "sft"]
        run = run_well([*command, *own, *FIXED.split(), *SIZES.split()], tmp_path, HIDDEN)
        (state,) = out.glob("checkpoint-2/trainer_state.json")
        norms = [row["grad_norm"] for row in json.loads(state.read_text())["log_history"] if "grad_norm" in row]
        found.append((norms, load_file(out / "model.safetensors")))
    (one, weights), (two, replicas) = found
    assert len(one) == 2
    assert two == pytest.approx(one, rel=1e-5)
    assert max(float((weights[key] - replicas[key]).abs().max()) for key in weights) < 1e-5
    assert "2 ranks" in run.err
