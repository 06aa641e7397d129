"""Several nodes: which address and interface of this machine reach the other nodes."""

from __future__ import annotations

import ipaddress
import random
import socket
import time
import zlib
from typing import Any

import psutil

from unsloth_multigpu.errors import LaunchError
from unsloth_multigpu.logs import get_logger
from unsloth_multigpu.options import MultiGPUConfig, num_nodes
from unsloth_multigpu.wire.wait import wait_until

logger = get_logger(__name__)

_NAME_POLL_S = 1.0


def is_one_node(config: MultiGPUConfig) -> bool:
    """True if no other node can take part in the run."""
    return num_nodes(config.nnodes) == 1


def shared_seed(config: MultiGPUConfig) -> int:
    """Seed of what ranks choose before they meet, 0 .. 2^32 - 1: random, or the same on all nodes by the run's name."""
    if is_one_node(config):
        return random.SystemRandom().randrange(2**32)
    return zlib.crc32(str(config.rdzv_id).encode())


def socket_interfaces(config: MultiGPUConfig) -> dict[str, str]:
    """Variables that name the network interface of gloo and NCCL.

    One node uses its loopback interface. With several nodes, gloo would take the interface of this host's name, which
    often is loopback, and NCCL the first one that is neither loopback nor Docker's: a bridge, a VPN. Both get the one
    that leads to `rdzv_endpoint`. InfiniBand is not affected.

    Raises:
        LaunchError: `rdzv_endpoint` names no host that this machine can reach.
    """
    if is_one_node(config):
        return {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}
    interface = _interface_of(address_towards(*split_endpoint(config)))
    # NCCL would take "eth1" for all names that begin like it.
    return {} if interface is None else {"GLOO_SOCKET_IFNAME": interface, "NCCL_SOCKET_IFNAME": f"={interface}"}


def split_endpoint(config: MultiGPUConfig) -> tuple[str, int]:
    """Host and port of `rdzv_endpoint`; "[fd00::1]:29400" -> ("fd00::1", 29400)."""
    host, _, port = str(config.rdzv_endpoint).rpartition(":")
    return host.strip("[]"), int(port)


def await_name(host: str, port: int, timeout_s: float) -> None:
    """Waits until a name resolves: that of a machine that is about to start is not known yet.

    Raises:
        LaunchError: It is not known after `timeout_s`.
    """

    def is_known() -> bool:
        try:
            _resolve(host, port)
        except socket.gaierror:
            return False
        return True

    if not is_known():
        logger.warning("the name %s is not known yet, waiting up to %g s for its machine to start", host, timeout_s)
    if not wait_until(is_known, time.monotonic() + timeout_s, poll_s=_NAME_POLL_S):
        raise LaunchError(
            f"The name {host!r}, where the nodes meet, was not known after {timeout_s:g} s.",
            hint="Check rdzv_endpoint, that node 0 has started, and that this machine asks the cluster's name server.",
        )


def address_towards(host: str, port: int) -> str:
    """The address that this machine has in the network of `host`. Nothing is sent.

    Raises:
        LaunchError: The name is unknown, or there is no way to it.
    """
    try:
        family, address = _resolve(host, port)
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(address)
            return str(probe.getsockname()[0])
    except OSError as error:
        raise LaunchError(
            f"rdzv_endpoint: this machine finds no way to {host!r}: {error.strerror or error}.",
            hint="Name a node by an address that all nodes can reach.",
        ) from error


def listen_at(host: str, port: int) -> socket.socket | None:
    """A listening socket at that address, None if it is not this machine's address or the port is not free.

    Args:
        host: An address or a name that resolves.
        port: 0 = any that is free.
    """
    family, address = _resolve(host, port)
    # Many machines know their own name as 127.0.1.1, where no other node would reach them.
    is_alias = ipaddress.ip_address(address[0]).is_loopback and not host.startswith(("localhost", "::1", "127."))
    try:
        return socket.create_server(("", port) if is_alias else address[:2], family=family)
    except OSError:
        return None


def _resolve(host: str, port: int) -> tuple[socket.AddressFamily, tuple[Any, ...]]:
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    return found[0], found[4]


def _interface_of(address: str) -> str | None:
    """Name of the interface with an address of this machine."""
    for label, entries in psutil.net_if_addrs().items():
        # The label of a second address is "eth0:1"; a link-local address is written "fe80::1%eth0".
        if any(entry.address.partition("%")[0] == address for entry in entries):
            return str(label).partition(":")[0]
    return None
