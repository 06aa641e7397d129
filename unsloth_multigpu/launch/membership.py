"""How the nodes of a run meet: each keeps a record in the store at `rdzv_endpoint`, and reads those of the others.

A record is JSON. The store has no authentication: whoever reaches its port can disturb the run, but executes no code.
"""

from __future__ import annotations

import json
import re
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import astuple, dataclass, replace
from datetime import timedelta

from torch.distributed import DistNetworkError
from torch.distributed.rendezvous import TCPStore

from unsloth_multigpu.errors import LaunchError
from unsloth_multigpu.launch.engine import Place
from unsloth_multigpu.launch.nodes import address_towards, is_one_node, listen_at, split_endpoint
from unsloth_multigpu.launch.store import listen_on_loopback, serve_store
from unsloth_multigpu.logs import get_logger
from unsloth_multigpu.options import MultiGPUConfig, num_nodes
from unsloth_multigpu.wire.wait import wait_until

logger = get_logger(__name__)

PERIOD_S = 1.0
# A call to a store that can be reached takes milliseconds.
CALL_LIMIT_S = 15.0
# No result depends on whether the other nodes are told that this one ends.
GOODBYE_LIMIT_S = 3.0
_POLL_S = 0.05
# Its ranks are about to start or run, have all ended well, one has failed. The node has left after "done", or ends the
# run for all.
_STATES = ("ready", "done", "failed", "left", "ended")
_ADDRESS = re.compile(r"[\w.:%-]{1,255}")
_MAX_TEXT, _MAX_MESSAGE = 4096, 300


@dataclass(frozen=True)
class Record:
    """What a node says of itself.

    Args:
        attempt: How often it has started its ranks before.
        state: One of `_STATES`.
        num_ranks: Its ranks.
        address: By which the others reach it.
        port: Of the store of this attempt's ranks; 0 = it serves none.
        message: Why it has failed.
        count: Grows while the node lives.
    """

    attempt: int
    state: str
    num_ranks: int
    address: str
    port: int = 0
    message: str = ""
    count: int = 0


def decode_record(text: bytes) -> Record | None:
    """None for a text that no node writes: anyone who reaches the store can have written it."""
    try:
        record = Record(*json.loads(text[:_MAX_TEXT]))
    except (ValueError, TypeError, RecursionError):
        return None
    if [type(value) for value in astuple(record)] != [int, str, int, str, int, str, int]:
        return None
    limits = ((record.attempt, 0, 2**31), (record.num_ranks, 1, 2**16), (record.port, 0, 2**16))
    is_plain = record.state in _STATES and record.message.isprintable() and _ADDRESS.fullmatch(record.address)
    return record if is_plain and all(least <= value < end for value, least, end in limits) else None


class Meeting:
    """Of one node: it is complete at once.

    Args:
        num_ranks: Ranks of this node.
    """

    def __init__(self, num_ranks: int) -> None:
        self._num_ranks = num_ranks
        self._ranks_store: TCPStore | None = None

    def __enter__(self) -> Meeting:
        return self

    def __exit__(self, *exc_info: object) -> None:
        """Tells the other nodes that this one leaves the run."""

    def meet(self, attempt: int, is_stopped: Callable[[], bool]) -> Place | None:
        """Called before each start of the ranks, which get a new store: without addresses and keys of earlier ranks.

        Args:
            attempt: How often they were started before.
            is_stopped: Ends the wait for other nodes.

        Returns:
            Where the ranks of this node stand; None where the wait was ended.

        Raises:
            LaunchError: The nodes do not come together, or one has ended the run.
        """
        listener, port = listen_on_loopback()
        self._ranks_store = serve_store("127.0.0.1", port, listener)
        return Place(0, self._num_ranks, 0, "127.0.0.1", port)

    def trouble(self) -> str:
        """Why the ranks must end, by what is known of other nodes; "" where they need not. Does not wait."""
        return ""

    def check(self) -> None:
        """Raises LaunchError where there cannot be another attempt, because of other nodes."""

    def unheard_s(self) -> dict[str, float]:
        """How long each other node has not been heard, by its name."""
        return {}

    def fail(self, message: str) -> None:
        """Lets the other nodes end their ranks, too."""

    def finish(self, is_stopped: Callable[[], bool]) -> str:
        """All ranks of this node have ended well: waits for those of the others; returns what `trouble` does."""
        return ""


def meeting_of(config: MultiGPUConfig, run_id: str, num_ranks: int) -> Meeting:
    """How this node meets those of the run.

    Raises:
        LaunchError: `rdzv_endpoint` names no host that this machine can reach.
    """
    return Meeting(num_ranks) if is_one_node(config) else MeetingOfNodes(config, run_id, num_ranks)


class MeetingOfNodes(Meeting):
    """Of several nodes. A thread talks to the store, because a call blocks for minutes where a machine has disappeared.

    Only the main thread replaces `_own`, and only that thread what it has read.

    Args:
        config: The run's options.
        run_id: Name of the run among those that meet there.
        num_ranks: Ranks of this node.
    """

    def __init__(self, config: MultiGPUConfig, run_id: str, num_ranks: int) -> None:
        super().__init__(num_ranks)
        self._config = config
        self._num_nodes = num_nodes(config.nnodes)
        self._prefix = f"unsloth_multigpu/{run_id}"
        host, port = split_endpoint(config)
        address = address_towards(host, port)
        self._listener = listen_at(host, port)
        # Others reach the node that serves the endpoint by the name that they were given.
        self._own = Record(0, "ready", num_ranks, address if self._listener is None else host)
        self._place: int | None = None
        self._others: Mapping[int, Record] = {}
        self._heard_s: Mapping[int, float] = {}
        self._sent: Record | None = None
        self._error: LaunchError | None = None
        self._wake = threading.Event()
        self._thread = threading.Thread(target=self._talk, name="unsloth_multigpu-nodes", daemon=True)

    def __enter__(self) -> Meeting:
        is_server, place = self._listener is not None, self._config.rdzv_endpoint
        logger.info("nodes meet at %s, nnodes=%d serves=%s", place, self._num_nodes, is_server)
        self._thread.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._show(state="left" if self._own.state == "done" else "ended")
        deadline_s = time.monotonic() + GOODBYE_LIMIT_S
        wait_until(lambda: self._place is None or self._sent is self._own or self._error is not None, deadline_s)
        if self._listener is not None:
            # The store ends with this process.
            wait_until(lambda: all(r.state in ("left", "ended") for r in self._others.values()), deadline_s)

    def meet(self, attempt: int, is_stopped: Callable[[], bool]) -> Place | None:
        """See `Meeting`."""
        self._show(attempt=attempt, state="ready", port=0)
        begin_s, timeout_s = time.monotonic(), self._config.timeout_s
        while not is_stopped():
            self.check()
            if self._place == 0 and not self._own.port:
                self._serve_ranks()
            nodes = {**self._others, **({} if self._place is None else {self._place: self._own})}
            is_complete = len(nodes) == self._num_nodes and all(r.attempt == attempt for r in nodes.values())
            if self._place is not None and is_complete and nodes[0].port:
                ranks = [nodes[n].num_ranks for n in range(self._num_nodes)]
                logger.info("attempt=%d nodes=%d node=%d", attempt, self._num_nodes, self._place)
                first_rank = sum(ranks[: self._place])
                return Place(first_rank, sum(ranks), self._place, nodes[0].address, nodes[0].port)
            # To connect takes up to `timeout_s` itself.
            if time.monotonic() - begin_s > timeout_s + (CALL_LIMIT_S if self._place is None else 0.0):
                raise LaunchError(
                    f"Fewer than {self._num_nodes} node(s) met at rdzv_endpoint={self._config.rdzv_endpoint!r}, or it "
                    f"does not answer; waited {timeout_s:g} s.",
                    hint="Start the command on the other nodes too, with the same rdzv_id.",
                )
            time.sleep(_POLL_S)
        return None

    def _serve_ranks(self) -> None:
        listener = listen_at(self._own.address, 0)
        if listener is None:
            raise LaunchError(
                f"This machine cannot listen at its address {self._own.address}.",
                hint="Name a node by an address that all nodes can reach.",
            )
        port = listener.getsockname()[1]
        self._ranks_store = serve_store(self._own.address, port, listener.detach())
        self._show(port=port)

    def trouble(self) -> str:
        """See `Meeting`."""
        if self._error is not None:
            return str(self._error)
        for node, other in self._others.items():
            if other.attempt > self._own.attempt or other.state in ("failed", "ended"):
                return f"node {node} has ended: {other.message or 'its own message names the cause'}"
        return ""

    def check(self) -> None:
        """See `Meeting`."""
        if self._error is not None:
            raise self._error
        if any(other.state == "ended" for other in self._others.values()):
            raise LaunchError(
                f"Another node has ended the run {self._config.rdzv_id!r}: {self.trouble()}.",
                hint="Start the command again on all nodes.",
            )

    def unheard_s(self) -> dict[str, float]:
        """See `Meeting`."""
        first, found = 0, {}
        for node in range(self._num_nodes):
            record = self._own if node == self._place else self._others[node]
            ranks = ", ".join(map(str, range(first, first + record.num_ranks)))
            if node != self._place:
                name = f"node {node} (rank{'s' * (record.num_ranks > 1)} {ranks})"
                found[name] = time.monotonic() - self._heard_s[node]
            first += record.num_ranks
        return found

    def fail(self, message: str) -> None:
        """See `Meeting`."""
        plain = "".join(character if character.isprintable() else " " for character in message)
        self._show(state="failed", message=plain[:_MAX_MESSAGE])

    def finish(self, is_stopped: Callable[[], bool]) -> str:
        """See `Meeting`."""
        self._show(state="done")
        while not is_stopped() and any(other.state not in ("done", "left") for other in self._others.values()):
            lost = [name for name, silent_s in self.unheard_s().items() if silent_s > self._config.timeout_s]
            if trouble := self.trouble() or (lost and f"{lost[0]} has not been heard for {self._config.timeout_s:g} s"):
                return trouble
            time.sleep(_POLL_S)
        return ""

    def _show(self, **changes: object) -> None:
        self._own = replace(self._own, **changes)  # type: ignore[arg-type]
        self._wake.set()

    def _talk(self) -> None:
        """The thread."""
        place = f"rdzv_endpoint={self._config.rdzv_endpoint!r}"
        try:
            store = self._open_store()
            self._place = self._take_place(store)
            while self._sent is None or self._sent.state not in ("left", "ended"):
                self._exchange(store, self._place)
                self._wake.wait(PERIOD_S)
                self._wake.clear()
        except LaunchError as error:
            self._error = error
        except RuntimeError as error:
            gone = LaunchError(f"The node that serves {place} is gone.", hint="Start the command again on all nodes.")
            gone.__cause__ = error
            self._error = gone

    def _open_store(self) -> TCPStore:
        (host, port), timeout = split_endpoint(self._config), timedelta(seconds=self._config.timeout_s)
        try:
            if self._listener is not None:
                store = serve_store(host, port, self._listener.detach(), timeout=timeout)
            else:
                store = TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=timeout)
        except RuntimeError as error:
            raise LaunchError(
                f"No node serves rdzv_endpoint={self._config.rdzv_endpoint!r}; waited {self._config.timeout_s:g} s.",
                hint="Start the same command on the node that has this address, and check that its port is open.",
            ) from error
        store.set_timeout(timedelta(seconds=CALL_LIMIT_S))
        return store

    def _take_place(self, store: TCPStore) -> int:
        place = self._config.node_rank
        if place is None:
            place = 0 if self._listener is not None else store.add(f"{self._prefix}/arrived", 1)
        if place >= self._num_nodes or store.add(f"{self._prefix}/place/{place}", 1) > 1:
            raise LaunchError(
                f"node_rank={place} is taken, or more than nnodes={self._num_nodes} nodes are in the run "
                f"{self._config.rdzv_id!r}.",
                hint=f"Give each node its own, 0 .. {self._num_nodes - 1}, or leave node_rank out on all. A node that "
                "is started again waits until the others have ended.",
            )
        return place

    def _exchange(self, store: TCPStore, place: int) -> None:
        own = self._own
        try:
            store.set(self._key(place), json.dumps(astuple(replace(own, count=store.add(f"{self._prefix}/count", 1)))))
            known = [n for n in range(self._num_nodes) if n in self._others or store.check([self._key(n)])]
            texts = store.multi_get([self._key(n) for n in known])
        except DistNetworkError:
            raise
        except RuntimeError as error:
            # A network that is cut may come back. Training continues while its own connections hold.
            logger.warning("rdzv_endpoint=%s does not answer: %s", self._config.rdzv_endpoint, error)
            return
        found = {n: record for n, text in zip(known, texts, strict=True) if (record := decode_record(text))}
        news = {n: r for n, r in found.items() if n != place and r != self._others.get(n)}
        self._heard_s = {**self._heard_s, **dict.fromkeys(news, time.monotonic())}
        self._others = {**self._others, **news}
        self._sent = own

    def _key(self, node: int) -> str:
        return f"{self._prefix}/node/{node}"
