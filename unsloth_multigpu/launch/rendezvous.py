"""One node meets itself: a store on a free port of the loopback interface, served by the supervisor."""

from __future__ import annotations

import socket

from torch.distributed.distributed_c10d import PrefixStore
from torch.distributed.elastic.rendezvous import (
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
)
from torch.distributed.rendezvous import TCPStore

BACKEND = "unsloth_multigpu"


class LoopbackRendezvous(RendezvousHandler):
    """torch's own rendezvous listens on all interfaces, and a port that is looked for first can be taken meanwhile."""

    # Ranks connect to this store instead of opening their own.
    use_agent_store = True

    def __init__(self, params: RendezvousParameters) -> None:
        self._run_id = params.run_id
        self._server: TCPStore | None = None

    def get_backend(self) -> str:
        """Name under which torch elastic knows this kind."""
        return BACKEND

    def next_rendezvous(self) -> RendezvousInfo:
        """The one node is complete at once. A restart gets a new store, without addresses of dead ranks."""
        listener = socket.create_server(("127.0.0.1", 0))
        port = listener.getsockname()[1]
        # The server takes over the socket that listens already.
        self._server = TCPStore(
            "127.0.0.1", port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach()
        )
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
