"""What steps are made from, and measured by, where a test hands it out itself."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class FakeLap:
    """A measured micro-batch."""

    time_s: float

    def seconds(self) -> float:
        return self.time_s


class Reference(torch.utils.data.DataLoader[Any]):
    """A loader as accelerate prepares it."""

    def set_epoch(self, epoch: int) -> None:
        """Its order does not depend on it."""
