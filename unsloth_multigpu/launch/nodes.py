"""Runs on several nodes: rendezvous, addresses and network interfaces.

Each node writes a record into the store at `rdzv_endpoint` and reads those of the others. A record is JSON. The store
has no authentication: whoever reaches its port can disturb the run, but not execute code.
"""

from __future__ import annotations

import ipaddress
import json
import socket
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from typing import Any

import psutil
from torch.distributed import DistNetworkError
from torch.distributed.rendezvous import TCPStore

from unsloth_multigpu.errors import LaunchError
from unsloth_multigpu.logs import get_logger
from unsloth_multigpu.options import MultiGPUConfig
from unsloth_multigpu.wire.identity import RankIdentity
from unsloth_multigpu.wire.wait import wait_until

logger = get_logger(__name__)

PERIOD_S = 1.0
# A call to a store that can be reached takes milliseconds.
CALL_LIMIT_S = 15.0
# How long a node that leaves waits until the others have seen that.
GOODBYE_LIMIT_S = 3.0
_POLL_S = 0.05
_NAME_POLL_S = 1.0
# "ready": the ranks start or run. "done": all have succeeded. "failed": one has failed. "left": the node has exited
# after "done". "ended": the node ends the run on all nodes.
_STATES = ("ready", "done", "failed", "left", "ended")
_OVER = ("left", "ended")
_MAX_TEXT, _MAX_MESSAGE = 4096, 300
_RESTART = "Start the command again on all nodes."


@dataclass(frozen=True)
class Record:
    """State of a node, for the other nodes.

    Args:
        attempt: How often it has started its ranks before.
        port: Port of the store that node 0 serves for the ranks of this attempt; 0 = not served yet.
        message: Why it has failed.
        count: Grows as long as the node lives.
    """

    attempt: int
    state: str
    num_ranks: int
    port: int = 0
    message: str = ""
    count: int = 0


def decode_record(text: bytes) -> Record | None:
    """Decodes a record. None if it is invalid: anyone who reaches the store may have written it."""
    try:
        record = Record(**json.loads(text[:_MAX_TEXT]))
        is_plain = record.state in _STATES and record.message.isprintable()
    except (ValueError, TypeError, AttributeError, RecursionError):
        return None
    numbers = (record.attempt, record.num_ranks, record.port, record.count)
    return record if is_plain and all(type(n) is int and 0 <= n < 2**31 for n in numbers) else None


def serve_store(host: str, port: int) -> TCPStore | None:
    """Serves a store; port 0 = any free port. None if the address is not of this machine or taken.

    Raises:
        LaunchError: The store cannot be reached at `host`.
    """
    if (listener := listen_at(host, port)) is None:
        return None
    place = host, listener.getsockname()[1]
    options: dict[str, Any] = {"is_master": True, "wait_for_workers": False, "timeout": timedelta(seconds=CALL_LIMIT_S)}
    options["master_listen_fd"] = listener.detach()
    try:
        try:
            return TCPStore(*place, **options)
        except NotImplementedError:
            # Up to torch 2.7 the default backend, libuv, does not accept a socket; the older backend does.
            return TCPStore(*place, **options, use_libuv=False)
    except RuntimeError as error:
        raise LaunchError(
            f"This machine cannot connect to its own port {place[1]} at {host}: {error}.",
            hint="Bring its network interface up, as by: ip link set lo up.",
        ) from error


class Rendezvous:
    """Connects this node with the other nodes. Node 0 serves the store at `rdzv_endpoint` and the ranks' stores.

    With several nodes a thread calls the store, because a call may block for minutes after a machine has vanished.
    Only the main thread replaces `_own`, only the other thread the attributes that it reads from the store.

    Attributes:
        random_state: `random_state.read_seeded_state` of this process; after `meet`, of the process that came first.
        node: Number of this node; None until it has one.

    Raises:
        LaunchError: This is node 0, and it cannot listen at `rdzv_endpoint`.
    """

    def __init__(self, config: MultiGPUConfig, run_id: str, num_ranks: int, random_state: str = "") -> None:
        self.random_state = random_state
        self._config = config
        self._num_nodes = config.nnodes
        self._prefix = f"unsloth_multigpu/{run_id}"
        is_alone = config.nnodes == 1
        self._host, self._port = ("127.0.0.1", 0) if is_alone else split_endpoint(config)
        self._served = None if is_alone or config.node_rank else serve_store(self._host, self._port)
        if config.node_rank == 0 and self._served is None:
            raise LaunchError(
                f"node_rank=0 cannot listen at rdzv_endpoint={config.rdzv_endpoint!r}: it is not an address of this "
                "machine, or another process has the port.",
                hint="Set rdzv_endpoint to a free port of node 0.",
            )
        self.node = 0 if is_alone else None
        self._own = Record(0, "ready", num_ranks)
        self._others: Mapping[int, Record] = {}
        self._heard_s: Mapping[int, float] = {}
        self._sent: Record | None = None
        self._error: LaunchError | None = None
        self._ranks_store: TCPStore | None = None
        self._has_left = False
        self._wake = threading.Event()
        self._thread = threading.Thread(target=self._talk, name="unsloth_multigpu-nodes", daemon=True)

    def __enter__(self) -> Rendezvous:
        if self._num_nodes > 1:
            is_server, place = self._served is not None, self._config.rdzv_endpoint
            logger.info("nodes connect at %s, nnodes=%d serves=%s", place, self._num_nodes, is_server)
            self._thread.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._show(state="left" if self._own.state == "done" else "ended")
        if self.node is not None and self._thread.is_alive():
            wait_until(self._may_leave, time.monotonic() + GOODBYE_LIMIT_S)
        self._has_left = True
        self._wake.set()

    def _may_leave(self) -> bool:
        # The store ends with the process that serves it.
        is_needed = self._served is not None and any(r.state not in _OVER for r in self._others.values())
        return self._error is not None or (self._sent is self._own and not is_needed)

    def meet(self, attempt: int, is_stopped: Callable[[], bool]) -> RankIdentity | None:
        """Waits for all nodes before the ranks are started. They get a new store, without keys of earlier attempts.

        Returns:
            This node's first rank; None if `is_stopped` ended the wait.

        Raises:
            LaunchError: Not all nodes have arrived in time, or one has ended the run.
        """
        self._show(attempt=attempt, state="ready", port=0)
        begin_s, timeout_s = time.monotonic(), self._config.timeout_s
        while not is_stopped():
            if self.is_over():
                raise self._error or LaunchError(f"The run has ended: {self.trouble()}.", hint=_RESTART)
            if self.node == 0 and not self._own.port:
                self._serve_ranks()
            nodes = {**self._others, **({} if self.node is None else {self.node: self._own})}
            is_complete = len(nodes) == self._num_nodes and all(r.attempt == attempt for r in nodes.values())
            if self.node is not None and is_complete and nodes[0].port:
                ranks = [nodes[n].num_ranks for n in range(self._num_nodes)]
                numbers = sum(ranks[: self.node]), 0, sum(ranks), ranks[self.node]
                return RankIdentity(*numbers, "unsloth_multigpu", self._host, nodes[0].port)
            # Connecting to the store may take `timeout_s` itself.
            if time.monotonic() - begin_s > timeout_s + (CALL_LIMIT_S if self.node is None else 0.0):
                raise LaunchError(
                    f"Fewer than {self._num_nodes} node(s) arrived at rdzv_endpoint={self._config.rdzv_endpoint!r}, or "
                    f"it does not answer; waited {timeout_s:g} s.",
                    hint="Start the command on the other nodes too, with the same rdzv_id.",
                )
            time.sleep(_POLL_S)
        return None

    def trouble(self) -> str:
        """Returns why the ranks must end because of another node, or "". Does not wait."""
        if self._error is not None:
            return str(self._error)
        for node, other in self._others.items():
            if other.attempt > self._own.attempt or other.state in ("failed", "ended"):
                return f"node {node} has ended: {other.message or 'its own message names the cause'}"
        return ""

    def is_over(self) -> bool:
        """True if another node prevents a restart."""
        return self._error is not None or any(other.state == "ended" for other in self._others.values())

    def unheard_s(self) -> dict[str, float]:
        """Returns the seconds since the last record of each other node, by the node's name in messages."""
        first, found = 0, {}
        for node in range(self._num_nodes):
            record = self._own if node == self.node else self._others[node]
            ranks = ", ".join(map(str, range(first, first + record.num_ranks)))
            if node != self.node:
                name = f"node {node} (rank{'s' * (record.num_ranks > 1)} {ranks})"
                found[name] = time.monotonic() - self._heard_s[node]
            first += record.num_ranks
        return found

    def fail(self, message: str) -> None:
        """Reports a failure of this node, so that the other nodes end their ranks, too."""
        plain = "".join(character if character.isprintable() else " " for character in message)
        self._show(state="failed", message=plain[:_MAX_MESSAGE])

    def finish(self, is_stopped: Callable[[], bool]) -> str:
        """Reports this node's success and waits for the others. Returns why the run has failed, or ""."""
        self._show(state="done")
        while not is_stopped() and any(other.state not in ("done", "left") for other in self._others.values()):
            lost = [name for name, silent_s in self.unheard_s().items() if silent_s > self._config.timeout_s]
            if trouble := self.trouble() or (lost and f"{lost[0]} has not reported for {self._config.timeout_s:g} s"):
                return trouble
            time.sleep(_POLL_S)
        return ""

    def _show(self, **changes: object) -> None:
        self._own = replace(self._own, **changes)  # type: ignore[arg-type]
        self._wake.set()

    def _serve_ranks(self) -> None:
        self._ranks_store = serve_store(self._host, 0)
        if self._ranks_store is None:
            raise LaunchError(
                f"This machine cannot listen at its address {self._host}.",
                hint="Bring its network interface up, as by: ip link set lo up.",
            )
        self._show(port=self._ranks_store.port)

    def _talk(self) -> None:
        """Target of the thread: exchanges records with the store about once a second."""
        place, timeout_s = f"rdzv_endpoint={self._config.rdzv_endpoint!r}", self._config.timeout_s
        try:
            if (store := self._served) is None:
                limit = timedelta(seconds=timeout_s)
                store = TCPStore(self._host, self._port, is_master=False, wait_for_workers=False, timeout=limit)
                store.set_timeout(timedelta(seconds=CALL_LIMIT_S))
            node = self._claim_node_rank(store)
            self.random_state = store.compare_set(f"{self._prefix}/draws", "", self.random_state).decode()
            self.node = node
            while not self._has_left:
                self._exchange(store, self.node)
                self._wake.wait(PERIOD_S)
                self._wake.clear()
        except LaunchError as error:
            self._error = error
        except RuntimeError as error:
            self._error = LaunchError(f"Node 0, which serves {place}, is gone or unreachable: {error}.", hint=_RESTART)

    def _claim_node_rank(self, store: TCPStore) -> int:
        node = 0 if self._served is not None else self._config.node_rank
        if node is None:
            node = store.add(f"{self._prefix}/arrived", 1)
        if node >= self._num_nodes or store.add(f"{self._prefix}/place/{node}", 1) > 1:
            raise LaunchError(
                f"node_rank={node} is taken, or more than nnodes={self._num_nodes} nodes are in the run "
                f"{self._config.rdzv_id!r}.",
                hint=f"Give each node its own node_rank, 0 .. {self._num_nodes - 1}, or leave it out on all. Start a "
                "node again only after the others have ended.",
            )
        return node

    def _exchange(self, store: TCPStore, node: int) -> None:
        own, nodes = self._own, range(self._num_nodes)
        keys = [f"{self._prefix}/node/{n}" for n in nodes]
        try:
            store.set(keys[node], json.dumps(asdict(replace(own, count=store.add(f"{self._prefix}/count", 1)))))
            known = [n for n in nodes if n in self._others or store.check([keys[n]])]
            texts = store.multi_get([keys[n] for n in known])
        except DistNetworkError:
            raise
        except RuntimeError as error:
            # The network may come back. Training continues as long as the ranks' connections hold.
            logger.warning("rdzv_endpoint=%s does not answer: %s", self._config.rdzv_endpoint, error)
            return
        found = {n: record for n, text in zip(known, texts, strict=True) if (record := decode_record(text))}
        news = {n: r for n, r in found.items() if n != node and r != self._others.get(n)}
        self._heard_s = {**self._heard_s, **dict.fromkeys(news, time.monotonic())}
        self._others = {**self._others, **news}
        self._sent = own


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
    """Waits at most `timeout_s` until a host name resolves, because node 0 may start later than this node."""

    def is_known() -> bool:
        with suppress(socket.gaierror):
            _resolve(host, port)
            return True
        return False

    if not is_known():
        logger.warning("host name %s does not resolve yet, waiting up to %g s for that machine", host, timeout_s)
        wait_until(is_known, time.monotonic() + timeout_s, poll_s=_NAME_POLL_S)


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
            hint="Use an address that all nodes can reach, start node 0, and let this machine use the cluster's name "
            "server.",
        ) from error


def listen_at(host: str, port: int) -> socket.socket | None:
    """Opens a listening socket; port 0 = any free port. None if the address is not of this machine or taken."""
    family, address = _resolve(host, port)
    # Many machines resolve their own name to 127.0.1.1, which other nodes cannot reach. Then listen at all addresses.
    is_alias = ipaddress.ip_address(address[0]).is_loopback and not host.startswith(("localhost", "::1", "127."))
    with suppress(OSError):
        return socket.create_server(("", port) if is_alias else address[:2], family=family)
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
