"""Arguments of a Trainer of TRL that name the server of `generators`, and how a rank waits for that server."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from types import SimpleNamespace

import pytest

from unsloth_multigpu.errors import ConfigError, RankTimeoutError, SetupError, VersionError
from unsloth_multigpu.hooks import server_patches
from unsloth_multigpu.hooks.server_patches import GenerationServer
from unsloth_multigpu.launch import generation_server
from unsloth_multigpu.options import MultiGPUConfig
from unsloth_multigpu.session import Session, open_session
from unsloth_multigpu.wire.event import EventWriter, read_events
from unsloth_multigpu.wire.heartbeat import HeartbeatPage
from unsloth_multigpu.wire.identity import RankIdentity


@dataclass
class Arguments:
    """As GRPOConfig has them."""

    use_vllm: bool = True
    vllm_mode: str = "server"
    vllm_server_base_url: str | None = None
    vllm_server_host: str = "0.0.0.0"
    vllm_server_port: int = 8000
    vllm_group_port: int = 51216


@pytest.fixture(autouse=True)
def _without_unsloth(monkeypatch):
    monkeypatch.delitem(sys.modules, "unsloth", raising=False)
    monkeypatch.setenv("no_proxy", "local")


def server(folder="", rank=0):
    """The server of a rank that waits 0.2 s for it."""
    config = MultiGPUConfig(generators=1, timeout_s=0.1)
    events = EventWriter(folder, rank, 0, HeartbeatPage(None, rank))
    return GenerationServer(config, 20000, events, is_first=rank == 0)


def use(server, name, **arguments):
    """Creates TRL's object for a Trainer whose model has this name."""

    def original(self, model, max_model_length=None, model_impl=None):
        pass

    server.patch().wrap(original, None, model=SimpleNamespace(name_or_path=name), **arguments)


def test_arguments_name_the_server_also_when_they_are_built_again():
    args = Arguments()
    server().set_address(args)
    assert args == Arguments(vllm_server_base_url="http://127.0.0.1:20000", vllm_group_port=20001)
    again = Arguments(**vars(args))
    server().set_address(again)
    assert again == args
    server().set_address(SimpleNamespace())  # Those of a Trainer that does not generate.


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"use_vllm": False}, "generators=1, but use_vllm=False and vllm_mode='server'"),
        ({"vllm_mode": "colocate"}, "generators=1, but use_vllm=True and vllm_mode='colocate'"),
        ({"vllm_server_base_url": "http://other:8000"}, "vllm_server_base_url='http://other:8000' names another one"),
        ({"vllm_server_host": "other"}, "vllm_server_host='other' names another one"),
        ({"vllm_server_port": 8001}, "vllm_server_port=8001 names another one"),
    ],
)
def test_arguments_that_ask_for_no_server_or_another_one_are_refused(given, message):
    with pytest.raises(ConfigError, match=message):
        server().set_address(Arguments(**given))


def test_unsloth_and_an_old_trl_are_refused(monkeypatch):
    monkeypatch.setitem(sys.modules, "unsloth", SimpleNamespace())
    with pytest.raises(SetupError, match="with Unsloth, each process generates by itself"):
        server().set_address(Arguments())
    monkeypatch.setattr(server_patches, "check_version", lambda _: SimpleNamespace(ok=False))
    with pytest.raises(VersionError, match=r"generators=1 needs trl>=0\.28"):
        server().set_address(Arguments())


def test_rank_0_asks_with_the_trainers_model_and_all_wait(tmp_path, monkeypatch):
    for rank in (0, 1):
        with pytest.raises(RankTimeoutError, match=r"no server answered within twice timeout_s=0\.1 s"):
            use(server(tmp_path, rank), "tiny", max_model_length=64, model_impl="auto")
    (event,) = read_events(tmp_path, 0)
    assert (event.rank, event.facts["port"]) == (0, 20000)
    assert event.facts["arguments"] == ["--model", "tiny", "--max_model_len", "64", "--vllm_model_impl", "auto"]
    monkeypatch.setattr(generation_server, "answers", lambda port: port == 20000)
    use(server(tmp_path, 1), "tiny")
    assert set(os.environ["no_proxy"].split(",")) == {"local", "127.0.0.1"}
    with pytest.raises(ConfigError, match="by its name, but the model has none"):
        use(server(tmp_path), "")


def test_server_serves_one_trainer_and_no_training_goes_by_it(tmp_path, monkeypatch):
    used, identity = server(tmp_path), RankIdentity(0, 0, 1, 1, "unsloth_multigpu")
    session = Session(MultiGPUConfig(generators=1), identity, server=used)
    with pytest.raises(SetupError, match="reserves GPUs for generation, and Other does not generate"):
        session.run_training(type("Other", (), {})(), lambda: None, {})
    monkeypatch.setattr(generation_server, "answers", lambda _: True)
    use(used, "tiny")
    used.check_use(None)
    with pytest.raises(SetupError, match="a second Trainer requests it"):
        use(used, "tiny")


def test_ranks_of_another_launcher_are_refused():
    told = "is started by the process that starts the ranks, and torchrun has started them"
    with pytest.raises(SetupError, match=told):
        open_session(Session(MultiGPUConfig(generators=1), RankIdentity(0, 0, 2, 2, "torchrun")))
