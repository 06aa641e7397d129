"""Two nodes with different numbers of ranks train as one, by variables.

And the ranks of a cluster's own launcher, whose store goes with rank 0.
"""

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.helpers.outcome import largest_difference
from tests.helpers.run import BARE, finish, free_port, orphans, run_python, start, wait_until

SCRIPT = Path(__file__).parent / "scripts" / "nodes.py"
LEAVES = SCRIPT.with_name("leaves.py")
# By the command, and by the line of the script: both read the variables.
STARTS = (["-m", "unsloth_multigpu.cli.main", "run", SCRIPT], [SCRIPT])


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Two nodes' outcomes and files in "cluster", one process's in "alone"."""
    folder = tmp_path_factory.mktemp("cluster")
    for name in ("cluster", "alone"):
        (folder / name).mkdir()
        (folder / name / "go_plain").touch()
    port = free_port()
    said = {"NNODES": "2", "RDZV_ENDPOINT": f"127.0.0.1:{port}", "RDZV_ID": "cluster"}
    here = {"HERE": str(folder / "cluster"), "UNSLOTH_MULTIGPU_BALANCE": "off", "UNSLOTH_MULTIGPU_TIMEOUT_S": "60"}
    with ThreadPoolExecutor() as pool:
        outcomes = []
        for node, command in enumerate(STARTS):
            (folder / f"node{node}").mkdir()
            options = {**said, "NODE_RANK": str(node), "NUM_GPUS": str(2 - node)}
            mine = {f"UNSLOTH_MULTIGPU_{name}": value for name, value in options.items()}
            arguments = [*command, "--folder", folder / "cluster", "plain"]
            process = start(arguments, folder / f"node{node}", {**BARE, **mine, **here})
            outcomes.append(pool.submit(finish, process))
        alone = {**BARE, "HERE": str(folder / "alone")}
        run = run_python([SCRIPT, "--folder", folder / "alone", "plain"], folder / "alone", alone)
        assert run.code == 0, run.err
        for node, outcome in enumerate(outcomes):
            (folder / f"node{node}.json").write_text(json.dumps(vars(outcome.result())))
    return folder


@pytest.mark.thorough
def test_two_nodes_train_as_one_process_by_variables_alone(folder):
    runs = [json.loads((folder / f"node{node}.json").read_text()) for node in range(2)]
    assert [run["code"] for run in runs] == [0, 0], [run["err"] for run in runs]
    for run in runs:
        assert "ranks 3 " in run["out"]
    assert largest_difference(*(folder / name / "weights_plain" for name in ("cluster", "alone"))) < 2e-6
    logs = [sorted(path.name for path in (folder / f"node{node}" / "logs").iterdir()) for node in range(2)]
    # Rank 0 is on the node that the cluster calls 0. The first rank of a node has its terminal.
    assert [[name for name in names if name.endswith(".log")] for names in logs] == [["rank_1.log"], []]
    assert "samples per step: 4" in runs[0]["err"]
    wait_until(lambda: not orphans(str(folder)), 30, "end of all processes")


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
