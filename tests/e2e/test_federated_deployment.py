"""Flower's own processes run the pair that the slots of one machine run, with the same result."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest

from tests.helpers.run import ROOT, run_python

if sys.version_info < (3, 11):
    pytest.skip("Flower 1.41 needs Python 3.11 or newer", allow_module_level=True)

from tests.helpers.deployment import Deployment, make_key

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

NUM_ROUNDS = 2

APP = """
import os

import torch

import unsloth_multigpu as ump


def build():
    return torch.nn.Sequential(torch.nn.Linear(6, 4), torch.nn.Tanh(), torch.nn.Linear(4, 1))


def rows(client):
    generator = torch.Generator().manual_seed(client.client_id)
    x = torch.randn(20 + 11 * client.client_id, 6, generator=generator)
    return x, (x.sum(1, keepdim=True) + client.client_id).sin()


def train(model, client):
    x, y = rows(client)
    optimizer = torch.optim.SGD(model.parameters(), lr=client.config["lr"])
    for batch in torch.randperm(len(x)).split(4):  # The order comes from the client's seed.
        loss = torch.nn.functional.mse_loss(model(x[batch]), y[batch])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    print(f"client={client.client_id} device={os.environ.get('CUDA_VISIBLE_DEVICES')}", flush=True)
    return len(x), {"loss": loss.item()}


server = ump.create_multigpu_flower_server("two-houses", build, train_fn=train, num_gpus=2, seed=7)
client_app = server.client_app
server_app = server.server_app

if __name__ == "__main__":
    with server:
        server.fit(num_clients=2, num_rounds=NUM_ROUNDS, config={"lr": 0.1})
        server.save("here")
""".replace("NUM_ROUNDS", str(NUM_ROUNDS))

PYPROJECT = """
[project]
name = "two-houses"
version = "1.0.0"
license = "Apache-2.0"

[tool.flwr.app]
publisher = "tests"

[tool.flwr.app.components]
serverapp = "houses:server_app"
clientapp = "houses:client_app"

[tool.flwr.app.config]
num-server-rounds = NUM_ROUNDS
num-clients = 2
output-dir = ""
lr = 0.1
""".replace("NUM_ROUNDS", str(NUM_ROUNDS))


@pytest.mark.thorough
def test_superlink_and_supernodes_over_tls_give_the_weights_of_two_slots(tmp_path: Path) -> None:
    app, there = tmp_path / "app", tmp_path / "there"
    app.mkdir()
    (app / "houses.py").write_text(APP)
    (app / "pyproject.toml").write_text(PYPROJECT)
    run = run_python(["houses.py"], app, {"PYTHONPATH": str(ROOT)})
    assert run.code == 0, run.out + run.err

    with Deployment(tmp_path / "flower") as deployment:
        deployment.register("node_0")
        deployment.register("node_1")
        deployment.join("node_0", "node_1")
        run = deployment.flwr("run", app, "here", "--stream", "--run-config", f"output-dir={json.dumps(str(there))}")
        logs = [deployment.log(name) for name in ("superlink", "node_0", "node_1")]
        assert (there / "final").exists(), "\n".join([run.out, run.err, *logs])
        assert "Uvicorn running on https://" in logs[0]
        for client_id, log in enumerate(logs[1:]):
            assert log.count("client=") == log.count(f"client={client_id} ") == NUM_ROUNDS

        # A SuperNode that trusts another CA does not talk to this SuperLink, and one whose key nobody registered is
        # not let in.
        make_key(deployment.tls / "stranger")
        visitors = [({"ca": "other.pem"}, "CERTIFICATE_VERIFY_FAILED"), ({"key": "stranger"}, "code: 2004")]
        for visitor, reason in visitors:
            refused = deployment.knock(**visitor)
            assert refused.code == 1
            assert reason in refused.out + refused.err
    # Leaving the block has waited for the end of every process.

    ours, theirs = weights(app / "here"), weights(there / "final")
    assert ours.keys() == theirs.keys()
    for name, value in ours.items():
        assert value.sub(theirs[name]).abs().max() <= 1e-6, name
    rounds = [json.loads(line) for line in (there / "rounds.jsonl").read_text().splitlines()]
    assert [line["num_examples"] for line in rounds] == [51] * NUM_ROUNDS


def weights(folder: Path) -> dict:
    from safetensors.torch import load_file

    (file,) = [name for name in os.listdir(folder) if name.endswith(".safetensors")]
    return load_file(folder / file)
