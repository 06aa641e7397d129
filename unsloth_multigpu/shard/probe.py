"""Asks a script for the description of its training, without loading weights: in a child that ends at `train()`.

The child runs the user's own command. One variable names the tool below; with it the line starts no ranks, models are
made on the meta device, and `Trainer.train` writes the description and ends the process.
"""

from __future__ import annotations

import atexit
import dataclasses
import json
import os
import signal
import sys
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, NoReturn

from unsloth_multigpu.accelerator import KINDS
from unsloth_multigpu.errors import MultiGPUError, RankTimeoutError, SetupError
from unsloth_multigpu.part import Part
from unsloth_multigpu.patching import PatchRegistry
from unsloth_multigpu.shard.description import Description
from unsloth_multigpu.tool import Tool
from unsloth_multigpu.trainer_protocol import TrainerLike
from unsloth_multigpu.wire.context import ToolRequest
from unsloth_multigpu.wire.folder import private_dir
from unsloth_multigpu.wire.process import exit_on_signal, only_here, run_to_end
from unsloth_multigpu.words import how_ended

DEFAULT_LIMIT_S = 600.0
_TERMINATE_LIMIT_S = 10.0
_LOG_LINES = 15
_WITHOUT = "shard='on' or shard='off' decides without a forecast."
_OUTCOME, _LOG = "forecast.json", "forecast.log"


@dataclass(frozen=True)
class Device:
    """An accelerator of this machine.

    Args:
        name: As its driver says.
        total_bytes: Its memory.
        free_bytes: What nobody used when the child looked.
    """

    name: str
    total_bytes: int
    free_bytes: int


@dataclass(frozen=True)
class Earlier:
    """The checkpoint that resume="auto" would take.

    Args:
        folder: Where it is.
        is_sharded: Its ranks each held a part of the weights.
    """

    folder: str
    is_sharded: bool


@dataclass(frozen=True)
class Answer:
    """What a script says of its training.

    Args:
        description: Model and training.
        devices: What the child saw of this machine; empty without a card.
        earlier: What it would resume from; None = nothing, or the script's own choice.
    """

    description: Description
    devices: tuple[Device, ...]
    earlier: Earlier | None = None


def ask(
    command: Sequence[str],
    environment: Mapping[str, str],
    *,
    tokens: int | None = None,
    limit_s: float = DEFAULT_LIMIT_S,
) -> Answer:
    """Runs a script up to its first `train()` and returns what it would need. Its output is not shown.

    Args:
        command: What starts it.
        environment: All of its variables.
        tokens: Of the longest sample; None = the longest of the data set.
        limit_s: It is ended after so many seconds.

    Raises:
        SetupError: The script does not come to a `train()` in this way, or nothing is known of what it trains.
        RankTimeoutError: It took longer than `limit_s`.
    """
    with exit_on_signal(), private_dir() as folder:
        outcome, log = folder / _OUTCOME, folder / _LOG
        request = ToolRequest("unsloth_multigpu.shard.probe:Probe", {"file": str(outcome), "tokens": tokens})
        variables = {**environment, **request.variables(), "WANDB_MODE": "disabled"}
        with log.open("wb") as output:
            code = run_to_end(
                command,
                variables,
                output,
                marker=str(outcome),
                limit_s=limit_s,
                terminate_limit_s=_TERMINATE_LIMIT_S,
            )
        if code is None:
            raise RankTimeoutError(
                f"The script did not come to train() within {limit_s:g} seconds.", hint=f"Raise it. {_WITHOUT}"
            )
        if not outcome.exists():
            raise _no_answer(code, log)
        return _answer(json.loads(outcome.read_text(encoding="utf-8")))


def _answer(values: Mapping[str, Any]) -> Answer:
    if "error" in values:
        raise SetupError(values["error"], hint=values["hint"])
    devices = tuple(Device(**device) for device in values["devices"])
    earlier = None if values["earlier"] is None else Earlier(**values["earlier"])
    return Answer(Description.from_values(values["description"]), devices, earlier)


def _no_answer(code: int, log: Path) -> SetupError:
    lines = [line for line in log.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]
    shown = "".join(f"\n  | {line}" for line in lines[-_LOG_LINES:])
    hint = "enable_multi_gpu() must come before transformers is imported."
    if code == -signal.SIGKILL:
        hint = (
            "from_pretrained loads no weights in a forecast; what the script builds in another way lies in this "
            "machine's memory."
        )
    return SetupError(
        f"The script {how_ended(code)} before a train() of a transformers Trainer; its memory cannot be "
        f"forecast.{shown}",
        hint=f"{hint} {_WITHOUT}",
    )


class Probe(Tool):
    """Writes the description of the first training and ends the process.

    Args:
        file: Where it goes, as JSON.
        tokens: Of the longest sample; None = the longest of the data set.
    """

    # The script may have the line itself, and nothing of the run is kept.
    is_comparison = True

    def __init__(self, file: str, tokens: int | None) -> None:
        self._file = Path(file)
        self._tokens = tokens
        self._keeps_batch = True
        self._is_offloaded = False
        self._resumes = False
        self._is_entered = False

    def adjusted(self, config: Any) -> Any:
        self._keeps_batch = config.global_batch == "keep" and config.batch_size_per_gpu is None
        self._resumes = config.resume == "auto"
        if not self._is_entered:
            self._enter()
        alone: dict[str, Any] = {
            "num_gpus": 1,
            "max_restarts": 0,
            "nnodes": "1",
            "rdzv_endpoint": None,
            "rdzv_id": None,
        }
        if hasattr(config, "shard"):
            self._is_offloaded = config.shard_offload
            alone.update(shard="off", shard_offload=False)
        return dataclasses.replace(config, resume="off", enable_ddp=True, **alone)

    def _enter(self) -> None:
        from unsloth_multigpu.shard.meta import meta_patches

        self._is_entered = True
        PatchRegistry(meta_patches()).apply()
        previous = sys.excepthook

        def tell(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
            if not self._file.exists():
                self._write(_failure(error, trace))
            previous(kind, error, trace)

        sys.excepthook = only_here(tell, otherwise=previous)

    def part(self, trainer: TrainerLike, session: Any, steps: Any) -> Part | None:
        from unsloth_multigpu.shard.describe import describe

        values: dict[str, Any]
        try:
            description = describe(
                trainer, tokens=self._tokens, keeps_batch=self._keeps_batch, is_offloaded=self._is_offloaded
            )
            found = session.find_way(trainer) if self._resumes else None
            earlier = None if found is None else {"folder": str(found[0]), "is_sharded": found[1]}
            values = {"description": description.plain_values(), "devices": _devices(), "earlier": earlier}
        except MultiGPUError as error:
            values = {"error": str(error.args[0]), "hint": error.hint}
        self._write(values)
        _leave()

    def _write(self, values: Mapping[str, Any]) -> None:
        # Renamed when complete, so that a process that is ended while it writes leaves no half of a file.
        partial = self._file.with_suffix(".part")
        partial.write_text(json.dumps(values), encoding="utf-8")
        partial.replace(self._file)


def _failure(error: BaseException, trace: TracebackType | None) -> dict[str, str]:
    """What went wrong, at which line of the user's own script."""
    if isinstance(error, MultiGPUError):
        return {"error": str(error.args[0]), "hint": error.hint}
    script = os.path.realpath(getattr(sys.modules["__main__"], "__file__", "") or "")
    frames = [f for f in traceback.extract_tb(trace) if os.path.realpath(f.filename) == script]
    where = f"{Path(script).name} line {frames[-1].lineno}, `{frames[-1].line}`: " if frames else ""
    return {
        "error": f"The script cannot be run without its weights: {where}{type(error).__name__}: {error}",
        "hint": f"What it does there needs weights, which a forecast does not load. {_WITHOUT}",
    }


def _devices() -> list[dict[str, Any]]:
    """The accelerators that torch sees in this process."""
    import torch

    kind = next((k for k in KINDS if hasattr(torch, k) and getattr(torch, k).is_available()), None)
    if kind is None:
        return []
    module, found = getattr(torch, kind), []
    for index in range(module.device_count()):
        free_bytes, total_bytes = module.mem_get_info(index)
        name = module.get_device_properties(index).name
        found.append({"name": name, "total_bytes": total_bytes, "free_bytes": free_bytes})
    return found


def _leave() -> NoReturn:
    """Ends the process before the script's next line. No SystemExit, which a script may catch."""
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
