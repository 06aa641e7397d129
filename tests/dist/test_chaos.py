"""The command that plants faults: a killed rank, a run that goes on by itself, and the same weights as without."""

import json
from pathlib import Path

from tests.helpers.run import BARE, orphans, run_python

SCRIPT = Path(__file__).parent / "scripts" / "chaos_train.py"
CHAOS = ["-m", "unsloth_multigpu.cli.main", "chaos"]


def test_killed_run_goes_on_to_the_same_weights(tmp_path):
    options = ["--faults", "kill@1:4", "--max-restarts", "1", "--json", "found.json", "--markdown", "table.md"]
    run = run_python([*CHAOS, *options, SCRIPT, "--steps", "5"], tmp_path, {**BARE, "TMPDIR": str(tmp_path)})
    assert run.code == 0, run.out + run.err
    (row,) = json.loads((tmp_path / "found.json").read_text())["rows"]
    assert row["told"].startswith("rank 1 was killed by SIGKILL after step 3")
    assert row["told"].endswith("Starting all ranks again (1).")
    assert row["from_step"] == 2
    assert (row["code"], row["num_orphans"], row["lost"], row["repeated"], row["difference"]) == (0, 0, 0, 0, 0.0)
    assert (tmp_path / "table.md").read_text().splitlines()[2].endswith("| 0 / 0 | equal |")
    # Neither processes nor folders are left, and nothing of the script's lies in the user's folder.
    assert orphans(str(tmp_path)) == []
    assert not {"checkpoints", "logs"} & {p.name for p in tmp_path.iterdir()}
    assert not list(tmp_path.glob("unsloth_multigpu_*"))
