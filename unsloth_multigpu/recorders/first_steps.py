"""Follows the first steps of the user's script in each rank, and records them. The process ends after `train()`."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

from unsloth_multigpu.errors import SetupError
from unsloth_multigpu.options import MultiGPUConfig
from unsloth_multigpu.part import ArgumentsLike, ControlLike, Part, StateLike, TrainerLike
from unsloth_multigpu.seam import instance_attribute
from unsloth_multigpu.shard.script_probe import leave_process
from unsloth_multigpu.tool import DEFAULT_OUTPUT, Tool

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


class FirstSteps(Part, Tool):
    """Base of the tools that record the first steps of a run: nothing is saved, and the run ends after them.

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
        args.push_to_hub = False  # The Trainer creates the repository before train().
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
