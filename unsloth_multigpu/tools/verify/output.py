"""What the script prints while `unsloth-multigpu verify` runs it twice: kept in one file, not on the screen."""

from __future__ import annotations

import os
from pathlib import Path
from typing import BinaryIO

from unsloth_multigpu.errors import ConfigError
from unsloth_multigpu.tools.tail import last_lines

# The begin of the file, by which the next call knows that it may replace it.
HEADING = "unsloth-multigpu verify: what the script printed"


class RunOutput:
    """The file, beside the receipt and with its name: `receipt.json` has `receipt.log`.

    Args:
        receipt: File of the receipt.

    Raises:
        ConfigError: Another file has that name, or it cannot be written.
    """

    def __init__(self, receipt: Path) -> None:
        self.path = receipt.with_suffix(".log" if receipt.suffix != ".log" else ".output.log")
        try:
            if self.path.exists() and not self._is_mine():
                raise ConfigError(
                    f"--json {receipt}: {self.path}, where the output of both runs goes, is another file, and would be "
                    "lost.",
                    hint="Name another receipt.",
                )
            self.path.write_text(f"{HEADING}\n", encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"--json {receipt}: {error}", hint="Name a folder that can be written.") from None
        self._begin = 0

    def _is_mine(self) -> bool:
        with self.path.open("rb") as file:
            return file.read(len(HEADING)) in (HEADING.encode(), b"")

    def open_for(self, label: str) -> BinaryIO:
        """Opens it for a run, behind what is there.

        Args:
            label: The run's name.
        """
        with self.path.open("ab") as file:
            file.write(f"\n===== {label} =====\n".encode())
        self._begin = os.path.getsize(self.path)
        return self.path.open("ab")

    def tail(self, num_lines: int = 40) -> str:
        """The end of what the last run has printed."""
        with self.path.open("rb") as file:
            file.seek(self._begin)
            return last_lines(file.read().decode("utf-8", errors="replace"), num_lines)
