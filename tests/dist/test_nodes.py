"""Training across two hosts, network namespaces of this machine: a rank that fails, then a wire that is cut."""

import json
import re
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.helpers.namespace import Host, two_hosts
from tests.helpers.outcome import largest_difference
from tests.helpers.run import BARE, Finished, finish, orphans, run_well, wait_until

SCRIPT = Path(__file__).parent / "scripts" / "nodes.py"
HANG_TIMEOUT_S = 4.0


@dataclass
class Outcome:
    """Of one run with two ranks on the first host and one on the second, and of one process."""

    hosts: tuple[Host, Host]
    folder: Path
    alone: Path
    runs: list[Finished]
    cut_s: float


@pytest.fixture(scope="module")
def outcome(tmp_path_factory):
    folder = tmp_path_factory.mktemp("nodes")
    job, alone = folder / "job", folder / "alone"
    with ThreadPoolExecutor(2) as pool, two_hosts() as hosts:
        given = {
            "nnodes": 2,
            "balance": "off",
            "rdzv_endpoint": f"{hosts[0].address}:29400",
            "rdzv_id": "job",
            "timeout_s": 60.0,
            "max_restarts": 1,
            "hang_timeout_s": HANG_TIMEOUT_S,
        }
        env = {**BARE, **{f"UNSLOTH_MULTIGPU_{name.upper()}": str(value) for name, value in given.items()}}
        begins_s, outcomes = [], []
        for index, host in enumerate(hosts):
            (job / f"host{index}").mkdir(parents=True)
            mine = {**env, "HERE": str(job), "UNSLOTH_MULTIGPU_NUM_GPUS": str(2 - index)}
            begins_s.append(time.monotonic())
            process = host.start([SCRIPT, "--folder", job, "again", "cut"], job / f"host{index}", mine)
            # What a process prints is read at once: a full pipe would stop it.
            outcomes.append(pool.submit(finish, process, 500.0))
        for path in (job, alone):
            path.mkdir(exist_ok=True)
            (path / "go_again").touch()
        run_well([SCRIPT, "--folder", alone, "again"], alone, {**BARE, "HERE": str(alone)})
        (job / "go_cut").touch()

        def trains() -> bool:
            assert not [outcome.result().err for outcome in outcomes if outcome.done()]
            return (job / "steps_cut_0").exists()

        wait_until(trains, 200.0, "step of the endless training")
        hosts[0].set_wire("down")
        cut_at_s = time.monotonic()
        runs = [outcome.result() for outcome in outcomes]
        cut_s = max(begin_s + run.seconds for begin_s, run in zip(begins_s, runs, strict=True)) - cut_at_s
        yield Outcome(hosts, job, alone, runs, cut_s)


def test_failure_on_one_node_starts_the_ranks_of_all_nodes_again_which_train_as_one_process(outcome):
    for run in outcome.runs:
        assert "Starting all ranks again (1)" in run.err
        assert "ranks 3 round 1" in run.out
    assert "rank 2 failed after step 4: ValueError: planted" in outcome.runs[1].err
    steps = [json.loads(line) for line in (outcome.folder / "steps_again_0").read_text().splitlines()]
    # Rank 2 failed in step 4, before its checkpoint.
    assert steps == [[n, 3] for n in (1, 2, 3, 4, *range(4, 13))]
    assert largest_difference(outcome.folder / "weights_again", outcome.alone / "weights_again") < 2e-6


def test_ranks_choose_the_same_on_all_nodes_and_take_the_interface_that_leads_to_the_other(outcome):
    assert len({seed for run in outcome.runs for seed in re.findall(r"seed (\d+)", run.out)}) == 1
    for host, run in zip(outcome.hosts, outcome.runs, strict=True):
        assert f"interfaces {host.interface} ={host.interface}\n" in run.out


def test_cut_wire_ends_both_nodes_and_says_what_is_lost(outcome):
    for run, here, there in zip(outcome.runs, ("0, 1", "2"), ("2", "0, 1"), strict=True):
        assert run.code == 124
        lost = f"node \\d \\(ranks? {there}\\) has not reported for \\d+ s: the connection is gone, or that machine"
        # Where it was cut: in a collective, or in the look into the store after a step.
        waits = r"all ranks of this node make no progress for \d+ s \(.*\)"
        assert re.search(f"{waits}; {lost}", run.err), run.err
        assert all(f"Stack of rank {rank} " in run.err for rank in here.split(", "))
    print(f"both nodes have ended {outcome.cut_s:.1f} s after the wire was cut, hang_timeout_s={HANG_TIMEOUT_S:g}")
    # Far below timeout_s; on a busy machine most of it is the end of the processes.
    assert HANG_TIMEOUT_S < outcome.cut_s < 100.0
    wait_until(lambda: not orphans(str(outcome.folder)), 30, "end of all processes")
