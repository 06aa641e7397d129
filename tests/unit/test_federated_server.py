"""What the server takes and refuses, its report, and its training over clients in this process."""

from pathlib import Path

import psutil
import pytest
import torch
from torch import nn

pytest.importorskip("flwr", reason="Flower needs Python 3.11")

from flwr.app import ArrayRecord, ConfigRecord, Message, RecordDict
from flwr.serverapp.strategy import FedAvg

import unsloth_multigpu as ump
from tests.helpers.answering_grid import LocalGrid
from unsloth_multigpu import plugin, versions
from unsloth_multigpu.errors import ConfigError, FederatedError, SetupError, VersionError
from unsloth_multigpu.federated import training
from unsloth_multigpu.federated.server import FitOptions, ServerOptions
from unsloth_multigpu.federated.training import Training
from unsloth_multigpu.wire.identity import RankIdentity

pytestmark = pytest.mark.usefixtures("may_make_messages")


def build():
    return nn.Linear(2, 1)


def train(model, client):
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += client.client_id + client.config.get("step", 1.0)
    return 1, {"loss": 1.0}


def make_server(**options):
    given = {"server_id": "s", "model_builder": build, "train_fn": train, **options}
    return ump.create_multigpu_flower_server(**given)


def make_plan(model_builder=build, **options):
    return training.FederatedServer(ServerOptions("s", model_builder, train, **options))


def run(plan, num_clients=2, **options):
    trained = Training(plan, LocalGrid(plan.client_app, num_clients), FitOptions(num_clients, **options))
    return trained.run()


@pytest.mark.parametrize(
    ("options", "fact"),
    [
        ({"server_id": "../up"}, "server_id='../up'; expected 1 to 100 letters"),
        ({"model_builder": nn.Linear(1, 1)}, "model_builder=.*; expected a function that is called as model_builder"),
        ({"device": "gpu"}, "device='gpu'; expected 'cpu', 'cuda'"),
        ({"clients_per_gpu": 0}, "clients_per_gpu=0; expected a whole number of at least 1"),
        ({"placement": "random"}, "placement='random'; expected 'round_robin' or 'balanced'"),
        ({"lora_aggregation": "svd"}, "lora_aggregation='svd'; expected 'mean' or 'project'"),
        (
            {"lora_aggregation": "project", "strategy": "fedadam"},
            "lora_aggregation='project' cannot work here: FedAdam does not compute the example-weighted mean",
        ),
        ({"train_fn": None}, "train_fn=None; expected a function that is called as train_fn"),
    ],
)
def test_argument_that_cannot_be_used_is_named_at_once(options, fact):
    with pytest.raises(ConfigError, match=fact):
        make_server(**options)
    make_server(device="npu:1")


@pytest.mark.parametrize(
    ("options", "fact"),
    [
        ({"num_clients": 0}, "num_clients=0; expected a whole number of at least 1"),
        ({"min_success": float("nan")}, "min_success=nan; expected a fraction from 0 to 1"),
        ({"round_timeout_s": 0}, "round_timeout_s=0; expected a number of at least 0.001"),
        ({"config": [1]}, r"config=\[1\]; expected a mapping"),
        ({"config": {"sizes": [1, 2.0]}}, r"config=.*sizes.*; expected a mapping"),
        ({"config": {"server-round": 1}}, r"config=.*server-round.*; expected .* without .*set in every round"),
        ({"resume": "auto"}, "resume='auto' looks for rounds in output_dir, which is not set"),
        ({"resume": "logs/round-1"}, "resume='logs/round-1'; expected 'auto'"),
        ({"output_dir": Path("runs"), "num_clients": 1, "strategy": FedAvg()}, "min_train_nodes=2 of FedAvg"),
    ],
)
def test_fit_refuses_before_it_starts_a_process(options, fact, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    before = psutil.Process().children()
    server_options = {"strategy": options.pop("strategy")} if "strategy" in options else {}
    with make_server(**server_options) as server, pytest.raises(ConfigError, match=fact):
        server.fit(**{"num_clients": 2, **options})
    assert psutil.Process().children() == before


def test_server_starts_nothing_before_fit(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    before = psutil.Process().children()
    with make_server(num_gpus=64) as server:
        assert psutil.Process().children() == before
        assert list(tmp_path.iterdir()) == []
        for use in (server.state_dict, lambda: server.save(tmp_path)):
            with pytest.raises(SetupError, match="No training of this server has ended yet"):
                use()


def test_missing_flower_is_named_with_the_command_that_installs_it(monkeypatch):
    monkeypatch.setattr(versions, "installed_version", {}.get)
    with pytest.raises(SetupError, match=r"needs flwr, which is not installed") as missing:
        make_server()
    assert 'pip install "flwr>=1.41,<2" cloudpickle' in missing.value.hint
    monkeypatch.setattr(versions, "installed_version", {"flwr": "1.8.0"}.get)
    with pytest.raises(VersionError, match=r"flwr 1.8.0 is installed; expected <2,>=1.41"):
        make_server()


def test_rank_of_a_training_and_a_session_are_refused(monkeypatch):
    monkeypatch.setattr(plugin, "is_multi_gpu_enabled", lambda: True)
    with pytest.raises(SetupError, match=r"enable_multi_gpu\(\) is in effect"):
        make_server()
    for name, value in RankIdentity(1, 1, 2, 2, "torchrun").variables().items():
        monkeypatch.setenv(name, value)
    with pytest.raises(SetupError, match=r"rank 1 of 2, started by torchrun"):
        make_server()


def test_client_app_trains_under_a_server_app_of_the_users():
    """As in docs/federated.md: Flower's own strategy asks it for the first weights, and for rounds."""
    app = make_server(seed=3).client_app
    grid = LocalGrid(app, 2)
    (reply,) = grid.send_and_receive([Message(RecordDict({"config": ConfigRecord()}), 1, "query.initial")])
    torch.manual_seed(3)
    expected = build().state_dict()
    strategy = FedAvg(fraction_evaluate=0.0)
    first = ArrayRecord(dict(reply.content["arrays"]))
    result = strategy.start(grid, first, 2, train_config=ConfigRecord({"step": 2.0}))
    # Clients 0 and 1 add 2 and 3 in every round.
    for name, value in result.arrays.to_torch_state_dict().items():
        torch.testing.assert_close(value, expected[name] + 5.0)


def test_what_the_model_does_not_allow_is_refused_before_the_first_round():
    with pytest.raises(ConfigError, match="lora_aggregation='project' cannot work here: no pair of lora_A and lora_B"):
        run(make_plan(lora_aggregation="project"))

    def broken():
        raise ValueError("no such weights")

    with pytest.raises(FederatedError, match="no client could build its model: client 0: no such weights"):
        run(make_plan(broken))


def test_servers_own_evaluation_gets_the_global_model_as_it_was_built(caplog):
    seen = {}

    def build_frozen():
        model = nn.Linear(2, 1)
        nn.init.ones_(model.weight.requires_grad_(False))
        return model

    def measure(model, server_round):
        assert not model.training
        seen[server_round] = [float(value.detach().sum()) for value in model.parameters()]
        model.get_parameter("weight").data += 1
        return {"bias": model.get_parameter("bias").detach().sum(), "list": [1.0, 2.0]}

    plan = make_plan(build_frozen)
    result = run(plan, num_rounds=2, server_evaluate=measure)
    assert [round(seen[n][1] - seen[0][1], 5) for n in (0, 1, 2)] == [0.0, 1.5, 3.0]
    assert [weight for weight, _ in seen.values()] == [2.0, 2.0, 2.0]
    assert "server_evaluate changed weight (and 0 more tensors)" in caplog.text
    assert dict(result.result.evaluate_metrics_serverapp[2]) == {"bias": pytest.approx(seen[2][1]), "list": [1.0, 2.0]}
    with pytest.raises(ConfigError, match="server_evaluate returned 'good', which are not metrics"):
        run(plan, server_evaluate=lambda model, number: "good")


def test_folder_is_written_by_one_training_at_a_time(tmp_path):
    plan, options = make_plan(), {"num_rounds": 2, "output_dir": str(tmp_path), "resume": "auto"}
    refused = []

    def evaluate(model, server_round):
        with pytest.raises(ConfigError, match="another running training writes its rounds there") as error:
            run(plan, **options)
        refused.append(error.value.hint)
        return {}

    run(plan, server_evaluate=evaluate, **options)
    assert len(refused) == 3  # Before the first round, and after each.
    run(plan, **options)
    with pytest.raises(ConfigError, match=r"has round-2.pt of an earlier training"):
        run(plan, **options | {"resume": None})
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="cannot be written: Not a directory"):
        run(plan, **options | {"output_dir": str(tmp_path / "file" / "below")})


def test_saved_round_of_another_model_is_refused(tmp_path):
    options = {"num_rounds": 1, "output_dir": str(tmp_path)}
    run(make_plan(), **options)
    with pytest.raises(FederatedError, match=r"shape of weight is \(1, 2\) on the server and \(1, 3\) in this model"):
        run(make_plan(lambda: nn.Linear(3, 1)), **options | {"num_rounds": 2, "resume": "auto"})
