"""Deals the samples of one optimizer step to the ranks. Pure: positions in, positions out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from unsloth_multigpu.errors import ConfigError


@dataclass(frozen=True)
class Piece:
    """One micro-batch of one rank.

    Args:
        positions: Places of its samples in the step, in the order of the one-process run.
        share: What its mean loss counts in the step's loss: 1 for a whole micro-batch of the one-process run,
            the part of the rows for a part of one, 0 for a filler. Only losses that average over rows need it.
        reference: Which micro-batch of the one-process run it is a part of, where `deal_step` keeps them apart.
        is_filler: True where a rank has no sample of its own and computes one without effect, so that it still
            takes part in the gradient exchange.
    """

    positions: tuple[int, ...]
    share: float = 1.0
    reference: int = 0
    is_filler: bool = False


_FILLER = Piece(positions=(0,), share=0.0, is_filler=True)


def deal_step(sizes: Sequence[int], world_size: int, *, regroup: bool) -> list[list[Piece]]:
    """Splits one optimizer step into contiguous shares, as even as whole samples allow.

    Args:
        sizes: Rows of each micro-batch that the one-process run would do in this step.
        world_size: Number of ranks.
        regroup: True where the loss is a sum divided by the step's token count: then rows may be grouped anew, up to
            the largest of `sizes` together. False where each micro-batch is averaged by itself: then no piece mixes
            rows of two of them, and they stay whole if their number divides evenly.

    Returns:
        `plan[rank]` = its micro-batches, at least one. Every position of the step occurs once outside of fillers.
    """
    num_rows = sum(sizes)
    if not regroup and len(sizes) % world_size == 0:
        per_rank = len(sizes) // world_size
        cuts = [sum(sizes[: r * per_rank]) for r in range(world_size + 1)]
    else:
        cuts = [r * num_rows // world_size for r in range(world_size + 1)]
    shares = [range(cuts[r], cuts[r + 1]) for r in range(world_size)]
    if regroup:
        plan = [_even_pieces(share, max(sizes, default=1)) for share in shares]
    else:
        plan = [_pieces_within(share, sizes) for share in shares]
    return [pieces or [_FILLER] for pieces in plan]


def check_divisible(num_samples: int, world_size: int) -> None:
    """Raises where a full step has fewer samples than there are ranks.

    Raises:
        ConfigError: `num_samples < world_size`.
    """
    if num_samples < world_size:
        raise ConfigError(
            f"An optimizer step of {num_samples} sample(s) cannot be shared by {world_size} ranks.",
            hint=f"Raise per_device_train_batch_size or gradient_accumulation_steps to {world_size} samples or more, "
            'or use global_batch="scale", or fewer GPUs.',
        )


def equation(sizes: Sequence[int], world_size: int, *, regroup: bool) -> str:
    """The step in words: "16 = 2 ranks x 4 samples x 2 accumulation", or "10 = 3 + 3 + 4 samples on 3 ranks"."""
    plan = deal_step(sizes, world_size, regroup=regroup)
    pieces = [0 if p.is_filler else len(p.positions) for share in plan for p in share]
    if len(set(pieces)) == 1 and len({len(share) for share in plan}) == 1:
        return f"{sum(sizes)} = {world_size} ranks x {pieces[0]} samples x {len(plan[0])} accumulation"
    rows = " + ".join(str(sum(len(p.positions) for p in share if not p.is_filler)) for share in plan)
    return f"{sum(sizes)} = {rows} samples on {world_size} ranks"


def _even_pieces(share: range, max_rows: int) -> list[Piece]:
    num_pieces = -(-len(share) // max_rows)
    cuts = [share.start + i * len(share) // num_pieces for i in range(num_pieces + 1)] if num_pieces else []
    return [Piece(tuple(range(a, b))) for a, b in pairwise(cuts)]


def _pieces_within(share: range, sizes: Sequence[int]) -> list[Piece]:
    pieces = []
    ends = list(accumulate(sizes))
    for reference, (size, end) in enumerate(zip(sizes, ends, strict=True)):
        rows = range(max(share.start, end - size), min(share.stop, end))
        if rows:
            pieces.append(Piece(tuple(rows), len(rows) / size, reference))
    return pieces
