"""Runs one arm of a benchmark once: a process group of its own, with a limit, that leaves nothing behind."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import sys
import tempfile
import textwrap
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from unsloth_multigpu.cli.screen import Progress, about, left_s
from unsloth_multigpu.errors import LaunchError
from unsloth_multigpu.row import flag
from unsloth_multigpu.tools.bench.arm import Arm, arm_command, arm_environment, num_processes
from unsloth_multigpu.tools.bench.option import BenchOptions
from unsloth_multigpu.tools.bench.result import RankRecord
from unsloth_multigpu.tools.tail import last_lines
from unsloth_multigpu.wire.process import run_to_end
from unsloth_multigpu.words import how_ended

# torchrun waits up to 30 s for ranks that it has told to end.
_TERMINATE_LIMIT_S = 35.0
Result = TypeVar("Result")


def run_rounds(
    names: Sequence[str], num_rounds: int, run_round: Callable[[Sequence[str], Path, str], Mapping[str, Result]]
) -> tuple[dict[str, list[Result]], LaunchError | None]:
    """Runs every arm in every round.

    Args:
        run_round: Gets the names in the order of the round, an empty folder and what the round is called; returns
            the results.

    Returns:
        `results[arm][round]` of the rounds in which every arm ran to its end, and what ended the last one early.
    """
    results: dict[str, list[Result]] = {name: [] for name in names}
    with tempfile.TemporaryDirectory(prefix="unsloth_multigpu_bench_") as root:
        for round_number in range(1, num_rounds + 1):
            first = (round_number - 1) % len(names)
            folder = Path(root, str(round_number))
            folder.mkdir()
            try:
                # Each round starts with another arm: a run after a pause, or after a large one, is measured slower.
                this_round = run_round([*names[first:], *names[:first]], folder, f"round {round_number}/{num_rounds}")
            except LaunchError as failed:
                return results, failed
            for name, result in this_round.items():
                results[name].append(result)
    return results, None


def one_by_one(
    run: Callable[[str, Path], Result], pace: Pace
) -> Callable[[Sequence[str], Path, str], Mapping[str, Result]]:
    """A round in which arms run one after the other, each in an empty folder of its own."""

    def run_round(names: Sequence[str], folder: Path, label: str) -> Mapping[str, Result]:
        results = {}
        for name in names:
            with pace.told(label, name):
                results[name] = run(name, arm_folder(folder, name))
        return results

    return run_round


def arm_folder(folder: Path, name: str) -> Path:
    """Makes the folder of an arm in that of the round."""
    # Processes that an arm leaves behind are found by this path, which must not be a prefix of another arm's.
    made = folder / f"{name.replace(':', '_')}.arm"
    made.mkdir()
    return made


class Pace:
    """Says how far a benchmark is, and how long the rest takes: a bar on a terminal, a line behind each run elsewhere.

    Args:
        names: What runs in a round: arms, or all of them together.
        num_rounds: Each has all of them.
    """

    def __init__(self, names: Sequence[str], num_rounds: int) -> None:
        self._progress = Progress("bench")
        self._names = names
        self._num_rounds = num_rounds
        self._total = len(names) * num_rounds
        self._took_s: list[float] = []

    def __enter__(self) -> Pace:
        each = ", one after the other" if self._total > 1 else ""
        tells = "; the first tells how long they take" if self._total > 1 else ""
        self._progress.say(
            f"{self._total} runs{each}: {', '.join(self._names)} in each of {self._num_rounds} round(s){tells}"
        )
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._progress.clear()

    @contextlib.contextmanager
    def told(self, label: str, name: str) -> Iterator[None]:
        """Says how long a run took, if it did not fail."""
        number = 1 + len(self._took_s)
        self._progress.show(f"{label}, {name} ({number} of {self._total}{self._left()})", number - 1, self._total)
        begin_s = time.monotonic()
        yield
        self._took_s.append(time.monotonic() - begin_s)
        took = f"{self._took_s[-1]:6.1f} s with start-up{self._left()}"
        self._progress.say(f"{number} of {self._total}, {label}  {name:<22} {took}")

    def _left(self) -> str:
        if len(self._took_s) in (0, self._total):
            return ""
        return f", {about(left_s([1.0] * self._total, self._took_s))} left"


def tell(line: str) -> None:
    """Says how far it is."""
    print(line, file=sys.stderr, flush=True)


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
        arm_command(arm, options),
        {"arm": arm.name, "options": dataclasses.asdict(options), "turns": None if turns is None else str(turns)},
        folder,
        arm_environment(arm, options, folder, os.environ),
        # In turns the conductor sets the limits.
        options.timeout_s if turns is None else options.timeout_of_turns_s,
        results=[f"rank_{rank}.json" for rank in range(num_processes(arm, options))],
        hint=f"Run it alone: unsloth-multigpu bench {flag(options.kind)} {arm.name}",
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
