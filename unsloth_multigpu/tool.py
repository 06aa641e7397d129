"""The contract of a tool: a command of ours that takes part in a run which it starts, as `verify` and `chaos` do."""

from __future__ import annotations

import importlib
from typing import Any

from unsloth_multigpu.part import Part
from unsloth_multigpu.trainer_protocol import ArgumentsLike, TrainerLike
from unsloth_multigpu.wire.context import RunContext

# Of TrainingArguments, where a script names no output_dir.
DEFAULT_OUTPUT = "trainer_output"


class Tool:
    """What takes part in every process of one run. The base class does nothing.

    The run's context names it (`RunContext.tool`); the package imports no tool.

    Attributes:
        is_comparison: The run is compared with one process, and its ranks end with their first training: nothing is
            saved, also not when a signal stops the run; the training resumes from a checkpoint only where the script
            asks for it, and one process is not steered.
        draws_alike: What the script draws without a seed is the same in all runs with the tool.
        plans_one_process: One process is steered as ranks are, and its steps are planned.
    """

    is_comparison = draws_alike = plans_one_process = False

    def adjusted(self, config: Any) -> Any:
        """The options of the run, given those of the script. Called in the supervisor, too.

        Raises:
            SetupError: The tool cannot do its work with them.
        """
        return config

    def check_variables(self, others: list[str]) -> None:
        """Called in a rank with the variables that ask for another kind of parallelism, as NAME=VALUE.

        Raises:
            SetupError: The tool cannot do its work with them.
        """

    def adjust_arguments(self, args: ArgumentsLike) -> None:
        """Called with `TrainingArguments` before they check themselves."""

    def part(self, trainer: TrainerLike, session: Any, steps: Any) -> Part | None:
        """Returns the part that the tool adds to a training; None where it adds nothing.

        Args:
            trainer: A `transformers.Trainer` or subclass.
            session: The session of this process: options, identity, context.
            steps: The `StepFeed` that deals the samples; None where the training is not steered.
        """
        return None

    def end_training(self) -> None:
        """Called after a training has ended well, before the script continues."""


def tool_of(context: RunContext) -> Tool:
    """Returns the tool of the run, or a `Tool` that does nothing."""
    if context.tool is None:
        return Tool()
    # By its name, "module:attribute": each folder of tools/ can be deleted by itself.
    module, _, attribute = context.tool.name.partition(":")
    tool: Tool = getattr(importlib.import_module(module), attribute)(**context.tool.values)
    return tool
