"""The interface of a tool: what a command such as `verify` does in each rank of a run that it has started."""

from __future__ import annotations

from typing import Any

from unsloth_multigpu.part import ArgumentsLike, Part, TrainerLike

# The default output_dir of TrainingArguments.
DEFAULT_OUTPUT = "trainer_output"


class Tool:
    """Takes part in every process of a run. The base class does nothing.

    The run's context names it (`RunContext.tool`); `plugin.tool_of` creates it.

    Attributes:
        is_comparison: The run is compared with one process. Ranks end after their first training and save nothing,
            not even after a signal. They resume only if the script asks for it. A single process is not steered.
        draws_alike: Random numbers that the script draws without a seed are equal in all runs with the tool.
        plans_one_process: A single process is steered as ranks are, and its steps are planned.
    """

    is_comparison = draws_alike = plans_one_process = False

    def adjusted(self, config: Any) -> Any:
        """Returns the options of the run, given those of the script. Called in ranks and in the supervisor.

        Raises:
            SetupError: The tool does not work with these options.
        """
        return config

    def adjust_arguments(self, args: ArgumentsLike) -> None:
        """Called with `TrainingArguments` before their `__post_init__`."""

    def part(self, trainer: TrainerLike, session: Any, steps: Any) -> Part | None:
        """Returns the part that the tool adds to a training, or None.

        `session` is that of this process; `steps` the `StepFeed`, None if the training is not steered.
        """
        return None

    def end_training(self) -> None:
        """Called after a successful training, before the script continues."""
