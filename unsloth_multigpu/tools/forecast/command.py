"""`unsloth-multigpu forecast`: how long would a script take on N GPUs?"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from unsloth_multigpu.cli.screen import Progress, Screen
from unsloth_multigpu.errors import ConfigError, SetupError
from unsloth_multigpu.options import MultiGPUConfig, variable
from unsloth_multigpu.row import CommandOption
from unsloth_multigpu.step.advice import advise, useful_up_to
from unsloth_multigpu.step.forecast import MOST_RANKS, TimeForecast, curve, forecast_time
from unsloth_multigpu.step.link import GPUS_PER_NODE, NODE_LINK, PCIE, Link, Network, fit_link, parse_link
from unsloth_multigpu.tools.forecast.measured import TOLERANCE, Check, Measured, check, read_measured
from unsloth_multigpu.tools.forecast.text import show
from unsloth_multigpu.tools.forecast.tool import MeasureRequest
from unsloth_multigpu.tools.plain_json import json_text
from unsloth_multigpu.tools.probe import Probe
from unsloth_multigpu.tools.program import (
    DEFAULT_LIMIT_S,
    check_is_no_rank,
    check_ranks,
    common_variables,
    device_variables,
    parse_numbers,
    run_program,
)
from unsloth_multigpu.tools.tail import last_lines
from unsloth_multigpu.wire.folder import private_dir
from unsloth_multigpu.wire.process import exit_on_signal

SCHEMA_VERSION = 1
DEFAULT_GPUS, DEFAULT_STEPS = "2,4,8,64,1024", 16
_LOG_LINES = 15
_REDUCE_LIMIT_S = 120.0
_MEASURE = "measure"
OWN_OPTIONS: dict[str, CommandOption] = {
    "gpus": CommandOption(str, f"Numbers of GPUs, with commas between. [{DEFAULT_GPUS}]", "N,N,..."),
    "link": CommandOption(
        str,
        "What joins the GPUs of a machine: nvlink, pcie, or ethernet:25 (Gbit/s) where each machine has one; measure = "
        "what an all-reduce on the ranks of this machine takes. [measured where there are two GPUs, else pcie]",
        "NAME",
    ),
    "node_link": CommandOption(
        str, f"What joins machines, all GPUs of one together. [{NODE_LINK.name}; that of --link ethernet]", "NAME"
    ),
    "gpus_per_node": CommandOption(int, f"GPUs of a machine. [{GPUS_PER_NODE}; 1 with --link ethernet]", "N"),
    "steps": CommandOption(int, f"Optimizer steps that are run; the first two are not timed. [{DEFAULT_STEPS}]", "N"),
    "check": CommandOption(
        int, "Also trains on so many ranks, and compares the forecast with what they take. [not]", "N"
    ),
    "device": CommandOption(str, '"cpu": measures on the CPU. [auto]', "{auto,cpu}"),
    "clock": CommandOption(
        str,
        "wall, or cpu = seconds that a single-threaded CPU rank has computed, without the link. [wall]",
        "{wall,cpu}",
    ),
    "json": CommandOption(bool, "Print one JSON object. [a table]"),
    "timeout_s": CommandOption(float, f"Limit of each run, in seconds. [{DEFAULT_LIMIT_S:g}]", "SECONDS"),
}


@dataclass(frozen=True)
class Request:
    """What a command line asks for, checked."""

    numbers: tuple[int, ...]
    link: str | None
    node_link: Link
    gpus_per_node: int
    num_steps: int
    check: int | None
    device: str
    clock: str
    limit_s: float

    @classmethod
    def read(cls, options: argparse.Namespace) -> Request:
        """Checks what was given.

        Raises:
            ConfigError: A value that cannot be used.
        """
        numbers = tuple(parse_numbers(options.gpus or DEFAULT_GPUS))
        if numbers[-1] > MOST_RANKS:
            raise ConfigError(f"--gpus {options.gpus}; expected at most {MOST_RANKS}.", hint="Leave larger ones out.")
        node_link, gpus_per_node = _between_machines(options)
        request = cls(
            numbers=numbers,
            link=options.link,
            node_link=node_link,
            gpus_per_node=gpus_per_node,
            num_steps=_or(options.steps, DEFAULT_STEPS),
            check=options.check,
            device=options.device or "auto",
            clock=options.clock or "wall",
            limit_s=_or(options.timeout_s, DEFAULT_LIMIT_S),
        )
        request.check_values()
        return request

    def check_values(self) -> None:
        """Raises ConfigError for a value out of range."""
        for name, value, least in (
            ("--gpus-per-node", self.gpus_per_node, 1),
            ("--steps", self.num_steps, 5),
            ("--check", self.check or 2, 2),
        ):
            if value < least:
                raise ConfigError(f"{name} {value}; expected at least {least}.", hint="Leave it out for the default.")
        if self.limit_s <= 0:
            raise ConfigError(f"--timeout-s {self.limit_s:g}; expected more than 0.", hint="Leave it out.")
        for name, given, known in (
            ("--clock", self.clock, ("wall", "cpu")),
            ("--device", self.device, ("auto", "cpu")),
        ):
            if given not in known:
                raise ConfigError(f"{name} {given!r}; expected {' or '.join(known)}.", hint="Leave it out.")


def _between_machines(options: argparse.Namespace) -> tuple[Link, int]:
    """What joins machines, and how many GPUs one has. `--link ethernet:n` says both: a network joins machines.

    Raises:
        ConfigError: No link, or `--link` and another option contradict each other.
    """
    given = None if options.link in (None, _MEASURE) else parse_link(options.link)
    node_link = None if options.node_link is None else parse_link(options.node_link)
    if given is None or not given.name.startswith("ethernet"):
        return node_link or NODE_LINK, _or(options.gpus_per_node, GPUS_PER_NODE)
    if node_link not in (None, given) or options.gpus_per_node not in (None, 1):
        other = "--node-link" if node_link not in (None, given) else "--gpus-per-node"
        raise ConfigError(
            f"--link {given.name} says that each machine has one GPU and what joins machines; {other} says otherwise.",
            hint=f"For machines of several GPUs: --link nvlink or pcie, with --node-link {given.name}.",
        )
    return given, 1


def run_forecast(options: argparse.Namespace, program: Sequence[str]) -> int:
    """Measures `program` on one rank, and prints the forecast.

    Args:
        options: What the command line gave; None = not given.
        program: The script and its arguments, or `-m`, a module and its arguments.

    Returns:
        0.

    Raises:
        ConfigError: An option that cannot be used.
        SetupError: The script failed, trained too little, or in a way of which nothing can be forecast.
        RankTimeoutError: A run took longer than its limit.
    """
    request = Request.read(options)
    check_is_no_rank("forecast")
    if request.check is not None:
        _check_can_run(request.check, options.device)
    screen, progress = Screen(), Progress("forecast")
    with private_dir() as folder, exit_on_signal():
        progress.say(f"runs {request.num_steps} steps of {' '.join(program)} on one rank")
        # Before the script, because there may be nothing to measure.
        link = _measured_link(request, folder) if request.link == _MEASURE else None
        (record,) = _run(request, program, folder, 1)
        measured = read_measured(record)
        network = _network(request, measured, folder, link)
        checked = None
        if request.check is not None:
            progress.say(f"runs the same steps on {request.check} ranks")
            records = _run(request, program, folder, request.check)
            checked = check(measured, records, _without_link(network) if request.clock == "cpu" else network)
    work = measured.work
    known = [n for n in sorted({1, *request.numbers}) if work.has_samples(n)]
    rows = [forecast_time(work, n, network, measured.mode) for n in known]
    whole = curve(work, network, measured.mode)
    advice = advise(work, whole, network, MOST_RANKS)
    if measured.misfit > TOLERANCE:
        advice.append(
            f"All of this is rough: the measured steps differ by {measured.misfit:.0%} from what it is made of."
        )
    if options.json:
        screen.line(json_text(_values(program, request, measured, network, rows, whole, advice, checked)).rstrip())
    else:
        show(screen, measured, request.numbers, rows, network, advice, checked)
    return 0


def _check_can_run(num_ranks: int, device: str | None) -> None:
    """Refuses, before anything runs, ranks that this machine cannot start."""
    try:
        check_ranks("forecast", MultiGPUConfig.resolve({"num_gpus": num_ranks, "device": device}))
    except SetupError as error:
        raise SetupError(
            f"--check {num_ranks} cannot be run here: {error.args[0]}",
            hint="Give a number that this machine has; --gpus may name any, since those are computed.",
        ) from error


def _run(request: Request, program: Sequence[str], folder: Path, num_gpus: int) -> list[dict[str, Any]]:
    """Runs the first steps of the program on so many ranks, and returns what each has recorded."""
    place = folder / f"ranks_{num_gpus}"
    place.mkdir()
    asked = MeasureRequest(str(place), request.num_steps, num_gpus, request.clock)
    environment = {
        **common_variables(place / "logs"),
        **({variable("device"): "cpu"} if request.device == "cpu" else {}),
        **device_variables(request.device, num_gpus),
        **asked.variables(),
    }
    log = place / "log"
    with log.open("wb") as output:
        code = run_program(program, environment, output, f"{folder.name}/{place.name}", request.limit_s)
    found = sorted(place.glob("rank_*.json"), key=lambda file: int(file.stem.split("_")[1]))
    if code != 0 or len(found) != num_gpus:
        raise _no_answer(code, log)
    return [json.loads(file.read_text(encoding="utf-8")) for file in found]


def _no_answer(code: int, log: Path) -> SetupError:
    lines = last_lines(log.read_text(encoding="utf-8", errors="replace"), _LOG_LINES).split("\n")
    shown = "".join(f"\n  | {line}" for line in lines)
    if code == 0:
        return SetupError(
            f"The script ended without a training that forecast could follow.{shown}",
            hint="It must call train() of a transformers Trainer; enable_multi_gpu(), if it is there, comes before.",
        )
    return SetupError(
        f"The script ended with exit code {code}; there is no forecast.{shown}",
        hint="`python -m unsloth_multigpu.cli.script train.py` runs it as this command does.",
    )


def _network(request: Request, measured: Measured, folder: Path, link: Link | None) -> Network:
    """What joins the ranks: as asked for, as measured, or assumed, and it says which."""
    if request.link not in (None, _MEASURE):
        assert request.link is not None
        return Network(parse_link(request.link), request.node_link, request.gpus_per_node)
    if link is None and not measured.facts["is_cpu"] and _num_devices() > 1:
        link = _measured_link(request, folder)
    if link is None:
        assumed = dataclasses.replace(PCIE, source=f"assumed; {PCIE.source}")
        return Network(assumed, request.node_link, request.gpus_per_node)
    return Network(link, request.node_link, request.gpus_per_node)


def _num_devices() -> int:
    from unsloth_multigpu.start import visible_accelerators

    return visible_accelerators()[1]


def _measured_link(request: Request, folder: Path) -> Link:
    Progress("forecast").say("measures an all-reduce on the ranks of this machine")
    variables = {variable("log_dir"): str(folder / "reduce"), variable("max_restarts"): "0"}
    if request.device == "cpu":
        variables[variable("device")] = "cpu"
    place = Path(tempfile.mkdtemp(dir=folder))
    with Probe("unsloth_multigpu.tools.allreduce", place, _REDUCE_LIMIT_S, variables) as probe:
        found = probe.outcome()
    if "error" in found:
        raise SetupError(
            f"The link could not be measured: {found['error']}",
            hint="Give --link; `unsloth-multigpu doctor` says more.",
        )
    if found["num_ranks"] == 1:
        raise SetupError(
            "The link could not be measured: one rank has nobody to send to.",
            hint="Give --link nvlink, pcie or ethernet:25; or set UNSLOTH_MULTIGPU_NUM_GPUS to 2 or more.",
        )
    where = f"measured here: {found['num_ranks']} x {found['device']} over {found['backend']}"
    small = (found["small_num_bytes"], found["small_seconds"])
    return fit_link("this machine's", small, (found["num_bytes"], found["seconds"]), found["num_ranks"], where)


def _without_link(network: Network) -> Network:
    free = Link("none", math.inf, 0.0, "not counted")
    return Network(free, free, network.gpus_per_node)


def _or(value: Any, default: Any) -> Any:
    return default if value is None else value


def _values(
    program: Sequence[str],
    request: Request,
    measured: Measured,
    network: Network,
    rows: Sequence[TimeForecast],
    whole: Sequence[TimeForecast],
    advice: Sequence[str],
    checked: Check | None,
) -> dict[str, Any]:
    work = measured.work
    kept = ("trainer", "model", "num_parameters", "num_trained", "device", "asked")
    return {
        "schema_version": SCHEMA_VERSION,
        "command": list(program),
        **{name: measured.facts[name] for name in kept},
        "notes": list(measured.notes),
        "clock": request.clock,
        "measured": {
            "num_timed_steps": len(measured.facts["steps"]),
            "misfit": measured.misfit,
            "token_s": work.token_s,
            "overhead_tokens": work.timing.overhead_tokens,
            "floor_tokens": work.timing.floor_tokens,
            "update_s": work.update_s,
            "num_samples": work.num_samples,
            "gradient_bytes": work.gradient_bytes,
            "weight_bytes": work.weight_bytes,
        },
        "network": asdict(network),
        "forecasts": [{**asdict(row), "total_s": row.total_s} for row in rows],
        "refused": [n for n in request.numbers if not work.has_samples(n)],
        "curve": [{**asdict(row), "total_s": row.total_s} for row in whole],
        "useful_up_to": useful_up_to(whole),
        "advice": list(advice),
        "check": None if checked is None else asdict(checked),
    }
