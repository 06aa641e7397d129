"""What `--help` says, frozen in help.txt: a change of an option shows as a difference that a reader can judge.

`UPDATE_HELP=1 pytest tests/unit/test_help.py` writes the file.
"""

import os
from pathlib import Path

import pytest

from unsloth_multigpu import __main__ as main

FROZEN = Path(__file__).parent / "help.txt"
COMMANDS = ("top", "verify", "plan", "forecast", "doctor", "bench", "chaos")
SHOWN = ("--help", "run --help", "run --help-all", *(f"{name} --help" for name in COMMANDS), "verify --help-all")


def test_help_of_every_command_is_the_frozen_one(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.setenv("NO_COLOR", "1")
    text = ""
    for arguments in SHOWN:
        with pytest.raises(SystemExit) as left:
            main.main(arguments.split())
        assert left.value.code == 0
        text += f"\n$ unsloth-multigpu {arguments}\n{capsys.readouterr().out}"
    if os.environ.get("UPDATE_HELP") == "1":
        FROZEN.write_text(text[1:], encoding="utf-8")
    # Versions of Python break lines at other places.
    assert text.split() == FROZEN.read_text(encoding="utf-8").split()
