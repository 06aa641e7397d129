"""How long a message takes between ranks, by latency and bandwidth. Pure.

A ring of N ranks passes N - 1 parts of a message on, each of 1 / N of it, in one pass: a gather or a reduce-scatter. An
all-reduce is two passes, so it takes `2 (N - 1) / N x bytes / bandwidth + 2 (N - 1) x latency` (Patarasuk and Yuan
2009, "Bandwidth optimal all-reduce algorithms for clusters of workstations").
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from unsloth_multigpu.errors import ConfigError

GPUS_PER_NODE = 8
_GIGA = 1e9
_MICRO = 1e-6
_EXPECTED = "nvlink, pcie, or ethernet with its Gbit/s, such as ethernet:25"


@dataclass(frozen=True)
class Link:
    """What joins ranks.

    Args:
        name: As on the command line.
        bytes_per_s: That a rank sends while it receives as many.
        latency_s: Of one message between neighbours.
        source: Where both figures are from.
    """

    name: str
    bytes_per_s: float
    latency_s: float
    source: str


# Bandwidths are those that NCCL itself plans with, in src/graph/topo.h: SM80_NVLINK_BW (20 GB/s a link, 12 links),
# PCI_BW (12 GB/s for generation 3 with 16 lanes, half of generation 4), NET_BW (12 GB/s for 100 Gbit/s). Latencies are
# its hwLat of rings with the Simple protocol, in src/graph/tuning.cc.
NVLINK = Link("nvlink", 240 * _GIGA, 3.4 * _MICRO, "NCCL's own figures: A100, 12 NVLinks of 20 GB/s, 3.4 us")
PCIE = Link("pcie", 24 * _GIGA, 5.7 * _MICRO, "NCCL's own figures: PCIe 4 x16 with peer access, 24 GB/s, 5.7 us")
_NETWORK_LATENCY_S = 14.0 * _MICRO
_NETWORK_BYTES_PER_GBIT = 0.12 * _GIGA


def ethernet(gbit: float) -> Link:
    """A network of `gbit` Gbit/s in each direction."""
    source = f"NCCL's own figures: 96 % of {gbit:g} Gbit/s, 14 us"
    return Link(f"ethernet:{gbit:g}", gbit * _NETWORK_BYTES_PER_GBIT, _NETWORK_LATENCY_S, source)


# Between machines where nothing else is said.
NODE_LINK = ethernet(100)


def parse_link(text: str) -> Link:
    """A link by the name that a command line gives it.

    Raises:
        ConfigError: There is none of this name.
    """
    named = {link.name: link for link in (NVLINK, PCIE)}
    if text.lower() in named:
        return named[text.lower()]
    match = re.fullmatch(r"ethernet:(\d+(?:\.\d+)?)", text.lower())
    if match is None or not float(match[1]):
        raise ConfigError(f"{text!r} is no link; expected {_EXPECTED}.", hint="ethernet:1 is 1 Gbit/s.")
    return ethernet(float(match[1]))


def fit_link(
    name: str, small: tuple[float, float], large: tuple[float, float], num_ranks: int, source: str = "measured here"
) -> Link:
    """The link by which all-reduces of two sizes took as long as they did.

    Args:
        name: Of the link.
        small: Bytes of the smaller message, and its seconds.
        large: The same of the larger one.
        num_ranks: That took part, at least 2.
        source: Where the figures are from.
    """
    per_byte = (large[1] - small[1]) / (large[0] - small[0])
    if per_byte <= 0:  # Noise: the smaller one took longer.
        per_byte = large[1] / large[0]
    latency_s = max(0.0, small[1] - per_byte * small[0]) / (2 * (num_ranks - 1))
    return Link(name, 2 * (num_ranks - 1) / num_ranks / per_byte, latency_s, source)


@dataclass(frozen=True)
class Network:
    """Machines with equal numbers of GPUs.

    An all-reduce over several machines is a reduce-scatter in each, an all-reduce of the parts between them over the
    one link that a machine has, and a gather in each.

    Args:
        inner: Joins the GPUs of a machine.
        outer: Joins machines: the whole of what a machine has.
        gpus_per_node: GPUs of a machine.
    """

    inner: Link
    outer: Link = NODE_LINK
    gpus_per_node: int = GPUS_PER_NODE

    def pass_s(self, num_bytes: float, num_ranks: int) -> float:
        """Seconds of a gather, or of a reduce-scatter, of `num_bytes` that all ranks together hold."""
        num_nodes = -(-num_ranks // self.gpus_per_node)
        rings = ((self.inner, min(num_ranks, self.gpus_per_node)), (self.outer, num_nodes))
        return sum((n - 1) / n * num_bytes / link.bytes_per_s + (n - 1) * link.latency_s for link, n in rings)

    def all_reduce_s(self, num_bytes: float, num_ranks: int) -> float:
        """Seconds in which every rank has the sum of all ranks' `num_bytes`."""
        return 2 * self.pass_s(num_bytes, num_ranks)

    def by_one_rank_s(self, num_bytes: float, num_ranks: int) -> float:
        """Seconds in which one rank takes `num_bytes` from each other rank, and gives each as many back."""
        link = self.inner if num_ranks <= self.gpus_per_node else self.outer
        return 2 * (num_ranks - 1) * (num_bytes / link.bytes_per_s + link.latency_s)

    def describe(self, num_ranks: int) -> str:
        """The links that so many ranks use, in words."""
        inner = f"{self.inner.name} ({self.inner.bytes_per_s / _GIGA:.3g} GB/s: {self.inner.source})"
        if num_ranks <= self.gpus_per_node:
            return inner
        outer = f"{self.outer.name} ({self.outer.bytes_per_s / _GIGA:.3g} GB/s: {self.outer.source})"
        if self.gpus_per_node == 1:
            return outer
        return f"{inner}; between machines of {self.gpus_per_node} GPUs {outer}"
