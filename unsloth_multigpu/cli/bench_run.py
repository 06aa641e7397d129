"""Runs one arm of a benchmark once: a process group of its own, with a limit, that leaves nothing behind."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import signal
import subprocess
from pathlib import Path

from unsloth_multigpu.cli.bench_arm import Arm, arm_command, arm_environment, num_processes
from unsloth_multigpu.cli.bench_option import BenchOptions
from unsloth_multigpu.cli.bench_result import RankRecord
from unsloth_multigpu.errors import LaunchError

_LOG_LINES = 30
# torchrun waits up to 30 s for ranks that it has told to end.
_TERMINATE_LIMIT_S = 35.0


def run_arm(arm: Arm, options: BenchOptions, folder: Path) -> list[RankRecord]:
    """Trains once and returns the records of its ranks, rank 0 first.

    Args:
        folder: An empty folder, where it works.

    Raises:
        LaunchError: It failed, or did not end within `options.timeout_s`; the message has the end of its output.
    """
    settings = folder / "settings.json"
    settings.write_text(json.dumps({"arm": arm.name, "options": dataclasses.asdict(options)}), encoding="utf-8")
    log = folder / "output.log"
    what = _wait(
        [*arm_command(arm, options), str(settings)],
        folder,
        arm_environment(arm, options, folder, os.environ),
        log,
        options.timeout_s,
    )
    paths = [folder / f"rank_{rank}.json" for rank in range(num_processes(arm, options))]
    missing = [path.stem for path in paths if not path.exists()]
    if what or missing:
        what = what or f"left no result of {', '.join(missing)}"
        flag = "--arms" if options.num_epochs is None else "--strategies"
        tail = log.read_text(encoding="utf-8", errors="replace").rstrip().splitlines()[-_LOG_LINES:]
        raise LaunchError(
            f"The arm {arm.name} ({arm.text}) {what}. The end of its output:\n" + "\n".join(f"  | {x}" for x in tail),
            hint=f"Run it alone: unsloth-multigpu bench {flag} {arm.name}",
        )
    return [RankRecord.from_json(json.loads(path.read_text(encoding="utf-8"))) for path in paths]


def _wait(command: list[str], folder: Path, environment: dict[str, str], log: Path, limit_s: float) -> str:
    """Runs a command to its end; returns what went wrong, "" if nothing did."""
    with log.open("wb") as output:
        # A group of its own: Ctrl-C reaches this process, which then ends the command and what the command started.
        process = subprocess.Popen(
            command,
            cwd=folder,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        code = process.wait(limit_s)
        return f"ended with exit code {code}" if code else ""
    except subprocess.TimeoutExpired:
        return f"did not end within {limit_s:g} s"
    finally:
        _end(process)


def _end(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        # The launchers end their ranks on SIGTERM.
        os.killpg(process.pid, signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_TERMINATE_LIMIT_S)
    with contextlib.suppress(ProcessLookupError):  # The usual case: nobody is left in the group.
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
