"""sentence-transformers on two ranks: the steps of one process."""

import json
from pathlib import Path

import pytest

from tests.helpers.run import hide, run_python
from tests.helpers.tiny import build_tiny

pytest.importorskip("sentence_transformers", reason="sentence-transformers is not installed")
SCRIPT = Path(__file__).parent / "scripts" / "embeddings.py"


def test_incomplete_last_batch_is_trained_as_in_one_process(tmp_path):
    model, logs = build_tiny(tmp_path / "model"), {}
    for ranks in ("1", "2"):
        out = tmp_path / f"{ranks}.json"
        run = run_python(
            [SCRIPT, model, out],
            tmp_path,
            {**hide("bitsandbytes", "torchao", "triton"), "UNSLOTH_MULTIGPU_NUM_GPUS": ranks},
        )
        assert run.code == 0, run.err
        logs[ranks] = json.loads(out.read_text())
    assert "12 + 15" in run.err or "15 + 12" in run.err, run.err
    assert len(logs["1"]) == 4
    assert [row[1] for row in logs["2"]] == [row[1] for row in logs["1"]]
    assert [row[0] for row in logs["2"]] == pytest.approx([row[0] for row in logs["1"]], rel=1e-5)
