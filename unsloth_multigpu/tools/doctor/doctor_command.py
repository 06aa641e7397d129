"""`unsloth-multigpu doctor`: is this machine ready to train on several GPUs?"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from unsloth_multigpu.cli.command import Arguments
from unsloth_multigpu.cli.screen import Progress, Screen
from unsloth_multigpu.option_type import Option
from unsloth_multigpu.options import MultiGPUConfig, variable
from unsloth_multigpu.versions import installed_version
from unsloth_multigpu.wire.process import exit_on_signal
from unsloth_multigpu.words import aligned, listed

if TYPE_CHECKING:
    from unsloth_multigpu.tools.doctor.findings import CheckRow

_HERE = "unsloth_multigpu.tools.doctor"
# Names of failed checks that are listed.
_MOST_NAMES = 5
_STYLES = {"FAIL": "bold red", "note": "yellow"}


@dataclass(frozen=True)
class Options(Arguments):
    """Options of `unsloth-multigpu doctor`.

    Args:
        json: Print one JSON object.
        num_gpus: Ranks of the all-reduce.
        timeout_s: Limit of each check.
    """

    json: Annotated[bool, Option()] = False
    num_gpus: Annotated[int | None, Option(least=1, otherwise="all; 2 without a GPU")] = None
    timeout_s: Annotated[float, Option(least=1, shown="SECONDS")] = 120.0


def run(own: Options, given: Mapping[str, Any], program: Sequence[str]) -> int:
    """Checks this machine and prints each section of the result when it is known.

    Returns:
        0, or 1 if a check failed.
    """
    MultiGPUConfig.resolve({})  # Raises for an invalid variable before the checks, which take a while.
    rows: list[CheckRow] = []
    screen = Screen()
    with exit_on_signal(), Progress("doctor") as progress:
        for what, section in check_machine(own.num_gpus, own.timeout_s):
            progress.clear()
            rows += section
            if section and not own.json:
                lead = [("", None)] if len(rows) > len(section) else []
                for text, style in [*lead, *section_lines(section)]:
                    screen.line(text, style)
            if what and not own.json:
                progress.show(what)
    has_failed = any(row.state == "FAIL" for row in rows)
    if own.json:
        version = installed_version("unsloth-multigpu")
        screen.json({"ok": not has_failed, "version": version, "rows": [asdict(row) for row in rows]})
    else:
        screen.line()
        screen.line(verdict(rows), "bold red" if has_failed else "bold green")
    return 1 if has_failed else 0


def check_machine(num_gpus: int | None, limit_s: float) -> Iterator[tuple[str, list[CheckRow]]]:
    """Runs every check. The check of imports runs in parallel with the others, which use the GPUs one by one.

    Yields:
        The name of the next check ("" at the end), and the rows of a section as soon as they are known.
    """
    from unsloth_multigpu.tools.doctor import findings as found
    from unsloth_multigpu.tools.probe import Probe

    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="unsloth_multigpu_doctor_")))
        patches = stack.enter_context(Probe(f"{_HERE}.patch_check", folder, limit_s))
        probe = stack.enter_context(Probe(f"{_HERE}.device_check", folder, limit_s))
        yield "devices, and copies between them", found.version_rows()
        devices = probe.outcome()
        yield "", [*found.driver_rows(devices), *found.device_rows(devices)]
        yield "an all-reduce on all ranks", found.copy_rows(devices)
        # timeout_s ends a hung collective with its own message, before the time limit of the probe.
        options = {"log_dir": folder / "logs", "timeout_s": limit_s / 2, "max_restarts": 0, "num_gpus": num_gpus}
        environment = {variable(name): str(value) for name, value in options.items() if value is not None}
        reduced = stack.enter_context(Probe("unsloth_multigpu.tools.allreduce", folder, limit_s, environment)).outcome()
        yield "imports of the libraries, and every patch", found.reduce_rows(reduced, devices)
        landed = patches.outcome()
        yield "", found.import_rows(landed)
        yield "", found.patch_rows(landed)


def verdict(rows: Sequence[CheckRow]) -> str:
    """Returns the last line: the failed checks, and what `enable_multi_gpu()` would do."""
    failed = [f"{row.name} ({row.section})" for row in rows if row.state == "FAIL"]
    line = "".join(f"With enable_multi_gpu(): {row.text}." for row in rows if row.name == "line" and row.state == "ok")
    if not failed:
        return line
    then = f" After that is fixed: {line}" if line else ""
    return f"NOT READY: {len(failed)} of {len(rows)} checks failed: {listed(failed, _MOST_NAMES)}.{then}"


def section_lines(rows: Sequence[CheckRow]) -> list[tuple[str, str | None]]:
    """Formats the rows of one section and its heading as (text, style)."""
    lines: list[tuple[str, str | None]] = [(rows[0].section, "bold")]
    for row, line in zip(rows, aligned([f"{r.state:<4}", r.name, r.text] for r in rows), strict=True):
        lines.append((f"  {line}", _STYLES.get(row.state)))
        if row.hint:
            lines.append((f"        Hint: {row.hint}", None))
        lines += [(f"        | {line}", "dim") for line in row.log]
    return lines
