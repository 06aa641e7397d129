"""Forecasts the memory of a script's training, in a child process that loads no weights and ends at `train()`.

The child runs the user's own command. An environment variable names the tool below. With it `enable_multi_gpu()` starts
no ranks, models are created on the meta device, and `Trainer.train` counts the first step, writes the forecasts and
ends the process.
"""

from __future__ import annotations

import atexit
import dataclasses
import json
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import psutil

from unsloth_multigpu.accelerator import KINDS
from unsloth_multigpu.errors import MultiGPUError, RankTimeoutError, SetupError
from unsloth_multigpu.logs import get_logger
from unsloth_multigpu.options import MultiGPUConfig
from unsloth_multigpu.part import Part
from unsloth_multigpu.patching import PatchRegistry
from unsloth_multigpu.shard.memory import MAX_RANKS, WITHOUT_FORECAST, MemoryForecast, Mode, Training, decide, fits
from unsloth_multigpu.tool import Tool
from unsloth_multigpu.trainer_protocol import TrainerLike
from unsloth_multigpu.wire.context import ToolRequest
from unsloth_multigpu.wire.folder import private_dir
from unsloth_multigpu.wire.process import exit_on_signal, run_to_end
from unsloth_multigpu.words import how_ended

logger = get_logger(__name__)

DEFAULT_LIMIT_S = 600.0
_END_LIMIT_S = 10.0
_LOG_LINES = 15


@dataclass(frozen=True)
class Question:
    """The forecasts that are wanted.

    Args:
        rows: Modes and numbers of ranks. Sharded ones are left out if the optimizer cannot train shards.
        tokens: Tokens of the longest sample; None = that of the data set.
        device_bytes: Memory of one device; None = that of the smallest one of this machine.
        otherwise_bytes: The same for a machine without a device; None = not known.
        is_choice: Stop at the first row that fits.
    """

    rows: Sequence[tuple[Mode, int]]
    tokens: int | None = None
    device_bytes: int | None = None
    otherwise_bytes: int | None = None
    is_choice: bool = False


@dataclass(frozen=True)
class Answer:
    """The forecasts of a script.

    Args:
        forecasts: Forecasts of the rows; if none fits, also of more ranks, up to the first number that fits.
        devices: Total bytes of each accelerator of this machine.
        device_bytes: Memory of one device; None = not known.
    """

    training: Training
    forecasts: Sequence[MemoryForecast]
    devices: Sequence[int] = ()
    device_bytes: int | None = None


def ask(
    command: Sequence[str], environment: Mapping[str, str], question: Question, *, limit_s: float = DEFAULT_LIMIT_S
) -> Answer:
    """Runs a script up to its first `train()` and returns its forecasts. Its output is not shown.

    `environment` has all variables of the script.

    Raises:
        SetupError: The script does not reach `train()`, or its step cannot be counted.
        RankTimeoutError: It took longer than `limit_s`.
    """
    with exit_on_signal(), private_dir() as folder:
        outcome, log = folder / "forecast.json", folder / "forecast.log"
        values = {"file": str(outcome), "question": dataclasses.asdict(question)}
        request = ToolRequest("unsloth_multigpu.shard.script_probe:Probe", values)
        variables = {**environment, **request.variables(), "WANDB_MODE": "disabled"}
        with log.open("wb") as output:
            code = run_to_end(
                command, variables, output, marker=str(outcome), limit_s=limit_s, terminate_limit_s=_END_LIMIT_S
            )
        if code is None:
            raise RankTimeoutError(
                f"The script did not reach train() within {limit_s:g} seconds.",
                hint=f"Raise the limit. {WITHOUT_FORECAST}",
            )
        if code or not outcome.exists():
            raise _no_answer(code, log)
        values = json.loads(outcome.read_text(encoding="utf-8"))
    if "error" in values:
        raise SetupError(values["error"], hint=values["hint"])
    forecasts = [MemoryForecast(**row) for row in values["forecasts"]]
    return Answer(Training(**values["training"]), forecasts, values["devices"], values["device_bytes"])


def _no_answer(code: int, log: Path) -> SetupError:
    """Returns the error about a script that has ended before `train()`, with its last lines."""
    lines = [line for line in log.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]
    shown = "".join(f"\n  | {line}" for line in lines[-_LOG_LINES:])
    hint = (
        "A forecast loads no weights, so the script must not read them before train(). enable_multi_gpu() must come "
        "before transformers is imported."
    )
    if code == -signal.SIGKILL:
        hint = "Models that the script builds without from_pretrained are in this machine's memory."
    return SetupError(
        f"The script {how_ended(code)} before train() of a transformers Trainer; its memory cannot be forecast.{shown}",
        hint=f"{hint} {WITHOUT_FORECAST}",
    )


def choose_shard(command: Sequence[str], environment: Mapping[str, str], config: MultiGPUConfig, num_ranks: int) -> str:
    """Decides shard="auto" by a forecast of the script: DDP if it fits the devices of `num_ranks` ranks, else sharding.

    Returns:
        The value of `shard`: "on" or "off".

    Raises:
        SetupError: Neither fits, the memory of the step cannot be counted, or the run has several nodes.
        RankTimeoutError: The script does not reach `train()` in time.
    """
    if config.nnodes != 1:
        raise SetupError(
            "shard='auto' is decided on one machine, and this run has several nodes.",
            hint="Set shard='on' or shard='off'.",
        )
    logger.info("shard=auto: runs the script up to train() without weights, to count the memory of its first step")
    # CPU ranks share the memory of the machine.
    of_machine = psutil.virtual_memory().total // num_ranks
    modes: tuple[Mode, ...] = ("ddp", "sharded") if num_ranks > 1 else ("ddp",)
    rows = tuple((mode, num_ranks) for mode in modes)
    answer = ask(command, environment, Question(rows, otherwise_bytes=of_machine, is_choice=True))
    mode, text = decide(answer.training, answer.forecasts, num_ranks, answer.device_bytes or of_machine)
    logger.info("shard=auto: %s", text)
    return "on" if mode == "sharded" else "off"


class Probe(Tool):
    """Writes the forecasts of the first training to a JSON file, and ends the process."""

    # Nothing of the run is saved.
    is_comparison = True

    def __init__(self, file: str, question: Mapping[str, Any]) -> None:
        self._file = Path(file)
        self._question = Question(**question)
        # The script's options.
        self._config: MultiGPUConfig | None = None

    def adjusted(self, config: Any) -> Any:
        if self._config is None:
            from unsloth_multigpu.shard.meta import meta_patches

            PatchRegistry(meta_patches()).apply()
        self._config = config
        return dataclasses.replace(
            config,
            num_gpus=1,
            generators=0,
            max_restarts=0,
            nnodes=1,
            rdzv_endpoint=None,
            rdzv_id=None,
            resume="off",
            enable_ddp=True,
            shard="off",
            shard_offload=False,
            sequence_parallel=1,
        )

    def part(self, trainer: TrainerLike, session: Any, steps: Any) -> Part | None:
        values: dict[str, Any]
        try:
            values = dataclasses.asdict(self._answered(trainer))
        except MultiGPUError as error:
            values = {"error": str(error.args[0]), "hint": error.hint}
        self._file.write_text(json.dumps(values), encoding="utf-8")
        _leave()

    def _answered(self, trainer: TrainerLike) -> Answer:
        from unsloth_multigpu.shard.count import Rows
        from unsloth_multigpu.shard.describe import describe

        asked, devices = self._question, _devices()
        training = describe(trainer, self._config, asked.tokens)
        smallest = min(devices, default=asked.otherwise_bytes)
        device_bytes = asked.device_bytes or smallest
        rows, forecasts = Rows(trainer, training), []
        for mode, num_ranks in asked.rows:
            if mode == "ddp" or not training.only_whole[0]:
                forecasts.append(rows.forecast(mode, num_ranks))
            if asked.is_choice and device_bytes is not None and fits(forecasts[-1], device_bytes):
                break
        if device_bytes is not None and not any(fits(row, device_bytes) for row in forecasts):
            for mode, num_ranks in _more_rows(training, max(n for _, n in asked.rows)):
                forecasts.append(rows.forecast(mode, num_ranks))
                if fits(forecasts[-1], device_bytes):
                    break
        return Answer(training, forecasts, devices, device_bytes)


def _more_rows(training: Training, num_ranks: int) -> list[tuple[Mode, int]]:
    """Returns further rows to try if none fits: one device, then twice as many ranks, up to the samples of a step."""
    rows: list[tuple[Mode, int]] = [("ddp", 1)]
    can_shard = not training.only_whole[0]
    while can_shard and (num_ranks := num_ranks * 2) <= MAX_RANKS and training.has_samples(num_ranks):
        rows.append(("sharded", num_ranks))
    return rows


def _devices() -> tuple[int, ...]:
    """Returns the total bytes of each accelerator that torch sees in this process."""
    import torch

    kind = next((k for k in KINDS if hasattr(torch, k) and getattr(torch, k).is_available()), None)
    module = getattr(torch, kind or "", None)
    return () if module is None else tuple(module.mem_get_info(index)[1] for index in range(module.device_count()))


def _leave() -> NoReturn:
    """Ends the process, not by SystemExit, which the script may catch."""
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
