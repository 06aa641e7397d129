"""Plants faults into the ranks that `tests.helpers.run.start` starts, and reads what was written down of it."""

from __future__ import annotations

from pathlib import Path

from unsloth_multigpu.recorders.fault import Fault, chaos_variables, read_records


def fail_at(kind: str, rank: int, step: int, *, folder: Path, **details) -> dict[str, str]:
    """Environment of a run in which `rank` meets a fault in optimizer step `step`, counted from 1.

    Args:
        kind: A key of `unsloth_multigpu.recorders.fault.KINDS`.
        folder: Where the ranks leave what `records` reads; it is there already.
        details: Other fields of `Fault`, such as `attempt=1` or `phase="save"`.
    """
    return faults_in(folder, Fault(kind, rank, step, **details))


def faults_in(folder: Path, *faults: Fault) -> dict[str, str]:
    """The same for several faults, or for none: the ranks then only write down what they do."""
    return chaos_variables(folder, faults)


def records(folder: Path, rank: int, event: str = "") -> list[dict]:
    """What a rank wrote down, oldest first: events "begin", "injected", "step" and "end", with `time_s` on the clock of
    `time.monotonic`."""
    return [record for record in read_records(folder, rank) if event in ("", record["event"])]
