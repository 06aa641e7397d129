"""Ranks that hang in a real training: which one, where, how soon, and what is left of the run."""

import re
import stat
import subprocess
import time
from pathlib import Path

import pytest

from tests.helpers.run import BARE, orphans, run_python, start, wait_until

SCRIPT = Path(__file__).parent / "scripts" / "hang.py"
HANG_TIMEOUT_S = 3.0
# What the supervisor of a busy machine may need beside the limit.
SLACK_S = 30.0


@pytest.mark.parametrize("kinds", [["stop"], pytest.param(["spin", "stop"], marks=pytest.mark.thorough)], ids=len)
def test_hung_ranks_are_named_and_the_run_ends(tmp_path, kinds):
    """A stopped process; before it, of the ranks' first start, an endless loop while samples are got."""
    script = tmp_path / "hang.py"  # The folder's name in the command line marks the processes of this run.
    script.write_text(SCRIPT.read_text())
    process = start([script, HANG_TIMEOUT_S, *kinds], cwd=tmp_path, env=BARE, stdout=subprocess.DEVNULL)
    lines = [(time.monotonic(), line) for line in process.stderr]
    code = process.wait()
    err = "".join(line for _, line in lines)
    times = {path.name: float(path.read_text()) for path in tmp_path.glob("*_*") if path.is_file()}
    assert code == 124, err
    assert "Hint: If the rank was only slow, raise hang_timeout_s=3." in err

    stopped_s, stopped = next((t, line) for t, line in lines if "no sign of life" in line)
    assert re.search(
        r"rank 1 hangs: no sign of life for \d+ s in step 3, .*\(hang\.py:\d+ in on_optimizer_step\)", stopped
    ), err
    assert HANG_TIMEOUT_S <= stopped_s - times["stop_since"] < HANG_TIMEOUT_S + SLACK_S
    if "spin" in kinds:
        looping_s, looping = next((t, line) for t, line in lines if "rank 1 hangs: no progress" in line)
        found = re.search(r"no progress for \d+ s in step \d+, getting samples \(hang\.py:(\d+) in collate\)", looping)
        assert found, err
        assert script.read_text().splitlines()[int(found[1]) - 1].strip() in ("while True:", "pass")
        assert "Starting all ranks again (1)" in looping
        # Before it a callback was left alone: behind a step it has five times the limit.
        assert times["spin_since"] - times["spin_begin"] > 1.5 * HANG_TIMEOUT_S
        assert HANG_TIMEOUT_S <= looping_s - times["spin_since"] < HANG_TIMEOUT_S + SLACK_S

    for rank in (0, 1):
        path = tmp_path / "logs" / f"stack_rank_{rank}.txt"
        assert "most recent call first" in path.read_text()
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
    wait_until(lambda: not orphans(str(tmp_path)), 30.0, "end of all processes")
    assert not list(Path("/tmp").glob(f"unsloth_multigpu_{process.pid}_*"))


def test_rank_that_hangs_before_there_is_a_group_is_named(tmp_path):
    """No watchdog sees it: what a script does before the training may take hours. The rank that waits has a limit."""
    run = run_python([SCRIPT.with_name("late.py"), 2, tmp_path], tmp_path, BARE)
    assert run.code == 124, run.err
    assert "\nunsloth_multigpu: rank 1 did not come to open the process group within 2 seconds." in run.err
    assert "RankTimeoutError: rank 1 did not come" in run.err
    assert "rank 0 failed" not in run.err
    wait_until(lambda: not orphans(str(tmp_path)), 30.0, "end of all processes")
