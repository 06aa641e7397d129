"""The contract of a gradient exchange in place of DDP, as the rest of a training sees it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from torch import nn

from unsloth_multigpu.part import Part


class GradientExchange(Part):
    """Exchanges gradients or weights between ranks."""

    place = "exchange"

    @property
    def parameters(self) -> Sequence[nn.Parameter]:
        """What it exchanges, once the training has begun."""
        raise NotImplementedError

    @property
    def are_replicas_equal(self) -> bool:
        """False between two meetings, for ranks that step independently."""
        raise NotImplementedError

    @property
    def may_stop(self) -> bool:
        """False where a stop would need an additional meeting, which would change the training."""
        raise NotImplementedError

    @property
    def sent_bytes(self) -> int | None:
        """What this rank has sent; None where it is not known."""
        raise NotImplementedError

    def save_state(self, folder: Path) -> None:
        """Adds its state to a checkpoint."""
        raise NotImplementedError
