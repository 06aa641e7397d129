"""Where the ranks of an attempt meet: a store on a free port, served by the supervisor of the first node."""

from __future__ import annotations

import socket
from typing import Any

from torch.distributed.rendezvous import TCPStore

from unsloth_multigpu.errors import LaunchError

# Limit of a connection to this machine itself.
_CONNECT_LIMIT_S = 5.0


def serve_store(host: str, port: int, descriptor: int, **options: Any) -> TCPStore:
    """Serves a store on a socket that already listens, because a free port that is opened later may be taken by then.

    Args:
        host: This machine's address, as the others know it.
        port: Where the socket listens.
        descriptor: Of the socket; the store takes it over.
        options: Further ones of `TCPStore`.
    """
    options |= {"is_master": True, "wait_for_workers": False, "master_listen_fd": descriptor}
    try:
        return TCPStore(host, port, **options)
    except NotImplementedError:
        # Up to torch 2.7 the default backend, libuv, cannot take over a socket, and leaves it alone; the older can.
        return TCPStore(host, port, **options, use_libuv=False)


def listen_on_loopback() -> tuple[int, int]:
    """File and port of a socket that listens on a free port of 127.0.0.1, and has been reached there once.

    torch would try for minutes to connect to a store that it cannot reach, without reacting to signals.

    Raises:
        LaunchError: There is no such address, or it cannot be reached.
    """
    listener = None
    try:
        listener = socket.create_server(("127.0.0.1", 0))
        with socket.create_connection(listener.getsockname(), timeout=_CONNECT_LIMIT_S):
            listener.accept()[0].close()
    except OSError as error:
        if listener is not None:
            listener.close()
        raise LaunchError(
            f"The ranks of this machine cannot meet on 127.0.0.1: {error}.",
            hint="Bring its loopback interface up with this address: ip link set lo up; ip addr add 127.0.0.1/8 dev lo",
        ) from error
    port = listener.getsockname()[1]
    return listener.detach(), port
