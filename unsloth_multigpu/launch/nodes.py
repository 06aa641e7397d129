"""Addresses and network interfaces for runs on several nodes."""

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
from unsloth_multigpu.options import MultiGPUConfig
from unsloth_multigpu.wire.wait import wait_until

logger = get_logger(__name__)

_NAME_POLL_S = 1.0


def shared_seed(config: MultiGPUConfig) -> int:
    """Returns the seed for all ranks, 0 .. 2^32 - 1: random on one node, else derived from `rdzv_id`."""
    if config.nnodes == 1:
        return random.SystemRandom().randrange(2**32)
    return zlib.crc32(str(config.rdzv_id).encode())


def socket_interfaces(config: MultiGPUConfig) -> dict[str, str]:
    """Returns the variables that select the network interface of gloo and NCCL.

    One node uses its loopback interface. With several nodes, gloo would take the interface of this host's name, which
    is often loopback, and NCCL the first one that is neither loopback nor Docker's, perhaps a bridge or a VPN. Both get
    the interface of the route to `rdzv_endpoint`. InfiniBand is not affected.

    Raises:
        LaunchError: This machine has no route to the host of `rdzv_endpoint`.
    """
    if config.nnodes == 1:
        return {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}
    interface = _interface_of(address_towards(*split_endpoint(config)))
    # Without "=" NCCL takes the name as a prefix: "eth1" would match "eth10".
    return {} if interface is None else {"GLOO_SOCKET_IFNAME": interface, "NCCL_SOCKET_IFNAME": f"={interface}"}


def split_endpoint(config: MultiGPUConfig) -> tuple[str, int]:
    """Splits `rdzv_endpoint` into host and port: "[fd00::1]:29400" -> ("fd00::1", 29400)."""
    host, _, port = str(config.rdzv_endpoint).rpartition(":")
    return host.strip("[]"), int(port)


def await_name(host: str, port: int, timeout_s: float) -> None:
    """Waits until a host name resolves, because node 0 may start later than this node.

    Raises:
        LaunchError: It does not resolve within `timeout_s`.
    """

    def is_known() -> bool:
        try:
            _resolve(host, port)
        except socket.gaierror:
            return False
        return True

    if not is_known():
        logger.warning("host name %s does not resolve yet, waiting up to %g s for that machine", host, timeout_s)
    if not wait_until(is_known, time.monotonic() + timeout_s, poll_s=_NAME_POLL_S):
        raise LaunchError(
            f"The host name {host!r} of rdzv_endpoint did not resolve within {timeout_s:g} s.",
            hint="Check rdzv_endpoint, that node 0 has started, and that this machine uses the cluster's name server.",
        )


def address_towards(host: str, port: int) -> str:
    """Returns this machine's address on the route to `host`. Sends nothing.

    Raises:
        LaunchError: The name does not resolve, or there is no route.
    """
    try:
        family, address = _resolve(host, port)
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(address)
            return str(probe.getsockname()[0])
    except OSError as error:
        raise LaunchError(
            f"rdzv_endpoint: this machine has no route to {host!r}: {error.strerror or error}.",
            hint="Use an address that all nodes can reach.",
        ) from error


def listen_at(host: str, port: int) -> socket.socket | None:
    """Opens a listening socket; port 0 = any free port. None if the address is not of this machine or taken."""
    family, address = _resolve(host, port)
    # Many machines resolve their own name to 127.0.1.1, which other nodes cannot reach. Then listen at all addresses.
    is_alias = ipaddress.ip_address(address[0]).is_loopback and not host.startswith(("localhost", "::1", "127."))
    try:
        return socket.create_server(("", port) if is_alias else address[:2], family=family)
    except OSError:
        return None


def _resolve(host: str, port: int) -> tuple[socket.AddressFamily, tuple[Any, ...]]:
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    return found[0], found[4]


def _interface_of(address: str) -> str | None:
    for label, entries in psutil.net_if_addrs().items():
        # The label of a second address is "eth0:1"; a link-local address is written "fe80::1%eth0".
        if any(entry.address.partition("%")[0] == address for entry in entries):
            return str(label).partition(":")[0]
    return None
