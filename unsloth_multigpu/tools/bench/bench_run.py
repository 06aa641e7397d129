"""Runs the arms of a benchmark: each in a process group of its own, with a limit, that leaves nothing behind."""

from __future__ import annotations

import dataclasses
import json
import os
import tempfile
import textwrap
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from unsloth_multigpu.cli.screen import Progress, left_s
from unsloth_multigpu.errors import LaunchError
from unsloth_multigpu.option_type import flag
from unsloth_multigpu.tools.bench.arm import Arm, arm_environment, find_arm
from unsloth_multigpu.tools.bench.bench_option import ARMS, STRATEGIES, BenchOptions
from unsloth_multigpu.tools.bench.bench_result import RankRecord
from unsloth_multigpu.tools.bench.turn import run_together
from unsloth_multigpu.tools.tail import last_lines
from unsloth_multigpu.wire.process import run_to_end
from unsloth_multigpu.words import how_ended

# torchrun waits up to 30 s for ranks that it has told to end.
_TERMINATE_LIMIT_S = 35.0
_Result = TypeVar("_Result")


def run_rounds(
    options: BenchOptions, progress: Progress
) -> tuple[dict[str, list[list[RankRecord]]], LaunchError | None]:
    """Runs every arm in every round.

    Returns:
        `records[arm][round][rank]` of the rounds in which every arm ran to its end, and what ended the last one early.
    """
    records: dict[str, list[list[RankRecord]]] = {name: [] for name in options.arms}
    is_together = options.interleave == "steps"
    total = options.repeats * (1 if is_together else len(options.arms))
    took_s: list[float] = []

    def timed(what: str, run: Callable[[], _Result]) -> _Result:
        number = 1 + len(took_s)
        progress.begin(number, total, what, left_s([1.0] * total, took_s) if took_s else None)
        begin_s = time.monotonic()
        result = run()
        took_s.append(time.monotonic() - begin_s)
        return result

    with tempfile.TemporaryDirectory(prefix="unsloth_multigpu_bench_") as root:
        for number in range(options.repeats):
            # Each round starts with another arm: a run after a pause, or after a large one, is measured slower.
            first = number % len(options.arms)
            names = [*options.arms[first:], *options.arms[:first]]
            label = f"round {number + 1}/{options.repeats}"
            # Processes that an arm leaves behind are found by its path, which is not a prefix of another arm's.
            folders = {name: Path(root, str(number + 1), f"{name}.arm") for name in names}
            for folder in folders.values():
                folder.mkdir(parents=True)
            try:
                if is_together:
                    done = timed(f"{label}, all arms in turns", partial(_in_turns, folders, options))
                else:
                    done = {
                        name: timed(f"{label}, {name}", partial(run_arm, find_arm(name), options, folder))
                        for name, folder in folders.items()
                    }
            except LaunchError as failed:
                return records, failed
            for name, ranks in done.items():
                records[name].append(ranks)
    return records, None


def _in_turns(folders: Mapping[str, Path], options: BenchOptions) -> dict[str, list[RankRecord]]:
    """All arms at once, of which one trains at a time."""
    turns = next(iter(folders.values())).parent
    num_ranks = {name: find_arm(name).num_processes(options) for name in folders}

    def run(name: str, check: Callable[[], None]) -> list[RankRecord]:
        return run_arm(find_arm(name), options, folders[name], turns, check)

    return run_together(num_ranks, options.warmup + options.steps, turns, options.timeout_s, run)


def run_arm(
    arm: Arm,
    options: BenchOptions,
    folder: Path,
    turns: Path | None = None,
    check: Callable[[], None] = lambda: None,
) -> list[RankRecord]:
    """Trains once and returns the records of its ranks, rank 0 first.

    Args:
        folder: An empty folder, where it works.
        turns: The folder of `turn.run_together`, where it takes turns with others.
        check: Called several times a second. It raises where the arm is to be ended.

    Raises:
        LaunchError: See `run_worker`.
    """
    records = run_worker(
        f"{arm.name} ({arm.text})",
        arm.command(options),
        {"arm": arm.name, "options": dataclasses.asdict(options), "turns": None if turns is None else str(turns)},
        folder,
        arm_environment(arm, options, folder, os.environ),
        # In turns the conductor sets the limits.
        options.timeout_s if turns is None else options.timeout_of_turns_s,
        results=[f"rank_{rank}.json" for rank in range(arm.num_processes(options))],
        hint=f"Run it alone: unsloth-multigpu bench {flag(STRATEGIES if options.is_learning else ARMS)} {arm.name}",
        look=lambda _: check(),
    )
    return list(map(RankRecord.from_json, records))


def run_worker(
    what: str,
    command: Sequence[str],
    settings: Mapping[str, Any],
    folder: Path,
    environment: Mapping[str, str],
    limit_s: float,
    *,
    results: Sequence[str],
    hint: str,
    look: Callable[[int], None] | None = None,
) -> list[Any]:
    """Runs a command that takes a file of settings and leaves results next to it as JSON; returns these.

    Args:
        what: Its name in errors.
        folder: An empty folder, where it works. Its environment must name it: what it leaves behind is found by that.
        results: Names of the files.
        hint: What helps to find out why it failed.
        look: Called with its process id several times a second, while it runs.

    Raises:
        LaunchError: It failed, or did not end within `limit_s`; the message has the end of its output.
    """
    file, log = folder / "settings.json", folder / "output.log"
    file.write_text(json.dumps(settings), encoding="utf-8")
    with log.open("wb") as output:
        code = run_to_end(
            [*command, str(file)],
            environment,
            output,
            marker=str(folder),  # Its TMPDIR.
            limit_s=limit_s,
            terminate_limit_s=_TERMINATE_LIMIT_S,
            cwd=folder,
            look=look,
        )
    problem = f"did not end within {limit_s:g} s" if code is None else how_ended(code) if code else ""
    paths = [folder / name for name in results]
    missing = [path.stem for path in paths if not path.exists()]
    if problem or missing:
        problem = problem or f"left no result of {', '.join(missing)}"
        tail = textwrap.indent(last_lines(log.read_text(encoding="utf-8", errors="replace")), "  | ")
        raise LaunchError(f"The arm {what} {problem}. The end of its output:\n{tail}", hint=hint)
    return [json.loads(path.read_text(encoding="utf-8")) for path in paths]
