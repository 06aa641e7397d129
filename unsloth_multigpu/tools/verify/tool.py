"""How `unsloth-multigpu verify` takes part in a run: what it asks, and what it changes for the comparison."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from unsloth_multigpu.options import MultiGPUConfig
from unsloth_multigpu.part import Part
from unsloth_multigpu.tools.first_steps import FirstStepsTool
from unsloth_multigpu.trainer_protocol import TrainerLike
from unsloth_multigpu.wire.context import ToolRequest

if TYPE_CHECKING:
    from unsloth_multigpu.tools.verify.recorder import Recorder

_STEPS_FILE = "steps_done"


@dataclass(frozen=True)
class ReceiptRequest:
    """What `verify` asks of a run.

    Args:
        folder: Where every rank leaves `rank_N.json`, and rank 0 its updates.
        num_steps: Optimizer steps after which the run ends.
        num_gpus: Ranks of this run; wins over the script's own number.
        dropout: False = every dropout probability is set to 0.
    """

    folder: str
    num_steps: int
    num_gpus: int
    dropout: bool

    def variables(self) -> dict[str, str]:
        """The environment that carries this request."""
        return ToolRequest("unsloth_multigpu.tools.verify.tool:Verify", asdict(self)).variables()


def write_steps_done(folder: str, num_steps: int) -> None:
    """Tells the command how many steps are done. By renaming, since it may look at any time."""
    file = Path(folder, _STEPS_FILE)
    partial = file.with_suffix(".part")
    partial.write_text(str(num_steps), encoding="ascii")
    partial.replace(file)


def steps_done(folder: Path) -> int:
    """How many steps a run has done so far."""
    try:
        return int((folder / _STEPS_FILE).read_text(encoding="ascii"))
    except FileNotFoundError:
        return 0


class Verify(FirstStepsTool):
    """Records the first steps of a run and ends its ranks; see `ReceiptRequest`."""

    name = "verify"
    draws_alike = True

    def __init__(self, **values: Any) -> None:
        self.request = ReceiptRequest(**values)
        self._recorder: Recorder | None = None
        self._session: Any = None

    def adjusted(self, config: MultiGPUConfig) -> MultiGPUConfig:
        # Both runs train as without the tool.
        return self.alone(config, self.request.num_gpus, verify_every=1)

    def part(self, trainer: TrainerLike, session: Any, steps: Any) -> Part:
        from unsloth_multigpu.tools.verify.recorder import Recorder

        self._session = session
        self._recorder = Recorder(trainer, self.request, session.identity.rank, session.config, steps)
        return self._recorder

    def end_training(self) -> None:
        assert self._recorder is not None
        self._recorder.write(self._session.report)
        self.leave_process()
