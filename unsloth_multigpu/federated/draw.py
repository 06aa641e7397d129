"""The draw of a round's clients: seeded, and not without an end."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast

from flwr.serverapp import Grid

from unsloth_multigpu.errors import FederatedError
from unsloth_multigpu.logs import get_logger

_log = get_logger(__name__)
_FIRST_LINE_S = 5.0
_NEXT_LINE_S = 60.0


@contextmanager
def drawing(grid: Grid, seed: str, what: str, timeout_s: float) -> Iterator[Grid]:
    """Seeds what strategies draw clients with, and puts it back. Yields the grid to draw from.

    Flower's strategies wait for nodes for ever, and say so in a log that is off here; on the grid that is yielded they
    wait no longer than `timeout_s`.

    Args:
        seed: Any text.
        what: Who waits, as in "round 2: FedAvg.configure_train".

    Raises:
        FederatedError: There were too few nodes for `timeout_s` seconds.
    """
    import numpy as np

    before, numpy_before = random.getstate(), np.random.get_state()
    drawn = random.Random(seed).getrandbits(32)
    random.seed(drawn)
    np.random.seed(drawn)
    limited = _LimitedGrid(grid, what, timeout_s)
    try:
        yield cast(Grid, limited)
    finally:
        limited.timeout_s = float("inf")  # A strategy may keep the grid.
        random.setstate(before)
        np.random.set_state(numpy_before)


class _LimitedGrid:
    """A grid that counts its nodes for a limited time. No subclass: it also has what a grid has beyond Flower's."""

    def __init__(self, grid: Grid, what: str, timeout_s: float) -> None:
        self._grid = grid
        self._what = what
        self.timeout_s = timeout_s
        self._begin_s = time.monotonic()
        self._next_line_s = _FIRST_LINE_S

    def __getattr__(self, name: str) -> Any:
        return getattr(self._grid, name)

    def get_node_ids(self) -> list[int]:
        node_ids, waited_s = list(self._grid.get_node_ids()), time.monotonic() - self._begin_s
        if waited_s > self.timeout_s:
            raise FederatedError(
                f"{self._what} still waits for nodes after {self.timeout_s:g} s; {len(node_ids)} are connected.",
                hint="Start more SuperNodes, or lower the strategy's min_train_nodes, min_evaluate_nodes and "
                "min_available_nodes.",
            )
        if waited_s > self._next_line_s:
            _log.info("%s waits for nodes: connected=%d", self._what, len(node_ids))
            self._next_line_s = waited_s + _NEXT_LINE_S
        return node_ids
