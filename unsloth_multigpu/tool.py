"""The contract of a tool: a command of ours that takes part in a run which it starts, as `verify` and `chaos` do."""

from __future__ import annotations

import importlib
from typing import Any

from unsloth_multigpu.part import Part
from unsloth_multigpu.trainer_protocol import ArgumentsLike, TrainerLike
from unsloth_multigpu.wire.context import RunContext


class Tool:
    """Takes part in every process of one run. This class itself does nothing.

    It is named by the run's context, `RunContext.tool`; the package imports none of them.

    Attributes:
        is_comparison: The run is compared with one process, and its ranks end with their first training: nothing is
            saved, a checkpoint is gone on from only where the script says so, and one process is not steered.
        draws_alike: What the script draws without a seed is the same in all runs with the tool.
    """

    is_comparison = draws_alike = False

    def adjusted(self, config: Any) -> Any:
        """The options of the run, given those of the script. Called in the supervisor, too.

        Raises:
            SetupError: They do not allow what the tool is for.
        """
        return config

    def check_variables(self, others: list[str]) -> None:
        """Called in a rank with the variables that ask for another kind of parallelism, as NAME=VALUE.

        Raises:
            SetupError: They do not allow what the tool is for.
        """

    def adjust_arguments(self, args: ArgumentsLike) -> None:
        """Called with `TrainingArguments` before they check themselves."""

    def part(self, trainer: TrainerLike, session: Any, steps: Any) -> Part | None:
        """What it adds to a training; None where it has nothing to do in it.

        Args:
            trainer: A `transformers.Trainer` or subclass.
            session: What the line has opened in this process: options, place, context.
            steps: What deals the samples; None where the training is not steered.
        """
        return None

    def end_training(self) -> None:
        """Called where a training has ended well, before the script goes on."""


def tool_of(context: RunContext) -> Tool:
    """The tool that takes part in the run; one that does nothing where there is none."""
    if context.tool is None:
        return Tool()
    tool: Tool = attached(context.tool.name)(**context.tool.values)
    return tool


def attached(name: str) -> Any:
    """What a folder offers that nothing imports, by its name: "module:attribute"."""
    module, _, attribute = name.partition(":")
    return getattr(importlib.import_module(module), attribute)
