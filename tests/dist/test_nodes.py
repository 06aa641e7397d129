"""Training across two hosts, network namespaces of this machine: a slow wire, a cut one, a rank that fails.

Two jobs run side by side, because both mostly wait: one with two ranks and one, whose wire is limited and then cut, and
one of which all ranks start again.
"""

import json
import re
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.helpers.namespace import two_hosts
from tests.helpers.outcome import largest_difference
from tests.helpers.run import BARE, Finished, finish, orphans, run_python, wait_until

SCRIPT = Path(__file__).parent / "scripts" / "nodes.py"
HANG_TIMEOUT_S = 6.0


class Job:
    """One run of the script on two hosts, in a folder for both."""

    def __init__(self, pool, hosts, folder, *, nnodes, num_gpus, names, **options):
        self.pool, self.hosts, self.folder, self.names = pool, hosts, folder, names
        given = {
            "nnodes": nnodes,
            "balance": "off",
            "rdzv_endpoint": f"{hosts[0].address}:29400",
            "rdzv_id": "job",
            **options,
        }
        self.env = {**BARE, **{f"UNSLOTH_MULTIGPU_{name.upper()}": str(value) for name, value in given.items()}}
        folder.mkdir()
        self.processes, self.outcomes, self.begins = [None, None], [None, None], [0.0, 0.0]
        for host, number in enumerate(num_gpus):
            self.start(host, number)

    def start(self, host, num_gpus):
        here = self.folder / f"host{host}"
        here.mkdir(exist_ok=True)
        env = {**self.env, "HERE": str(self.folder), "UNSLOTH_MULTIGPU_NUM_GPUS": str(num_gpus)}
        self.begins[host] = time.monotonic()
        self.processes[host] = self.hosts[host].start([SCRIPT, "--folder", self.folder, *self.names], here, env)
        # What a process says is read at once: a full pipe would stop it.
        self.outcomes[host] = self.pool.submit(finish, self.processes[host], 500.0)

    def let(self, name):
        (self.folder / f"go_{name}").touch()

    def wait_for(self, file):
        def is_there():
            assert not [outcome.result().err for outcome in self.outcomes if outcome.done()]
            return (self.folder / file).exists()

        wait_until(is_there, 150.0, file)

    def steps(self, name, rank):
        return [json.loads(line) for line in (self.folder / f"steps_{name}_{rank}").read_text().splitlines()]

    def finish(self):
        return [outcome.result() for outcome in self.outcomes]


@dataclass
class Outcome:
    """What became of the jobs."""

    wired: Job
    again: Job
    alone: Path
    cut: list[Finished]
    cut_s: float
    went: list[Finished]


@pytest.fixture(scope="module")
def outcome(tmp_path_factory):
    folder = tmp_path_factory.mktemp("nodes")
    alone = folder / "alone"
    alone.mkdir()
    with ExitStack() as stack:
        pool = stack.enter_context(ThreadPoolExecutor(5))
        first, second = stack.enter_context(two_hosts(1)), stack.enter_context(two_hosts(2))
        names, options = ["plain", "wide", "slow", "cut"], {"hang_timeout_s": HANG_TIMEOUT_S}
        wired = Job(pool, first, folder / "wired", nnodes="2", num_gpus=(2, 1), names=names, **options)
        for name in ("plain", "wide"):
            wired.let(name)
        wired.wait_for("done_wide")
        for host in first:
            host.limit("100mbit")
        wired.let("slow")
        wired.wait_for("done_slow")
        for host in first:
            host.limit("")
        options = {"timeout_s": 60.0, "max_restarts": 1}
        again = Job(pool, second, folder / "again", nnodes="2", num_gpus=(1, 1), names=["again"], **options)
        again.let("again")
        wired.let("cut")
        wired.wait_for("step_cut")
        first[0].set_wire("down")
        cut_at = time.monotonic()
        for name in ("plain", "again"):
            (alone / f"go_{name}").touch()
        run = run_python([SCRIPT, "--folder", alone, "plain", "again"], alone, {**BARE, "HERE": str(alone)})
        assert run.code == 0, run.err
        cut = wired.finish()
        cut_s = max(begin + run.seconds for begin, run in zip(wired.begins, cut, strict=True)) - cut_at
        yield Outcome(wired, again, alone, cut, cut_s, again.finish())


def test_three_ranks_on_two_nodes_train_as_one_process_does(outcome):
    assert largest_difference(outcome.wired.folder / "weights_plain", outcome.alone / "weights_plain") < 2e-6
    assert [step[:2] for step in outcome.wired.steps("plain", 2)] == [[n, 3] for n in range(1, 7)]


def test_slow_wire_changes_the_time_and_not_the_result(outcome):
    job = outcome.wired
    assert largest_difference(job.folder / "weights_slow", job.folder / "weights_wide") < 2e-6
    seconds = {name: [s for _, _, s in job.steps(name, 0)] for name in ("wide", "slow")}
    step_s = {name: (times[-1] - times[0]) / (len(times) - 1) for name, times in seconds.items()}
    print(f"seconds of a step: {step_s['wide']:.3f} on the wire as it is, {step_s['slow']:.3f} with 100 Mbit/s")
    assert step_s["slow"] > 2 * step_s["wide"]


def test_cut_wire_ends_both_nodes_and_says_what_is_lost(outcome):
    for run, here, there in zip(outcome.cut, ("0, 1", "2"), ("2", "0, 1"), strict=True):
        assert run.code == 124
        lost = f"node \\d \\(ranks? {there}\\) has not been heard for \\d+ s: the connection is gone, or that machine"
        # Where it was cut: in a collective, or in the look into the store after a step.
        waits = r"all ranks of this node (wait in .*|make no progress) for \d+ s \(.*\)"
        assert re.search(f"{waits}; {lost}", run.err), run.err
        assert all(f"Stack of rank {rank} " in run.err for rank in here.split(", "))
    print(f"both nodes have ended {outcome.cut_s:.1f} s after the wire was cut, hang_timeout_s={HANG_TIMEOUT_S:g}")
    # Far below timeout_s; on a busy machine most of it is the end of the processes.
    assert HANG_TIMEOUT_S < outcome.cut_s < 100.0


def test_failure_on_one_node_starts_the_ranks_of_all_nodes_again(outcome):
    job = outcome.again
    assert [run.code for run in outcome.went] == [0, 0], [run.err for run in outcome.went]
    for run in outcome.went:
        assert "Starting all ranks again (1)" in run.err
        assert "ranks 2 round 1" in run.out
    assert "rank 1 failed after step 4: ValueError: planted" in outcome.went[1].err
    steps, _, times = zip(*job.steps("again", 0), strict=True)
    print(f"{times[4] - times[3]:.1f} s from the last step before the failure to the first step after it")
    # Rank 1 failed in step 4, before its checkpoint.
    assert steps == (1, 2, 3, 4, *range(4, 13))
    assert largest_difference(job.folder / "weights_again", outcome.alone / "weights_again") < 2e-6


def test_ranks_choose_the_same_on_all_nodes(outcome):
    seeds = {run.out.rpartition("seed ")[2].split()[0] for run in outcome.went}
    assert len(seeds) == 1


def test_ranks_take_the_interface_that_leads_to_the_other_node(outcome):
    for host, run in zip(outcome.again.hosts, outcome.went, strict=True):
        assert f"interfaces {host.interface} ={host.interface}\n" in run.out


def test_nothing_is_left(outcome):
    wait_until(lambda: not orphans(str(outcome.alone.parent)), 30, "end of all processes")
