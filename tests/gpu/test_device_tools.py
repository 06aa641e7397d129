"""Commands, notebooks, clients and plain loops on cards of their own. Needs two GPUs; some need them in host memory."""

from __future__ import annotations

import contextlib
import io
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.gpu.card import IS_FAKE, IS_REHEARSAL, NUM_CARDS, of_ranks
from tests.helpers.fake_cuda import cards, needs_device, reports
from tests.helpers.run import BARE, LIGHT, PLAIN, ROOT, finish, light, orphans, run_python, run_well, start, wait_until
from unsloth_multigpu.__main__ import main
from unsloth_multigpu.wire.run import find_runs

SCRIPTS = ROOT / "tests" / "dist" / "scripts"
COMMAND = ("-m", "unsloth_multigpu")
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
pytestmark = [
    pytest.mark.skipif(NUM_CARDS < 2, reason=f"needs 2 GPUs, {NUM_CARDS} visible"),
    pytest.mark.skipif(IS_REHEARSAL, reason="needs GPUs, and a rehearsal has CPU ranks"),
    pytest.mark.slow,
]
VISIBLE = of_ranks(2)
NAMES = ["cuda:0", "cuda:1"]
HANG_TIMEOUT_S = 8.0


# Commands.


@pytest.mark.thorough
def test_doctor_finds_both_devices_and_no_fault(tmp_path: Path) -> None:
    # It imports what it finds. Unsloth takes as long as all the rest.
    run = run_well([*COMMAND, "doctor", "--json"], tmp_path, {**light("unsloth", "unsloth_zoo"), **VISIBLE})
    rows = json.loads(run.out)["rows"]
    assert [row["name"] for row in rows if row["section"] == "devices"][1:3] == NAMES
    copies = {row["name"] for row in rows if row["section"] == "copies between devices"}
    assert copies == {"cuda:0 -> cuda:1", "cuda:1 -> cuda:0"}
    (reduced,) = (row["facts"] for row in rows if row["section"] == "all-reduce")
    assert (reduced["num_ranks"], reduced["backend"], reduced["num_wrong_by_rank"]) == (2, "nccl", [0, 0])


@pytest.mark.thorough
def test_verify_finds_the_same_training_on_two_devices(tmp_path: Path) -> None:
    script = [SCRIPTS / "tiny_train.py", "--out", tmp_path / "log.json"]
    run = run_well([*COMMAND, "verify", "--json", "--steps", "2", *script], tmp_path, {**BARE, **VISIBLE})
    found = json.loads(run.out)
    assert found["agree"]
    assert [found["runs"][name]["world_size"] for name in ("one", "many")] == [1, 2]
    assert not found["runs"]["many"]["device"].startswith("cpu")
    assert all(step["compared"]["is_exact"] for step in found["steps"])
    assert found["one_process_s"] > 0 < found["ranks_s"]


def test_bench_times_the_legacy_path_on_two_devices(tmp_path: Path) -> None:
    tiny = ["--model-size", "tiny", "--lengths", "fixed:16", "--steps", "1", "--warmup", "1", "--repeats", "1"]
    run = run_well([*COMMAND, "bench", "--json", "--arms", "legacy", *tiny], tmp_path, {**light("triton"), **VISIBLE})
    ((record,),) = json.loads(run.out)["runs"]["legacy"]
    # Two micro-batches of each device.
    assert all(len(step["micro_batches"]) == 4 and 0 < step["compute_s"] <= step["wall_s"] for step in record["steps"])


# A rank that is late, and then does not come.


def said(*arguments: str) -> str:
    """What a command prints, in this process: one of its own would come behind the end of what hangs."""
    with contextlib.redirect_stdout(io.StringIO()) as screen:
        assert main(arguments) == 0
    return screen.getvalue()


def test_late_rank_is_shown_by_top_and_named(tmp_path: Path) -> None:
    """Rank 1 sleeps before it computes gradients, and then does not come; rank 0 is stuck in a collective."""
    script = tmp_path / "hang.py"  # The folder's name in the command line marks the processes of this run.
    script.write_text((SCRIPTS / "hang.py").read_text())
    process = start([script, HANG_TIMEOUT_S, "late"], tmp_path, {**BARE, **VISIBLE})
    top = ["top", "--once", str(process.pid)]
    wait_until(lambda: any(run.pid == process.pid for run in find_runs()), 60.0, "the run's folder")
    looks: list[str] = []  # A further look may come when the run has ended.

    def is_stuck() -> bool:
        looks.append(said(*top, "--json"))
        return '"is_stuck": true' in looks[-1]

    wait_until(is_stuck, 120.0, "a rank that is stuck")
    ranks, table = json.loads(looks[-1])["ranks"], said(*top)
    run = finish(process)
    for rank in ranks:
        assert not (rank["device"] or "cpu").startswith("cpu"), rank
        # Of a card: what torch has allocated there, and not the size of the process.
        assert 0 < rank["memory_bytes"] <= rank["peak_bytes"] < 2**27, rank
        assert rank["device"] in table
    assert ranks[0]["collective"] > ranks[1]["collective"]
    assert run.code == 124, run.err
    hang = r"rank 1 hangs: no progress for \d+ s in step 4, computing \(hang\.py:\d+ in forward\)"
    assert re.search(hang, run.err), run.err
    assert orphans(str(tmp_path)) == []
    # By events: the host of rank 0 does not stand still in the exchange, but later.
    lines = re.findall(r"waiting ([\d.]+) slowest (\d)", run.out)
    assert len(lines) == 3, run.out
    for waiting, slowest in lines[1:]:
        assert (float(waiting) > 0.1, slowest) == (True, "1"), lines


# A notebook.

ENABLE = """
import unsloth_multigpu as ump
ump.enable_multi_gpu(num_gpus=2)
import torch, torch.distributed as dist
from transformers import Trainer, TrainerCallback, TrainingArguments
rank = dist.get_rank()
class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(4))
    def forward(self, x, labels=None):
        if rank == 1 and log.step == log.fails_behind:
            raise ValueError("one")
        return {"loss": ((x * self.weight).sum(-1) - labels).square().mean()}
class Log(TrainerCallback):
    step, fails_behind, says = 0, None, False
    def on_train_begin(self, args, state, control, **kwargs):
        self.step, self.weights = 0, {}
    def on_step_end(self, args, state, control, **kwargs):
        self.step = state.global_step
        self.weights[self.step] = model.weight.detach().cpu().clone()
        if self.says and self.step == 4:
            print("go", flush=True)
model, log = Model(), Log()
torch.manual_seed(0)
rows = [{"x": torch.randn(4), "labels": torch.tensor(1.0)} for _ in range(8)]
arguments = dict(per_device_train_batch_size=2, learning_rate=0.1, save_strategy="no", report_to="none", disable_tqdm=1)
def make(max_steps):
    arguments_of_run = TrainingArguments(output_dir="out", max_steps=max_steps, **arguments)
    return Trainer(model=model, args=arguments_of_run, train_dataset=rows, callbacks=[log])
def are_equal():
    weights = [torch.zeros(4, device=model.weight.device) for _ in range(2)]
    dist.all_gather(weights, model.weight.detach())
    return bool((weights[0] == weights[1]).all())
"""
TRAINS = (
    "log.fails_behind, log.says = None, False\nprint(make(4).train().global_step, are_equal(), model.weight.device)"
)
TRAINED = "4 True cuda:0"
FAILS = "log.fails_behind = 2\ntrainer = make(6)\ntrainer.train()"
LEFT = "print(trainer.state.global_step, sorted(log.weights), bool((model.weight.cpu() == log.weights[2]).all()))"


@pytest.fixture(scope="module")
def notebook(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    pytest.importorskip("jupyter_client", reason="needs jupyter_client and ipykernel")
    pytest.importorskip("ipykernel", reason="needs jupyter_client and ipykernel")
    from tests.helpers.notebook import NotebookRun

    with NotebookRun(tmp_path_factory.mktemp("notebook"), {**PLAIN, **VISIBLE}) as notebook:
        cell = notebook.run(ENABLE, 120.0)
        assert cell.error == "", cell.traceback
        yield notebook


def last_line(cell: Any) -> str:
    assert cell.error == "", cell.traceback
    return cell.text.splitlines()[-1]


def test_worker_that_fails_in_a_step_lets_rank_0_make_none_on_its_own_gradients(notebook: Any) -> None:
    """Aborted, a collective of NCCL ends without an error: rank 0 has to have the exception by then."""
    assert last_line(notebook.run(TRAINS, 60.0)) == TRAINED
    cell = notebook.run(FAILS, 60.0)
    assert (cell.error, "rank 1 raised ValueError: one" in cell.value) == ("DistributedError", True), cell
    assert last_line(notebook.run(LEFT, 60.0)) == "2 [1, 2] True"
    assert last_line(notebook.run(TRAINS, 60.0)) == TRAINED


def test_stop_in_a_training_ends_the_cell_and_the_next_one_trains(notebook: Any) -> None:
    cell = notebook.stop("log.says = True\nmake(10**6).train()")
    assert (cell.error, cell.seconds < 30.0) == ("KeyboardInterrupt", True), cell
    assert last_line(notebook.run(TRAINS, 60.0)) == TRAINED


# Clients, a plain loop, eight ranks.


@pytest.mark.thorough
def test_clients_see_one_device_each_and_the_server_opens_none(tmp_path: Path) -> None:
    pytest.importorskip("flwr", reason="Flower needs Python 3.11")
    run_well([ROOT / "tests" / "gpu" / "clients.py", tmp_path], tmp_path, {**LIGHT, **VISIBLE})
    facts = json.loads((tmp_path / "facts.json").read_text())
    assert facts["2"] == [{"cuda:0": [0, 2, 4], "cuda:1": [1, 3]}] * 2
    slots = sorted(facts["slots of 2"], key=lambda slot: slot["visible"])
    assert [slot["visible"] for slot in slots] == VISIBLE["CUDA_VISIBLE_DEVICES"].split(",")
    assert all((slot["count"], slot["weights_on"]) == (1, ["cuda:0"]) for slot in slots)
    assert len({slot["card"] for slot in slots}) == 2
    assert not facts["server has opened a card"]
    one, two = (load_file(tmp_path / f"{num_gpus}.safetensors") for num_gpus in (1, 2))
    assert max(float((one[name] - two[name]).abs().max()) for name in one) < 1e-6


@pytest.mark.thorough
def test_plain_loop_trains_on_two_devices_as_on_one(tmp_path: Path) -> None:
    report = {"FAKE_CUDA_REPORT": str(tmp_path / "report")} if IS_FAKE else {}
    run_well([*TORCHRUN, SCRIPTS / "plain.py", tmp_path], tmp_path, {**VISIBLE, **report})
    ranks = [json.loads((tmp_path / f"plain_{rank}.json").read_text()) for rank in range(2)]
    alone = "from plain import *; m, s, e = train(0); print(json.dumps([s, e, [p.tolist() for p in m.parameters()]]))"
    begin, epochs, weights = json.loads(run_python(["-c", alone], SCRIPTS, of_ranks(1)).out)
    for rank in ranks:
        assert (rank["kind"], rank["start"]) == ("DistributedDataParallel", begin)
        for mine, his in zip(rank["end"], weights, strict=True):
            assert torch.allclose(torch.tensor(mine), torch.tensor(his), atol=1e-5)
    for left, right, whole in zip(ranks[0]["epochs"], ranks[1]["epochs"], epochs, strict=True):
        assert [a + b for a, b in zip(left, right, strict=True)] == whole
    if IS_FAKE:
        assert [each.opened for each in reports(tmp_path / "report")] == [[0], [1]]


@needs_device
@pytest.mark.thorough
def test_each_of_eight_ranks_opens_its_own_device(tmp_path: Path) -> None:
    variables = cards(8, report=tmp_path / "report")
    script = [SCRIPTS / "tiny_train.py", "--num-gpus", "8", "--batch-size", "10", "--out", tmp_path / "log.json"]
    run = run_well(script, tmp_path, {**BARE, **variables})
    assert "8 ranks on 8 x " in run.err
    assert [each.opened for each in reports(tmp_path / "report")] == [[rank] for rank in range(8)]
