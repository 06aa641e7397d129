"""The rendezvous of one node: a store on a free port of the loopback interface, served by the supervisor."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from typing import Any

from torch.distributed.distributed_c10d import PrefixStore
from torch.distributed.elastic.rendezvous import (
    RendezvousHandler,
    RendezvousInfo,
    RendezvousStoreInfo,
)
from torch.distributed.rendezvous import TCPStore

from unsloth_multigpu.errors import LaunchError
from unsloth_multigpu.wire.context import attempt_variables

# Limit of a connection to this machine itself.
_CONNECT_LIMIT_S = 5.0


class Rounds(RendezvousHandler):
    """Counts how often the ranks are started, and passes everything on to the handler that lets nodes meet.

    Torch elastic counts only restarts after failures, not restarts because a node joined or left.

    Args:
        handler: Lets nodes meet.
        begin_round: Called before each start of the ranks with the number of earlier starts. An exception ends the run.
        begin_start: Called when the nodes have met, before the ranks' processes are started.
        turn: Called about every 0.1 s while ranks run, in the engine's thread. An exception ends the run.
    """

    def __init__(
        self,
        handler: RendezvousHandler,
        begin_round: Callable[[int], None],
        begin_start: Callable[[], None],
        turn: Callable[[], None],
    ) -> None:
        self._handler = handler
        self._begin_round = begin_round
        self._begin_start = begin_start
        self._turn = turn
        self._num_rounds = 0

    @property
    def use_agent_store(self) -> bool:
        """True if ranks connect to the supervisor's store instead of opening their own."""
        return bool(self._handler.use_agent_store)

    def get_backend(self) -> str:
        """Name under which torch elastic finds this one handler."""
        return f"unsloth_multigpu_{self._handler.get_run_id()}"

    def next_rendezvous(self) -> RendezvousInfo:
        """Called before each start of the ranks, which inherit the environment as it is then."""
        self._begin_round(self._num_rounds)
        info = self._handler.next_rendezvous()
        os.environ.update(attempt_variables(self._num_rounds))
        self._begin_start()
        self._num_rounds += 1
        return info

    def is_closed(self) -> bool:
        """True once a node has ended the run for all."""
        return bool(self._handler.is_closed())

    def set_closed(self) -> None:
        """Ends the run for all nodes."""
        self._handler.set_closed()

    def num_nodes_waiting(self) -> int:
        """Nodes that want to join; torch elastic asks in every turn of its loop while the ranks run."""
        self._turn()
        return int(self._handler.num_nodes_waiting())

    def get_run_id(self) -> str:
        """Identifier of the run."""
        return str(self._handler.get_run_id())

    def shutdown(self) -> bool:
        """Frees what the handler holds."""
        return bool(self._handler.shutdown())


class LoopbackRendezvous(RendezvousHandler):
    """A store on loopback. torch's own listens on all interfaces, and its port can be taken before it is opened."""

    # Ranks connect to this store instead of opening their own.
    use_agent_store = True

    def __init__(self, run_id: str) -> None:
        self._run_id = run_id
        self._server: TCPStore | None = None

    def get_backend(self) -> str:
        """Name under which torch elastic knows this kind."""
        return "loopback"

    def next_rendezvous(self) -> RendezvousInfo:
        """The one node is complete at once. A restart gets a new store, without addresses of dead ranks.

        Raises:
            LaunchError: This machine does not reach itself by 127.0.0.1.
        """
        listener, port = listen_on_loopback()
        self._server = serve_store("127.0.0.1", port, listener)
        return RendezvousInfo(PrefixStore("agent", self._server), 0, 1, RendezvousStoreInfo("127.0.0.1", port))

    def is_closed(self) -> bool:
        """Never: only this process takes part."""
        return False

    def set_closed(self) -> None:
        """Nothing to close for others."""

    def num_nodes_waiting(self) -> int:
        """No other node can join."""
        return 0

    def get_run_id(self) -> str:
        """Identifier of the run."""
        return self._run_id

    def shutdown(self) -> bool:
        """The server ends with this process."""
        return True


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
