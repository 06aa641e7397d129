"""How `unsloth-multigpu verify` takes part in a run: what it changes for the comparison."""

from __future__ import annotations

from typing import Any

from unsloth_multigpu.options import MultiGPUConfig
from unsloth_multigpu.tools.first_steps import FirstSteps, FirstStepsTool
from unsloth_multigpu.trainer_protocol import TrainerLike


class Verify(FirstStepsTool):
    """Records the first steps of a run and ends its ranks."""

    name = "verify"
    draws_alike = True

    def adjusted(self, config: MultiGPUConfig) -> MultiGPUConfig:
        # Both runs train as without the tool. The ranks compute each step as one process as well, and compare.
        compared = {"check_first_step": "every"} if self.request.num_gpus > 1 else {}
        return self.alone(config, verify_every=1, **compared)

    def recorder(self, trainer: TrainerLike, session: Any, steps: Any) -> FirstSteps:
        from unsloth_multigpu.tools.verify.verify_recorder import Recorder

        return Recorder(trainer, self.request, session.identity.rank, session.config, steps)
