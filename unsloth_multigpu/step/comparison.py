"""The result of comparing a step with one process, and its text. Needs no torch."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

# The gradient of a single parameter may differ by this many times the bound for all parameters together.
_OF_ONE = 20.0
# A larger bound is that of a lower precision than fp32.
_NOT_FINE = 1e-4
# Ranks may differ from one process by this many times what a change of the weights' last bits does.
_OF_LAST_BITS = 4.0


@dataclass(frozen=True)
class Difference:
    """The difference of two gradients.

    Args:
        norm, other_norm: Norms of the two gradients.
        off: Norm of their difference divided by `norm`; inf if only one of them is not finite, nan if both are not.
        worst: The parameter whose gradient has the largest relative difference, `worst_off`.
    """

    norm: float
    other_norm: float
    off: float
    worst: str = ""
    worst_off: float = 0.0

    def is_within(self, bound: float) -> bool:
        """True if the gradients are equal up to rounding, or both are not finite."""
        return math.isnan(self.off) or (self.off <= bound and not self.worst_off > _OF_ONE * bound)


def speed_in_words(one_s: float, dealt_s: float) -> str:
    """Describes a ratio of seconds: "1.90 times as fast" or "1.90 times slower"."""
    return f"{one_s / dealt_s:.2f} times as fast" if dealt_s <= one_s else f"{dealt_s / one_s:.2f} times slower"


def times_in_words(one_s: float, dealt_s: float, num_ranks: int) -> str:
    """Describes the times of a step: "2.41 s as one process, 1.27 s on 2 ranks (1.90 times as fast)"."""
    ranks = f"{num_ranks} ranks" if num_ranks > 1 else "one rank, as planned"
    return f"{one_s:.3g} s as one process, {dealt_s:.3g} s on {ranks} ({speed_in_words(one_s, dealt_s)})"


@dataclass(frozen=True)
class Comparison:
    """The comparison of a step, counted from 1, on the ranks with the same step in one process.

    Args:
        num_compared: Micro-batches of one process that were compared, of `num_references`.
        difference: Difference of the gradients; None if they were not compared.
        bound: Largest relative difference due to rounding in this precision.
        rounding: Relative difference of one process from itself if the last bits of the weights change; nan = not
            measured, since the difference is within the bound, or far above it.
        one_s: Seconds of these micro-batches in one process; nan = not measured.
        dealt_s: Seconds on the ranks.
        unproven: Why the gradients were not compared; "" = they were.
        draws: What draws random numbers in the training, which differ from those of one process. The comparison uses
            equal ones.
        counts: Counters of the script that differ from those of one process, and may change a later step.
    """

    step: int
    num_ranks: int
    num_compared: int
    num_references: int
    difference: Difference | None = None
    bound: float = math.nan
    rounding: float = math.nan
    one_s: float = math.nan
    dealt_s: float = math.nan
    unproven: str = ""
    draws: tuple[str, ...] = ()
    counts: tuple[str, ...] = ()

    @property
    def is_exact(self) -> bool:
        """True if the gradients are equal up to rounding."""
        if self.difference is None or self.unproven:
            return False
        return self.difference.is_within(self.bound) or self.difference.off <= _OF_LAST_BITS * self.rounding

    @property
    def _what(self) -> str:
        return "first step" if self.step == 1 else f"step {self.step}"

    @property
    def _is_timed(self) -> bool:
        return math.isfinite(self.one_s) and self.dealt_s > 0

    def in_short(self) -> str:
        """Returns a short form: "first step: equal, 1.90 times as fast", "first step: differs by 3.1e-02"."""
        if self.unproven or self.difference is None:
            return f"{self._what}: not compared"
        times = f", {speed_in_words(self.one_s, self.dealt_s)}" if self._is_timed else ""
        return f"{self._what}: {'equal' if self.is_exact else f'differs by {self.difference.off:.1e}'}{times}"

    def __str__(self) -> str:
        what = self._what
        if self.num_compared < self.num_references:
            what += f", {self.num_compared} of {self.num_references} micro-batches"
        if self.unproven or self.difference is None:
            return f"{what}: not compared with one process: {self.unproven}"
        seconds = ""
        if self._is_timed:
            seconds = f"forward and backward {times_in_words(self.one_s, self.dealt_s, self.num_ranks)}, "
        size = "equal gradient, differs by" if self.is_exact else "the gradient differs by"
        rounding = "" if math.isnan(self.rounding) else f" (rounding changes it by {self.rounding:.1e})"
        if self.is_exact and self.bound > _NOT_FINE:
            rounding = f" (rounding in this precision: up to {self.bound:.0e})"
        draws = f"; drawn anew on each rank: {', '.join(self.draws)}" if self.draws and self.num_ranks > 1 else ""
        is_counted = self.counts and self.is_exact  # Else a warning says what may be done.
        counts = f"; counted by each rank for itself: {', '.join(self.counts)}" if is_counted else ""
        return f"{what}: {seconds}{size} {self.difference.off:.1e}{rounding}{draws}{counts}"

    def values(self) -> dict[str, Any]:
        """Returns JSON values for files and reports; None for numbers that are not finite."""
        found = self.difference
        numbers = {
            "difference": math.nan if found is None else found.off,
            "gradient_norm": math.nan if found is None else found.norm,
            "one_process_s": self.one_s,
            "dealt_s": self.dealt_s,
            "bound": self.bound,
            "rounding": self.rounding,
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
