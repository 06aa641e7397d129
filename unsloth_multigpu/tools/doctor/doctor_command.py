"""`unsloth-multigpu doctor`: is this machine ready to train on several GPUs?"""

from __future__ import annotations

import platform
import sys
from collections.abc import Generator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from dataclasses import asdict, dataclass, field
from typing import Annotated, Any, Literal

from unsloth_multigpu import versions
from unsloth_multigpu.cli.command import Arguments, Command
from unsloth_multigpu.cli.screen import Progress, Screen
from unsloth_multigpu.option_type import Option
from unsloth_multigpu.options import MultiGPUConfig, variable
from unsloth_multigpu.tools.probe import run_probe
from unsloth_multigpu.wire.child import exit_on_signal, kill_marked
from unsloth_multigpu.wire.run import private_dir
from unsloth_multigpu.words import aligned, listed

State = Literal["ok", "note", "FAIL"]

_CPU_REDUCE_HINT = "Other processes may use the cores or the memory; a firewall may block connections to 127.0.0.1."
_GPU_REDUCE_HINT = (
    "Run it again with NCCL_DEBUG=INFO, and with NCCL_P2P_DISABLE=1 to see whether direct copies are the cause."
)
_HERE = "unsloth_multigpu.tools.doctor"
# The last line names at most this many failed checks.
_MOST_NAMES = 5
_STYLES = {"FAIL": "bold red", "note": "yellow"}


@dataclass(frozen=True)
class CheckRow:
    """One line of the result.

    Args:
        section: Heading under which it is listed.
        name: Name of the check.
        state: "ok", "FAIL", or "note" for a remark that does not prevent a training.
        text: The result as text.
        hint: The next action; every "FAIL" has one.
        facts: The result as JSON values.
        log: Last lines of a failed check's output.
    """

    section: str
    name: str
    state: State
    text: str
    hint: str = ""
    facts: dict[str, Any] = field(default_factory=dict)
    log: tuple[str, ...] = ()


@dataclass(frozen=True)
class Options(Arguments):
    """Checks this machine. The last line says on which devices a script with enable_multi_gpu() would run. Exit code 0
    = ready to train, 1 = a check failed.

    Args:
        json: Print one JSON object.
        num_gpus: Ranks of the all-reduce.
        timeout_s: Limit of each check.
    """

    json: Annotated[bool, Option()] = False
    num_gpus: Annotated[int | None, Option(least=1, otherwise="all; 2 without a GPU")] = None
    timeout_s: Annotated[float, Option(least=1, shown="SECONDS")] = 120.0


def run(own: Options, given: Mapping[str, Any], program: Sequence[str]) -> int:
    """Checks this machine and prints each section of the result when it is known. Returns 1 if a check failed."""
    MultiGPUConfig.resolve({})  # Raises for an invalid variable before the checks, which take a while.
    rows: list[CheckRow] = []
    screen, progress = Screen(), Progress("doctor")
    with exit_on_signal(), progress, closing(check_machine(own.num_gpus, own.timeout_s, progress)) as sections:
        for section in filter(None, sections):
            progress.clear()
            if not own.json:
                for text, style in [*([("", None)] if rows else []), *section_lines(section)]:
                    screen.line(text, style)
            rows += section
    has_failed = any(row.state == "FAIL" for row in rows)
    if own.json:
        version = versions.installed_version("unsloth-multigpu")
        screen.json({"ok": not has_failed, "version": version, "rows": [asdict(row) for row in rows]})
    else:
        screen.line()
        screen.line(verdict(rows), "bold red" if has_failed else "bold green")
    return 1 if has_failed else 0


COMMAND = Command("doctor", "check versions, devices, copies between GPUs, an all-reduce and the patches", Options, run)


def check_machine(num_gpus: int | None, limit_s: float, progress: Progress) -> Generator[list[CheckRow], None, None]:
    """Runs every check. The check of imports runs in parallel with the others, which use the GPUs one after the other.

    Yields the rows of a section as soon as they are known.
    """
    with ExitStack() as stack:
        folder = stack.enter_context(private_dir())
        pool = stack.enter_context(ThreadPoolExecutor(1))
        stack.callback(kill_marked, str(folder))  # The pool waits for its probe, also after an error or a signal.
        patches = pool.submit(run_probe, f"{_HERE}.patch_check", folder, limit_s)
        yield version_rows()
        progress.show("devices, and copies between them")
        seen = run_probe(f"{_HERE}.device_check", folder, limit_s)
        devices = rows_of(seen, "devices", "torch", "Run `python -c 'import torch; torch.accelerator.device_count()'`.")
        yield [row for row in devices if row.section == "devices"]
        yield [row for row in devices if row.section != "devices"]
        progress.show("an all-reduce on all ranks")
        # timeout_s ends a hung collective with its own message, before the time limit of the probe.
        options = {"log_dir": folder / "logs", "timeout_s": limit_s / 2, "max_restarts": 0, "num_gpus": num_gpus}
        environment = {variable(name): str(value) for name, value in options.items() if value is not None}
        reduced = run_probe("unsloth_multigpu.tools.allreduce", folder, limit_s, environment)
        yield reduce_rows(reduced, seen.get("kind"))
        progress.show("imports of the libraries, and every patch")
        failed = "A library cannot be imported, see the lines below."
        landed = rows_of(patches.result(), "patches", "functions", failed)
        yield [row for row in landed if row.section == "imports"]
        yield [row for row in landed if row.section == "patches"]


def rows_of(outcome: Mapping[str, Any], section: str, name: str, hint: str) -> list[CheckRow]:
    """Returns the rows of a probe, or if it failed one row with this section and name."""
    if "error" not in outcome:
        return [CheckRow(**row) for row in outcome.get("rows", ())]
    log = tuple(outcome.get("log", ()))
    return [CheckRow(section, name, "FAIL", outcome["error"], outcome.get("hint") or hint, log=log)]


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


def version_rows() -> list[CheckRow]:
    """Checks the versions of interpreter, system and libraries."""
    # Always "ok": pip refuses an older Python.
    rows = [CheckRow("versions", "python", "ok", platform.python_version())]
    is_linux = sys.platform == "linux"
    hint = "" if is_linux else "Several ranks need Linux, or WSL2."
    rows.append(CheckRow("versions", "system", "ok" if is_linux else "FAIL", platform.platform(), hint))
    for row in versions.version_rows():
        facts = {"installed": row.installed, "supported": row.supported}
        text = f"{row.installed or 'not installed'} ({supported_text(row.supported)})"
        hint = "" if row.ok else f'pip install "{row.name}{supported_text(row.supported)}"'
        if row.is_newer:
            hint = "Newer than tested: `unsloth-multigpu verify train.py` compares the first steps with one process."
        state: State = "FAIL" if not row.ok else "ok" if row.installed and not row.is_newer else "note"
        rows.append(CheckRow("versions", row.name, state, text, hint, facts))
    return rows


def supported_text(specifier: str) -> str:
    """Formats a range with the lower bound first: `>=2.6,<2.16`."""
    return ",".join(sorted(specifier.split(","), key=lambda part: part.startswith("<")))


def reduce_rows(reduced: Mapping[str, Any], kind: str | None) -> list[CheckRow]:
    """Returns the row of the all-reduce, on devices of a kind."""
    hint = _CPU_REDUCE_HINT if kind == "cpu" else _GPU_REDUCE_HINT
    if "error" in reduced:
        return rows_of(reduced, "all-reduce", "ranks", hint)
    name = f"{reduced['num_ranks']} x {reduced['device']}"
    speed = (
        f"{reduced['num_bytes'] / 2**20:g} MiB over {reduced['backend']} in {1000 * reduced['seconds']:.1f} ms, "
        f"algorithm bandwidth {reduced['algorithm_gb_per_s']:.2f} GB/s"
    )
    if any(reduced["num_wrong_by_rank"]):
        text = f"wrong sums, by rank {reduced['num_wrong_by_rank']}; {speed}"
        return [CheckRow("all-reduce", name, "FAIL", text, hint, dict(reduced))]
    return [CheckRow("all-reduce", name, "ok", f"every sum is exact; {speed}", facts=dict(reduced))]
