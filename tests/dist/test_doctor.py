"""`unsloth-multigpu doctor` on this machine, as it is and with planted faults."""

from __future__ import annotations

import json
import os
import signal

import pytest

from tests.helpers import need
from tests.helpers.run import finish, hide, orphans, run_python, start, wait_until
from unsloth_multigpu.tools.probe import run_probe
from unsloth_multigpu.versions import SUPPORTED

DOCTOR = ["-m", "unsloth_multigpu", "doctor"]
# Read by every Python that starts with this folder in PYTHONPATH.
FAULT = """
import os, time
from wrapt import register_post_import_hook

def plant(dist):
    original = dist.all_reduce
    def all_reduce(tensor, *args, **kwargs):
        if FAULT == "stuck":
            time.sleep(600)
        original(tensor, *args, **kwargs)
        tensor[7] += 1
    dist.all_reduce = all_reduce

if os.environ.get("RANK") == "1":
    register_post_import_hook(plant, "torch.distributed")
"""


def plant_fault(folder, fault) -> dict[str, str]:
    """Variables under which rank 1 of the all-reduce has the fault."""
    (folder / "sitecustomize.py").write_text(f"FAULT = {fault!r}\n{FAULT}")
    return {"PYTHONPATH": os.pathsep.join([str(folder), *filter(None, [os.environ.get("PYTHONPATH")])])}


@pytest.mark.slow
def test_doctor_finds_this_machine_ready(tmp_path):
    # IPython is of the extra `notebook`.
    run = run_python([*DOCTOR, "--json"], tmp_path, hide("IPython"))
    result = json.loads(run.out)
    known = [("imports", "unsloth")] if need.UNSLOTH_ASKS_FOR_GPU else []
    failed = [row for row in result["rows"] if row["state"] == "FAIL"]
    assert [(row["section"], row["name"]) for row in failed] == known, failed
    assert result["ok"] is (not known)
    assert run.code == len(known)
    assert run.err == ""
    rows = {(row["section"], row["name"]): row for row in result["rows"]}
    assert all(("versions", name) in rows for name in SUPPORTED)
    (reduced,) = (row["facts"] for row in result["rows"] if row["section"] == "all-reduce")
    assert set(reduced["num_wrong_by_rank"]) == {0}
    assert reduced["algorithm_gb_per_s"] > 0
    if reduced["device"] == "cpu":
        assert (reduced["num_ranks"], reduced["backend"]) == (2, "gloo")
    assert rows["imports", "transformers"]["state"] == "ok"
    assert rows["patches", "functions"]["facts"]["num_patches"] > 30
    assert rows["patches", "functions"]["facts"]["num_methods"] > 20
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_doctor_finds_every_planted_fault(tmp_path):
    variables = plant_fault(tmp_path, "wrong sum")
    old = tmp_path / "peft-0.1.0.dist-info"
    old.mkdir()
    (old / "METADATA").write_text("Metadata-Version: 2.1\nName: peft\nVersion: 0.1.0\n")
    run = run_python([*DOCTOR, "--num-gpus", "2"], tmp_path, {**variables, "UNSLOTH_MULTIGPU_DEVICE": "cpu"})
    assert run.code == 1, run.out
    failed = [line.strip() for line in run.out.splitlines() if line.startswith("  FAIL")]
    assert any(line.startswith("FAIL  peft  ") and "0.1.0 (>=0.18,<0.22)" in line for line in failed), run.out
    assert any("wrong sums, by rank [0, 1]" in line for line in failed), run.out
    assert any("peft 0.1.0 is installed, but peft." in line and "is known for >=0.18" in line for line in failed)
    assert run.out.count("Hint: ") >= len(failed)
    last = run.out.splitlines()[-1]
    assert last.startswith(f"NOT READY: {len(failed)} of ")
    assert "peft (versions)" in last
    assert "2 x cpu (all-reduce)" in last


@pytest.mark.thorough
def test_stuck_all_reduce_names_its_rank(tmp_path):
    options = {"LOG_DIR": str(tmp_path / "logs"), "TIMEOUT_S": "10", "NUM_GPUS": "2", "DEVICE": "cpu"}
    variables = {**plant_fault(tmp_path, "stuck"), **{f"UNSLOTH_MULTIGPU_{n}": v for n, v in options.items()}}
    outcome = run_probe("unsloth_multigpu.tools.allreduce", tmp_path, 120.0, variables)
    # Rank 0, which waits for rank 1, is the one that notices.
    assert "unsloth_multigpu: rank 0 failed: RuntimeError: " in outcome["error"], outcome
    assert "imed out" in outcome["error"], outcome
    assert orphans(str(tmp_path)) == []


@pytest.mark.thorough
def test_stopped_doctor_leaves_no_process(tmp_path):
    process = start(DOCTOR, tmp_path, {"TMPDIR": str(tmp_path)})
    wait_until(lambda: len(orphans(str(tmp_path))) >= 2, 60, "two probes")
    # What is known by then has been shown.
    assert process.stdout.readline() == "versions\n"
    process.send_signal(signal.SIGTERM)
    run = finish(process, 30)
    assert (run.code, run.err) == (143, "")
    assert "\nall-reduce\n" not in run.out
    # The kernel ends the ranks of a launcher that was ended; on a busy machine that takes a moment.
    wait_until(lambda: not orphans(str(tmp_path)), 30, "the end of every process")
    assert list(tmp_path.iterdir()) == []
