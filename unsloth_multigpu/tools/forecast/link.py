"""How long an all-reduce takes between ranks, by latency and bandwidth. Pure.

A ring of N ranks passes N - 1 parts of a message on, each of 1 / N of it, in one pass. An all-reduce is two passes, so
it takes `2 (N - 1) / N x bytes / bandwidth + 2 (N - 1) x latency` (Patarasuk and Yuan 2009, "Bandwidth optimal
all-reduce algorithms for clusters of workstations").
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from unsloth_multigpu.errors import ConfigError

_GIGA = 1e9
_MICRO = 1e-6


@dataclass(frozen=True)
class Link:
    """The slowest connection of a ring of ranks.

    Args:
        name: As on the command line.
        bytes_per_s: That a rank sends while it receives as many.
        latency_s: Of one message between neighbours.
    """

    name: str
    bytes_per_s: float
    latency_s: float

    def all_reduce_s(self, num_bytes: float, num_ranks: int) -> float:
        """Seconds in which every rank has the sum of all ranks' `num_bytes`."""
        passes = 2 * (num_ranks - 1)
        return passes * num_bytes / num_ranks / self.bytes_per_s + passes * self.latency_s

    def __str__(self) -> str:
        return f"{self.name} ({self.bytes_per_s / _GIGA:.3g} GB/s, {self.latency_s / _MICRO:.2g} us)"


# Bandwidths are those that NCCL itself plans with, in src/graph/topo.h: SM80_NVLINK_BW (20 GB/s a link, 12 links),
# PCI_BW (12 GB/s for generation 3 with 16 lanes, half of generation 4), NET_BW (12 GB/s for 100 Gbit/s). Latencies are
# its hwLat of rings with the Simple protocol, in src/graph/tuning.cc.
NVLINK, PCIE = Link("nvlink", 240 * _GIGA, 3.4 * _MICRO), Link("pcie", 24 * _GIGA, 5.7 * _MICRO)


def parse_link(name: str, text: str) -> Link:
    """A link by the name that a command line gives it.

    Raises:
        ConfigError: There is none of this name.
    """
    for link in (NVLINK, PCIE):
        if text.lower() == link.name:
            return link
    match = re.fullmatch(r"ethernet:(\d+(?:\.\d+)?)", text.lower())
    if match is None or not (gbit := float(match[1])):
        raise ConfigError(
            f"{name}={text!r}; expected nvlink, pcie, or ethernet with its Gbit/s, such as ethernet:25.",
            hint="ethernet:1 is 1 Gbit/s.",
        )
    return Link(f"ethernet:{gbit:g}", gbit * 0.12 * _GIGA, 14.0 * _MICRO)
