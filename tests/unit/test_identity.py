"""Which rank a launcher's variables mean, and what is said where they make no sense; helpers of multiprocessing."""

import multiprocessing
import sys
from types import SimpleNamespace

import pytest
import torch.utils.data

from tests.helpers.refused import refused
from unsloth_multigpu.errors import LaunchError, SetupError
from unsloth_multigpu.options import ENV_RUN_DIR
from unsloth_multigpu.wire.identity import RankIdentity, first_host, is_helper, read_identity

TORCHRUN = {
    "RANK": "5",
    "LOCAL_RANK": "1",
    "WORLD_SIZE": "8",
    "LOCAL_WORLD_SIZE": "4",
    "MASTER_ADDR": "node1",
    "MASTER_PORT": "29400",
    "TORCHELASTIC_RESTART_COUNT": "0",
}
# `srun --nodes=1 --ntasks=4`.
SRUN = {
    "SLURM_JOB_ID": "123456",
    "SLURM_JOB_NODELIST": "gpu07",
    "SLURM_NTASKS": "4",
    "SLURM_PROCID": "3",
    "SLURM_LOCALID": "3",
    "SLURM_NODEID": "0",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_STEP_TASKS_PER_NODE": "4",
    "SLURM_STEP_NODELIST": "gpu07",
}


def without(environment, *names):
    return {name: value for name, value in environment.items() if name not in names}


# Of Kubeflow's PyTorchJob: RANK is its number, and its processes have not been started.
POD = {"MASTER_ADDR": "llama-master-0", "MASTER_PORT": "23456", "WORLD_SIZE": "1", "RANK": "0"}


@pytest.mark.parametrize(
    "environment",
    [
        {"HOME": "/root", "SLURM_JOB_ID": "1", "LOCAL_RANK": "0"},
        POD,
        # The batch script itself, before any srun: four tasks are allotted, this process is none of them.
        without(SRUN, "SLURM_STEP_NUM_TASKS", "SLURM_STEP_TASKS_PER_NODE", "SLURM_STEP_NODELIST"),
        # `srun --ntasks=1` holds a node, and one process of ours starts the ranks there.
        {**SRUN, "SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0"},
    ],
)
def test_process_that_nobody_launched_is_no_rank(environment):
    assert read_identity(environment) is None


def test_our_own_ranks_are_known_by_the_folder_of_the_run_and_a_pods_by_what_started_them():
    identity = read_identity({**TORCHRUN, "WORLD_SIZE": "6", "LOCAL_WORLD_SIZE": "6", ENV_RUN_DIR: "/tmp/run"})
    assert identity.launcher == "unsloth_multigpu"
    assert identity.local_world_size == identity.world_size
    rank = read_identity({**POD, "WORLD_SIZE": "8", "RANK": "5", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4"})
    assert rank == RankIdentity(5, 1, 8, 4, "torchrun", "llama-master-0", 23456)


def test_kernel_of_a_group_of_one_is_no_rank():
    # As jupyter-distributed sets them.
    alone = {**without(TORCHRUN, "LOCAL_WORLD_SIZE"), "RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
    assert read_identity(alone, is_kernel=True) is None
    assert read_identity(alone) == RankIdentity(0, 0, 1, 1, "torchrun", "node1", 29400)
    of_two = {**alone, "WORLD_SIZE": "2"}
    assert read_identity(of_two, is_kernel=True) == RankIdentity(0, 0, 2, 2, "torchrun", "node1", 29400)


START = "Start with torchrun, or unset RANK and WORLD_SIZE"
JOIN = "env -u RANK -u WORLD_SIZE unsloth-multigpu run --nnodes"


@pytest.mark.parametrize(
    ("environment", "message", "hint"),
    [
        (without(TORCHRUN, "LOCAL_RANK"), "RANK and WORLD_SIZE=8 are set, but LOCAL_RANK is not", START),
        (without(TORCHRUN, "MASTER_ADDR", "MASTER_PORT"), "but MASTER_ADDR, MASTER_PORT is not", START),
        # One pod of several: the command joins it.
        ({**POD, "WORLD_SIZE": "2", "RANK": "1"}, "WORLD_SIZE=2 are set, but LOCAL_RANK is not", JOIN),
        (
            {**TORCHRUN, "RANK": "8"},
            "contradict each other: rank=8 world_size=8 local_rank=1 local_world_size=4",
            "Unset ",
        ),
        ({**TORCHRUN, "LOCAL_RANK": "4"}, "local_rank=4 local_world_size=4", "Unset "),
        ({**TORCHRUN, "WORLD_SIZE": "two"}, "WORLD_SIZE='two'; expected a whole number", "Unset "),
    ],
)
def test_variables_that_are_missing_or_contradict_are_named(environment, message, hint):
    with refused(LaunchError, message, hint):
        read_identity(environment)


def test_srun_on_three_nodes_gives_each_rank_its_place():
    step = {"SLURM_STEP_NUM_TASKS": "5", "SLURM_STEP_TASKS_PER_NODE": "2(x2),1", "SLURM_STEP_NODELIST": "gpu[03-05]"}
    for rank, (node, local, num_local) in enumerate([(0, 0, 2), (0, 1, 2), (1, 0, 2), (1, 1, 2), (2, 0, 1)]):
        place = {"SLURM_PROCID": str(rank), "SLURM_LOCALID": str(local), "SLURM_NODEID": str(node)}
        expected = RankIdentity(rank, local, 5, num_local, "slurm", "gpu03", 18456)
        assert read_identity({**SRUN, **step, **place}) == expected


@pytest.mark.parametrize(
    ("nodelist", "host"),
    [
        ("gpu07", "gpu07"),
        ("gpu07,cpu1", "gpu07"),
        ("gpu[03-05,09],cpu1", "gpu03"),
        ("gpu[007]", "gpu007"),
        ("login-1.cluster.org,gpu[1-2]", "login-1.cluster.org"),
    ],
)
def test_first_host_of_a_node_list(nodelist, host):
    assert first_host(nodelist) == host


OF_TWO = RankIdentity(1, 1, 2, 2, "torchrun").variables()


@pytest.fixture
def child(monkeypatch):
    """This process as a child of multiprocessing, without variables of a rank."""
    for name in (*OF_TWO, ENV_RUN_DIR):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    monkeypatch.setattr(multiprocessing, "parent_process", lambda: SimpleNamespace(pid=1))
    return monkeypatch


def from_spawn():
    """What `torch.multiprocessing.spawn` gets as the result of its function."""

    def train():
        return enable()

    def enable():
        return is_helper()

    return eval("f()", {"__name__": "torch.multiprocessing.spawn", "f": train})


def become_rank(child):
    for name, value in OF_TWO.items():
        child.setenv(name, value)


def test_process_that_spawn_has_started_with_variables_of_its_own_is_a_rank(child):
    become_rank(child)
    assert not from_spawn()
    assert is_helper()  # What a rank starts itself inherits the variables.
    child.setenv(ENV_RUN_DIR, "/run")
    assert from_spawn()  # Of one of ours.


def test_process_that_has_opened_a_group_is_a_rank(child):
    become_rank(child)
    group = SimpleNamespace(is_available=lambda: True, is_initialized=lambda: True, get_world_size=lambda: 2)
    child.setitem(sys.modules, "torch.distributed", group)
    assert not is_helper()


def test_rank_that_does_not_know_itself_is_refused(child):
    with refused(SetupError, "one of several that multiprocessing has started", "Before this call set RANK"):
        from_spawn()
    child.setenv("RANK", "0")
    child.setenv("WORLD_SIZE", "2")
    with pytest.raises(LaunchError, match="LOCAL_RANK"):
        from_spawn()


def test_only_children_of_multiprocessing_are_asked(child):
    become_rank(child)
    with child.context() as alone:
        alone.setattr(multiprocessing, "parent_process", lambda: None)
        assert not is_helper()
    child.setattr(torch.utils.data, "get_worker_info", lambda: SimpleNamespace(id=0))
    assert from_spawn()  # A worker of a data loader.
    child.setattr(torch.utils.data, "get_worker_info", lambda: None)
    child.setattr(multiprocessing.current_process(), "_inheriting", True, raising=False)
    assert from_spawn()  # It is importing the script.
