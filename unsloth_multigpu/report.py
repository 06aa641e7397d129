"""What a training did, as plain data: the figures of each rank."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class RankReport:
    """One rank's share of a training.

    Args:
        rank: Which rank.
        num_steps: Optimizer steps.
        num_samples: Samples whose gradient counted, over all steps.
        num_micro_batches: Forward-backward passes.
        train_s: Seconds inside `Trainer.train`.
        sent_bytes: What gradients or weights were sent, without headers, in the algorithms that are usual; None where
            it is not known.
    """

    rank: int
    num_steps: int
    num_samples: int
    num_micro_batches: int
    train_s: float
    sent_bytes: int | None = None


@dataclass(frozen=True)
class RunReport:
    """All ranks' shares of a training, in the order of ranks.

    Args:
        planner: What the planner had measured at the end, as JSON values; empty where samples were dealt in order.
    """

    ranks: tuple[RankReport, ...]
    planner: Mapping[str, Any] = field(default_factory=dict)

    @property
    def num_samples(self) -> int:
        """Samples of all ranks together."""
        return sum(r.num_samples for r in self.ranks)

    def summary(self, traffic: str = "sent={:.1f} MB per rank") -> str:
        """One line of facts.

        Args:
            traffic: What it says of the `sent_bytes` of the rank that sent most, in MB.
        """
        slowest_s = max(r.train_s for r in self.ranks)
        shares = "+".join(str(r.num_samples) for r in self.ranks)
        line = f"trained steps={self.ranks[0].num_steps} samples={self.num_samples} ({shares}) seconds={slowest_s:.1f}"
        sent = [r.sent_bytes for r in self.ranks if r.sent_bytes is not None]
        return f"{line} {traffic.format(max(sent) / 1e6)}" if sent else line
