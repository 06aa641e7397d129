"""What this machine is called in the network of the other nodes, and what its ranks are told of it."""

import socket

import pytest

from unsloth_multigpu.launch import nodes
from unsloth_multigpu.launch.nodes import listen_at, shared_seed, socket_interfaces, split_endpoint
from unsloth_multigpu.options import MultiGPUConfig


def config_of(endpoint="127.0.0.1:29400", rdzv_id="job"):
    return MultiGPUConfig(nnodes=2, rdzv_endpoint=endpoint, rdzv_id=rdzv_id)


def test_one_node_stays_on_its_loopback_interface():
    assert MultiGPUConfig().nnodes == 1
    assert socket_interfaces(MultiGPUConfig()) == {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}


def test_ranks_take_the_interface_that_leads_to_the_others(monkeypatch):
    assert socket_interfaces(config_of()) == {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "=lo"}
    # NCCL by itself would take the first one.
    monkeypatch.setattr(nodes, "_interface_of", {"172.18.0.1": "br-1", "10.0.0.2": "eth1", "127.0.0.1": "lo"}.get)
    monkeypatch.setattr(nodes, "address_towards", lambda host, port: "10.0.0.2")
    chosen = {"GLOO_SOCKET_IFNAME": "eth1", "NCCL_SOCKET_IFNAME": "=eth1"}
    assert socket_interfaces(config_of("10.0.0.1:29400")) == chosen
    # The machine's own name leads to its loopback interface, where no other node is.
    monkeypatch.setattr(nodes, "address_towards", lambda host, port: "127.0.1.1")
    assert socket_interfaces(config_of("myself:29400")) == {}


def test_nodes_of_a_run_choose_the_same_without_asking_each_other():
    assert shared_seed(config_of()) == shared_seed(config_of("10.0.0.1:1"))
    assert shared_seed(config_of()) != shared_seed(config_of(rdzv_id="other"))
    assert shared_seed(MultiGPUConfig()) != shared_seed(MultiGPUConfig())
    assert 0 <= shared_seed(config_of()) < 2**32


@pytest.mark.parametrize(
    ("endpoint", "place"),
    [("node1:29400", ("node1", 29400)), ("[fd00::1]:80", ("fd00::1", 80)), ("10.0.0.1:1", ("10.0.0.1", 1))],
)
def test_endpoint_is_host_and_port(endpoint, place):
    assert split_endpoint(config_of(endpoint)) == place


def test_only_one_process_of_the_machine_with_that_address_serves():
    first = listen_at("127.0.0.1", 0)
    with first:
        assert first.getsockname()[0] == "127.0.0.1"
        assert listen_at("127.0.0.1", first.getsockname()[1]) is None
    assert listen_at("192.0.2.1", 29400) is None  # Of no machine: RFC 5737.


def test_own_name_that_means_loopback_is_served_on_all_interfaces(monkeypatch):
    # As Debian writes /etc/hosts.
    monkeypatch.setattr(nodes, "_resolve", lambda host, port: (socket.AF_INET, ("127.0.1.1", port)))
    listener = listen_at("node1", 0)
    with listener:
        assert listener.getsockname()[0] == "0.0.0.0"
