"""Wrappers over `Trainer.train`, what callbacks read and change, loaders of a script's own."""

import json
from pathlib import Path

from tests.helpers.run import BARE, finish, start
from unsloth_multigpu.errors import DivergenceError

SCRIPT = Path(__file__).parent / "scripts" / "ways.py"


def found(folder, rank=0):
    return json.loads((folder / f"found_{rank}.json").read_text())


def test_a_training_is_steered_whatever_leads_to_it_or_it_is_said(tmp_path):
    one, two = tmp_path / "one", tmp_path / "two"
    one.mkdir()
    two.mkdir()
    alone = start([SCRIPT], one, {**BARE, "UNSLOTH_MULTIGPU_NUM_GPUS": "1"})
    run = finish(start([SCRIPT], two, {**BARE, "UNSLOTH_MULTIGPU_NUM_GPUS": "2"}))
    # The last training was refused, and the script continued without it.
    assert run.code == DivergenceError.exit_code, run.err
    (line,) = [line for line in run.err.splitlines() if "train() was ended" in line]
    assert line.startswith("unsloth_multigpu: train() was ended after step 1: DivergenceError: ")
    assert line.endswith("; the script continued without it (exit code 77)")
    assert finish(alone).code == 0
    ours, wanted = found(two), found(one)
    assert ours == found(two, 1)
    for name in ("plain", "closure"):
        assert ours[name] == wanted[name]
    # Whoever looks sees one process: its data set, its batches, its accumulation.
    for name in ("look", "look at a stream"):
        assert ours[name] == wanted[name]
        assert ours[name]["is the script's"]
        assert ours[name]["behind train()"] == [True, 2]
    assert ours["replaced"]["error"] == "PatchError"
    assert "scripts/ways.py" in ours["replaced"]["text"]
    assert "Let it call the function that it replaces" in ours["replaced"]["text"]
    assert "begins without a call of Trainer.train and is not distributed" in run.err
    # Such a loop has the batches of one process on each rank.
    assert wanted["own"] == ours["own"] == {"aside": 7, "in its loop": 7}
    changed = "A callback has set gradient_accumulation_steps from 2 to 1 in on_epoch_end"
    assert changed in ours["changed"]["text"]
    assert "prepared 2 data loaders; expected one.\nHint: Return one DataLoader" in ours["two loaders"]["text"]
    assert ours["past DDP"]["error"] == "DivergenceError"
    assert "The ranks' replicas differ after step 1" in ours["past DDP"]["text"]
