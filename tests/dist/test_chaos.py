"""The command that plants faults: a killed rank, a run that goes on by itself, and the same weights as without."""

import json
import re
import shutil
from pathlib import Path

import pytest

from tests.helpers.run import BARE, orphans, run_well

SCRIPT = Path(__file__).parent / "scripts" / "chaos_train.py"
CHAOS = ["-m", "unsloth_multigpu", "chaos"]

# A user's folder: the script reads below it, and an earlier training has left its checkpoints and logs there.
MINE = {
    "data/rows.txt": "rows",
    "checkpoints/checkpoint-2/model.safetensors": "weights",
    "checkpoints/runs/events": "curve",
    "logs/rank_1.log": "words",
}
READS = """from pathlib import Path
assert Path("data/rows.txt").read_text() == "rows"
"""
WRITES = """
assert Path(trainer.args.output_dir, "checkpoint-4").is_dir()
if trainer.is_world_process_zero():
    Path("notes.txt").write_text("done")
"""


def files_in(folder: Path) -> dict[str, tuple[int, bytes]]:
    """What each file holds, and when it was written."""
    paths = [p for p in folder.rglob("*") if p.is_file() and "__pycache__" not in p.parts]
    return {str(p.relative_to(folder)): (p.stat().st_mtime_ns, p.read_bytes()) for p in paths}


@pytest.mark.thorough
def test_killed_run_goes_on_to_the_same_weights_and_leaves_the_users_folder_alone(tmp_path):
    scratch, home = tmp_path / "scratch", tmp_path / "home"
    scratch.mkdir()
    for name, text in MINE.items():
        (home / name).parent.mkdir(parents=True, exist_ok=True)
        (home / name).write_text(text)
    (home / "train.py").write_text(READS + SCRIPT.read_text() + WRITES)
    shutil.copy(SCRIPT.with_name("tiny_llama.py"), home)
    before = files_in(home)
    options = ["--faults", "kill@1:4", "--max-restarts", "1", "--json"]
    run = run_well([*CHAOS, *options, "train.py", "--steps", "5"], home, {**BARE, "TMPDIR": str(scratch)})
    (row,) = json.loads(run.out)["rows"]
    assert row["told"].startswith("rank 1 was killed by SIGKILL after step 3")
    assert row["told"].endswith("Starting all ranks again (1).")
    assert row["from_step"] == 2
    assert (row["code"], row["num_orphans"], row["lost"], row["repeated"], row["difference"]) == (0, 0, 0, 0, 0.0)
    # Neither processes nor folders are left, and of the user's files none was touched.
    assert orphans(str(tmp_path)) == []
    assert list(scratch.glob("unsloth_multigpu_*")) == []
    after = files_in(home)
    assert {name: after.get(name) for name in before} == before
    assert after.keys() - before.keys() == {"notes.txt"}
    # How long it all takes is said when it is known.
    said = run.err.splitlines()
    assert said[0].startswith("chaos: the run without faults, at most 600 s")
    assert re.fullmatch(
        r"chaos: it took \d+\.\d s, .* step; 1 more with faults take about [\d.]+ (s|min)( \d\d s)?", said[1]
    )
    assert said[2] == "chaos: 1 of 1: kill@1:4"
