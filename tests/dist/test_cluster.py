"""The ranks of a cluster's own launcher, whose store goes with rank 0."""

from pathlib import Path

import pytest

from tests.helpers.run import BARE, finish, free_port, start

LEAVES = Path(__file__).parent / "scripts" / "leaves.py"


@pytest.fixture
def left(request, tmp_path):
    """How the two ranks of a way of tests/dist/scripts/leaves.py ended."""
    port = free_port()
    processes = [start([LEAVES, request.param], tmp_path, slurm(rank, port)) for rank in (0, 1)]
    return [finish(process) for process in processes]


def slurm(rank, port):
    number = {"SLURM_STEP_NUM_TASKS": "2", "SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank)}
    return {**BARE, **number, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}


@pytest.mark.parametrize("left", ["late"], indirect=True)
def test_rank_0_serves_the_store_until_the_others_have_left(left):
    first, second = left
    assert [first.code, second.code] == [0, 0], second.err
    assert "saved on rank 1" in second.out


@pytest.mark.thorough
@pytest.mark.parametrize("left", ["killed"], indirect=True)
def test_rank_0_does_not_stay_for_a_rank_that_is_dead(left):
    first, second = left
    assert [first.code, second.code] == [0, -9], first.err


@pytest.mark.thorough
@pytest.mark.parametrize("left", ["failed"], indirect=True)
def test_rank_that_waits_for_a_rank_0_that_failed_ends_with_it(left):
    first, second = left
    assert [first.code, second.code] == [1, 1]
    assert "ValueError: of rank 0" in first.err
    assert "rank 0 leaves, and with it" not in first.err
