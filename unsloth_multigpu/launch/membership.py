"""Which nodes take part in a round: torch elastic's rendezvous, with a limit for every wait and a store for each round.

Torch's own handler reuses one store for all rounds, counts restarts on each node separately, and may block for minutes
in a call to a store whose machine disappeared. It also unpickles whatever is in that open store. Here nodes exchange
the state of a rendezvous as JSON.
"""

from __future__ import annotations

import json
import os
import pickle
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from datetime import datetime, timedelta
from typing import Any, TypeVar

from torch.distributed import DistNetworkError
from torch.distributed.elastic.rendezvous import (
    RendezvousClosedError,
    RendezvousError,
    RendezvousHandler,
    RendezvousInfo,
    RendezvousStateError,
    RendezvousStoreInfo,
    RendezvousTimeoutError,
)
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import C10dRendezvousBackend
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import (
    DynamicRendezvousHandler,
    RendezvousBackend,
    RendezvousTimeout,
    Token,
    _NodeDesc,
    _RendezvousState,
)
from torch.distributed.rendezvous import TCPStore

from unsloth_multigpu.errors import LaunchError
from unsloth_multigpu.launch.nodes import address_towards, is_one_node, listen_at, split_endpoint
from unsloth_multigpu.launch.rendezvous import LoopbackRendezvous, serve_store
from unsloth_multigpu.logs import get_logger
from unsloth_multigpu.options import MultiGPUConfig, num_nodes
from unsloth_multigpu.wire.beat import Beat, Node, decode_beats, encode_beats
from unsloth_multigpu.wire.wait import wait_until

logger = get_logger(__name__)

T = TypeVar("T")

# Set for the shell that becomes a rank, which makes it TORCHELASTIC_RESTART_COUNT.
ENV_ROUND = "ROUND_OF_ALL_NODES"
# How long a round of MIN:MAX nodes waits for more once MIN are there.
LAST_CALL_S = 10.0
# A call to a store that can be reached takes milliseconds.
CALL_LIMIT_S = 15.0
# No result depends on whether the other nodes are told that this one ends.
GOODBYE_LIMIT_S = 3.0
_LAST_TO_LEAVE_S = 1.0
_POLL_S = 1.0
# What a call to a store or to torch's handler raises.
_FAILURES = (RendezvousError, RuntimeError, OSError, ValueError)
Hear = Callable[[Sequence[Node]], Mapping[int, Beat]]


def make_handler(config: MultiGPUConfig, run_id: str, hear: Hear) -> RendezvousHandler:
    """How the nodes of this run meet. With several nodes, waits until `rdzv_endpoint` is served.

    Raises:
        LaunchError: It cannot be reached, or was not there within `timeout_s`.
    """
    return LoopbackRendezvous(run_id) if is_one_node(config) else NodesRendezvous(config, run_id, hear)


class NodesRendezvous(RendezvousHandler):
    """Lets this node meet the others at `rdzv_endpoint`, and continue without nodes that went away.

    Args:
        config: The run's options.
        run_id: Name of the run among those that meet there.
        hear: Gets, about once a second and in a thread of its own, what is known of the other nodes of the round.
            Returns the latest beats of this node's ranks, which are sent to the other nodes.
    """

    # Ranks connect to a store of a supervisor instead of opening their own.
    use_agent_store = True

    def __init__(self, config: MultiGPUConfig, run_id: str, hear: Hear) -> None:
        self._config = config
        self._run_id = run_id
        self._hear = hear
        host, port = split_endpoint(config)
        address = address_towards(host, port)
        listener = listen_at(host, port)
        # Others reach the node that serves the endpoint by the name that they were given.
        self._address = address if listener is None else host
        self._store = self._open_store(host, port, listener)
        fewest, most = num_nodes(config.nnodes)
        backend = PlainStateBackend(C10dRendezvousBackend(self._store, run_id))
        timeouts = RendezvousTimeout(timedelta(seconds=config.timeout_s), timedelta(seconds=LAST_CALL_S))
        # Torch's handler orders the nodes by this text, which nothing connects to.
        place = self._address if config.node_rank is None else f"{config.node_rank:06d} {self._address}"
        self._handler = DynamicRendezvousHandler.from_backend(
            run_id, self._store, backend, fewest, most, place, timeouts
        )
        # Torch's handler keeps one store for the ranks of all rounds otherwise.
        os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
        self._ranks_store: TCPStore | None = None
        self._info: RendezvousInfo | None = None
        self._others: dict[int, Node] = {}
        self._texts: dict[int, bytes] = {}
        self._is_server = listener is not None
        self._round = -1
        self._num_nodes = 1
        self._lock = threading.Lock()
        self._num_waiting = 0
        self._lost: RendezvousError | None = None
        self._stop = threading.Event()
        threading.Thread(target=self._poll, name="unsloth_multigpu-nodes", daemon=True).start()

    def _open_store(self, host: str, port: int, listener: socket.socket | None) -> TCPStore:
        is_server = listener is not None
        logger.info("nodes meet at %s:%d, nnodes=%s serves=%s", host, port, self._config.nnodes, is_server)

        def connect() -> TCPStore:
            timeout = timedelta(seconds=self._config.timeout_s)
            if listener is not None:
                return serve_store(host, listener.getsockname()[1], listener.detach(), timeout=timeout)
            return TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=timeout)

        try:
            store = _within(self._config.timeout_s + CALL_LIMIT_S, connect)
        except _FAILURES as error:
            raise LaunchError(
                f"No node serves rdzv_endpoint={self._config.rdzv_endpoint!r}; waited {self._config.timeout_s:g} s.",
                hint="Start the same command on the node that has this address, and check that its port is open.",
            ) from error
        store.set_timeout(timedelta(seconds=CALL_LIMIT_S))
        return store

    def get_backend(self) -> str:
        """Name under which torch elastic knows this kind."""
        return "nodes"

    def next_rendezvous(self) -> RendezvousInfo:
        """Waits for the nodes of the next round; the ranks that start then inherit its number.

        Raises:
            RendezvousError: Fewer nodes than the minimum came, the run was closed, or the store does not answer.
        """
        # While the network is cut, a call blocks until the connection is back.
        if not self._lock.acquire(timeout=self._config.timeout_s):
            raise RendezvousTimeoutError("the store does not answer")
        try:
            info = _within(self._config.timeout_s + 2 * CALL_LIMIT_S, self._handler.next_rendezvous)
            self._num_waiting = 0
            return _within(2 * CALL_LIMIT_S, lambda: self._serve_ranks(info))
        finally:
            self._lock.release()

    def _serve_ranks(self, info: RendezvousInfo) -> RendezvousInfo:
        """A store for the ranks of this round alone, without addresses and keys of earlier ranks."""
        self._check_place(info)
        key = "unsloth_multigpu/ranks"
        if info.rank == 0:
            listener = listen_at(self._address, 0)
            if listener is None:
                raise OSError(f"this machine cannot listen at its address {self._address}")
            port = listener.getsockname()[1]
            self._ranks_store = serve_store(self._address, port, listener.detach())
            round_index = self._store.add(f"unsloth_multigpu/{self._run_id}/rounds", 1) - 1
            for node in range(info.world_size):
                # A key that is missing would keep its readers waiting.
                info.store.set(_beats_key(node), "")
            info.store.set(key, json.dumps([self._address, port, round_index]))
        address, port, round_index = json.loads(info.store.get(key))
        self._round, self._num_nodes, self._info = int(round_index), info.world_size, info
        now_s = time.monotonic()
        self._others = {node: Node(node, now_s, {}) for node in range(info.world_size) if node != info.rank}
        self._texts.clear()
        self._hear(list(self._others.values()))
        os.environ[ENV_ROUND] = str(self._round)
        logger.info("round=%d nodes=%d node=%d", self._round, info.world_size, info.rank)
        return RendezvousInfo(info.store, info.rank, info.world_size, RendezvousStoreInfo(str(address), int(port)))

    def _check_place(self, info: RendezvousInfo) -> None:
        """With a fixed number of nodes each has the place that it was given, unless two were given one."""
        wanted, is_fixed = self._config.node_rank, ":" not in self._config.nnodes
        if is_fixed and wanted is not None and wanted != info.rank:
            raise LaunchError(
                f"node_rank={wanted}, but this is node {info.rank} of the {info.world_size} that met: another node has "
                "the same node_rank, or none.",
                hint=f"Give each node its own, 0 .. {info.world_size - 1}, or leave node_rank out on all.",
            )

    def num_nodes_waiting(self) -> int:
        """Nodes that want to join, as of the last second. Does not wait.

        Raises:
            RendezvousConnectionError: The node that serves `rdzv_endpoint` has closed the connection.
        """
        if self._lost is not None:
            raise self._lost
        return self._num_waiting

    def _poll(self) -> None:
        """In a thread of its own: torch elastic asks in the loop by which it watches the ranks."""
        is_silent = False
        while not self._stop.wait(_POLL_S):
            with self._lock:
                try:
                    self._num_waiting = self._handler.num_nodes_waiting()
                    self._exchange_beats()
                    is_silent = False
                except _FAILURES as error:
                    if isinstance(error, RendezvousError) and isinstance(error.__cause__, DistNetworkError):
                        self._lost = error
                        return
                    # A network that is cut may come back. Training continues while its own connections hold.
                    if not is_silent:
                        logger.warning("rdzv_endpoint=%s does not answer", self._config.rdzv_endpoint)
                    is_silent = True

    def _exchange_beats(self) -> None:
        """Receives how the ranks of the other nodes are, and sends how those of this node are."""
        if self._info is None:
            return
        store, others = self._info.store, list(self._others)
        texts = store.multi_get([_beats_key(node) for node in others]) if others else []
        now_s = time.monotonic()
        for node, text in zip(others, texts, strict=True):
            beats = decode_beats(text, now_s) if text != self._texts.get(node) else None
            if beats is not None:
                self._others[node], self._texts[node] = Node(node, now_s, beats), text
        own = self._hear(list(self._others.values()))
        store.set(_beats_key(self._info.rank), encode_beats(own, time.monotonic()))

    def is_closed(self) -> bool:
        """True once a node has ended the run for all."""
        return bool(_within(CALL_LIMIT_S, self._handler.is_closed))

    def set_closed(self) -> None:
        """Ends the run for all nodes."""
        _within(CALL_LIMIT_S, self._handler.set_closed)

    def get_run_id(self) -> str:
        """Identifier of the run."""
        return self._run_id

    def shutdown(self) -> bool:
        """Ends the run for all nodes; False where they cannot be told."""
        self._stop.set()
        try:
            is_told = bool(_within(GOODBYE_LIMIT_S, self._handler.shutdown))
            _within(GOODBYE_LIMIT_S, self._leave)
            return is_told
        except _FAILURES as error:
            logger.debug("the other nodes were not told: %s", error)
            return False

    def _leave(self) -> None:
        """The store ends with the node that serves it. If all nodes end together, that node must end last."""
        key = f"unsloth_multigpu/{self._run_id}/left/{self._round}"
        self._store.add(key, 1)
        if self._is_server:
            wait_until(lambda: self._store.add(key, 0) >= self._num_nodes, time.monotonic() + _LAST_TO_LEAVE_S)


def explain(error: RendezvousError, config: MultiGPUConfig) -> LaunchError:
    """What it means for the user that nodes could not meet."""
    place = f"rdzv_endpoint={config.rdzv_endpoint!r}"
    if isinstance(error, RendezvousClosedError):
        return LaunchError(
            f"Another node has ended the run {config.rdzv_id!r}.",
            hint="Its own message names the cause. Start the command again on all nodes.",
        )
    if isinstance(error, RendezvousTimeoutError):
        return LaunchError(
            f"Fewer than {num_nodes(config.nnodes)[0]} node(s) met at {place}, or it does not answer; "
            f"waited {config.timeout_s:g} s.",
            hint="Start the command on the other nodes too, with the same rdzv_id, or set nnodes to MIN:MAX.",
        )
    if isinstance(error, RendezvousStateError):
        return LaunchError(
            f"{place}: {error}", hint="Use one version of torch on all nodes, in a network of their own."
        )
    return LaunchError(f"The node that serves {place} is gone.", hint="Start the command again on all nodes.")


def _beats_key(node: int) -> str:
    return f"unsloth_multigpu/beats/{node}"


def _within(limit_s: float, call: Callable[[], T]) -> T:
    """Calls in a thread: a socket whose other end disappeared blocks until the kernel gives up.

    Raises:
        RendezvousTimeoutError: It took longer than `limit_s`; the thread is left behind.
    """
    outcome: Future[T] = Future()

    def run() -> None:
        try:
            outcome.set_result(call())
        except _FAILURES as error:
            outcome.set_exception(error)

    threading.Thread(target=run, name="unsloth_multigpu-call", daemon=True).start()
    try:
        return outcome.result(timeout=limit_s)
    except FutureTimeoutError:
        raise RendezvousTimeoutError(f"no answer within {limit_s:g} s") from None


class PlainStateBackend(RendezvousBackend):
    """Wraps a backend of torch's, so that torch unpickles only what this process has pickled.

    The store has no authentication: whoever reaches its port can still disturb the run, but cannot execute code.

    Args:
        backend: Keeps the state's bytes where all nodes find them.
    """

    def __init__(self, backend: RendezvousBackend) -> None:
        self._backend = backend

    @property
    def name(self) -> str:
        """Name of the wrapped backend."""
        return str(self._backend.name)

    def get_state(self) -> tuple[bytes, Token] | None:
        """The pickled state and its version, None before the first.

        Raises:
            RendezvousStateError: What is stored is not a state.
        """
        found = self._backend.get_state()
        return None if found is None else (_pickled(found[0]), found[1])

    def set_state(self, state: bytes, token: Token | None = None) -> tuple[bytes, Token, bool] | None:
        """Stores a pickled state of this process, if `token` is still the latest version.

        Returns:
            The state that is stored now, its version, and whether it is the one given.

        Raises:
            RendezvousStateError: What is stored is not a state.
        """
        plain = json.dumps({name: _encode(value) for name, value in vars(pickle.loads(state)).items()})
        found = self._backend.set_state(plain.encode(), token)
        return None if found is None else (_pickled(found[0]), found[1], found[2])


def _pickled(plain: bytes) -> bytes:
    state = _RendezvousState()
    try:
        values = {name: _decode(value) for name, value in json.loads(plain).items()}
    except (ValueError, TypeError, AttributeError, RecursionError) as error:
        raise RendezvousStateError(f"The rendezvous state in the store cannot be read: {error}") from error
    if values.keys() != vars(state).keys():
        raise RendezvousStateError("The rendezvous state in the store was written by another version of torch.")
    vars(state).update(values)
    return pickle.dumps(state)


def _encode(value: Any) -> Any:
    if isinstance(value, datetime):
        return {"time": value.isoformat()}
    if isinstance(value, _NodeDesc):
        return {"node": [value.addr, value.pid, value.local_id]}
    if isinstance(value, set):
        return {"set": [_encode(v) for v in sorted(value)]}
    if isinstance(value, dict):
        return {"dict": [[_encode(k), _encode(v)] for k, v in value.items()]}
    return value


def _decode(value: Any) -> Any:
    if not isinstance(value, dict):
        return value
    ((kind, content),) = value.items()
    if kind == "time":
        return datetime.fromisoformat(content)
    if kind == "node":
        addr, pid, local_id = content
        return _NodeDesc(str(addr), int(pid), int(local_id))
    if kind == "set":
        return {_decode(v) for v in content}
    if kind == "dict":
        return {_decode(k): _decode(v) for k, v in content}
    raise ValueError(f"{kind!r} is not a kind of value")
