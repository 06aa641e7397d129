"""Wrong input as the user of a script sees it: the last lines of what is printed."""

import os
import subprocess
import sys

import pytest

from unsloth_multigpu import errors

# Also says what was imported before the error: counting devices is too late for a typing mistake.
CALL = """
import atexit, sys
atexit.register(lambda: print("torch" in sys.modules))
import unsloth_multigpu as ump
ump.enable_multi_gpu({arguments})
"""


@pytest.mark.parametrize(
    ("arguments", "variables", "lines"),
    [
        (
            "strategy=ump.DiLoCo(outer_momentum=-0.9)",
            {},
            [
                "unsloth_multigpu.errors.ConfigError: outer_momentum=-0.9; expected a number of at least 0 and",
                "Hint: Leave outer_momentum out: its default is 0.9.",
            ],
        ),
        (
            "",
            {"RANK": "0", "WORLD_SIZE": "2"},
            [
                "unsloth_multigpu.errors.LaunchError: RANK and WORLD_SIZE=2 are set, but LOCAL_RANK, MASTER_ADDR, "
                "MASTER_PORT is not.",
                "Hint: Start with torchrun, or unset RANK and WORLD_SIZE so that unsloth_multigpu starts the ranks.",
            ],
        ),
    ],
)
def test_last_lines_name_the_input_and_the_way_out(tmp_path, arguments, variables, lines):
    done = subprocess.run(
        [sys.executable, "-c", CALL.format(arguments=arguments)],
        cwd=tmp_path,
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode != 0
    shown = done.stderr.splitlines()
    shown = shown[:-1] if errors.page() else shown
    assert [line[: len(start)] for line, start in zip(shown[-2:], lines, strict=True)] == lines
    assert done.stdout == "False\n"
    assert list(tmp_path.iterdir()) == []
