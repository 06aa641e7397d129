"""`unsloth-multigpu bench --federated`: the same clients trained in processes and in threads, in turns."""

from __future__ import annotations

import dataclasses
import importlib.util
import os
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import Any

from unsloth_multigpu.errors import DivergenceError, SetupError
from unsloth_multigpu.tools.bench.arm import Arm, arm_environment, choose_names
from unsloth_multigpu.tools.bench.command import find_device, machine_lines, variable_lines
from unsloth_multigpu.tools.bench.option import BenchOptions
from unsloth_multigpu.tools.bench.result import Spread, ratios
from unsloth_multigpu.tools.bench.run import Pace, one_by_one, run_rounds, run_worker, tell
from unsloth_multigpu.tools.bench.table import Table, model_text, show_result, spread_text
from unsloth_multigpu.tools.plain_json import json_text
from unsloth_multigpu.wire.process import exit_on_signal, find_marked

# Not -m: functions of `__main__` would travel to a slot by value.
_COMMAND = (sys.executable, "-c", "from unsloth_multigpu.tools.bench.federated_arm import main; main()")
_ALL = "slots:2,slots:1,threads:2"
# With which the others are compared.
_BASELINE = "slots:1"
# Largest difference of a trained value. On other devices sums of the same numbers vary from run to run.
_MAX_DIFFERENCE = {("cpu", "fp32"): 1e-6}
_MAX_DIFFERENCE_ELSEWHERE = 1e-3
_LEGEND = (
    "s/round: of the rounds after warm-up. Medians of the repeats with (smallest-largest); the ratio is taken within",
    "each repeat. start-up s: until the first round, imports of the arm's own process not counted.",
    "PSS: the machine's memory of a process, what it shares counted in part; at the moment of most in all, looked at",
    "several times a second. threads have their models in the process of the server.",
    "loss: mean of the samples of the last round. difference: of the trained weights from those of the first arm, the",
    "largest.",
)


@dataclass(frozen=True)
class ArmRun:
    """One arm, run once.

    Args:
        rounds_s: Seconds of each round that counts.
        startup_s: Seconds before the first round.
        device: What clients computed on.
        pss_bytes: Of each process at the moment of most memory in all, that of the server first.
        losses: Mean training loss in each of all rounds.
        weights: What was trained.
    """

    rounds_s: tuple[float, ...]
    startup_s: float
    device: str
    pss_bytes: tuple[int, ...]
    losses: tuple[float, ...]
    weights: Mapping[str, Any]


def run_federated(named: str, options: BenchOptions, file: str | None) -> int:
    """Runs every arm as often as asked, and prints a table.

    Args:
        named: "all", or slots:N and threads:N with commas between them.
        file: Where all figures go.

    Returns:
        0, or 1 if an arm failed.

    Raises:
        ConfigError: There is no such arm.
        SetupError: This machine lacks what was asked for.
        DivergenceError: Two arms trained other weights.
    """
    names = choose_names(
        options.kind, _ALL if named == "all" else named, _is_known, "slots:N and threads:N, as in slots:2"
    )
    if importlib.util.find_spec("flwr") is None:
        raise SetupError(
            "--federated needs Flower (flwr), which is not installed.",
            hint='pip install "flwr>=1.41,<2" cloudpickle, with Python 3.11 or newer',
        )
    options = dataclasses.replace(options, device=find_device(options.device)[0], arms=names)
    with exit_on_signal(), Pace(names, options.repeats) as pace:
        runs, failed = run_rounds(
            names, options.repeats, one_by_one(lambda name, folder: _run_arm(name, options, folder), pace)
        )
    if runs[names[0]]:
        _publish(file, options, runs)
        _check_equal(runs, options)
    if failed is not None:
        tell(f"error: {failed}")
    return 0 if failed is None else 1


def _is_known(name: str) -> bool:
    return re.fullmatch(r"(slots|threads):[1-9]\d*", name) is not None


def _run_arm(name: str, options: BenchOptions, folder: Path) -> ArmRun:
    from safetensors.torch import load_file

    from unsloth_multigpu.tools.bench.federated_arm import RECORD, WEIGHTS

    most: list[int] = []

    def look(server_pid: int) -> None:
        others = [pid for pid in find_marked(str(folder)) if pid != server_pid]
        sizes = [_pss_bytes(pid) for pid in (server_pid, *others)]
        most[:] = max(most, sizes, key=sum)

    (record,) = run_worker(
        name,
        _COMMAND,
        {"arm": name, "options": dataclasses.asdict(options)},
        folder,
        # The arm sees all cards and chooses among them itself.
        arm_environment(Arm(name, "", lambda _: []), options, folder, os.environ),
        options.timeout_s,
        results=[RECORD],
        hint=f"Run it alone: unsloth-multigpu bench --federated {name}",
        look=look,
    )
    return ArmRun(
        rounds_s=tuple(record["rounds_s"][options.warmup :]),
        startup_s=record["startup_s"],
        device=record["device"],
        pss_bytes=tuple(most),
        losses=tuple(record["losses"]),
        weights=load_file(folder / WEIGHTS),
    )


def _pss_bytes(pid: int) -> int:
    """0 where the process has ended meanwhile."""
    try:
        text = Path(f"/proc/{pid}/smaps_rollup").read_text(encoding="utf-8")
    except OSError:
        return 0
    return sum(int(line.split()[1]) * 1024 for line in text.splitlines() if line.startswith("Pss:"))


def _difference(runs: Sequence[ArmRun], other: ArmRun) -> float:
    """The largest of all values; infinite where the tensors are others, no number where a value is none."""
    import torch

    found = []
    for run in runs:
        if {name: w.shape for name, w in run.weights.items()} != {name: w.shape for name, w in other.weights.items()}:
            return float("inf")
        found += [(w - other.weights[name]).abs().max().float() for name, w in run.weights.items()]
    return float(torch.stack(found).max())  # Python's max() can drop NaN.


def _check_equal(runs: Mapping[str, Sequence[ArmRun]], options: BenchOptions) -> None:
    first, *_ = runs
    limit = _MAX_DIFFERENCE.get((options.device, options.dtype), _MAX_DIFFERENCE_ELSEWHERE)
    for name, repeats in runs.items():
        worst = _difference(repeats, runs[first][0])
        # True for NaN, too.
        if not worst <= limit:
            raise DivergenceError(
                f"{name} and {first} trained other weights: they differ by {worst:.1e}, expected at most {limit:.0e}.",
                hint="Run each arm alone with --repeats 2 to see which of them is not the same twice.",
            )


def _publish(file: str | None, options: BenchOptions, runs: Mapping[str, Sequence[ArmRun]]) -> None:
    lines = [*machine_lines(), *_conditions(options, runs), *variable_lines()]
    figures = _figures(runs)
    cells = [_cells(name, row, options) for name, row in figures.items()]
    show_result(lines, [Table(list(cells[0]), [list(row.values()) for row in cells], _LEGEND)])
    if file:
        kept = [f.name for f in dataclasses.fields(ArmRun) if f.name != "weights"]
        outcome = {
            "options": dataclasses.asdict(options),
            "conditions": lines,
            "results": {n: {k: _plain(v) for k, v in row.items()} for n, row in figures.items()},
            "runs": {n: [{k: getattr(run, k) for k in kept} for run in repeats] for n, repeats in runs.items()},
        }
        Path(file).write_text(json_text(outcome), encoding="utf-8")


def _figures(runs: Mapping[str, Sequence[ArmRun]]) -> dict[str, dict[str, Any]]:
    first = next(iter(runs.values()))[0]
    base = [mean(run.rounds_s) for run in runs.get(_BASELINE, ())]
    figures: dict[str, dict[str, Any]] = {}
    for name, repeats in runs.items():
        rounds_s = [mean(run.rounds_s) for run in repeats]
        others = [run.pss_bytes[1:] for run in repeats]
        figures[name] = {
            "round_s": Spread.of(rounds_s),
            "times_baseline": ratios(base, rounds_s) if base else None,
            "startup_s": Spread.of([run.startup_s for run in repeats]),
            "num_processes": max(len(run.pss_bytes) for run in repeats),
            "server_bytes": max((run.pss_bytes[0] for run in repeats if run.pss_bytes), default=0),
            "slot_bytes": max((max(sizes) for sizes in others if sizes), default=None),
            "total_bytes": max(sum(run.pss_bytes) for run in repeats),
            "loss": repeats[0].losses[-1],
            "difference": _difference(repeats, first),
        }
    return figures


def _cells(name: str, row: Mapping[str, Any], options: BenchOptions) -> dict[str, str]:
    """Column -> text."""
    round_s: Spread = row["round_s"]
    per_s = Spread(*(options.clients / s for s in (round_s.median, round_s.high, round_s.low)))

    def memory(key: str) -> str:
        return "-" if row[key] is None else f"{row[key] / 2**20:,.0f} MiB"

    return {
        "arm": name,
        "s/round": spread_text(round_s, "{:.2f}".format),
        "clients/s": spread_text(per_s, "{:.2f}".format),
        f"x {_BASELINE}": spread_text(row["times_baseline"], "{:.2f}".format),
        "start-up s": spread_text(row["startup_s"], "{:.1f}".format),
        "processes": str(row["num_processes"]),
        "server PSS": memory("server_bytes"),
        "slot PSS": memory("slot_bytes"),
        "PSS in all": memory("total_bytes"),
        "loss": f"{row['loss']:.4f}",
        "difference": f"{row['difference']:.1e}",
    }


def _conditions(options: BenchOptions, runs: Mapping[str, Sequence[ArmRun]]) -> list[str]:
    devices = sorted({run.device for repeats in runs.values() for run in repeats})
    return [
        f"device: {', '.join(devices)}",
        f"{model_text(options)}, SGD",
        f"clients: {options.clients}, each {options.steps} steps of {options.batch_size} samples in a round, "
        f"{options.lengths}",
        f"rounds: {options.rounds} timed after {options.warmup} of warm-up; {options.repeats} repeat(s), "
        f"seed {options.seed}",
        "threads: 1 in every slot, and for every client of threads:N (OMP_NUM_THREADS=1)",
    ]


def _plain(value: Any) -> Any:
    return dataclasses.asdict(value) if isinstance(value, Spread) else value
