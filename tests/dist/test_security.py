"""A whole training as others on the machine see it: what they can read, what they can reach, and what is unpickled."""

import json
from pathlib import Path

import pytest

from tests.helpers.outcome import facts_of
from tests.helpers.run import BARE, run_well

SCRIPT = Path(__file__).parent / "scripts" / "security.py"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("security")
    run_well([SCRIPT, folder], folder, BARE)
    return folder


@pytest.fixture(scope="module")
def facts(folder):
    return json.loads((folder / "facts.json").read_text())


def test_files_of_a_run_are_private_under_any_umask(facts):
    run_dir, log_dir = facts["run_dir"], facts["log_dir"]
    assert run_dir["."] == log_dir["."] == 0o700
    # Torch's own files lie in the private folder.
    ours = {**run_dir, **log_dir}
    assert {name: oct(mode) for name, mode in ours.items() if mode & 0o077} == {}
    assert {"events_rank_0.jsonl", "beat_rank_1"} <= run_dir.keys()
    assert {".lock", "rank_1.log"} <= log_dir.keys()


def test_checkpoints_have_the_modes_that_the_user_asks_for(facts):
    for step in (1, 2):
        assert facts["out"][f"checkpoint-{step}"] == 0o777
        assert facts["out"][f"checkpoint-{step}/trainer_state.json"] == 0o666


def test_nothing_listens_beyond_loopback(facts):
    assert {address for _, address in facts["listeners"]} <= {"127.0.0.1", "::1"}
    # The store of the supervisor, and gloo in each rank.
    assert [is_supervisor for is_supervisor, _ in facts["listeners"]].count(True) == 1
    assert len(facts["listeners"]) >= 3


def test_training_sends_and_loads_no_pickle(folder):
    assert facts_of(folder / "pickled") == [[], []]
    assert list(folder.glob("unpickled_*")) == []
