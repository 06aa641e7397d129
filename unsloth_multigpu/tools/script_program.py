"""Runs the user's script for a tool (ranks, devices, variables, time limit), and follows its first steps in each rank.

In a run whose first steps are followed nothing is saved, and the process ends after `train()`.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

from unsloth_multigpu.accelerator import HIDDEN, variables_for
from unsloth_multigpu.errors import ConfigError, RankTimeoutError, SetupError
from unsloth_multigpu.options import MultiGPUConfig, variable
from unsloth_multigpu.part import ArgumentsLike, ControlLike, Part, StateLike, TrainerLike
from unsloth_multigpu.seam import instance_attribute
from unsloth_multigpu.shard.script_probe import leave_process
from unsloth_multigpu.tool import DEFAULT_OUTPUT, Tool
from unsloth_multigpu.wire.child import run_to_end
from unsloth_multigpu.wire.context import ToolRequest
from unsloth_multigpu.wire.identity import read_identity
from unsloth_multigpu.wire.process import threads_of_each
from unsloth_multigpu.wire.run import SCRIPT_MODULE
from unsloth_multigpu.words import last_lines

DEFAULT_LIMIT_S = 3600.0
# The supervisor and torchrun give their ranks 30 seconds to end.
_TERMINATE_LIMIT_S = 40.0
# Lines of the output that are shown after a failure.
_NUM_LINES = 40
# Methods that do nothing in such a run, which must not write to the user's folders or accounts.
_SAVERS = (
    "save_model",
    "save_state",
    "_save_checkpoint",
    "save_pretrained",
    "push_to_hub",
    # Unsloth's, on the model.
    "save_pretrained_merged",
    "save_pretrained_gguf",
    "push_to_hub_merged",
    "push_to_hub_gguf",
)
# save_total_limit would remove checkpoints at the end.
_SETTINGS = {"logging_nan_inf_filter": False, "eval_on_start": False, "save_total_limit": None}
_TRACKERS = "transformers.integrations"


def command_of(program: Sequence[str]) -> list[str]:
    """Returns the command that starts a program, as `unsloth-multigpu run` does.

    `program` is the script and its arguments, or `-m`, a module and its arguments.
    """
    # An absolute path, because the script may change its working folder before it starts the ranks.
    name = program[0] if program[0] == "-m" else os.path.abspath(program[0])
    return [sys.executable, "-m", SCRIPT_MODULE, name, *program[1:]]


def run_recorded(
    command: Sequence[str], environment: Mapping[str, str], folder: Path, *, limit_s: float, cwd: Path | None = None
) -> tuple[int | None, list[dict[str, Any]], str]:
    """Runs a command whose processes write `rank_N.json` to `folder`, and ends all of its processes.

    They are identified by the folder's path, which must occur in `environment` only.

    Returns the exit code, None = it took longer than `limit_s`; if it is 0 the records, rank 0 first; the end of the
    output.
    """
    log = folder / "output.log"
    code = run_to_end(
        command, environment, log, marker=str(folder), limit_s=limit_s, terminate_limit_s=_TERMINATE_LIMIT_S, cwd=cwd
    )
    paths = folder.glob("rank_*.json") if code == 0 else ()
    records = [json.loads(path.read_text(encoding="utf-8")) for path in paths]
    tail = last_lines(log.read_text(encoding="utf-8", errors="replace"), _NUM_LINES)
    return code, sorted(records, key=lambda record: int(record["rank"])), tail


def run_first_steps(
    name: str,
    program: Sequence[str],
    values: Mapping[str, Any],
    device: str,
    variables: Mapping[str, str],
    limit_s: float,
) -> tuple[int, list[dict[str, Any]], str]:
    """Runs the first steps of a program with the recorder class in `<name>_recorder`, `name` being that of the command.

    `values` are the arguments of `FirstSteps`, whose folder is created. device="cpu" hides accelerators from the run;
    `variables` are the options of the run, and others. Returns the exit code as in a shell; the record of each rank,
    rank 0 first; the end of the output.

    Raises:
        RankTimeoutError: It took longer than `limit_s`.
        SetupError: It exited with 0 and recorded nothing.
    """
    folder = Path(values["folder"])
    folder.mkdir()
    environment = {
        # Not the folder of the user's trainings, unless the user has set it.
        variable("log_dir"): str(folder / "logs"),
        # The iteration order of a set of strings may decide the order of samples.
        "PYTHONHASHSEED": "0",
        **os.environ,
        variable("max_restarts"): "0",
        "WANDB_MODE": "disabled",
        **variables,
        **device_variables(device, values["num_gpus"]),
        **ToolRequest(f"unsloth_multigpu.tools.{name}.{name}_recorder:{name.title()}", values).variables(),
    }
    code, records, tail = run_recorded(command_of(program), environment, folder, limit_s=limit_s)
    if code is None:
        raise RankTimeoutError(
            f"The run did not reach its end within timeout_s={limit_s:g} seconds. The end of its output:\n{tail}",
            hint="Set fewer --steps, or a higher --timeout-s.",
        )
    if code == 0 and not records:
        raise SetupError(
            f"{' '.join(program)} ended without a training that {name} could record. The end of its output:\n{tail}",
            hint="It must call train() of a transformers Trainer, after enable_multi_gpu() if it has that call.",
        )
    return 128 - code if code < 0 else code, records, tail


def check_is_no_rank(name: str) -> None:
    """Raises SetupError in a rank, because the command starts ranks itself."""
    if read_identity(os.environ) is not None:
        raise SetupError(f"{name} starts its ranks itself, but is a rank here.", hint="Run it without a launcher.")


def device_variables(device: str, num_gpus: int) -> dict[str, str]:
    """Returns variables that hide all devices, or all but one from a single process, which would use DataParallel."""
    from unsloth_multigpu.start import visible_accelerators

    if device == "cpu":
        # Set for the whole process: a library may count the GPUs before the script selects the CPU.
        return {**HIDDEN, "ACCELERATE_USE_CPU": "true"}
    kind, num_devices = visible_accelerators()
    if num_gpus > 1 or num_devices < 2:
        return {}
    return variables_for(kind, [0], os.environ)


def thread_variables(device: str, num_ranks: int) -> dict[str, str]:
    """Returns the variable that gives one CPU process as many threads as a rank, unless the user has set it."""
    from unsloth_multigpu.start import visible_accelerators

    if device != "cpu" and visible_accelerators()[1] > 0:
        return {}
    return {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS") or str(threads_of_each(num_ranks))}


def parse_numbers(name: str, text: str) -> list[int]:
    """Parses numbers of GPUs such as "1,2,8", or raises ConfigError. Returns them in ascending order."""
    if not re.fullmatch(r"[1-9]\d{0,4}(,[1-9]\d{0,4})*", text):
        raise ConfigError(
            f"{name}={text!r}; expected numbers of GPUs such as 1,2,4,8.", hint="Put commas between them."
        )
    return sorted({int(number) for number in text.split(",")})


class FirstSteps(Part, Tool):
    """Base of the tools that record the first steps of a run: nothing is saved, and the last of them ends the run.

    `name` is that of the command.

    Args:
        folder: Folder for `rank_N.json` of every rank.
        num_steps: Optimizer steps after which the run ends.
        num_gpus: Ranks of this run; overrides the script's own number.
        dropout: False = dropout is switched off.
    """

    is_comparison = True
    place = "recorder"
    keeps = (*(f"args.{name}" for name in _SETTINGS), "callback_handler.callbacks")
    name: str
    _new_folders: tuple[Path, ...] = ()

    def __init__(self, folder: str, num_steps: int, num_gpus: int, dropout: bool = True) -> None:
        self._folder, self._num_steps = folder, num_steps
        self._num_gpus, self._dropout = num_gpus, dropout

    def part(self, trainer: TrainerLike, session: Any, steps: Any) -> Part:
        self._trainer, self._steps = trainer, steps
        self._rank, self._config = session.identity.rank, session.config
        self._first_step = 0
        return self

    def end_training(self) -> None:
        """Ends the process before the script's next line, which may overwrite the user's model."""
        self.write()
        for path in self._new_folders:
            with suppress(OSError):  # Another rank may have removed it.
                path.rmdir()
        leave_process()

    def alone(self, config: MultiGPUConfig, **changes: Any) -> MultiGPUConfig:
        """Returns the options of a run on this machine without restarts and resume, and with the changes of the tool.

        Raises SetupError if the script uses the legacy path or generators.
        """
        if not config.enable_ddp:
            raise SetupError(
                f"{self.name} compares one process with several ranks, but enable_ddp=False runs in one process.",
                hint="Leave enable_ddp out for this comparison.",
            )
        if config.generators:
            raise SetupError(
                f"{self.name} needs the same samples on one process and on several ranks, but generators="
                f"{config.generators} generates others each time.",
                hint=f"Leave generators out for {self.name}.",
            )
        given: dict[str, Any] = {"max_restarts": 0, "nnodes": 1, "resume": "off", "num_gpus": self._num_gpus}
        given |= dict.fromkeys(("rdzv_endpoint", "rdzv_id", "node_rank"))
        return dataclasses.replace(config, **given, **changes)

    def adjust_arguments(self, args: ArgumentsLike) -> None:
        args.push_to_hub = False  # The Trainer makes the repository before train().
        folder = Path(args.output_dir or DEFAULT_OUTPUT).absolute()
        self._new_folders += tuple(path for path in (folder, *folder.parents) if not path.exists())

    @contextmanager
    def around(self) -> Iterator[None]:
        """Turns off saving, uploads and trackers."""
        trainer, handler = self._trainer, self._trainer.callback_handler
        for name, value in _SETTINGS.items():
            setattr(trainer.args, name, value)
        handler.callbacks = [c for c in handler.callbacks if not _is_tracker(c)]
        with ExitStack() as stack:
            for owner in (trainer, trainer.model):
                for name in (n for n in _SAVERS if hasattr(owner, n)):
                    stack.enter_context(instance_attribute(owner, name, lambda *_, **__: None))
            yield

    def record(self) -> dict[str, Any]:
        """Returns the record as JSON values."""
        raise NotImplementedError

    def write(self) -> None:
        """Writes the record to its folder."""
        file = Path(self._folder, f"rank_{self._rank}.json")
        file.write_text(json.dumps(self.record()), encoding="utf-8")

    def _step(self) -> int:
        """Returns the optimizer steps since the training began or resumed."""
        return int(self._trainer.state.global_step) - self._first_step

    def on_train_begin(self, args: ArgumentsLike, state: StateLike, control: ControlLike, **kwargs: Any) -> None:
        self._first_step = int(state.global_step)
        # Set after a resume: the Trainer would load that checkpoint at the end.
        state.best_model_checkpoint = None

    def on_step_end(self, args: ArgumentsLike, state: StateLike, control: ControlLike, **kwargs: Any) -> None:
        self._steer(control)

    on_epoch_end = on_step_end

    def _steer(self, control: ControlLike) -> None:
        """Prevents saving and evaluation, and ends the training after the last step."""
        control.should_save = control.should_evaluate = False
        if self._step() >= self._num_steps:
            control.should_training_stop = True


def _is_tracker(callback: Any) -> bool:
    return any(cls.__module__.startswith(_TRACKERS) for cls in type(callback).__mro__)
