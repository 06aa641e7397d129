"""How `unsloth-multigpu verify` takes part in a run: what it asks, and what it changes for the comparison."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from unsloth_multigpu.options import MultiGPUConfig
from unsloth_multigpu.part import Part
from unsloth_multigpu.tools.first_steps import FirstStepsTool
from unsloth_multigpu.trainer_protocol import TrainerLike
from unsloth_multigpu.wire.context import ToolRequest

if TYPE_CHECKING:
    from unsloth_multigpu.tools.verify.verify_recorder import Recorder


@dataclass(frozen=True)
class ReceiptRequest:
    """What `verify` asks of a run.

    Args:
        folder: Where every rank leaves `rank_N.json`.
        num_steps: Optimizer steps after which the run ends.
        num_gpus: Ranks of this run; wins over the script's own number.
        dropout: False = it is switched off.
    """

    folder: str
    num_steps: int
    num_gpus: int
    dropout: bool

    def variables(self) -> dict[str, str]:
        """The environment that carries this request."""
        return ToolRequest("unsloth_multigpu.tools.verify.verify_tool:Verify", asdict(self)).variables()


class Verify(FirstStepsTool):
    """Records the first steps of a run and ends its ranks; see `ReceiptRequest`."""

    name = "verify"
    draws_alike = True

    def __init__(self, **values: Any) -> None:
        self.request = ReceiptRequest(**values)
        self._recorder: Recorder | None = None

    def adjusted(self, config: MultiGPUConfig) -> MultiGPUConfig:
        # Both runs train as without the tool. The ranks compute each step as one process as well, and compare.
        compared = {"check_first_step": "every"} if self.request.num_gpus > 1 else {}
        return self.alone(config, self.request.num_gpus, verify_every=1, **compared)

    def part(self, trainer: TrainerLike, session: Any, steps: Any) -> Part:
        from unsloth_multigpu.tools.verify.verify_recorder import Recorder

        self._recorder = Recorder(trainer, self.request, session.identity.rank, session.config, steps)
        return self._recorder

    def end_training(self) -> None:
        assert self._recorder is not None
        self._recorder.write()
        self.leave_process()
