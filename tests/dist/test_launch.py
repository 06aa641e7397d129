"""Every way to start: our own from each form of the command, and joining ranks that another launcher started."""

import os
from pathlib import Path

import pytest
import torch

from tests.helpers.outcome import each, facts_of
from tests.helpers.run import BARE, finish, free_port, run_python, run_well, start
from unsloth_multigpu.accelerator import allocator_variables

SCRIPT = Path(__file__).parent / "scripts" / "whoami.py"
LEAVES = SCRIPT.with_name("leaves.py")
# As `import unsloth` sets it, where it is installed; that comes too late in a rank.
UNSLOTHS_ALLOCATOR = allocator_variables({})
ARGUMENTS = ["--n", "two words", "$HOME", "${local_rank}", "a'b\"c"]


def facts(folder):
    found = facts_of(folder / "rank")
    assert [f["rank"] for f in found] == [0, 1]
    assert [f["total"] for f in found] == [3, 3]
    return found


def test_command_is_started_again_as_it_was(tmp_path):
    options = ["-X", "faulthandler", "-W", "ignore", "-b"]
    variables = {"UNSLOTH_MULTIGPU_NUM_GPUS": "2", "OMP_NUM_THREADS": ""}
    run_well([*options, SCRIPT, tmp_path, *ARGUMENTS], cwd=tmp_path, env=variables)
    shared_threads = str(max(1, len(os.sched_getaffinity(0)) // 2))
    for rank in facts(tmp_path):
        assert rank["arguments"] == ARGUMENTS
        assert rank["name"] == "__main__"
        assert rank["launcher"] == "unsloth_multigpu"
        assert rank["threads"] == shared_threads
        assert rank["flags"] == [True, 1]
        assert rank["allocator"] == UNSLOTHS_ALLOCATOR


@pytest.mark.thorough
def test_ranks_of_accelerate_launch_are_joined(tmp_path):
    """Other tests train in ranks of torchrun."""
    options = ["--multi_gpu", "--num_processes", "2", "--num_machines", "1"]
    run_well(["-m", "accelerate.commands.launch", *options, SCRIPT, tmp_path], tmp_path, BARE)
    assert {f["launcher"] for f in facts(tmp_path)} == {"torchrun"}
    assert all(f["allocator"] == UNSLOTHS_ALLOCATOR for f in facts(tmp_path))


def slurm(rank, port):
    return {
        "SLURM_JOB_ID": "7",
        "SLURM_STEP_NUM_TASKS": "2",
        "SLURM_STEP_TASKS_PER_NODE": "2",
        "SLURM_STEP_NODELIST": "localhost",
        "SLURM_NODEID": "0",
        "SLURM_PROCID": str(rank),
        "SLURM_LOCALID": str(rank),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }


def run_as_srun(folder, *command):
    port = free_port()
    processes = [start(command, folder, {**BARE, **slurm(rank, port)}) for rank in (0, 1)]
    return [finish(p) for p in processes]


def test_ranks_of_srun_are_joined(tmp_path):
    runs = run_as_srun(tmp_path, SCRIPT, tmp_path)
    assert [r.code for r in runs] == [0, 0], runs[0].err + runs[1].err
    assert {f["launcher"] for f in facts(tmp_path)} == {"slurm"}
    assert all(f["allocator"] == UNSLOTHS_ALLOCATOR for f in facts(tmp_path))


# The store of the ranks goes with rank 0: it serves until the others have left, but not for one that is dead. Where
# rank 0 fails, those that wait for it end with it.
CODES = {"late": [0, 0], "killed": [0, -9], "failed": [1, 1]}


@pytest.mark.parametrize("way", each(CODES, ["killed", "failed"]))
def test_rank_0_serves_the_store_as_long_as_another_rank_needs_it(tmp_path, way):
    first, second = run_as_srun(tmp_path, LEAVES, way)
    assert [first.code, second.code] == CODES[way], first.err + second.err
    assert ("saved on rank 1" in second.out) == (way == "late")
    if way == "failed":
        assert "ValueError: of rank 0" in first.err
        assert "rank 0 leaves, and with it" not in first.err


def test_seed_before_the_line_stays_spawned_worker_is_no_rank_and_the_exit_code_of_all_ranks_is_passed_on(tmp_path):
    script = tmp_path / "spawns.py"
    script.write_text(
        "import sys\n"
        "import torch\n"
        "torch.manual_seed(7)\n"
        "import unsloth_multigpu as ump\n"
        "ump.enable_multi_gpu(num_gpus=2)\n"
        "class Rows(torch.utils.data.Dataset):\n"
        "    def __len__(self): return 5\n"
        "    def __getitem__(self, index): return index\n"
        "if __name__ == '__main__':\n"
        "    print('drawn', torch.initial_seed(), float(torch.rand(())))\n"
        "    loader = torch.utils.data.DataLoader(Rows(), num_workers=1, multiprocessing_context='spawn')\n"
        "    print('sum', sum(int(x) for x in loader))\n"
        "    torch.distributed.init_process_group('gloo')\n"
        "    torch.distributed.barrier()\n"  # The end of the first rank ends the other.
        "    sys.exit(3)\n"
    )
    run = run_python([script], cwd=tmp_path)
    assert run.code == 3, run.err
    assert "exited with code 3" in run.err
    with torch.random.fork_rng():
        torch.manual_seed(7)
        drawn = f"drawn 7 {float(torch.rand(()))}\n"
    for text in (run.out, (tmp_path / "logs" / "rank_1.log").read_text()):
        assert (drawn in text, "sum 10\n" in text) == (True, True), text
