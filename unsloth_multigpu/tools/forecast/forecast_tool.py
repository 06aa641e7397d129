"""How `unsloth-multigpu forecast` takes part in a run: what it refuses."""

from __future__ import annotations

from typing import Any

from unsloth_multigpu.errors import SetupError
from unsloth_multigpu.options import MultiGPUConfig
from unsloth_multigpu.strategy import DDP
from unsloth_multigpu.tools.first_steps import FirstSteps, FirstStepsTool
from unsloth_multigpu.trainer_protocol import TrainerLike


class Measure(FirstStepsTool):
    """Times the first steps of a run on one rank, and ends it."""

    name = "forecast"
    plans_one_process = True

    def adjusted(self, config: MultiGPUConfig) -> MultiGPUConfig:
        others = {
            f"strategy={config.strategy}": not isinstance(config.strategy, DDP),
            f"shard={config.shard!r}": config.shard != "off",
            "global_batch='scale'": not config.keeps_global_batch,
        }
        if asked := [name for name, is_asked in others.items() if is_asked]:
            raise SetupError(
                f"forecast counts DDP with the global batch of one process; the script asks for {asked[0]}.",
                hint="Leave it out for the forecast.",
            )
        return self.alone(config)

    def recorder(self, trainer: TrainerLike, session: Any, steps: Any) -> FirstSteps:
        from unsloth_multigpu.tools.forecast.forecast_recorder import Recorder

        return Recorder(trainer, self.request, session.identity.rank, steps)
