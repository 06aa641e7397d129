"""`unsloth-multigpu plan`: does a script fit, on how many GPUs, whole or sharded?"""

from __future__ import annotations

import argparse
import os
import re
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from unsloth_multigpu.cli.screen import Progress, Screen
from unsloth_multigpu.errors import ConfigError, SetupError
from unsloth_multigpu.row import CommandOption
from unsloth_multigpu.shard.description import Description
from unsloth_multigpu.shard.memory import (
    RESERVE,
    MemoryForecast,
    Way,
    fewest_ranks,
    fits,
    forecast_memory,
    has_samples,
    in_gib,
    usable_bytes,
    would_do,
)
from unsloth_multigpu.shard.probe import DEFAULT_LIMIT_S, Answer, Device, ask
from unsloth_multigpu.tools.plain_json import json_text
from unsloth_multigpu.tools.program import command_of, parse_numbers
from unsloth_multigpu.words import GIB

SCHEMA_VERSION = 1
DEFAULT_GPUS = "1,2,4,8"
_COLUMNS = ("GPUs", "way", "weights", "gradients", "optimizer", "activations", "overhead", "total")
_UNITS = {"": GIB, "B": 1, "MB": 10**6, "GB": 10**9, "TB": 10**12, "MIB": 2**20, "GIB": GIB, "TIB": 2**40}
OWN_OPTIONS: dict[str, CommandOption] = {
    "gpus": CommandOption(str, f"Numbers of GPUs, with commas between. [{DEFAULT_GPUS}]", "N,N,..."),
    "memory": CommandOption(str, "Memory of one GPU, such as 24GiB or 80GB. [the smallest of this machine]", "SIZE"),
    "tokens": CommandOption(int, "Tokens of the longest sample. [that of the script's data set]", "N"),
    "json": CommandOption(bool, "Print one JSON object. [a table]"),
    "timeout_s": CommandOption(
        float, f"Limit of the script's way to train(), in seconds. [{DEFAULT_LIMIT_S:g}]", "SECONDS"
    ),
}


def run_plan(options: argparse.Namespace, program: Sequence[str]) -> int:
    """Forecasts the memory of `program` and prints it.

    Args:
        options: What the command line gave; None = not given.
        program: The script and its arguments, or `-m`, a module and its arguments.

    Returns:
        0 where a row fits, or where the memory of the GPUs is not known; the exit code of `SetupError` where none does.

    Raises:
        ConfigError: An option that cannot be used.
        SetupError: The script cannot be run without its weights, or nothing is known of what it trains.
        RankTimeoutError: It did not come to `train()` in time.
    """
    numbers = parse_numbers(options.gpus or DEFAULT_GPUS)
    given = None if options.memory is None else parse_memory(options.memory)
    limit_s = DEFAULT_LIMIT_S if options.timeout_s is None else options.timeout_s
    if limit_s <= 0 or (options.tokens is not None and options.tokens < 1):
        raise ConfigError("--tokens and --timeout-s must be greater than 0.", hint="Leave them out for the defaults.")
    Progress("plan").say(f"runs {' '.join(program)} up to train(), without weights")
    answer = ask(command_of(program), os.environ, tokens=options.tokens, limit_s=limit_s)
    device_bytes = given if given is not None else _smallest(answer.devices)
    ways: tuple[Way, ...] = ("ddp", "sharded") if answer.description.training.trains_parts else ("ddp",)
    rows = [forecast_memory(answer.description, way, n) for n in numbers for way in ways if n > 1 or way == "ddp"]
    screen = Screen()
    if options.json:
        screen.line(json_text(_values(answer, rows, device_bytes)).rstrip())
    else:
        show(screen, answer.description, rows, answer.devices, device_bytes)
    if device_bytes is None:
        return 0
    is_possible = any(fits(row, device_bytes) and has_samples(answer.description, row.num_ranks) for row in rows)
    return 0 if is_possible else SetupError.exit_code


def parse_memory(text: str) -> int:
    """ "24GiB", "80GB" or "24" (GiB) in bytes.

    Raises:
        ConfigError: It is something else.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([A-Za-z]*)", text.strip())
    if match is None or match[2].upper() not in _UNITS or not float(match[1]):
        raise ConfigError(f"--memory {text!r}; expected a size such as 24GiB or 80GB.", hint="Give that of one GPU.")
    return int(float(match[1]) * _UNITS[match[2].upper()])


def show(
    screen: Screen,
    description: Description,
    rows: Sequence[MemoryForecast],
    devices: Sequence[Device],
    device_bytes: int | None,
) -> None:
    """The table, what it is based on, and what to set.

    Args:
        screen: Where to.
        description: Of the training.
        rows: A forecast for each number of GPUs and way.
        devices: Of this machine.
        device_bytes: Memory of one GPU; None = not known.
    """
    training = description.training
    screen.line(
        f"{description.model}: {_trainable(description)}; {training.optimizer}, gradient checkpointing "
        f"{training.checkpointing}, {training.autocast or 'no mixed precision'}, "
        f"loss {'from ' if training.loss == 'whole logits' else ''}{training.loss}"
    )
    hosts = [f"{row.num_ranks} x {in_gib(row.host)}" for row in rows if row.host]
    offloaded = [f"offloaded where sharded, GiB in the host's memory: {', '.join(hosts)}"] if hosts else []
    for note in [*description.notes, *offloaded]:
        screen.line(f"note: {note}")
    screen.line("\nGiB on the rank that needs most:")
    columns = (*_COLUMNS, *(() if device_bytes is None else (f"of {in_gib(device_bytes)}",)))
    screen.table(columns, [_cells(description, row, device_bytes) for row in rows], num_left=2)
    screen.line()
    for line in _advice(description, rows, devices, device_bytes):
        screen.line(line, "bold")


def _advice(
    description: Description, rows: Sequence[MemoryForecast], devices: Sequence[Device], device_bytes: int | None
) -> list[str]:
    too_many = sorted({row.num_ranks for row in rows if not has_samples(description, row.num_ranks)})
    if too_many:
        training = description.training
        num_samples = training.rows * training.accumulation
        text = f"A step has {num_samples} samples, too few for {', '.join(map(str, too_many))} ranks: raise the batch."
        rows = [row for row in rows if row.num_ranks not in too_many]
        return [text, *(_advice(description, rows, devices, device_bytes) if rows else [])]
    if device_bytes is None:
        return ["This machine has no accelerator: give --memory, such as --memory 24GiB, to see which row fits."]
    of = f"{in_gib(usable_bytes(device_bytes))} of {in_gib(device_bytes)} GiB count: {RESERVE:.0%} stay free"
    here = len(devices)
    mine = [row for row in rows if row.num_ranks == here and fits(row, device_bytes)]
    if not any(fits(row, device_bytes) for row in rows):
        return [f"{of}. No row fits. {would_do(fewest_ranks(description, 'sharded', device_bytes))}"]
    best = mine[0] if mine else next(row for row in rows if fits(row, device_bytes))
    place = (
        f"On this machine ({here} GPUs)" if mine else f"With {best.num_ranks} GPU{'s' if best.num_ranks > 1 else ''}"
    )
    setting = "enable_multi_gpu()" if best.way == "ddp" else 'enable_multi_gpu(shard="on")'
    return [f"{of}.", f"{place}: {setting}"]


def _cells(description: Description, row: MemoryForecast, device_bytes: int | None) -> tuple[str, ...]:
    sizes = (row.weights, row.gradients, row.optimizer, row.activations, row.overhead_bytes, row.total)
    cells = (str(row.num_ranks), row.way, *map(_shown, sizes))
    if device_bytes is None:
        return cells
    if not has_samples(description, row.num_ranks):
        return (*cells, "too few samples")
    if fits(row, device_bytes):
        return (*cells, "fits")
    return (*cells, "while loading" if row.loading > row.total else "too large")


def _shown(num_bytes: int) -> str:
    size = num_bytes / GIB
    return f"{size:.2f}" if size >= 0.01 or not num_bytes else f"{size:.5f}"


def _trainable(description: Description) -> str:
    all_of = sum(t.count * t.numel for t in description.parameters())
    trained = sum(t.count * t.numel for t in description.trained())
    packed = sum(t.count * t.numel for t in description.parameters() if t.packing)
    return f"{all_of:,} parameters, {trained:,} trainable, {packed:,} quantised"


def _smallest(devices: Sequence[Device]) -> int | None:
    return min((device.total_bytes for device in devices), default=None)


def _values(answer: Answer, rows: Sequence[MemoryForecast], device_bytes: int | None) -> dict[str, Any]:
    forecasts = [
        {
            **asdict(row),
            "overhead": dict(row.overhead),
            "total": row.total,
            "has_samples": has_samples(answer.description, row.num_ranks),
            "fits": None if device_bytes is None else fits(row, device_bytes),
        }
        for row in rows
    ]
    return {
        "schema_version": SCHEMA_VERSION,
        "model": answer.description.model,
        "notes": list(answer.description.notes),
        "training": asdict(answer.description.training),
        "devices": [asdict(device) for device in answer.devices],
        "device_bytes": device_bytes,
        "reserve": RESERVE,
        "forecasts": forecasts,
    }
