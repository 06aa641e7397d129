"""Nodes meet, fail, are lost and leave; what this machine is called in their network, and what its ranks are told.

Here each node is a rendezvous of its own in this process, over loopback.
"""

import socket
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from datetime import timedelta

import pytest
from torch.distributed.rendezvous import TCPStore

from tests.helpers.run import free_port, wait_until
from unsloth_multigpu.errors import LaunchError
from unsloth_multigpu.launch import nodes
from unsloth_multigpu.launch.nodes import Rendezvous, listen_at, socket_interfaces, split_endpoint
from unsloth_multigpu.options import MultiGPUConfig


@pytest.fixture
def node(monkeypatch):
    """Makes a node; all leave at the end, the one that serves first."""
    monkeypatch.setattr(nodes, "PERIOD_S", 0.1)
    monkeypatch.setattr(nodes, "GOODBYE_LIMIT_S", 1.0)
    port = free_port()
    with ExitStack() as stack:

        def make(num_ranks=1, node_rank=None, timeout_s=30.0):
            given = {"nnodes": 2, "rdzv_endpoint": f"127.0.0.1:{port}", "rdzv_id": "job", "timeout_s": timeout_s}
            draws = f"of {num_ranks} ranks"
            made = Rendezvous(MultiGPUConfig(**given, node_rank=node_rank), "job", num_ranks, draws)
            stack.enter_context(made)
            return made

        yield make


def meet(*meetings, attempt=0):
    with ThreadPoolExecutor() as pool:
        places = list(pool.map(lambda one: one.meet(attempt, lambda: False), meetings))
    assert None not in places
    return places


def store_of_ranks(places):
    """What a rank connects to; all nodes name the same one."""
    ((address, port),) = {(place.master_addr, place.master_port) for place in places}
    return TCPStore(address, port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=10))


def test_nodes_have_their_ranks_one_after_the_other_and_a_new_store_in_each_attempt(node):
    first, second = node(2), node(3)
    before = meet(first, second)
    # Rank 0 is on the node that serves, which came first.
    assert [(place.rank, place.local_world_size, place.world_size) for place in before] == [(0, 2, 5), (2, 3, 5)]
    assert (first.node, second.node) == (0, 1)
    assert first.random_state == second.random_state  # Of one of the two.
    assert first.random_state in ("of 2 ranks", "of 3 ranks")
    store_of_ranks(before).set("address of a rank", "x")
    after = meet(first, second, attempt=1)
    assert not store_of_ranks(after).check(["address of a rank"])
    assert first.unheard_s().keys() == {"node 1 (ranks 2, 3, 4)"}
    assert second.unheard_s().keys() == {"node 0 (ranks 0, 1)"}


def test_one_node_meets_nobody():
    with Rendezvous(MultiGPUConfig(), "id", 2) as alone:
        place = alone.meet(0, lambda: False)
        assert (place.rank, place.world_size, alone.node, place.master_addr) == (0, 2, 0, "127.0.0.1")
        assert (alone.trouble(), alone.unheard_s(), alone.finish(lambda: False)) == ("", {}, "")
    assert not alone._thread.is_alive()


def test_two_nodes_with_one_place_are_an_error(node):
    node(node_rank=0, timeout_s=5.0)
    with pytest.raises(LaunchError, match="node_rank=0 cannot listen at rdzv_endpoint="):
        node(node_rank=0)
    first = node(node_rank=1)
    wait_until(lambda: first.node == 1, 20, "the place of the first")
    with pytest.raises(LaunchError, match="node_rank=1 is taken, or more than nnodes=2 nodes are in the run 'job'"):
        node(node_rank=1).meet(0, lambda: False)


def test_wait_for_other_nodes_has_a_limit_and_ends_by_a_signal(node):
    alone = node(timeout_s=0.5)
    assert alone.meet(0, lambda: True) is None
    with pytest.raises(LaunchError, match=r"Fewer than 2 node\(s\) arrived at .*; waited 0.5 s"):
        alone.meet(0, lambda: False)
    given = {"nnodes": 2, "rdzv_endpoint": "127.0.0.1:1", "rdzv_id": "j", "node_rank": 1, "timeout_s": 0.5}
    lost = Rendezvous(MultiGPUConfig(**given), "j", 1).__enter__()
    with pytest.raises(LaunchError, match=r"Node 0, which serves rdzv_endpoint=.*, is gone or unreachable"):
        lost.meet(0, lambda: False)


def test_failure_of_one_node_is_known_to_the_other_which_waits_for_it_again(node):
    first, second = node(), node()
    meet(first, second)
    assert (first.trouble(), second.trouble()) == ("", "")
    second.fail("rank 1 failed: ValueError: \x1b[2J bad row")
    wait_until(first.trouble, 20, "news of the failure")
    assert first.trouble() == "node 1 has ended: rank 1 failed: ValueError:  [2J bad row"
    assert not first.is_over()
    meet(first, second, attempt=1)
    assert (first.trouble(), second.trouble()) == ("", "")
    second.fail("rank 1 failed")
    second.__exit__()
    wait_until(first.is_over, 20, "news of the end")
    with pytest.raises(LaunchError, match="The run has ended: node 1 has ended: rank 1 failed"):
        first.meet(2, lambda: False)


def test_node_whose_ranks_have_ended_waits_for_the_others(node, monkeypatch):
    first, second = node(), node()
    meet(first, second)
    with ThreadPoolExecutor() as pool:
        outcome = pool.submit(first.finish, lambda: False)
        wait_until(lambda: second._others[0].state == "done", 20, "news of the end")
        assert not outcome.done()
        second.fail("late")
        assert outcome.result(20) == "node 1 has ended: late"
        meet(first, second, attempt=1)
        outcomes = [pool.submit(one.finish, lambda: False) for one in (first, second)]
        assert [outcome.result(20) for outcome in outcomes] == ["", ""]
        # The store is served until the others have left.
        monkeypatch.setattr(nodes, "GOODBYE_LIMIT_S", 20.0)
        leaving = pool.submit(first.__exit__)
        wait_until(lambda: second._others[0].state == "left", 20, "news of the first that leaves")
        time.sleep(5 * nodes.PERIOD_S)
        assert (second._error, leaving.done()) == (None, False)
        second.__exit__()
        leaving.result(20)


def test_node_that_is_silent_is_counted_and_given_up(node):
    first, second = node(timeout_s=1.0), node()
    meet(first, second)
    began_s = time.monotonic()
    second._exchange = lambda store, place: None
    assert first.finish(lambda: False) == "node 1 (rank 1) has not reported for 1 s"
    (silent_s,) = first.unheard_s().values()
    assert 1.0 < silent_s < time.monotonic() - began_s + 1.0


def config_of(endpoint="127.0.0.1:29400"):
    return MultiGPUConfig(nnodes=2, rdzv_endpoint=endpoint, rdzv_id="job")


def test_ranks_take_the_interface_that_leads_to_the_others(monkeypatch):
    assert socket_interfaces(MultiGPUConfig()) == {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}
    assert socket_interfaces(config_of()) == {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "=lo"}
    # NCCL by itself would take the first one.
    monkeypatch.setattr(nodes, "_interface_of", {"172.18.0.1": "br-1", "10.0.0.2": "eth1", "127.0.0.1": "lo"}.get)
    monkeypatch.setattr(nodes, "address_towards", lambda host, port: "10.0.0.2")
    chosen = {"GLOO_SOCKET_IFNAME": "eth1", "NCCL_SOCKET_IFNAME": "=eth1"}
    assert socket_interfaces(config_of("10.0.0.1:29400")) == chosen
    # The machine's own name leads to its loopback interface, where no other node is.
    monkeypatch.setattr(nodes, "address_towards", lambda host, port: "127.0.1.1")
    assert socket_interfaces(config_of("myself:29400")) == {}


@pytest.mark.parametrize(
    ("endpoint", "place"),
    [("node1:29400", ("node1", 29400)), ("[fd00::1]:80", ("fd00::1", 80)), ("10.0.0.1:1", ("10.0.0.1", 1))],
)
def test_endpoint_is_host_and_port(endpoint, place):
    assert split_endpoint(config_of(endpoint)) == place


def test_only_one_process_of_the_machine_with_that_address_serves(monkeypatch):
    with listen_at("127.0.0.1", 0) as first:
        assert first.getsockname()[0] == "127.0.0.1"
        assert listen_at("127.0.0.1", first.getsockname()[1]) is None
    assert listen_at("192.0.2.1", 29400) is None  # Of no machine: RFC 5737.
    # An own name that means loopback, as Debian writes /etc/hosts, is served on all interfaces.
    monkeypatch.setattr(nodes, "_resolve", lambda host, port: (socket.AF_INET, ("127.0.1.1", port)))
    with listen_at("node1", 0) as listener:
        assert listener.getsockname()[0] == "0.0.0.0"
