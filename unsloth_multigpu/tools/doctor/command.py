"""`unsloth-multigpu doctor`: is this machine ready to train on several GPUs?"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING

from unsloth_multigpu.options import ENV_PREFIX
from unsloth_multigpu.text_table import aligned
from unsloth_multigpu.tools.doctor.probe import exit_on_sigterm
from unsloth_multigpu.versions import installed_version

if TYPE_CHECKING:
    from unsloth_multigpu.tools.doctor.findings import CheckRow

_HERE = "unsloth_multigpu.tools.doctor"


def run_doctor(num_gpus: int | None, *, as_json: bool, limit_s: float) -> int:
    """Checks this machine and prints the result.

    Args:
        num_gpus: Ranks of the all-reduce; None = all visible accelerators, or two where there is none.
        as_json: Print one JSON object in place of text.
        limit_s: Limit of each check that runs in a process of its own, in seconds.

    Returns:
        0, or 1 if a row failed.
    """
    with exit_on_sigterm():
        rows = check_machine(num_gpus, limit_s)
    has_failed = any(row.state == "FAIL" for row in rows)
    if as_json:
        version = installed_version("unsloth-multigpu")
        print(json.dumps({"ok": not has_failed, "version": version, "rows": [asdict(row) for row in rows]}))
    else:
        print(render(rows))
    return 1 if has_failed else 0


def check_machine(num_gpus: int | None, limit_s: float) -> list[CheckRow]:
    """Runs every check. Libraries are imported in parallel with the others, which use the GPUs one after the other."""
    from unsloth_multigpu.tools.doctor.findings import (
        copy_rows,
        device_rows,
        import_rows,
        reduce_rows,
        seam_rows,
        version_rows,
    )
    from unsloth_multigpu.tools.doctor.probe import Probe

    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="unsloth_multigpu_doctor_")))
        seams = stack.enter_context(Probe(f"{_HERE}.seam", folder, limit_s))
        devices = stack.enter_context(Probe(f"{_HERE}.device", folder, limit_s)).outcome()
        environment = _reduce_environment(num_gpus, folder, limit_s)
        reduced = stack.enter_context(Probe(f"{_HERE}.allreduce", folder, limit_s, environment)).outcome()
        landed = seams.outcome()
    return [
        *version_rows(devices),
        *import_rows(landed),
        *device_rows(devices),
        *copy_rows(devices),
        *reduce_rows(reduced, devices),
        *seam_rows(landed),
    ]


def render(rows: Sequence[CheckRow]) -> str:
    """The rows as aligned text under their headings, and a last line that counts the failures."""
    lines: list[str] = []
    for section, group in groupby(rows, key=lambda row: row.section):
        members = list(group)
        lines += ["", section] if lines else [section]
        for row, line in zip(members, aligned([f"{r.state:<4}", r.name, r.text] for r in members), strict=True):
            lines.append(f"  {line}")
            if row.hint:
                lines.append(f"        Hint: {row.hint}")
            lines += [f"        | {line}" for line in row.log]
    num_failed = sum(row.state == "FAIL" for row in rows)
    return "\n".join([*lines, "", f"{len(rows)} checks, {num_failed} failed"])


def _reduce_environment(num_gpus: int | None, folder: Path, limit_s: float) -> dict[str, str]:
    options = {
        "LOG_DIR": str(folder / "logs"),
        # Ends a stuck collective with its own message, before the whole check is ended.
        "TIMEOUT_S": str(limit_s / 2),
        "MAX_RESTARTS": "0",
        **({} if num_gpus is None else {"NUM_GPUS": str(num_gpus)}),
    }
    return {ENV_PREFIX + name: value for name, value in options.items()}
