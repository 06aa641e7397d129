"""Plans that let one rank compute what several would: micro-batches of the sizes that the forecast is about."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from unsloth_multigpu.step.balance import Balancer
from unsloth_multigpu.step.deal import Balance, Piece, balance_step, deal_step
from unsloth_multigpu.step.step import Plan

# Steps that are not timed: libraries compile, caches fill.
WARM_UP_STEPS = 2
# Numbers of ranks whose shares are computed, in turn. More of them would only make the last ones smaller.
_TRIED = (1, 2, 4, 8, 16)


@dataclass
class Sweep:
    """Plans each step as some number of ranks would share it, and puts all their micro-batches on one.

    Args:
        balancer: Knows lengths and costs; where it plans nothing, steps are dealt in order.
        regroup: See `deal_step`, for steps in order.
        whole: Micro-batches are not cut.

    Attributes:
        steps: Tokens of each sample of a step, by the number of the step.
        sizes: Rows of each micro-batch of that step in one process.
    """

    balancer: Balancer
    regroup: bool
    whole: bool
    steps: dict[int, tuple[int, ...]] = field(default_factory=dict)
    sizes: dict[int, tuple[int, ...]] = field(default_factory=dict)

    @property
    def num_steps(self) -> int:
        """How many steps were computed so far."""
        return self.balancer.num_steps

    def plan(self, samples: Sequence[int], sizes: Sequence[int], step_index: int) -> Callable[[], Plan]:
        """What makes the plan of step `step_index`."""
        balance, known = self.balancer.balance, self.balancer.lengths
        lengths = tuple(known[i] for i in samples) if known else ()
        self.steps[step_index], self.sizes[step_index] = lengths, tuple(sizes)
        tried = [n for n in _TRIED if n <= len(samples)]
        num_ranks = 1 if step_index <= WARM_UP_STEPS else tried[step_index % len(tried)]
        regroup = self.balancer.may_regroup if balance is not None else self.regroup
        # Looked up now: what is returned reads nothing that changes.
        return lambda: [_shared(lengths, sizes, num_ranks, balance, regroup=regroup, whole=self.whole)]


def _shared(
    lengths: Sequence[int],
    sizes: Sequence[int],
    num_ranks: int,
    balance: Balance | None,
    *,
    regroup: bool,
    whole: bool,
) -> list[Piece]:
    """The pieces of all ranks. One rank has the script's own micro-batches."""
    if balance is None or num_ranks == 1:
        whole = whole and (len(sizes) >= num_ranks or sizes[0] == 1)
        plan = deal_step(sizes, num_ranks, regroup=regroup and num_ranks > 1, whole=whole)
    else:
        plan = balance_step(lengths, sizes, replace(balance, speeds=(1.0,) * num_ranks), regroup=regroup)
    return [piece for share in plan for piece in share if not piece.is_filler]
