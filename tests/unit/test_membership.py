"""Nodes meet, go away and come back. Here each node is a handler of its own in this process, over loopback."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import replace
from datetime import timedelta

import pytest
from torch.distributed import DistNetworkError
from torch.distributed.elastic.rendezvous import (
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousError,
    RendezvousInfo,
    RendezvousStateError,
    RendezvousTimeoutError,
)
from torch.distributed.rendezvous import TCPStore

from tests.helpers.run import free_port, wait_until
from unsloth_multigpu.errors import LaunchError
from unsloth_multigpu.launch import membership
from unsloth_multigpu.launch.membership import ENV_ROUND, Hear, NodesRendezvous, explain, make_handler
from unsloth_multigpu.launch.rendezvous import LoopbackRendezvous
from unsloth_multigpu.options import MultiGPUConfig
from unsloth_multigpu.wire.beat import Beat, Node, Phase


@pytest.fixture
def node(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., NodesRendezvous]]:
    """Makes a node; all are told goodbye at the end."""
    for name in (ENV_ROUND, "TORCH_DISABLE_SHARE_RDZV_TCP_STORE"):
        monkeypatch.setenv(name, "")
    monkeypatch.setattr(membership, "LAST_CALL_S", 1.0)
    port = free_port()
    made: list[NodesRendezvous] = []

    def make(
        nnodes: str = "2", timeout_s: float = 30.0, hear: Hear = lambda others: {}, node_rank: int | None = None
    ) -> NodesRendezvous:
        given = {"nnodes": nnodes, "rdzv_endpoint": f"127.0.0.1:{port}", "rdzv_id": "job", "timeout_s": timeout_s}
        config = MultiGPUConfig(**given, node_rank=node_rank)
        made.append(NodesRendezvous(config, "job", hear))
        return made[-1]

    yield make
    for one in made[::-1]:
        one.shutdown()


def in_thread(call: Callable[[], RendezvousInfo]) -> Future[RendezvousInfo]:
    outcome: Future[RendezvousInfo] = Future()

    def run() -> None:
        try:
            outcome.set_result(call())
        except LaunchError as error:
            outcome.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return outcome


def meet(*nodes: NodesRendezvous) -> list[RendezvousInfo]:
    return [outcome.result(60) for outcome in [in_thread(one.next_rendezvous) for one in nodes]]


def store_of_ranks(infos: list[RendezvousInfo]) -> TCPStore:
    """What a rank connects to; all nodes name the same place."""
    ((addr, port),) = {(i.bootstrap_store_info.master_addr, i.bootstrap_store_info.master_port) for i in infos}
    return TCPStore(addr, port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=10))


def test_one_node_meets_nobody() -> None:
    assert isinstance(make_handler(MultiGPUConfig(), "id", lambda others: {}), LoopbackRendezvous)


def test_each_round_has_a_store_of_its_own_and_one_number_for_all_nodes(node: Callable[..., NodesRendezvous]) -> None:
    first, second = node(), node()
    before = meet(first, second)
    assert sorted(info.rank for info in before) == [0, 1]
    assert {info.world_size for info in before} == {2}
    assert os.environ[ENV_ROUND] == "0"
    store_of_ranks(before).set("address of a rank", "x")
    after = meet(first, second)
    assert os.environ[ENV_ROUND] == "1"
    assert not store_of_ranks(after).check(["address of a rank"])


def test_each_node_has_the_place_that_it_was_given(node: Callable[..., NodesRendezvous]) -> None:
    # By address and process alone their order would be the same in all rounds, whatever they were given.
    nodes = [node(node_rank=1), node(node_rank=0)]
    infos = meet(*nodes)
    assert [info.rank for info in infos] == [1, 0]
    assert {info.bootstrap_store_info.master_addr for info in infos} == {"127.0.0.1"}


def test_two_nodes_with_one_place_are_an_error(node: Callable[..., NodesRendezvous]) -> None:
    nodes = [node(node_rank=0), node(node_rank=0)]
    threads = [in_thread(one.next_rendezvous) for one in nodes]
    errors = [outcome.exception(60) for outcome in threads]
    (error,) = [e for e in errors if e is not None]
    assert isinstance(error, LaunchError)
    assert str(error).startswith("node_rank=0, but this is node 1 of the 2 that met: another node has the same")


def test_nodes_hear_how_the_ranks_of_the_others_are(node: Callable[..., NodesRendezvous]) -> None:
    heard: list[dict[int, Node]] = [{}, {}]
    began_s = time.monotonic()
    beats = [
        {0: Beat(3, Phase.SAVE, 0, began_s - 5, began_s, 7, "all_reduce [4]")},
        {1: Beat(4, Phase.DATA, 2, began_s - 50, began_s, -1, "")},
    ]

    def hearer(here: int) -> Hear:
        def hear(others: Sequence[Node]) -> dict[int, Beat]:
            heard[here] = {n.index: n for n in others}
            return beats[here]

        return hear

    nodes = [node(hear=hearer(0)), node(hear=hearer(1))]
    numbers = [info.rank for info in meet(*nodes)]
    for here, there in ((0, 1), (1, 0)):
        place = numbers[there]
        assert list(heard[here]) == [place]
        wait_until(lambda here=here, place=place: heard[here][place].beats, 20.0, "news of the other node")
        ((rank, beat),) = heard[here][place].beats.items()
        said = beats[there][rank]
        assert rank == there
        # Times are those of this machine's clock, and younger by what the news took, a second as a rule.
        assert 0 <= beat.progress_s - said.progress_s < 20
        assert replace(beat, progress_s=said.progress_s, alive_s=said.alive_s) == said
    with nodes[1]._lock:
        nodes[1]._exchange_beats = lambda: None  # type: ignore[method-assign]
    with nodes[0]._lock:
        nodes[0]._exchange_beats()
        before = heard[0][numbers[1]]
        # What was heard before is no news, and what nobody understands is none either.
        nodes[0]._exchange_beats()
        nodes[1]._info.store.set(membership._beats_key(numbers[1]), b"cos\nsystem")  # type: ignore[union-attr]
        nodes[0]._exchange_beats()
        assert heard[0][numbers[1]] == before


def test_late_node_is_let_in_at_the_next_round(
    node: Callable[..., NodesRendezvous], monkeypatch: pytest.MonkeyPatch
) -> None:
    # A node that waits looks once a second.
    monkeypatch.setattr(membership, "LAST_CALL_S", 3.0)
    early = node("1:2")
    (info,) = meet(early)
    assert (info.rank, info.world_size) == (0, 1)
    late = in_thread(node("1:2").next_rendezvous)
    wait_until(lambda: early.num_nodes_waiting() == 1, 20.0, "sight of the late node")
    infos = [early.next_rendezvous(), late.result(30)]
    assert {info.world_size for info in infos} == {2}
    assert early.num_nodes_waiting() == 0
    assert os.environ[ENV_ROUND] == "1"


def test_node_alone_gives_up(node: Callable[..., NodesRendezvous]) -> None:
    with pytest.raises(RendezvousTimeoutError):
        node(timeout_s=1.0).next_rendezvous()


def test_closed_run_lets_nobody_in(node: Callable[..., NodesRendezvous]) -> None:
    first, second = node(), node()
    meet(first, second)
    assert not first.is_closed()
    assert second.shutdown()
    with pytest.raises(RendezvousClosedError):
        first.next_rendezvous()
    assert first.is_closed()


def test_endpoint_that_nobody_serves_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(membership, "listen_at", lambda host, port: None)
    port = free_port()
    config = MultiGPUConfig(nnodes="2", rdzv_endpoint=f"127.0.0.1:{port}", rdzv_id="job", timeout_s=0.5)
    with pytest.raises(LaunchError, match=r"No node serves rdzv_endpoint='127.0.0.1:\d+'; waited 0.5 s"):
        NodesRendezvous(config, "job", lambda others: {})


class Silent:
    """In place of torch's handler: answers nothing forever, or raises."""

    def __init__(self, cause: Exception | None = None) -> None:
        self.cause = cause
        self.num_calls = 0

    def num_nodes_waiting(self) -> int:
        self.num_calls += 1
        if self.cause is not None:
            raise RendezvousConnectionError("the connection has failed") from self.cause
        threading.Event().wait()
        return 0

    def shutdown(self) -> bool:
        return bool(self.num_nodes_waiting())


def test_silent_store_does_not_hold_up_the_watch_over_ranks(
    node: Callable[..., NodesRendezvous], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(membership, "CALL_LIMIT_S", 0.2)
    monkeypatch.setattr(membership, "GOODBYE_LIMIT_S", 0.2)
    one = node("1:2")
    one._config = replace(one._config, timeout_s=0.2)
    one._handler = silent = Silent()  # type: ignore[assignment]
    wait_until(lambda: silent.num_calls > 0, 20.0, "first call")
    begin = time.monotonic()
    assert one.num_nodes_waiting() == 0
    with pytest.raises(RendezvousTimeoutError):
        one.next_rendezvous()
    assert not one.shutdown()
    assert time.monotonic() - begin < 20.0


def test_store_whose_connection_is_closed_ends_the_node_and_one_that_is_slow_does_not(
    node: Callable[..., NodesRendezvous],
) -> None:
    slow, cut = node("1:2"), node("1:2")
    slow._handler = on_slow = Silent(RuntimeError("wait timeout"))  # type: ignore[assignment]
    cut._handler = Silent(DistNetworkError("Broken pipe"))  # type: ignore[assignment]
    wait_until(lambda: cut._lost is not None and on_slow.num_calls > 1, 60, "two calls")
    assert slow.num_nodes_waiting() == 0
    with pytest.raises(RendezvousConnectionError):
        cut.num_nodes_waiting()


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (RendezvousClosedError(), "Another node has ended the run 'job'."),
        (RendezvousTimeoutError(), "Fewer than 2 node(s) met at rdzv_endpoint='host:1'"),
        (RendezvousConnectionError(), "The node that serves rdzv_endpoint='host:1' is gone."),
        (RendezvousStateError("It is no state."), "It is no state."),
    ],
)
def test_user_reads_what_became_of_the_nodes(error: RendezvousError, message: str) -> None:
    config = MultiGPUConfig(nnodes="2:3", rdzv_endpoint="host:1", rdzv_id="job")
    assert message in str(explain(error, config))
