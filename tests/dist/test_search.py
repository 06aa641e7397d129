"""A search for hyperparameters on two ranks is the one of one process."""

import json
import os
from pathlib import Path

from tests.helpers.run import BARE, ROOT, finish, start

SCRIPT = Path(__file__).parent / "scripts" / "search.py"
BACKEND = str(ROOT / "tests" / "helpers" / "search")


def test_all_ranks_train_rank_0s_trials_and_have_their_result(tmp_path):
    path = os.pathsep.join(filter(None, [BACKEND, os.environ.get("PYTHONPATH")]))
    one, two = tmp_path / "one", tmp_path / "two"
    one.mkdir()
    two.mkdir()
    environment = {**BARE, "PYTHONPATH": path}
    alone = start([SCRIPT], one, {**environment, "UNSLOTH_MULTIGPU_NUM_GPUS": "1"})
    run = finish(start([SCRIPT], two, {**environment, "UNSLOTH_MULTIGPU_NUM_GPUS": "2"}))
    assert run.code == 0, run.err
    assert finish(alone).code == 0
    wanted = json.loads((one / "found_0.json").read_text())["found"]
    ours = [json.loads((two / f"found_{rank}.json").read_text()) for rank in range(2)]
    # Objective, weights and steps of each trial, the one that was pruned among them, and as many as fitted.
    assert ours[0]["found"] == ours[1]["found"] == wanted
    assert [trial[:4] for trial in wanted["trials"]] == [[0.05, 2, 1, 4], [0.02, 4, 3, 2], [0.1, 4, 1, 4]]
    assert wanted["folders"] == ["run-0", "run-2"]
    for rank in range(2):
        by_ray, at_once = ours[rank]["refused"]
        assert "starts its trials on one rank" in by_ray
        assert "trains several trials at once" in at_once
