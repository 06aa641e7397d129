"""Ranks that multiprocessing starts, as torch.multiprocessing.spawn, notebook_launcher and Lightning do."""

from pathlib import Path

import pytest

from tests.helpers.outcome import facts_of
from tests.helpers.run import BARE, finish, free_port, start

SCRIPT = Path(__file__).parent / "scripts" / "spawned.py"


def begin(folder, where, *num_ranks):
    folder.mkdir()
    env = {**BARE, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    return start([SCRIPT, folder, where, *num_ranks], folder, env)


def test_spawned_ranks_train_as_one_process(tmp_path):
    with begin(tmp_path / "one", "inside", 0) as one, begin(tmp_path / "two", "inside") as two:
        finished = [finish(one), finish(two)]
    assert [run.code for run in finished] == [0, 0], finished[1].err
    (alone,), ranks = facts_of(tmp_path / "one" / "rank", 1), facts_of(tmp_path / "two" / "rank")
    assert [rank["status"] for rank in ranks] == [[True, 0, 2], [True, 1, 2]]
    # 6 steps of 4 samples, but for the last of an epoch of 15: the same samples as in one process.
    assert sum(rank["samples"] for rank in ranks) == 23
    assert ranks[0]["weights"] == ranks[1]["weights"]
    for rank in ranks:
        assert rank["norms"] == pytest.approx(alone["norms"], rel=1e-5)
        assert rank["weights"] == pytest.approx(alone["weights"], rel=1e-5)
    # What a rank starts itself is no rank, though it inherits the variables.
    assert [(tmp_path / "two" / f"helper_{rank}").read_text() for rank in (0, 1)] == ["False", "False"]


@pytest.mark.thorough
def test_line_that_would_do_nothing_in_a_spawned_rank_is_refused(tmp_path):
    """Each rank would train by itself, and exit code 0 would say that all went well."""
    run = finish(begin(tmp_path / "top", "top"))
    assert run.code != 0
    assert "started this process as a rank, and enable_multi_gpu() is not in effect: it was called while" in run.err
    assert not list(tmp_path.glob("*/trained_*"))
