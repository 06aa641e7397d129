"""Wrong input as the user of a script sees it: the last lines of what is printed."""

import os
import subprocess
import sys

# Also says what was imported before the error: counting devices is too late for a typing mistake.
CALL = """
import atexit, sys
atexit.register(lambda: print("torch" in sys.modules))
import unsloth_multigpu as ump
ump.enable_multi_gpu()
"""


def test_last_lines_name_the_input_and_the_way_out(tmp_path):
    variables = {**os.environ, "RANK": "0", "WORLD_SIZE": "2"}
    command = [sys.executable, "-c", CALL]
    done = subprocess.run(command, cwd=tmp_path, env=variables, capture_output=True, text=True, timeout=60)
    assert done.returncode != 0
    shown = done.stderr.splitlines()
    error, hint = shown[-2:]
    assert error == (
        "unsloth_multigpu.errors.LaunchError: RANK and WORLD_SIZE=2 are set, but LOCAL_RANK, MASTER_ADDR, MASTER_PORT "
        "is not."
    )
    way_out = "Hint: Start with torchrun, or unset RANK and WORLD_SIZE so that unsloth_multigpu starts the ranks."
    assert hint.startswith(way_out)
    assert done.stdout == "False\n"
    assert list(tmp_path.iterdir()) == []
