"""Gradient strategies on three CPU ranks that begin with different weights: against torch's DDP, and with mistakes."""

import json
import math
from pathlib import Path

import pytest

from tests.helpers.run import ROOT, finish, start

SCRIPT = ROOT / "tests/dist/scripts/sync_strategies.py"
WORLD_SIZE = 3
SYNCHRONOUS = ["each", "buckets", "one_bucket", "server", "server_each"]
# float32's rounding, over 20 steps of AdamW.
CLOSE = 1e-5


@pytest.fixture(scope="module")
def ranks(tmp_path_factory) -> list[dict]:
    """What each rank wrote down."""
    folder = tmp_path_factory.mktemp("sync")
    processes = [
        start([SCRIPT, rank, WORLD_SIZE], cwd=folder, env={"PYTHONPATH": str(ROOT)}) for rank in range(WORLD_SIZE)
    ]
    for finished in [finish(process) for process in processes]:
        assert finished.code == 0, finished.err
    return [json.loads(Path(folder, f"facts_{rank}.json").read_text()) for rank in range(WORLD_SIZE)]


def largest_difference(mine: dict, other: dict, key: str = "weights") -> float:
    """The largest |a - b| / |b| of a tensor."""
    return max(math.dist(mine[key][name], values) / (math.hypot(*values) or 1.0) for name, values in other[key].items())


def are_equal(ranks: list[dict], run: str, key: str) -> bool:
    return all(facts[run][key] == ranks[0][run][key] for facts in ranks)


@pytest.mark.parametrize("run", SYNCHRONOUS)
def test_synchronous_strategy_equals_ddp_on_all_ranks(ranks, run):
    mine, ddp = ranks[0][run], ranks[0]["ddp"]
    assert largest_difference(mine, ddp) < CLOSE
    assert mine["norms"] == pytest.approx(ddp["norms"], rel=CLOSE)
    # DDP hands rank 0's buffers out when the next forward begins.
    assert largest_difference(mine, ddp, "buffers") < CLOSE
    # Bit by bit.
    assert all(are_equal(ranks, run, key) for key in ("seen", "hashes", "buffers"))


def test_parameter_that_no_rank_uses_is_not_decayed_and_one_that_a_rank_uses_is_trained(ranks):
    start = ranks[0]["ddp"]["weights"]
    for run in SYNCHRONOUS:
        weights = ranks[0][run]["weights"]
        assert weights["never"] == start["never"]
        assert ranks[1][run]["weights"]["on_last_rank"] == weights["on_last_rank"]
        assert weights["frozen"] == ranks[2][run]["weights"]["frozen"] == start["frozen"]


def test_workers_of_a_parameter_server_hold_no_optimizer_state(ranks):
    # Rank 0 has what it loaded for the unused parameter as well.
    assert [facts["server"]["num_states"] for facts in ranks] == [7, 0, 0]
    assert [facts["one_bucket"]["num_states"] for facts in ranks] == [6, 6, 6]
    # Their gradients are gone before they are clipped.
    assert ranks[1]["server"]["norms"] == [0.0] * 20


def test_sent_bytes_are_those_of_the_usual_algorithms(ranks):
    trained, used, buffers = 4 * (48 + 8 + 8 + 24 + 3 + 8 + 5), 4 * (48 + 8 + 8 + 24 + 3 + 8), 4 * (64 + 8 + 8) + 8 + 3
    frozen, flags, num_steps = 4 * 8, 8, 20
    begin = trained + frozen + buffers
    ring = 2 * 2 * flags // 3 + 2 * 2 * used // 3
    assert ranks[0]["one_bucket"]["sent_bytes"] == begin + num_steps * (ring + buffers)
    assert ranks[2]["one_bucket"]["sent_bytes"] == num_steps * ring
    reduced = 2 * 2 * flags // 3 + used
    assert ranks[0]["server"]["sent_bytes"] == begin + num_steps * (2 * 2 * flags // 3 + trained + buffers)
    assert ranks[1]["server"]["sent_bytes"] == begin + num_steps * (reduced + trained + buffers)
    assert ranks[2]["server"]["sent_bytes"] == num_steps * reduced


def test_gradient_scaler_skips_a_step_on_all_ranks_of_a_parameter_server(ranks):
    for facts in ranks:
        # Doubled after two good steps, halved by the overflow in the third.
        assert facts["scaled"]["scales"] == [8.0, 16.0, 8.0, 8.0, 16.0]
        first, second, third, fourth, _ = facts["scaled"]["seen"]
        assert first != second == third != fourth
    assert are_equal(ranks, "scaled", "seen")
    assert [facts["scaled"]["num_states"] for facts in ranks] == [6, 1, 1]


def test_sparse_gradient_is_refused(ranks):
    assert all("0.weight has a sparse gradient" in facts["sparse"] for facts in ranks)


@pytest.mark.parametrize("run", ["local_1", "diloco_1"])
def test_meeting_after_each_step_of_sgd_equals_ddp(ranks, run):
    assert largest_difference(ranks[0][run], ranks[0]["ddp_sgd"]) < CLOSE
    assert are_equal(ranks, run, "hashes")
    assert all(ranks[0][run]["equal"])


def test_ranks_of_local_sgd_are_equal_where_they_have_met_and_nowhere_else(ranks):
    # Every 4 steps, counted again from the meeting after step 10.
    meets = [step in (4, 8, 14) for step in range(1, 15)]
    seen = [facts["local_4"]["seen"] for facts in ranks]
    assert [seen[0][i] == seen[1][i] == seen[2][i] for i in range(14)] == meets
    assert [facts["local_4"]["equal"] for facts in ranks] == [meets] * WORLD_SIZE
    assert are_equal(ranks, "local_4", "buffers")


@pytest.mark.parametrize("run", ["local_4", "diloco_4"])
def test_constant_buffers_stay_as_they_are(ranks, run):
    assert ranks[0][run]["buffers"]["constant"] == ranks[0]["ddp"]["buffers"]["constant"]


def test_diloco_does_what_the_paper_says(ranks):
    mine, by_hand = ranks[0]["diloco_4"], ranks[0]["by_hand"]
    assert largest_difference(mine, by_hand) < CLOSE
    # The comparison could tell: without an outer step the weights are others.
    assert largest_difference(ranks[0]["local_4"], by_hand) > 0.1
    assert are_equal(ranks, "diloco_4", "hashes")


def test_weights_of_16_bits_are_averaged_in_32(ranks):
    for facts in ranks:
        assert facts["half"]["is_mean"]
        # Four outer steps of a quarter of the spacing of bfloat16: half of it rounds to even, all of it is a step.
        assert facts["half"]["seen"] == [1.0, 1.0, 1 + 2**-7, 1 + 2**-7]
        assert facts["half"]["kept"] == 1 + 2**-7
