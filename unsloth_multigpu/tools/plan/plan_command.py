"""`unsloth-multigpu plan`: forecasts the memory of a script on several numbers of GPUs, replicated and sharded."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Annotated, Any

from unsloth_multigpu.cli.command import Arguments, Command
from unsloth_multigpu.cli.screen import Progress, Screen
from unsloth_multigpu.errors import ConfigError, SetupError
from unsloth_multigpu.option_type import Option
from unsloth_multigpu.shard.memory import RESERVE, MemoryForecast, Mode, Training, fits, usable_bytes
from unsloth_multigpu.shard.script_probe import DEFAULT_LIMIT_S, Answer, Question, ask
from unsloth_multigpu.tools.script_program import command_of, parse_numbers
from unsloth_multigpu.words import GIB, in_gib

# The script of `--model`, and its defaults: tokens of a sample, rank of the adapters, bits of a weight.
_MODEL_SCRIPT = "unsloth_multigpu.tools.plan.model_script"
_TOKENS, _LORA, _BITS = 2048, 16, "16"
_COLUMNS = ("GPUs", "mode", "weights", "gradients", "optimizer", "activations", "overhead", "total")
_UNITS = {"": GIB, "B": 1, "MB": 10**6, "GB": 10**9, "TB": 10**12, "MIB": 2**20, "GIB": GIB, "TIB": 2**40}


def parse_memory(name: str, text: str) -> int:
    """Parses a size such as "24GiB", "80GB" or "24" (GiB), or raises ConfigError. Returns bytes."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([A-Za-z]*)", text.strip())
    if match is None or match[2].upper() not in _UNITS or not float(match[1]):
        raise ConfigError(
            f"{name}={text!r}; expected a size such as 24GiB or 80GB.", hint="Give the memory of one GPU."
        )
    return int(float(match[1]) * _UNITS[match[2].upper()])


@dataclass(frozen=True)
class Options(Arguments):
    """Runs the script up to its first train(), with a model that has shapes and no weights, and prints the memory that
    each rank would need: with DDP, where every rank has the whole model, and sharded by FSDP2. The code before train(),
    such as tokenizing, is run. Exit code 0 = a row fits, 69 = none fits, or there is no forecast.

    Args:
        gpus: Numbers of GPUs, separated by commas.
        memory: Memory of one GPU, such as 24GiB or 80GB.
        tokens: Tokens of the longest sample.
        model: A folder with config.json, or a hub id: forecast without a script.
        lora: Rank of the model's adapters on all linear layers; 0 = all weights are trained.
        bits: Bits of the model's weights, 4 or 16.
        json: Print one JSON object.
        timeout_s: Time limit of the script up to train(), in seconds.
    """

    gpus: Annotated[Any, Option(check=parse_numbers, shown="N,N,...")] = "1,2,4,8"
    memory: Annotated[Any, Option(check=parse_memory, shown="SIZE", otherwise="the smallest of this machine")] = None
    tokens: Annotated[int | None, Option(least=1, otherwise="that of the script's data set")] = None
    model: Annotated[str | None, Option(shown="DIR_OR_ID", otherwise="that of the script")] = None
    lora: Annotated[int | None, Option(least=0, otherwise="16, with --model")] = None
    bits: Annotated[str | None, Option(choices=("4", "16"), otherwise="16, with --model")] = None
    json: Annotated[bool, Option()] = False
    timeout_s: Annotated[float, Option(least=1, shown="SECONDS")] = DEFAULT_LIMIT_S

    def program(self) -> list[str]:
        """Returns the script of `--model` and its arguments."""
        if self.model is None:
            return []
        lora = _LORA if self.lora is None else self.lora
        values = {"lora": lora, "bits": self.bits or _BITS, "tokens": self.tokens or _TOKENS, "samples": max(self.gpus)}
        asked = [text for name, value in values.items() for text in (f"--{name}", str(value))]
        return ["-m", _MODEL_SCRIPT, self.model, *asked]


def run(own: Options, given: Mapping[str, Any], program: Sequence[str]) -> int:
    """Forecasts the memory of `program` and prints it.

    Returns:
        0 if a row fits or the memory of the GPUs is not known; the exit code of `SetupError` if none fits.

    Raises:
        ConfigError: An invalid option.
        SetupError: The script cannot be run without weights, or its training cannot be forecast.
        RankTimeoutError: It did not reach `train()` in time.
    """
    of_model = [name for name in ("model", "lora", "bits") if getattr(own, name) is not None]
    if of_model and list(program[:2]) != ["-m", _MODEL_SCRIPT]:
        raise ConfigError(
            f"--{of_model[0]} is for a forecast without a script, but {' '.join(program)} was given.",
            hint="Leave one of them out.",
        )
    Progress("plan").say(f"runs {' '.join(program)} up to train(), without weights")
    modes: tuple[Mode, ...] = ("ddp", "sharded")
    asked = tuple((mode, n) for n in own.gpus for mode in modes if n > 1 or mode == "ddp")
    answer = ask(command_of(program), os.environ, Question(asked, own.tokens, own.memory), limit_s=own.timeout_s)
    screen = Screen()
    if own.json:
        screen.json(_values(answer))
    else:
        show(screen, answer, own.gpus)
    return SetupError.exit_code if answer.device_bytes is not None and not _possible(answer) else 0


COMMAND = Command(
    "plan",
    "forecast the memory of a script on several numbers of GPUs, without loading weights",
    Options,
    run,
    runs_program=True,
)


def show(screen: Screen, answer: Answer, numbers: Sequence[int]) -> None:
    """Prints the training, the table and the advice for these numbers of GPUs."""
    training, device_bytes = answer.training, answer.device_bytes
    screen.line(
        f"{training.model}: {training.num_parameters:,} parameters, {training.num_trainable:,} trainable, "
        f"{training.num_quantised:,} quantized; {training.optimizer}, gradient checkpointing "
        f"{'on' if training.checkpointing else 'off'}, {training.autocast or 'no mixed precision'}"
    )
    rows = answer.forecasts
    for note in training.notes:
        screen.line(f"note: {note}")
    if hosts := [f"{row.num_ranks} x {in_gib(row.host)}" for row in rows if row.host]:
        screen.line(f"note: sharded rows are offloaded, GiB in host memory: {', '.join(hosts)}")
    screen.line("\nGiB on the rank that needs most:")
    columns = (*_COLUMNS, *(() if device_bytes is None else (f"of {in_gib(device_bytes)}",)))
    screen.table(columns, [_cells(training, row, device_bytes) for row in rows], num_left=2)
    screen.line()
    for line in _advice(answer, numbers):
        screen.line(line, "bold")


def _possible(answer: Answer) -> list[MemoryForecast]:
    """Returns the rows that fit and whose ranks all have samples."""
    device_bytes, has_samples = answer.device_bytes or 0, answer.training.has_samples
    return [row for row in answer.forecasts if fits(row, device_bytes) and has_samples(row.num_ranks)]


def _advice(answer: Answer, numbers: Sequence[int]) -> list[str]:
    training, device_bytes = answer.training, answer.device_bytes
    lines = []
    if too_many := [str(number) for number in numbers if not training.has_samples(number)]:
        num_samples = training.rows * training.accumulation
        lines = [f"A step has {num_samples} samples, too few for {', '.join(too_many)} ranks: raise the batch size."]
    if len(too_many) == len(numbers):
        return lines
    if device_bytes is None:
        hint = "This machine has no accelerator: set --memory, such as --memory 24GiB, to see which row fits."
        return [*lines, hint]
    of = f"{in_gib(usable_bytes(device_bytes))} of {in_gib(device_bytes)} GiB can be used: {RESERVE:.0%} stay free"
    possible, here = _possible(answer), len(answer.devices)
    if not possible:
        return [*lines, f"{of}. No row fits: --gpus 16,32 shows more GPUs, --memory larger ones."]
    mine = [row for row in possible if row.num_ranks == here]
    best = (mine or possible)[0]
    gpus = f"{best.num_ranks} GPU{'s' if best.num_ranks > 1 else ''}"
    place = f"On this machine ({here} GPUs)" if mine else f"With {gpus}"
    setting = "enable_multi_gpu()" if best.mode == "ddp" else 'enable_multi_gpu(shard="on")'
    return [*lines, f"{of}.", f"{place}: {setting}"]


def _cells(training: Training, row: MemoryForecast, device_bytes: int | None) -> tuple[str, ...]:
    sizes = (row.weights, row.gradients, row.optimizer, row.activations, row.overhead_bytes, row.total)
    cells = (str(row.num_ranks), row.mode, *map(_shown, sizes))
    if device_bytes is None:
        return cells
    mark = "fits" if fits(row, device_bytes) else "too large"
    return (*cells, mark if training.has_samples(row.num_ranks) else "too few samples")


def _shown(num_bytes: int) -> str:
    size = num_bytes / GIB
    return f"{size:.2f}" if size >= 0.01 or not num_bytes else f"{size:.5f}"


def _values(answer: Answer) -> dict[str, Any]:
    training, device_bytes = asdict(answer.training), answer.device_bytes
    forecasts = [
        {
            **asdict(row),
            "total": row.total,
            "has_samples": answer.training.has_samples(row.num_ranks),
            "fits": None if device_bytes is None else fits(row, device_bytes),
        }
        for row in answer.forecasts
    ]
    return {
        "schema_version": 2,
        "model": training.pop("model"),
        "notes": list(training.pop("notes")),
        "training": training,
        "devices": [{"total_bytes": num_bytes} for num_bytes in answer.devices],
        "device_bytes": device_bytes,
        "reserve": RESERVE,
        "forecasts": forecasts,
    }
