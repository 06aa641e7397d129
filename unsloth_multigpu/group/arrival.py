"""Which rank has not come yet? Asked before a process group is opened, where torch would name a key of its store."""

from __future__ import annotations

import time

from torch.distributed import Store

from unsloth_multigpu.errors import RankTimeoutError
from unsloth_multigpu.wire.wait import wait_until


def meet(store: Store, rank: int, world_size: int, *, timeout_s: float, hint: str) -> None:
    """Waits for the other ranks, in Python, where signals and other threads reach it.

    Args:
        store: Shared by the ranks. Each may meet them once in it, or again without waiting.
        rank: This rank.
        world_size: Number of ranks.
        timeout_s: The limit.
        hint: What a user does about a rank that does not come.

    Raises:
        RankTimeoutError: It names the ranks that have not come. `launch.cause` takes the blame from that text.
    """
    keys = [f"here/{other}" for other in range(world_size)]
    store.set(keys[rank], "1")
    if wait_until(lambda: store.check(keys), time.monotonic() + timeout_s):
        return
    missing = [str(other) for other, key in enumerate(keys) if not store.check([key])]
    if missing:  # Else the last one came at the last moment.
        who = f"rank{'s' * (len(missing) > 1)} {', '.join(missing)}"
        raise RankTimeoutError(f"{who} did not come to open the process group within {timeout_s:g} seconds.", hint=hint)
