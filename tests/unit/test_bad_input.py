"""Wrong input as the user of a script sees it: the last lines of what is printed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

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
            "num_gpus=0",
            {},
            [
                "unsloth_multigpu.errors.ConfigError: num_gpus=0; expected a whole number of at least 1, or None for "
                "all visible accelerators.",
                "Hint: Leave it out for all GPUs, or give their number; CUDA_VISIBLE_DEVICES chooses which.",
            ],
        ),
        (
            'global_batch="all"',
            {},
            [
                "unsloth_multigpu.errors.ConfigError: global_batch='all'; expected 'keep' or 'scale'.",
                "Hint: Set global_batch to one of them; `unsloth-multigpu doctor --options` says what each does.",
            ],
        ),
        (
            'timeout_s=float("nan")',
            {},
            [
                "unsloth_multigpu.errors.ConfigError: timeout_s=nan; expected seconds above 0",
                "Hint: Leave timeout_s out.",
            ],
        ),
        (
            "num_gpu=2",
            {},
            [
                "unsloth_multigpu.errors.ConfigError: enable_multi_gpu() got num_gpu=2, which it does not know.",
                "Hint: Did you mean num_gpus? `unsloth-multigpu doctor --options` lists all.",
            ],
        ),
        (
            'enable_ddp=False, strategy="allreduce"',
            {},
            [
                "unsloth_multigpu.errors.ConfigError: strategy='allreduce' is for several ranks; enable_ddp=False is "
                "the legacy path, one process that cuts the script's batches.",
                "Hint: Leave one of them out.",
            ],
        ),
        (
            "enable_ddp=False",
            {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"},
            [
                "unsloth_multigpu.errors.SetupError: enable_ddp=False, the legacy path, is one process, but torchrun "
                "started 2 ranks.",
                "Hint: Start the script with python alone, or leave enable_ddp out.",
            ],
        ),
        (
            "enable_ddp=False",
            {
                "UNSLOTH_MULTIGPU_TOOL": json.dumps(
                    [
                        "unsloth_multigpu.tools.verify.tool:Verify",
                        {"folder": "", "num_steps": 1, "num_gpus": 2, "dropout": True},
                    ]
                )
            },
            [
                "unsloth_multigpu.errors.SetupError: verify compares one process with several ranks; enable_ddp=False, "
                "the legacy path, is one process.",
                "Hint: Leave enable_ddp out for this comparison.",
            ],
        ),
        (
            'strategy="diloco:outer_momentum=1"',
            {},
            [
                "unsloth_multigpu.errors.ConfigError: strategy='diloco:outer_momentum=1'; outer_momentum=1.0 grows "
                "without a limit; expected a number below 1.",
                "Hint: Leave outer_momentum out.",
            ],
        ),
        (
            "strategy=ump.DiLoCo(outer_momentum=-0.9)",
            {},
            [
                "unsloth_multigpu.errors.ConfigError: outer_momentum=-0.9; expected a number of at least 0.",
                "Hint: Leave outer_momentum out.",
            ],
        ),
        (
            "",
            {"UNSLOTH_MULTIGPU_NUM_GPUS": "two"},
            [
                "unsloth_multigpu.errors.ConfigError: UNSLOTH_MULTIGPU_NUM_GPUS='two'; expected a whole number",
                "Hint: Set UNSLOTH_MULTIGPU_NUM_GPUS=2, say.",
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
def test_last_lines_name_the_input_and_the_way_out(
    tmp_path: Path, arguments: str, variables: dict[str, str], lines: list[str]
) -> None:
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
