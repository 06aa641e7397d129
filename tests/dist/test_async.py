"""The asynchronous parameter server: bounded lead, every gradient once, and an end in every case."""

import json
import os
import signal
import time
from pathlib import Path

import pytest

from tests.helpers.run import ROOT, finish, start, wait_until

SCRIPTS = Path(__file__).parent / "scripts"
SETTLE_S = 0.5  # Connections are filled in less, and a test that comes too early passes.
NUM_RANKS, NUM_STEPS, SLOW_RANK = 3, 10, 2
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    """What each rank wrote; the last one dies in the end, as planted."""
    folder = tmp_path_factory.mktemp("async")
    processes = start_ranks("async_steps.py", folder)
    found = [finish(process, 100) for process in processes]
    assert [f.code for f in found] == [0, 0, 9], [f.err for f in found]
    return [json.loads((folder / f"facts_{r}.json").read_text()) for r in range(NUM_RANKS)]


def start_ranks(script, folder):
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    return [start([SCRIPTS / script], folder, {"RANK": str(r), "PYTHONPATH": path}) for r in range(NUM_RANKS)]


def seen_lead(facts):
    """The largest lead by the ranks' own clocks: steps finished at the begin of one, less those the slowest handed
    over by then. Never more than the true lead, since a rank hands over before the server counts."""
    return max(
        step - min(sum(moment < begun for moment in other["handed"]) for other in facts)
        for rank in facts
        for step, begun in enumerate(rank["begun"])
    )


@pytest.mark.parametrize("bound", [0, 1, 3])
def test_lead_stays_within_the_bound(ranks, bound):
    facts = [rank[f"bound_{bound}"] for rank in ranks]
    assert seen_lead(facts) <= facts[0]["max_lead_steps"] <= bound
    assert facts[0]["max_missed_updates"] <= (2 * bound + 1) * (NUM_RANKS - 1)
    assert bound != 3 or facts[0]["max_lead_steps"] == seen_lead(facts) == 3  # The quick ones did not wait before it.


def test_lead_exceeds_the_bound_without_the_gate(ranks):
    facts = [rank["ungated"] for rank in ranks]
    assert facts[0]["max_lead_steps"] > 3
    assert seen_lead(facts) > 3


@pytest.mark.parametrize("name", ["bound_0", "bound_1", "bound_3"])
def test_training_learns_and_ranks_meet_in_the_same_weights(ranks, name):
    facts = [rank[name] for rank in ranks]
    for rank in facts:
        assert rank["start"] == facts[0]["start"]
        assert rank["losses"][-1] < 0.5 * rank["losses"][0]
        assert rank["is_equal"] == [True, False, True]
        assert rank["met"] == rank["end"] == facts[0]["met"]  # Buffers too.
        assert rank["num_steps"] == NUM_STEPS
    assert facts[0]["met"]["idle"] == [1.0, 1.0]


def test_end_leaves_an_ordinary_optimizer(ranks):
    for rank, facts in enumerate(r["bound_1"] for r in ranks):
        assert (facts["is_own"], facts["num_hooks"], facts["num_threads"]) == (True, 0, 1)
        assert facts["is_trainable"]
        # Every parameter but the idle one, and one update for each step of each rank.
        expected = {n: NUM_RANKS * NUM_STEPS for n in facts["met"] if n != "idle" and not is_buffer(n)}
        assert facts["state"] == (expected if rank == 0 else {})
        assert facts["num_states"] == (len(expected) if rank == 0 else 0)


def is_buffer(name):
    return "running" in name or "num_batches" in name


def test_nothing_moves_at_learning_rate_zero(ranks):
    facts = ranks[0]["still"]
    moved = {name for name, value in facts["met"].items() if value != facts["start"][name]}
    assert all(map(is_buffer, moved)), moved


def test_every_gradient_is_used_once(ranks):
    total = sum(4.0 ** (rank + 1) for rank in range(NUM_RANKS)) * sum(range(1, NUM_STEPS + 1))
    assert [rank["summed"]["shift"] for rank in ranks] == [[-0.5 * total] * 3] * NUM_RANKS
    # Rank 0 alone has a gradient for it.
    assert [rank["summed"]["idle"] for rank in ranks] == [[1.0 - 0.5 * NUM_STEPS] * 2] * NUM_RANKS


def test_bytes_are_those_of_gradients_and_weights(ranks):
    net = (8 * 16 + 16 + 16 + 16 + 16 + 1) * 4 + 3 * 8  # Without the idle parameter.
    meeting = net + 2 * 4 + (16 + 16) * 4 + 8
    # Begin and one meeting pass through all ranks but the last.
    assert ranks[2]["bound_1"]["sent_bytes"] == NUM_STEPS * net
    assert ranks[1]["bound_1"]["sent_bytes"] == NUM_STEPS * net + 2 * meeting
    assert ranks[0]["bound_1"]["sent_bytes"] == 2 * NUM_STEPS * (net + 2 * 4) + 2 * meeting


def test_optimizer_rests_from_meet_to_the_next_step_of_rank_0(ranks):
    before, after = ranks[0]["resting"]["counts"]
    assert before == after == [2 * NUM_RANKS] * 7


def test_stuck_rank_is_a_timeout(ranks):
    for rank in ranks[:SLOW_RANK]:
        facts = rank["stuck"]
        # Rank 0 may notice first, and closes its connections then.
        told = {"RankTimeoutError"} if rank is ranks[0] else {"RankTimeoutError", "DistributedError"}
        assert facts["error"] in told, facts
        assert 1 <= facts["seconds"] < 20
        assert facts["is_clean"]
    assert "waited 1 seconds for the slowest rank" in ranks[0]["stuck"]["text"]
    assert "finished steps by rank: [3, 3, 2]" in ranks[0]["stuck"]["text"]


def test_dead_rank_is_an_error_at_once(ranks):
    for rank in ranks[:SLOW_RANK]:
        facts = rank["dead"]
        assert facts["error"] == "DistributedError", facts
        assert facts["is_chained"]
        assert facts["seconds"] < 10  # Of 60 that a wait may take.
        assert facts["is_clean"]
    assert "The parameter server has lost rank 2. DistributedError: The exchange" in ranks[0]["dead"]["text"]
    assert "Connection" in ranks[0]["dead"]["text"]  # By which the supervisor knows it for a consequence.


def test_death_within_a_message_is_an_error_at_once(tmp_path):
    """gloo forgets who has a part of a message in its queue, and who has received a part."""
    died, _, receives = processes = start_ranks("half_sent.py", tmp_path)
    try:
        wait_until(lambda: len(list(tmp_path.glob("ready_*"))) == NUM_RANKS, 60, "ranks ready")
        (tmp_path / "go_2").touch()
        time.sleep(SETTLE_S)
        receives.send_signal(signal.SIGSTOP)
        (tmp_path / "go_0").touch()
        time.sleep(SETTLE_S)
        died.send_signal(signal.SIGSTOP)
        (tmp_path / "go_1").touch()
        time.sleep(SETTLE_S)
        died.kill()
        receives.send_signal(signal.SIGCONT)
        found = [finish(process, 60) for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert [f.code for f in found] == [-signal.SIGKILL, 0, 0], [f.err for f in found]
    facts = [json.loads((tmp_path / f"facts_{rank}.json").read_text()) for rank in (1, 2)]
    # A limit that ran out is a RankTimeoutError.
    assert [f["error"] for f in facts] == ["DistributedError"] * 2, facts
