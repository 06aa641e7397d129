"""What the comparison of a step with that of one process has found, and how it is said. Needs no torch."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

# How much more the gradient of a single parameter may differ by rounding than that of all together.
_OF_ONE = 20.0


@dataclass(frozen=True)
class Difference:
    """How far a gradient is from another one.

    Args:
        norm: Of the first.
        other_norm: Of the second.
        off: Norm of their difference by `norm`; inf where one of them alone is not finite, nan where both are not.
        worst: The parameter whose own gradient differs most, relative to its norm.
        worst_off: By how much.
    """

    norm: float
    other_norm: float
    off: float
    worst: str = ""
    worst_off: float = 0.0

    def is_within(self, bound: float) -> bool:
        """True where gradients are equal but for rounding; those that are not finite are not told apart."""
        return math.isnan(self.off) or (self.off <= bound and not self.worst_off > _OF_ONE * bound)


def times_in_words(one_s: float, dealt_s: float, num_ranks: int) -> str:
    """What a step takes: "2.41 s as one process, 1.27 s on 2 ranks (1.90 times as fast)".

    Where the ranks take longer, it ends with "(1.90 times slower)".

    Args:
        one_s: Seconds as one process.
        dealt_s: Seconds as the ranks share it, above 0.
        num_ranks: That share it; 1 = a planner deals it.
    """
    ranks = f"{num_ranks} ranks" if num_ranks > 1 else "one rank, as planned"
    times = f"{one_s / dealt_s:.2f} times as fast" if dealt_s <= one_s else f"{dealt_s / one_s:.2f} times slower"
    return f"{one_s:.3g} s as one process, {dealt_s:.3g} s on {ranks} ({times})"


@dataclass(frozen=True)
class Comparison:
    """One step, as one process computes it and as the ranks share it.

    Args:
        step: Its number, from 1 on.
        num_ranks: That share it.
        num_compared: Micro-batches of one process that were compared.
        num_references: Those of the step.
        difference: Of the gradients; None where they were not compared.
        bound: Largest relative difference that rounding makes in this precision.
        one_s: Seconds of these micro-batches as one process; nan = not measured.
        dealt_s: Seconds as the ranks share them.
        unproven: Why they were not compared, in words; "" = they were.
        draws: What draws random numbers in the training, of which ranks have others than one process; it is compared
            without.
        counts: What the script counts on each rank by itself, and otherwise than in one process: it may change a later
            step.
    """

    step: int
    num_ranks: int
    num_compared: int
    num_references: int
    difference: Difference | None = None
    bound: float = math.nan
    one_s: float = math.nan
    dealt_s: float = math.nan
    unproven: str = ""
    draws: tuple[str, ...] = ()
    counts: tuple[str, ...] = ()

    @property
    def is_exact(self) -> bool:
        """The gradients are equal but for rounding."""
        return self.difference is not None and not self.unproven and self.difference.is_within(self.bound)

    @property
    def _what(self) -> str:
        return "first step" if self.step == 1 else f"step {self.step}"

    @property
    def _is_timed(self) -> bool:
        return math.isfinite(self.one_s) and self.dealt_s > 0

    def in_short(self) -> str:
        """For a table: "first step: equal, 1.90 times as fast", "first step: differs by 3.1e-02"."""
        if self.unproven or self.difference is None:
            return f"{self._what}: not compared"
        times = f", {self.one_s / self.dealt_s:.2f} times as fast" if self._is_timed else ""
        return f"{self._what}: {'equal' if self.is_exact else f'differs by {self.difference.off:.1e}'}{times}"

    def __str__(self) -> str:
        what = self._what
        if self.num_compared < self.num_references:
            what += f", {self.num_compared} of {self.num_references} micro-batches"
        if self.unproven or self.difference is None:
            return f"{what}: not compared with one process: {self.unproven}"
        seconds = f"{times_in_words(self.one_s, self.dealt_s, self.num_ranks)}, " if self._is_timed else ""
        size = "equal gradient, differs by" if self.is_exact else "the gradient differs by"
        draws = f"; drawn anew on each rank: {', '.join(self.draws)}" if self.draws and self.num_ranks > 1 else ""
        is_counted = self.counts and self.is_exact  # Else a warning says what may be done.
        counts = f"; counted by each rank for itself: {', '.join(self.counts)}" if is_counted else ""
        return f"{what}: {seconds}{size} {self.difference.off:.1e}{draws}{counts}"

    def values(self) -> dict[str, Any]:
        """As JSON values, for files and reports; None for what is no number."""
        found = self.difference
        numbers = {
            "difference": math.nan if found is None else found.off,
            "gradient_norm": math.nan if found is None else found.norm,
            "one_process_s": self.one_s,
            "dealt_s": self.dealt_s,
            "bound": self.bound,
        }
        return {
            "step": self.step,
            "ranks": self.num_ranks,
            "micro_batches": [self.num_compared, self.num_references],
            **{name: value if math.isfinite(value) else None for name, value in numbers.items()},
            "is_exact": self.is_exact,
            "not_compared": self.unproven,
            "draws": list(self.draws),
            "counts": list(self.counts),
        }
