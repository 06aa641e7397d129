"""The engine and its stores, on every version of torch that is promised."""

from __future__ import annotations

import dataclasses
import socket
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from torch.distributed.launcher.api import LaunchConfig
from torch.distributed.rendezvous import TCPStore

from unsloth_multigpu.launch import engine, rendezvous
from unsloth_multigpu.launch.rendezvous import LoopbackRendezvous, Rounds
from unsloth_multigpu.options import MultiGPUConfig

# `LaunchConfig` of torch 2.6 has not these fields.
LATER = {"shutdown_timeout": 30, "signals_to_handle": "SIGQUIT"}
OLDER = dataclasses.make_dataclass(
    "LaunchConfig",
    [(f.name, f.type, f) for f in dataclasses.fields(LaunchConfig) if f.name not in LATER],
)


@pytest.mark.parametrize("launch_config", [LaunchConfig, OLDER], ids=["installed", "older"])
def test_engine_gets_only_options_that_it_has(
    launch_config: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[Any] = []

    def elastic_launch(config: Any, entrypoint: str) -> Any:
        seen.append(config)
        return lambda *arguments: None

    monkeypatch.setattr(engine, "LaunchConfig", launch_config)
    monkeypatch.setattr(engine, "elastic_launch", elastic_launch)
    rounds = Rounds(LoopbackRendezvous(launch_config.__module__), lambda attempt: None, lambda: None, lambda: None)
    engine.run_elastic(["train.py"], 2, MultiGPUConfig(), "id", tmp_path, rounds)
    assert seen[0].nproc_per_node == 2
    known = {field.name for field in dataclasses.fields(launch_config)}
    for name, value in LATER.items():
        assert getattr(seen[0], name, None) == (value if name in known else None)


def older_store(*args: Any, use_libuv: bool = True, **kwargs: Any) -> TCPStore:
    """`TCPStore` up to torch 2.7."""
    if use_libuv and kwargs.get("master_listen_fd") is not None:
        raise NotImplementedError(
            "The libuv TCPStore backend does not support initialization with an listen fd. Please switch to the legacy "
            'TCPStore by setting environment variable USE_LIBUV to "0".'
        )
    return TCPStore(*args, use_libuv=use_libuv, **kwargs)


def test_store_of_ranks_takes_over_a_socket_where_libuv_cannot(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendezvous, "TCPStore", older_store)
    info = LoopbackRendezvous("id").next_rendezvous()
    address = info.bootstrap_store_info
    # A rank joins with torch's default backend, whatever serves.
    limit = timedelta(seconds=10)
    rank = TCPStore(address.master_addr, address.master_port, is_master=False, timeout=limit)
    rank.set("key", "value")
    rank.add("count", 2)
    assert rank.get("key") == b"value"
    assert rank.multi_get(["key", "count"]) == [b"value", b"2"]
    assert rank.compare_set("key", "value", "other") == b"other"
    assert rank.check(["none"]) is False


def test_store_is_served_on_the_socket_that_was_given() -> None:
    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    store = rendezvous.serve_store("127.0.0.1", port, listener.detach(), timeout=timedelta(seconds=10))
    assert store.port == port
