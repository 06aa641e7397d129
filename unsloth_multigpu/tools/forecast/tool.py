"""How `unsloth-multigpu forecast` takes part in a run: what it asks, and what it changes for the measurement."""

from __future__ import annotations

import dataclasses
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from unsloth_multigpu.errors import SetupError
from unsloth_multigpu.options import MultiGPUConfig
from unsloth_multigpu.part import Part
from unsloth_multigpu.strategy import DDP
from unsloth_multigpu.tool import Tool
from unsloth_multigpu.trainer_protocol import ArgumentsLike, TrainerLike
from unsloth_multigpu.wire.context import ToolRequest

if TYPE_CHECKING:
    from unsloth_multigpu.tools.forecast.recorder import Recorder


@dataclass(frozen=True)
class MeasureRequest:
    """What `forecast` asks of a run.

    Args:
        folder: Where every rank leaves `rank_N.json`.
        num_steps: Optimizer steps after which the run ends.
        num_gpus: Ranks of this run; wins over the script's own number.
        clock: "wall", or "cpu" = seconds that the main thread has computed: those of single-threaded CPU ranks do not
            depend on what else the machine does.
    """

    folder: str
    num_steps: int
    num_gpus: int
    clock: str

    def variables(self) -> dict[str, str]:
        """The environment that carries this request."""
        return ToolRequest("unsloth_multigpu.tools.forecast.tool:Measure", asdict(self)).variables()


class Measure(Tool):
    """Times the first steps of a run and ends its ranks; see `MeasureRequest`."""

    is_comparison = plans_one_process = True

    def __init__(self, **values: Any) -> None:
        self.request = MeasureRequest(**values)
        self._asked: MultiGPUConfig | None = None
        self._recorder: Recorder | None = None

    def adjusted(self, config: MultiGPUConfig) -> MultiGPUConfig:
        if not config.enable_ddp:
            raise SetupError(
                "forecast is for several ranks; enable_ddp=False, the legacy path, is one process.",
                hint="Leave enable_ddp out.",
            )
        self._asked = config
        given: dict[str, Any] = {"max_restarts": 0, "nnodes": "1", "resume": "off"}
        given |= dict.fromkeys(("rdzv_endpoint", "rdzv_id", "node_rank"))
        if self.request.num_gpus == 1:
            # One process meets nobody; what the script asks for is counted in the forecast.
            given |= {"sync": DDP(), "shard": "off", "grad_compression": None, "rank_speeds": None}
        return dataclasses.replace(config, num_gpus=self.request.num_gpus, **given)

    def check_variables(self, others: list[str]) -> None:
        if others:
            raise SetupError(
                f"forecast knows ranks that have all weights, or shards of them; {others[0]} is set.",
                hint="Unset it for the forecast.",
            )

    def adjust_arguments(self, args: ArgumentsLike) -> None:
        args.push_to_hub = False  # The Trainer makes the repository before train().

    def part(self, trainer: TrainerLike, session: Any, steps: Any) -> Part:
        from unsloth_multigpu.tools.forecast.recorder import Recorder

        assert self._asked is not None
        self._recorder = Recorder(trainer, self.request, session.identity.rank, self._asked, steps)
        return self._recorder

    def end_training(self) -> None:
        from unsloth_multigpu.tools.verify.recorder import leave_process

        assert self._recorder is not None
        self._recorder.write()
        leave_process()
