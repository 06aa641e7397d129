"""Options of files reach the ranks: those of a script with the line, which changes the folder, as well."""

from __future__ import annotations

import json
from pathlib import Path

from tests.helpers.run import BARE, run_well

SCRIPT = """
import os, sys
import unsloth_multigpu as ump
ump.enable_multi_gpu()
import json
status, config = ump.get_multi_gpu_status(), ump.get_active_config()
facts = [status.world_size, config.num_gpus, config.timeout_s, config.grace_s, config.max_restarts]
with open(f"facts_{status.rank}.json", "w") as file:
    json.dump(facts, file)
"""


def test_files_of_options_reach_every_rank(tmp_path: Path) -> None:
    table = "num_gpus = 3\ntimeout_s = 50\ngrace_s = 7\nmax_restarts = 4"
    (tmp_path / "pyproject.toml").write_text(f"[tool.unsloth_multigpu]\n{table}\n")
    folder = tmp_path / "scripts"
    folder.mkdir()
    (folder / "multigpu.yaml").write_text("num_gpus: 2\ntimeout_s: 60\ngrace_s: 8\nlog_dir: records\n")
    (folder / "train.py").write_text(SCRIPT)
    run = ["-m", "unsloth_multigpu.cli.main", "run", "--config", "multigpu.yaml", "--grace-s", "9", "train.py"]
    run_well(run, folder, {**BARE, "UNSLOTH_MULTIGPU_TIMEOUT_S": "70"})
    for rank in range(2):
        # The file over the table, the variable over the file, the flag over both, and the table where nothing else is.
        assert json.loads((folder / f"facts_{rank}.json").read_text()) == [2, 2, 70.0, 9.0, 4]
    assert not (folder / "facts_2.json").exists()
    assert (folder / "records" / "rank_1.log").exists()
