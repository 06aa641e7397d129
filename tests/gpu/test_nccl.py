"""Ranks over NCCL train as one process does: on cards of their own, or on one that they share. Needs a GPU."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
from collections import Counter
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.gpu.card import IS_FAKE, IS_REHEARSAL, NEEDS_CARD, cards, of_ranks, place_of
from tests.helpers.outcome import assert_trained_as_one, distance
from tests.helpers.run import BARE, PLAIN, ROOT, finish, free_port, light, orphans, run_well, start, wait_until
from tests.helpers.tiny import build_tiny

SCRIPTS = ROOT / "tests" / "dist" / "scripts"
pytestmark = NEEDS_CARD
BACKEND = place_of(2).backend
# Interpreted, the kernels of Unsloth and TRL are too slow for these sizes: tests/e2e/test_gpu_path.py has smaller ones.
LIBRARIES = light("rich", "triton", "unsloth", "unsloth_zoo") if IS_FAKE else {}
# Rows x batch size x accumulation: the last shape divides neither by the step nor by the ranks.
EVEN, UNEVEN = "24x4x2", "26x3x3"
JOBS = {
    2: [f"{kind}:{UNEVEN}" for kind in ("trainer_peft", "dpo")],
    4: [f"trainer_peft:{EVEN}", f"trainer_peft:{UNEVEN}"],
}
MORE = [f"{kind}:{UNEVEN}" for kind in ("sft_lora", "sft_full")]
# Unsloth's kernels compute in the card's own precision.
BOUNDS = {"trainer_peft": 1e-4, "sft_lora": 1e-2, "sft_full": 1e-2, "dpo": 1e-2}
SHARDED_JOB = "momentum_full:36x6x2"
HANG_TIMEOUT_S = 8.0


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A function of the number of ranks: the folder of its outcomes, in which each job was trained."""
    folder, done = tmp_path_factory.mktemp("nccl"), {}
    model = build_tiny(folder / "model")

    def train(num_ranks, jobs):
        if (num_ranks, *jobs) not in done:
            out = done[(num_ranks, *jobs)] = folder / str(len(done))
            command = [SCRIPTS / "parity.py", num_ranks, model, out, *jobs]
            run_well(command, folder, {**LIBRARIES, **of_ranks(num_ranks, guarded=True)})
        return done[(num_ranks, *jobs)]

    return train


def check(trained, num_ranks, job):
    bound, jobs = BOUNDS[job.partition(":")[0]], MORE if job in MORE else JOBS[num_ranks]
    places = trained(1, jobs), trained(num_ranks, jobs)
    one, *ranks = assert_trained_as_one(*places, job, num_ranks, norms=bound, weights=bound)
    seen = Counter()
    for rank in ranks:
        seen.update((step, row) for step, rows in rank["seen"].items() for row in Counter(rows).elements())
    assert seen == Counter((step, row) for step, rows in one["seen"].items() for row in Counter(rows).elements())
    assert ranks[0]["loss"] == pytest.approx(one["loss"], rel=bound)


@pytest.mark.parametrize("job", [*JOBS[2], *(pytest.param(job, marks=pytest.mark.thorough) for job in MORE)])
def test_two_ranks_train_as_one_process(trained, job):
    check(trained, 2, job)


@pytest.mark.thorough
@pytest.mark.parametrize("job", JOBS[4])
def test_four_ranks_train_as_one_process(trained, job):
    check(trained, 4, job)


@pytest.mark.thorough
@pytest.mark.skipif(
    BACKEND == "gloo" and not IS_REHEARSAL, reason="needs NCCL 2.30 or 2 GPUs: gloo does not divide tensors of a card"
)
def test_sharded_ranks_train_as_one_process(tmp_path):
    model, norms = build_tiny(tmp_path / "model"), []
    for num_ranks, shard in ((1, "off"), (2, "on")):
        out = tmp_path / str(num_ranks)
        command = [SCRIPTS / "shard.py", num_ranks, model, out, 0, SHARDED_JOB]
        run = run_well(command, tmp_path, {**of_ranks(num_ranks), "UNSLOTH_MULTIGPU_SHARD": shard})
        norms.append(json.loads((out / SHARDED_JOB / "facts_0.json").read_text())["norms"])
    assert "sharded by FSDP2 of accelerate: a rank holds 50." in run.err
    assert norms[1] == pytest.approx(norms[0], rel=1e-4)
    one, two = (load_file(tmp_path / num / SHARDED_JOB / "weights.safetensors") for num in "12")
    assert distance(one, two) < 1e-4


@pytest.mark.thorough
def test_hung_rank_is_named_and_the_run_ends(tmp_path):
    """The other rank waits in a collective, which NCCL would do for ever."""
    script = tmp_path / "hang.py"  # The folder's name in the command line marks the processes of this run.
    script.write_text((SCRIPTS / "hang.py").read_text())
    process = start([script, HANG_TIMEOUT_S, "stop"], tmp_path, {**BARE, **of_ranks(2)}, stdout=subprocess.DEVNULL)
    run = finish(process, 200.0)
    assert run.code == 124, run.err
    assert re.search(
        r"rank 1 hangs: no sign of life for \d+ s in step 3, .*\(hang\.py:\d+ in on_optimizer_step\)", run.err
    )
    wait_until(lambda: not orphans(str(tmp_path)), 30.0, "end of all processes")


@pytest.mark.thorough
def test_step_with_nan_is_left_out_on_all_ranks(tmp_path):
    run = run_well([SCRIPTS / "messages.py", "skip", "without"], tmp_path, {**PLAIN, **of_ranks(2)})
    line = "step 3: gradient norm is nan; loss of rank 1, micro-batch 0, was nan: left out on all ranks (1 so far)"
    assert run.err.count(line) == 1
    skipped, without = (
        [torch.load(tmp_path / f"{name}_{rank}.pt", map_location="cpu", weights_only=True)["now"] for rank in range(2)]
        for name in ("skip", "without")
    )
    assert torch.equal(skipped[0], skipped[1])
    assert float((skipped[0] - without[0]).abs().max()) < 1e-6


RESUMED = {"lora": True, "args": {"gradient_accumulation_steps": 2}}
# The masks of dropout are drawn by the generators of the devices.
RESUMES = {
    "killed": {**RESUMED, "dropout": 0.1, "kill": [1, 8]},
    "whole": {**RESUMED, "dropout": 0.1},
    "elastic": {**RESUMED, "random": False},
    "server": {**RESUMED, "random": False, "options": {"strategy": "parameter_server", "balance": "off"}},
}


def resume(folder, num_ranks, lines):
    options = json.dumps({"resume": "auto", "max_restarts": 1, "balance": "off"})
    configurations = [f"{name}={json.dumps(line)}" for name, line in lines.items()]
    arguments = [SCRIPTS / "resume.py", str(num_ranks), options, *configurations]
    run = run_well(arguments, folder, {**PLAIN, **of_ranks(num_ranks)})
    return run.err


def test_killed_rank_costs_no_step_and_one_card_goes_on(tmp_path):
    """The second attempt, and one card with a checkpoint of two, end with the weights of an undisturbed training.

    So does a strategy that meets in every step.
    """
    assert "resumes from checkpoints_killed/checkpoint-6" in resume(tmp_path, 2, RESUMES)
    one = {**RESUMES["elastic"], "folder": "on_one", "from": "checkpoints_elastic/checkpoint-6"}
    resume(tmp_path, 1, {"on_one": one})
    assert json.loads((tmp_path / "server_0_1.json").read_text())["wrapper"] == "PeftModel"
    for name, other in (("killed", "whole"), ("on_one", "elastic"), ("server", "elastic")):
        mine, whole = (load_file(tmp_path / f"{each}.safetensors") for each in (name, other))
        assert max(float((mine[key] - whole[key]).abs().max()) for key in whole) < 1e-5


def line_of(num_gpus, out):
    """The line of a command that trains, and writes what rank 0 logged."""
    return [str(SCRIPTS / "tiny_train.py"), "--num-gpus", str(num_gpus), "--batch-size", "5", "--out", str(out)]


def norms_in(out):
    return [line["grad_norm"] for line in json.loads(out.read_text())["log"] if "grad_norm" in line]


@pytest.fixture(scope="module")
def norms_of_one(tmp_path_factory):
    folder = tmp_path_factory.mktemp("one")
    run_well(line_of(1, folder / "log.json"), folder, {**PLAIN, **of_ranks(1)})
    return pytest.approx(norms_in(folder / "log.json"), rel=1e-4)


@pytest.mark.thorough
def test_notebook_trains_as_one_card(tmp_path, norms_of_one):
    pytest.importorskip("jupyter_client", reason="needs jupyter_client and ipykernel")
    pytest.importorskip("ipykernel", reason="needs jupyter_client and ipykernel")
    from tests.helpers.notebook import NotebookRun

    command = line_of(2, tmp_path / "log.json")
    with NotebookRun(tmp_path, {**PLAIN, **of_ranks(2)}) as notebook:
        for source in (
            f"import sys\nsys.argv = {command!r}\nsys.path.insert(0, {str(SCRIPTS)!r})\n{Path(command[0]).read_text()}",
            f"import torch.distributed as dist\nassert dist.get_backend() == {BACKEND!r}",
        ):
            cell = notebook.run(source, 120.0)
            assert cell.error == "", cell.traceback
    assert norms_in(tmp_path / "log.json") == norms_of_one


def test_ranks_may_see_one_card_each(tmp_path, norms_of_one):
    """As srun binds them: both ranks' card is number 0, and the local rank of one is 1."""
    port = free_port()
    shared = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    names = cards(place_of(2).num_cards) or [""]
    of_each = [names[0], names[-1]]
    ranks = []
    try:
        for rank, card in enumerate(of_each):
            folder = tmp_path / str(rank)
            folder.mkdir()
            own = {**PLAIN, **of_ranks(2), **shared, "RANK": str(rank), "LOCAL_RANK": str(rank)}
            own["CUDA_VISIBLE_DEVICES"] = card
            ranks.append(start(line_of(2, folder / "log.json"), folder, own))
        runs = [finish(rank) for rank in ranks]
    finally:
        for rank in ranks:
            if rank.poll() is None:
                os.kill(rank.pid, signal.SIGKILL)
                rank.wait()
    assert [run.code for run in runs] == [0, 0], [run.err for run in runs]
    assert norms_in(tmp_path / "0" / "log.json") == norms_of_one
