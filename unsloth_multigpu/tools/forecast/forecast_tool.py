"""How `unsloth-multigpu forecast` takes part in a run: what it asks, and what it changes for the measurement."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from unsloth_multigpu.errors import SetupError
from unsloth_multigpu.options import MultiGPUConfig
from unsloth_multigpu.part import Part
from unsloth_multigpu.strategy import DDP
from unsloth_multigpu.tools.first_steps import FirstStepsTool
from unsloth_multigpu.trainer_protocol import TrainerLike
from unsloth_multigpu.wire.context import ToolRequest

if TYPE_CHECKING:
    from unsloth_multigpu.tools.forecast.forecast_recorder import Recorder


@dataclass(frozen=True)
class MeasureRequest:
    """What `forecast` asks of a run.

    Args:
        folder: Where every rank leaves `rank_N.json`.
        num_steps: Optimizer steps after which the run ends.
        num_gpus: Ranks of this run; wins over the script's own number.
    """

    folder: str
    num_steps: int
    num_gpus: int

    def variables(self) -> dict[str, str]:
        """The environment that carries this request."""
        return ToolRequest("unsloth_multigpu.tools.forecast.forecast_tool:Measure", asdict(self)).variables()


class Measure(FirstStepsTool):
    """Times the first steps of a run and ends its ranks; see `MeasureRequest`."""

    name = "forecast"
    plans_one_process = True

    def __init__(self, **values: Any) -> None:
        self.request = MeasureRequest(**values)
        self._recorder: Recorder | None = None

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
        return self.alone(config, self.request.num_gpus)

    def part(self, trainer: TrainerLike, session: Any, steps: Any) -> Part:
        from unsloth_multigpu.tools.forecast.forecast_recorder import Recorder

        self._recorder = Recorder(trainer, self.request, session.identity.rank, steps)
        return self._recorder

    def end_training(self) -> None:
        assert self._recorder is not None
        self._recorder.write()
        self.leave_process()
