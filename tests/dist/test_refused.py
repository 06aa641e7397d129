"""A script that catches the refusal of its training and goes on: exit code 0 does not hide it."""

from pathlib import Path

import pytest

from tests.helpers.run import BARE, run_python
from unsloth_multigpu.errors import ConfigError

SCRIPT = Path(__file__).parent / "scripts" / "refused.py"


def test_refusal_that_the_script_catches_is_the_exit_code(tmp_path):
    run = run_python([SCRIPT, "alone"], tmp_path, BARE)
    assert run.out.split("\n")[:3] == ["caught ConfigError", "steps 0", "end"]
    assert run.code == ConfigError.exit_code, run.err
    (line,) = [line for line in run.err.splitlines() if "train() was refused" in line]
    assert line.startswith("unsloth_multigpu: train() was refused: ConfigError: ")
    assert line.endswith("; the script continued without it (exit code 64)")


@pytest.mark.thorough
def test_later_training_makes_up_for_it_and_an_error_that_one_process_has_as_well_is_the_scripts(tmp_path):
    run = run_python([SCRIPT, "again"], tmp_path, BARE)
    shown = [line for line in run.out.splitlines() if not line.startswith("{")]
    assert shown == ["caught ConfigError", "steps 0", "steps 3", "caught NonFiniteGradientError", "steps 0", "end"]
    assert run.code == 0, run.err
    assert "continued without it" not in run.err
