"""Keeps rank 0's process alive until all ranks have left the store that it serves.

Torch elastic serves the store from a separate process. Under srun and Ray rank 0 serves it, and a rank that still reads
from it would lose its connection.
"""

from __future__ import annotations

import json
import os
import platform
import time

from unsloth_multigpu.group.board import Board
from unsloth_multigpu.logs import get_logger
from unsloth_multigpu.wire.process import is_alive
from unsloth_multigpu.wire.wait import wait_until

logger = get_logger(__name__)

# Ranks leave a script together, but never in the same instant.
_QUIET_S = 5.0
_LEFT = "left"


class ShutdownBarrier:
    """Says which ranks have left the store, which rank 0's process serves, and lets rank 0 stay for them."""

    def __init__(self, board: Board, world_size: int) -> None:
        self._board = board
        self._others = range(1, world_size)
        board.publish(f"shutdown/{board.rank}", json.dumps([platform.node(), os.getpid()]))

    def leave(self, limit_s: float) -> None:
        """This rank needs the store no more. Rank 0 waits up to `limit_s` until all have left, or are gone."""
        if self._board.rank > 0:
            try:
                self._board.publish(f"shutdown/{self._board.rank}", _LEFT)
            except RuntimeError as gone:
                logger.debug("rank 0 has left before: %s", gone)
            return
        deadline_s = time.monotonic() + limit_s
        if wait_until(lambda: not self._present(), min(deadline_s, time.monotonic() + _QUIET_S)):
            return
        logger.info("rank 0 serves the store of the ranks and stays until all have left, at most %g s", limit_s)
        if not wait_until(lambda: not self._present(), deadline_s):
            present = ", ".join(map(str, self._present()))
            logger.warning(
                "rank 0 leaves, and with it the store of the ranks; rank(s) %s have not left within %g s (timeout_s)",
                present,
                limit_s,
            )

    def _present(self) -> list[int]:
        """Ranks that may need the store still, also those that have not come to it yet."""
        told = {rank: self._board.read(f"shutdown/{rank}") for rank in self._others}
        return [rank for rank, text in told.items() if text is None or (text != _LEFT and _lives(*json.loads(text)))]


def _lives(host: str, pid: int) -> bool:
    """False for a process of this machine that has ended; of another one nothing is known."""
    return host != platform.node() or is_alive(pid)
