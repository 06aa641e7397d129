"""A search for hyperparameters: on one GPU it is Hugging Face's, on several ranks it is refused at once."""

import json
import os
from pathlib import Path

import pytest

from tests.helpers.run import BARE, ROOT, finish, start
from unsloth_multigpu.errors import SetupError
from unsloth_multigpu.options import MultiGPUConfig
from unsloth_multigpu.session import Session
from unsloth_multigpu.wire.identity import SINGLE_PROCESS

SCRIPT = Path(__file__).parent / "scripts" / "search.py"
BACKEND = str(ROOT / "tests" / "helpers" / "search")


def test_search_runs_in_one_process_and_is_refused_on_several_ranks(tmp_path):
    path = os.pathsep.join(filter(None, [BACKEND, os.environ.get("PYTHONPATH")]))
    started = {}
    for num_gpus in (1, 2):
        (folder := tmp_path / str(num_gpus)).mkdir()
        variables = {**BARE, "PYTHONPATH": path, "UNSLOTH_MULTIGPU_NUM_GPUS": str(num_gpus)}
        started[folder] = start([SCRIPT], folder, variables)
    found = []
    for folder, process in started.items():
        run = finish(process)
        assert run.code == 0, run.err
        found.append([json.loads(file.read_text()) for file in sorted(folder.glob("found_*.json"))])
    (one,), two = found
    assert one["best"] in ("0", "1")
    assert one["trials"] == [[0.05, 2, 1, 4], [0.02, 4, 3, 4]]
    refused = "hyperparameter_search on several ranks: its trials are chosen by one process."
    assert [text.splitlines()[0] for text in two] == [refused, refused]


def test_trial_is_not_steered_and_refuses_what_would_steer_it():
    def run(**options):
        session = Session(MultiGPUConfig(**options), SINGLE_PROCESS, console=None)
        return session.run_training(None, lambda: "trained", {"trial": object()})

    assert run() == "trained"
    with pytest.raises(SetupError, match="resume='auto' steers a training, and the trials of hyperparameter_search"):
        run(resume="auto")
