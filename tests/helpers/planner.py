"""A planner of steps that plans none: each is dealt in order."""

from __future__ import annotations

from collections.abc import Sequence


class InOrder:
    """See `unsloth_multigpu.step.step.StepPlanner`."""

    num_steps = 0

    def plan(self, samples: Sequence[int], sizes: Sequence[int], step_index: int) -> None:
        """No plan."""
