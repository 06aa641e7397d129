"""How ranks get cards: one each, or one that they share. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

# From this version on several ranks may use one card, where NCCL_MULTI_RANK_GPU_ENABLE=1.
SHARING_NCCL = (2, 30)


@dataclass(frozen=True)
class Place:
    """Cards and backend of some ranks.

    Args:
        backend: "nccl"; "gloo" where ranks share a card, and NCCL is too old for that.
        num_cards: So many of the visible cards.
        variables: Of the ranks, beside those that choose the cards.
        note: What a result has to say of it; "" where each rank has a card of its own.
    """

    backend: str
    num_cards: int
    variables: dict[str, str]
    note: str = ""


def place_ranks(num_ranks: int, num_cards: int, nccl: Sequence[int] | None) -> Place:
    """Cards for `num_ranks` ranks.

    Args:
        num_cards: Visible cards, one or more.
        nccl: NCCL's version, like (2, 29, 7); None = this torch has none.
    """
    if num_cards >= num_ranks:
        return Place("nccl", num_ranks, {})
    variables, shared = {"NCCL_MULTI_RANK_GPU_ENABLE": "1"}, f"{num_ranks} ranks shared one card"
    found = "no NCCL" if nccl is None else f"NCCL {'.'.join(map(str, nccl))}"
    if nccl is not None and tuple(nccl[:2]) >= SHARING_NCCL:
        return Place("nccl", 1, variables, f"{shared} over {found}")
    oldest = ".".join(map(str, SHARING_NCCL))
    note = f"{shared} over gloo, because NCCL can share one from {oldest} on, and here is {found}"
    return Place("gloo", 1, variables, note)
