"""`unsloth-multigpu bench --federated`: the same clients trained in processes and in threads, in turns."""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import Any

from unsloth_multigpu.errors import DivergenceError, SetupError
from unsloth_multigpu.tools.bench.arm import Arm, arm_environment
from unsloth_multigpu.tools.bench.federated_option import BASELINE, FederatedArm, FederatedOptions, parse_arms
from unsloth_multigpu.tools.bench.result import Spread
from unsloth_multigpu.tools.bench.table import Table, show_result, spread_text
from unsloth_multigpu.tools.plain_json import json_text
from unsloth_multigpu.wire.process import exit_on_signal, find_marked

_WORKER = "unsloth_multigpu.tools.bench.federated_arm"
# Largest difference of a trained value. On other devices sums of the same numbers vary from run to run.
_MAX_DIFFERENCE = {("cpu", "fp32"): 1e-6}
_MAX_DIFFERENCE_ELSEWHERE = 1e-3
COLUMNS = (
    "arm",
    "s/round",
    "clients/s",
    f"x {BASELINE}",
    "start-up s",
    "processes",
    "server PSS",
    "slot PSS",
    "PSS in all",
    "loss",
    "difference",
)
LEGEND = (
    "s/round: of the rounds after warm-up. Medians of the repeats with (smallest-largest); the ratio is taken within",
    "each repeat. start-up s: until the first round, imports of the arm's own process not counted.",
    "PSS: the machine's memory of a process, what it shares counted in part; at the moment of most in all, looked at",
    "twice a second. threads have their models in the process of the server.",
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


def run_federated(arguments: argparse.Namespace) -> int:
    """Runs every arm as often as asked, and prints a table.

    Returns:
        0, or 1 if an arm failed.

    Raises:
        ConfigError: An option has a value that cannot be used.
        SetupError: This machine lacks what was asked for.
        DivergenceError: Two arms trained other weights.
    """
    from unsloth_multigpu.tools.bench.command import check_outputs
    from unsloth_multigpu.tools.bench.run import Pace, one_by_one, run_rounds, tell

    arms = parse_arms(arguments.federated)
    options = FederatedOptions.from_arguments(arguments)
    check_outputs(arguments.json, None)
    if importlib.util.find_spec("flwr") is None:
        raise SetupError(
            "--federated needs Flower (flwr), which is not installed.",
            hint='pip install "flwr>=1.41,<2" cloudpickle, with Python 3.11 or newer',
        )
    options = options.on_device(_device(arguments.device))
    by_name = {arm.name: arm for arm in arms}
    with exit_on_signal(), Pace(list(by_name), options.num_repeats) as pace:
        runs, failed = run_rounds(
            list(by_name),
            options.num_repeats,
            one_by_one(lambda name, folder: _run_arm(by_name[name], options, folder), pace),
        )
    if runs[arms[0].name]:
        _publish(arguments.json, options, runs)
        _check_equal(runs, options)
    if failed is not None:
        tell(f"error: {failed}")
    return 0 if failed is None else 1


def _device(given: str) -> str:
    from unsloth_multigpu.start import visible_accelerators

    if given == "cpu":
        return given
    kind, count = visible_accelerators()
    if kind == "cuda" and count:
        return "cuda"
    if given == "auto" and not count:
        return "cpu"
    raise SetupError(
        "--device cuda, but this machine has no CUDA device.",
        hint="Use --device cpu, or check the driver and the installed torch.",
    )


def _run_arm(arm: FederatedArm, options: FederatedOptions, folder: Path) -> ArmRun:
    from safetensors.torch import load_file

    from unsloth_multigpu.tools.bench.federated_arm import RECORD, WEIGHTS
    from unsloth_multigpu.tools.bench.run import run_worker

    most: list[int] = []

    def look(server_pid: int) -> None:
        others = [pid for pid in find_marked(str(folder)) if pid != server_pid]
        sizes = [_pss_bytes(pid) for pid in (server_pid, *others)]
        most[:] = max(most, sizes, key=sum)

    (record,) = run_worker(
        arm.name,
        [sys.executable, "-m", _WORKER],
        {"arm": dataclasses.asdict(arm), "options": dataclasses.asdict(options)},
        folder,
        # The arm sees all cards and chooses among them itself.
        arm_environment(Arm(arm.name, "", lambda _: []), options.llama, folder, os.environ),
        options.llama.timeout_s,
        results=[RECORD],
        hint=f"Run it alone: unsloth-multigpu bench --federated {arm.name}",
        look=look,
    )
    return ArmRun(
        rounds_s=tuple(record["rounds_s"][options.num_warmup :]),
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


def _check_equal(runs: Mapping[str, Sequence[ArmRun]], options: FederatedOptions) -> None:
    first, *_ = runs
    limit = _MAX_DIFFERENCE.get((options.llama.device, options.llama.dtype), _MAX_DIFFERENCE_ELSEWHERE)
    for name, repeats in runs.items():
        worst = _difference(repeats, runs[first][0])
        # True for NaN, too.
        if not worst <= limit:
            raise DivergenceError(
                f"{name} and {first} trained other weights: they differ by {worst:.1e}, expected at most {limit:.0e}.",
                hint="Run each arm alone with --repeats 2 to see which of them is not the same twice.",
            )


def _publish(file: str | None, options: FederatedOptions, runs: Mapping[str, Sequence[ArmRun]]) -> None:
    from unsloth_multigpu.tools.bench.command import machine_lines, variable_lines

    lines = [*machine_lines(), *_conditions(options, runs), *variable_lines()]
    rows = _figures(runs)
    show_result(lines, [Table(COLUMNS, [_cells(name, row, options) for name, row in rows.items()], LEGEND)])
    if file:
        kept = [f.name for f in dataclasses.fields(ArmRun) if f.name != "weights"]
        outcome = {
            "options": dataclasses.asdict(options),
            "conditions": lines,
            "results": {n: {k: _plain(v) for k, v in row.items()} for n, row in rows.items()},
            "runs": {n: [{k: getattr(run, k) for k in kept} for run in repeats] for n, repeats in runs.items()},
        }
        Path(file).write_text(json_text(outcome), encoding="utf-8")


def _figures(runs: Mapping[str, Sequence[ArmRun]]) -> dict[str, dict[str, Any]]:
    first = next(iter(runs.values()))[0]
    base = [mean(run.rounds_s) for run in runs.get(BASELINE, ())]
    figures: dict[str, dict[str, Any]] = {}
    for name, repeats in runs.items():
        rounds_s = [mean(run.rounds_s) for run in repeats]
        others = [run.pss_bytes[1:] for run in repeats]
        figures[name] = {
            "round_s": Spread.of(rounds_s),
            "times_baseline": Spread.of([b / r for b, r in zip(base, rounds_s, strict=True)]) if base else None,
            "startup_s": Spread.of([run.startup_s for run in repeats]),
            "num_processes": max(len(run.pss_bytes) for run in repeats),
            "server_bytes": max((run.pss_bytes[0] for run in repeats if run.pss_bytes), default=0),
            "slot_bytes": max((max(sizes) for sizes in others if sizes), default=None),
            "total_bytes": max(sum(run.pss_bytes) for run in repeats),
            "loss": repeats[0].losses[-1],
            "difference": _difference(repeats, first),
        }
    return figures


def _cells(name: str, row: Mapping[str, Any], options: FederatedOptions) -> list[str]:
    round_s: Spread = row["round_s"]
    per_s = Spread(*(options.num_clients / s for s in (round_s.median, round_s.high, round_s.low)))
    return [
        name,
        spread_text(round_s, "{:.2f}".format),
        spread_text(per_s, "{:.2f}".format),
        spread_text(row["times_baseline"], "{:.2f}".format),
        spread_text(row["startup_s"], "{:.1f}".format),
        str(row["num_processes"]),
        *("-" if row[key] is None else f"{row[key] / 2**20:,.0f} MiB" for key in ("server_bytes", "slot_bytes")),
        f"{row['total_bytes'] / 2**20:,.0f} MiB",
        f"{row['loss']:.4f}",
        f"{row['difference']:.1e}",
    ]


def _conditions(options: FederatedOptions, runs: Mapping[str, Sequence[ArmRun]]) -> list[str]:
    llama = options.llama
    devices = sorted({run.device for repeats in runs.values() for run in repeats})
    return [
        f"device: {', '.join(devices)}",
        f"model: Llama, hidden {llama.hidden_size}, {llama.num_layers} layers, vocabulary {llama.vocab_size:,}, "
        f"random weights, {llama.dtype}, {llama.train} training, SGD",
        f"clients: {options.num_clients}, each {llama.num_steps} steps of {llama.batch_size} samples in a round, "
        f"{llama.lengths}",
        f"rounds: {options.num_rounds} timed after {options.num_warmup} of warm-up; {options.num_repeats} repeat(s), "
        f"seed {llama.seed}",
        "threads: 1 in every slot, and for every client of threads:N (OMP_NUM_THREADS=1)",
    ]


def _plain(value: Any) -> Any:
    return dataclasses.asdict(value) if isinstance(value, Spread) else value
