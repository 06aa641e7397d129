"""What `--help` says, frozen in help.txt: a change of an option shows as a difference that a reader can judge.

`UPDATE_HELP=1 pytest tests/unit/test_help.py` writes the file.
"""

from __future__ import annotations

import io
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from unsloth_multigpu.cli import main
from unsloth_multigpu.errors import SetupError
from unsloth_multigpu.table import SECTIONS

FROZEN = Path(__file__).parent / "help.txt"
COMMANDS = ("", "run", "top", "verify", "plan", "forecast", "doctor", "bench", "chaos")


def shown_help(capsys: pytest.CaptureFixture[str]) -> str:
    texts = []
    for command in COMMANDS:
        with pytest.raises(SystemExit) as left:
            main.main([*command.split(), "--help"])
        assert left.value.code == 0
        texts.append(f"$ {' '.join(['unsloth-multigpu', *command.split(), '--help'])}\n{capsys.readouterr().out}")
    return "\n".join(texts)


def test_help_of_every_command_is_the_frozen_one(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.setenv("NO_COLOR", "1")
    text = shown_help(capsys)
    if os.environ.get("UPDATE_HELP") == "1":
        FROZEN.write_text(text, encoding="utf-8")
    # Versions of Python break lines at other places.
    assert text.split() == FROZEN.read_text(encoding="utf-8").split()


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_help_on_a_terminal_is_the_same_in_colour(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    for name in ("NO_COLOR", "FORCE_COLOR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")
    terminal = Terminal()
    monkeypatch.setattr(sys, "stdout", terminal)
    with pytest.raises(SystemExit):
        main.main(["run", "--help"])
    coloured = terminal.getvalue()
    monkeypatch.setattr(sys, "stdout", plain := io.StringIO())
    with pytest.raises(SystemExit):
        main.main(["run", "--help"])
    assert re.sub(r"\x1b\[[0-9;]*m", "", coloured) == plain.getvalue()
    for shown, style in (("--num-gpus", "36"), ("{keep,scale}", "32"), ("Everyday:", "1;33"), ("[keep]", "2")):
        assert f"\x1b[{style}m{shown}\x1b[0m" in coloured, shown


def test_options_have_their_values_and_their_sections() -> None:
    text = FROZEN.read_text(encoding="utf-8")
    assert " STR" not in text
    assert "--shard {off,auto,on}" in text
    run = text.partition("$ unsloth-multigpu run --help")[2].partition("\n$ ")[0]
    headings = [line.removesuffix(":") for line in run.splitlines() if line.endswith(":") and not line.startswith(" ")]
    assert headings == ["options", *SECTIONS]


@pytest.mark.parametrize(
    ("line", "found", "absent"),
    [
        ("unsloth-multigpu ve", "verify", "run"),
        ("unsloth-multigpu run --num", "--num-gpus", "--nnodes"),
        ("unsloth-multigpu run --global-batch ", "scale", "verify"),
        ("unsloth-multigpu run --strategy dil", "diloco", "ddp"),
        ("unsloth-multigpu bench --dtype ", "bf16", "cuda"),
    ],
)
def test_shell_completes_commands_options_and_values(tmp_path: Path, line: str, found: str, absent: str) -> None:
    answer = tmp_path / "answer"
    # As the lines that `--completion bash` prints ask.
    asked = {"_ARGCOMPLETE": "1", "COMP_LINE": line, "COMP_POINT": str(len(line)), "_ARGCOMPLETE_IFS": "\n"}
    asked |= {"_ARGCOMPLETE_STDOUT_FILENAME": str(answer), "COMP_TYPE": "9"}
    code = "import sys; sys.argv = ['unsloth-multigpu']; from unsloth_multigpu.cli.main import main; main()"
    done = subprocess.run([sys.executable, "-c", code], env={**os.environ, **asked}, timeout=60, capture_output=True)
    words = answer.read_text().split()
    assert found in words, (words, done.stderr)
    assert absent not in words


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_lines_for_the_shell_are_printed(capsys: pytest.CaptureFixture[str], shell: str) -> None:
    with pytest.raises(SystemExit) as left:
        main.main(["--completion", shell])
    assert left.value.code == 0
    assert "unsloth-multigpu" in capsys.readouterr().out


def test_completion_without_its_library_is_told(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "argcomplete", None)
    assert main.main(["--completion", "bash"]) == SetupError.exit_code
    assert "\nHint: pip install argcomplete\n" in capsys.readouterr().err
