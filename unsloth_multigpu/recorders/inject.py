"""Injects faults into a training and records its steps, for `unsloth-multigpu chaos` and the tests."""

from __future__ import annotations

import dataclasses
import json
import os
import resource
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import psutil
import torch

from unsloth_multigpu.options import MultiGPUConfig
from unsloth_multigpu.part import ArgumentsLike, ControlLike, Override, Part, StateLike, TrainerLike
from unsloth_multigpu.recorders.fault import ALL_RANKS, Fault, read_records
from unsloth_multigpu.recorders.fingerprint import fingerprints, trained_weights
from unsloth_multigpu.step.comparison import sketch_of
from unsloth_multigpu.step.feed import StepFeed
from unsloth_multigpu.tool import DEFAULT_OUTPUT, Tool
from unsloth_multigpu.wire.process import send_signal

# File size that the simulated full disk still accepts: less than any file of a checkpoint.
_DISK_LEFT_BYTES = 4096
_MEMORY_LEFT_BYTES = 2**26
_MEMORY_ASKED_BYTES = 2**31
# The supervisor checks for signals ten times a second.
_LOOK_S = 0.5


class Chaos(Part, Tool):
    """Injects faults into a run, and records the samples of each rank without those of filler micro-batches.

    `folder` is for the records; see `chaos_variables`.
    """

    draws_alike = True
    place = "faults"

    def __init__(self, folder: str, faults: list[dict[str, Any]], work: str | None = None) -> None:
        self._folder, self._all, self._work = Path(folder), [Fault(**fault) for fault in faults], work

    def adjusted(self, config: MultiGPUConfig) -> MultiGPUConfig:
        self._asked = config  # Later shard="auto" is replaced by the decision.
        return config if self._work is None else dataclasses.replace(config, log_dir=str(Path(self._work, "logs")))

    def adjust_arguments(self, args: ArgumentsLike) -> None:
        """Redirects what a Trainer writes, and turns off its uploads."""
        if self._work is None:
            return
        args.push_to_hub = False
        args.output_dir = self._redirected(args.output_dir or DEFAULT_OUTPUT)
        curves = getattr(args, "logging_dir", None)
        if curves is not None:
            args.logging_dir = self._redirected(curves)

    def _redirected(self, folder: str | os.PathLike[str]) -> str:
        """Returns the path of a folder within the run's own folder, equal in every start of the ranks."""
        work, path = Path(self._work or "").resolve(), Path(folder).resolve()
        return str(path if path.is_relative_to(work) else work.joinpath("output", *path.parts[1:]))

    def part(self, trainer: TrainerLike, session: Any, steps: StepFeed | None) -> Part | None:
        if steps is None:
            return None
        self.adjust_arguments(trainer.args)  # Again, because the script may have changed them.
        self.trainer, self._steps = trainer, steps
        self._rank, self._attempt = session.identity.rank, session.context.attempt
        self.supervisor_pid = session.context.supervisor_pid
        mine = [f for f in self._all if f.rank in (self._rank, ALL_RANKS) and f.attempt == self._attempt]
        # A script may train several times; each fault is injected in one training.
        written = read_records(self._folder, self._rank)
        done = [r["fault"] for r in written if r["event"] == "injected" and r["attempt"] == self._attempt]
        self._faults = [fault for fault in mine if str(fault) not in done]
        self._training = sum(r["event"] == "begin" and r["pid"] == os.getpid() for r in written)
        self._samples: Counter[str] = Counter()
        self.is_poisoned = False
        return self

    def overrides(self) -> dict[str, Override]:
        return {
            "training_step": self._training_step,
            "compute_loss": self._compute_loss,
            "save_model": self._save_model,
            "_save_checkpoint": self._save_checkpoint,
        }

    def _training_step(self, original: Callable[..., Any], model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        self._act(self._take("train"))
        current = self._steps.passes.current
        if current is None or not current.piece.is_filler:
            self._samples.update(fingerprints(inputs))
        return original(model, inputs, *args, **kwargs)

    def _compute_loss(self, original: Callable[..., Any], model: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(model, *args, **kwargs)
        if not self.is_poisoned or not model.training:
            return result
        self.is_poisoned = False
        return (result[0] * torch.nan, *result[1:]) if isinstance(result, tuple) else result * torch.nan

    def _save_checkpoint(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        # Python ignores SIGXFSZ, so a write beyond the limit raises OSError, as on a full disk.
        is_full = self._take("save", "disk_full") is not None
        with _limited(resource.RLIMIT_FSIZE, _DISK_LEFT_BYTES) if is_full else nullcontext():
            return original(*args, **kwargs)

    def _save_model(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        # Set by the Trainer in a checkpoint, whose other files follow.
        if kwargs.get("_internal_call"):
            self._act(self._take("save"))
        return result

    def on_prediction_step(self, args: ArgumentsLike, state: StateLike, control: ControlLike, **kwargs: Any) -> None:
        self._act(self._take("evaluate"))

    def _take(self, phase: str, kind: str | None = None) -> Fault | None:
        """Returns the fault that is due now, each once. `kind` selects "disk_full", which begins with a checkpoint."""
        finished = int(self.trainer.state.global_step)
        # A checkpoint and an evaluation belong to the step that has just been finished.
        step = finished + 1 if phase == "train" else finished
        for fault in self._faults:
            is_here = fault.kind == kind if kind else fault.phase == phase and fault.kind in _ACTIONS
            can_act = fault.kind != "corrupt" or newest_checkpoint(self.trainer.args.output_dir) is not None
            if is_here and step >= fault.step and can_act:
                self._faults.remove(fault)
                self.write("injected", fault=str(fault), kind=fault.kind, step=step)
                return fault
        return None

    def _act(self, fault: Fault | None) -> None:
        if fault is not None:
            _ACTIONS[fault.kind](self)

    def write(self, event: str, **facts: Any) -> None:
        """Adds a line to this rank's file, with the time of `time.monotonic`, which all processes share."""
        place = {"pid": os.getpid(), "attempt": self._attempt, "training": self._training}
        line = {"event": event, "time_s": time.monotonic(), **place, **facts}
        with (self._folder / f"rank_{self._rank}.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")

    def on_train_begin(self, args: ArgumentsLike, state: StateLike, control: ControlLike, **kwargs: Any) -> None:
        self.write(
            "begin",
            step=int(state.global_step),
            output_dir=os.path.abspath(args.output_dir),
            config=self._asked.plain_values(),
        )

    def on_step_end(self, args: ArgumentsLike, state: StateLike, control: ControlLike, **kwargs: Any) -> None:
        samples, self._samples = self._samples, Counter()
        self.write("step", step=int(state.global_step), samples=samples)

    def on_train_end(self, args: ArgumentsLike, state: StateLike, control: ControlLike, **kwargs: Any) -> None:
        weights = {name: sketch_of(value) for name, value in trained_weights(self.trainer.model, self._rank)}
        self.write("end", step=int(state.global_step), weights=weights)


def newest_checkpoint(output_dir: str) -> Path | None:
    """Returns the checkpoint of the highest step."""
    found = [p for p in Path(output_dir).glob("checkpoint-*") if p.name.rpartition("-")[2].isdigit()]
    return max(found, key=lambda p: int(p.name.rpartition("-")[2]), default=None)


def _raise(_: Chaos) -> None:
    raise RuntimeError("injected by unsloth-multigpu chaos")


def _loop(_: Chaos) -> None:
    """Keeps the main thread busy forever."""
    while True:
        pass


def _corrupt(chaos: Chaos) -> None:
    """Truncates the largest file of the newest checkpoint, as a crash may, and kills this process."""
    checkpoint = newest_checkpoint(chaos.trainer.args.output_dir)
    assert checkpoint is not None
    largest = max((p for p in checkpoint.rglob("*") if p.is_file()), key=lambda p: p.stat().st_size)
    os.truncate(largest, largest.stat().st_size // 2)
    _signal(os.getpid(), signal.SIGKILL)


def _signal(pid: int, number: signal.Signals) -> None:
    send_signal(pid, number)
    # Stay in the step until the signal takes effect.
    time.sleep(_LOOK_S)


def _run_out_of_memory(chaos: Chaos) -> None:
    """Raises torch's own error of a device without enough memory."""
    device = chaos.trainer.args.device
    if device.type != "cpu":
        torch.empty(2**50, dtype=torch.uint8, device=device)
    # The limit is restored before the error is reported, which needs memory.
    with _limited(resource.RLIMIT_AS, psutil.Process().memory_info().vms + _MEMORY_LEFT_BYTES):
        torch.empty(_MEMORY_ASKED_BYTES, dtype=torch.uint8)


_ACTIONS: dict[str, Callable[[Chaos], Any]] = {
    "raise": _raise,
    "exit": lambda _: sys.exit(0),
    "memory": _run_out_of_memory,
    "nan": lambda chaos: setattr(chaos, "is_poisoned", True),
    "kill": lambda _: _signal(os.getpid(), signal.SIGKILL),
    "stop": lambda _: _signal(os.getpid(), signal.SIGSTOP),
    "loop": _loop,
    "corrupt": _corrupt,
    "kill_supervisor": lambda chaos: _signal(chaos.supervisor_pid, signal.SIGKILL),
    "sigterm": lambda chaos: _signal(chaos.supervisor_pid, signal.SIGTERM),
}


@contextmanager
def _limited(kind: int, limit: int) -> Iterator[None]:
    """Lowers a limit of this process, one of `resource.RLIMIT_*`, within the context."""
    soft, hard = resource.getrlimit(kind)
    resource.setrlimit(kind, (limit, hard))
    try:
        yield
    finally:
        resource.setrlimit(kind, (soft, hard))
