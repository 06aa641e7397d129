"""What the server takes and refuses, its report, and its half of the pair under a grid of Flower."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from torch import nn

pytest.importorskip("flwr", reason="Flower needs Python 3.11")

from flwr.app import Array, ArrayRecord, Context, Error, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp.strategy import DifferentialPrivacyClientSideFixedClipping, FedAvg
from safetensors.torch import load_file

import unsloth_multigpu as ump
from tests.helpers.answering_grid import AnsweringGrid
from unsloth_multigpu import plugin, versions
from unsloth_multigpu.checkpoint.manifest import PART_FOLDER
from unsloth_multigpu.errors import ConfigError, FederatedError, SetupError, VersionError
from unsloth_multigpu.federated import server_app, training
from unsloth_multigpu.federated.option import FitOptions
from unsloth_multigpu.federated.report import (
    DeviceReport,
    FederatedReport,
    RoundReport,
    busy_seconds,
    round_from_dict,
    write_rounds,
)


def build() -> nn.Module:
    return nn.Linear(2, 1)


def train(model: nn.Module, client: Any) -> tuple[int, dict[str, float]]:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += client.client_id + client.config.get("step", 1.0)
    return 1, {"loss": 1.0}


def evaluate(model: nn.Module, client: Any) -> tuple[float, int, dict[str, float]]:
    return 0.5, 1, {}


def make_server(**options: Any) -> ump.FederatedServer:
    names = {"server_id", "model_builder", "device", "strategy", "auto_gpu"} & options.keys()
    given = {"server_id": "s", "model_builder": build, **{name: options.pop(name) for name in names}}
    options.setdefault("train_fn", train)
    return ump.create_multigpu_flower_server(**given, **options)


def make_plan(model_builder: Callable[[], nn.Module] = build, **options: Any) -> training.ServerPlan:
    """The server's half of the pair, which trains over any grid of Flower."""
    defaults = {"strategy": "fedavg", "strategy_kwargs": None, "lora_aggregation": "mean", "seed": 0, "device": "cpu"}
    return training.ServerPlan("s", model_builder, train, None, **{**defaults, **options})


@pytest.mark.parametrize(
    ("options", "fact"),
    [
        ({"server_id": ""}, "server_id=''; expected 1 to 100 letters"),
        ({"server_id": "../up"}, "server_id='../up'"),
        ({"server_id": 3}, "server_id=3"),
        ({"model_builder": "gpt2"}, "model_builder='gpt2'; expected a function"),
        ({"model_builder": nn.Linear(1, 1)}, "model_builder is a model; expected a function that makes one"),
        ({"device": "gpu"}, "device='gpu'; expected 'cpu', 'cuda'"),
        ({"device": 0}, "device=0"),
        ({"num_gpus": 0}, "num_gpus=0; expected a whole number of 1 or more"),
        ({"num_gpus": True}, "num_gpus=True"),
        ({"clients_per_gpu": "many"}, "clients_per_gpu='many'; expected a whole number of 1 or more"),
        ({"max_workers": 1.5}, "max_workers=1.5"),
        ({"placement": "random"}, "placement='random'; expected one of 'round_robin', 'balanced'"),
        ({"lora_aggregation": "svd"}, "lora_aggregation='svd'; expected one of 'mean', 'project', 'exact'"),
        (
            {"lora_aggregation": "exact", "strategy": "fedadam"},
            "lora_aggregation='exact' cannot work here: FedAdam does not take the example-weighted mean",
        ),
        ({"seed": -1}, "seed=-1"),
        ({"log_dir": ""}, "log_dir=''"),
        ({"train_fn": None}, "train_fn=None; expected a function that is called as train_fn"),
        ({"evaluate_fn": 1}, "evaluate_fn=1"),
        ({"strategy": "sgd"}, "strategy='sgd'; expected one of"),
        ({"strategy": FedAvg}, "strategy=<class .*expected a name such as 'fedavg' or a flwr.serverapp"),
        ({"strategy": FedAvg(), "strategy_kwargs": {"fraction_train": 0.5}}, "together with an object as strategy"),
        ({"strategy_kwargs": ["a"]}, r"strategy_kwargs=\['a'\] is no mapping"),
        ({"strategy_kwargs": {"momentum": 1}}, "strategy='fedavg' does not know 'momentum'"),
        (
            {"strategy": DifferentialPrivacyClientSideFixedClipping(FedAvg(), 1.0, 1.0, 2)},
            "DifferentialPrivacyClientSideFixedClipping needs clients that clip their updates with Flower's mod",
        ),
        (
            {
                "strategy": "differentialprivacyclientsideadaptiveclipping",
                "strategy_kwargs": {"strategy": FedAvg(), "noise_multiplier": 0.1, "num_sampled_clients": 100},
            },
            "AdaptiveClipping needs clients that clip their updates",
        ),
    ],
)
def test_argument_that_cannot_be_used_is_named_at_once(options: dict[str, Any], fact: str) -> None:
    with pytest.raises(ConfigError, match=fact):
        make_server(**options)


@pytest.mark.parametrize(
    ("options", "fact"),
    [
        ({"num_clients": 0}, "num_clients=0; expected a whole number of 1 or more"),
        ({"num_rounds": 0}, "num_rounds=0"),
        ({"num_rounds": 2.0}, "num_rounds=2.0"),
        ({"min_success": 1.1}, "min_success=1.1; expected a share from 0 to 1"),
        ({"min_success": float("nan")}, "min_success=nan"),
        ({"round_timeout_s": 0}, "round_timeout_s=0; expected seconds above 0"),
        ({"config": [1]}, r"config=\[1\]; expected a mapping"),
        ({"config": {"model": nn.Linear}}, r"config\['model'\]=.*cannot be sent"),
        ({"config": {"sizes": [1, 2.0]}}, r"config\['sizes'\]=\[1, 2.0\] cannot be sent"),
        ({"config": {"server-round": 1}}, r"config\['server-round'\] is set in every round"),
        ({"config": {"lrs": [[0.1]]}}, r"config\['lrs'\]=\[\[0.1\]\] cannot be sent"),
        ({"output_dir": ""}, "output_dir=''"),
        ({"output_dir": Path("runs"), "num_clients": 1, "strategy": FedAvg()}, "min_train_nodes=2 of FedAvg"),
        ({"resume": "auto"}, "resume='auto' looks for rounds in output_dir, which is not set"),
        ({"resume": "logs/round-1"}, "resume='logs/round-1'; expected 'auto' or None"),
        ({"server_evaluate": "f"}, "server_evaluate='f'"),
        ({"num_clients": 1, "strategy": FedAvg()}, "min_train_nodes=2 of FedAvg, but num_clients=1"),
    ],
)
def test_fit_refuses_before_it_starts_a_process(
    options: dict[str, Any], fact: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    before = psutil.Process().children()
    server_options = {"strategy": options.pop("strategy")} if "strategy" in options else {}
    with make_server(**server_options) as server, pytest.raises(ConfigError, match=fact):
        server.fit(**{"num_clients": 2, **options})
    assert psutil.Process().children() == before


def test_server_starts_nothing_before_fit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    before = psutil.Process().children()
    with make_server(num_gpus=64) as server:
        assert psutil.Process().children() == before
        assert list(tmp_path.iterdir()) == []
        for use in (server.state_dict, lambda: server.save(tmp_path)):
            with pytest.raises(SetupError, match="No training of this server has ended yet"):
                use()


def test_missing_flower_is_named_with_the_command_that_installs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(versions, "installed_version", {}.get)
    with pytest.raises(SetupError, match=r"needs flwr, which is not installed") as missing:
        make_server()
    assert 'pip install "flwr>=1.41,<2" cloudpickle' in missing.value.hint
    monkeypatch.setattr(versions, "installed_version", {"flwr": "1.8.0"}.get)
    with pytest.raises(VersionError, match=r"flwr 1.8.0 is installed; expected <2,>=1.41"):
        make_server()


def test_rank_of_a_training_and_a_session_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plugin, "is_multi_gpu_enabled", lambda: True)
    with pytest.raises(SetupError, match=r"enable_multi_gpu\(\) is in effect"):
        make_server()
    rank = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    for name, value in rank.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(SetupError, match=r"rank 1 of 2, started by torchrun\.\nHint: Start the script with plain"):
        make_server()
    monkeypatch.setenv("UNSLOTH_MULTIGPU_RUN_DIR", "/run")
    with pytest.raises(SetupError, match=r"started by unsloth_multigpu\.\nHint: Remove enable_multi_gpu\(\): the"):
        make_server()


@pytest.mark.parametrize(
    ("intervals", "seconds"),
    [([], 0.0), ([(0, 1), (2, 4)], 3.0), ([(0, 3), (1, 2)], 3.0), ([(2, 4), (0, 3)], 4.0), ([(0, 1), (1, 2)], 2.0)],
)
def test_device_is_busy_while_a_client_runs(intervals: list[tuple[float, float]], seconds: float) -> None:
    assert busy_seconds(intervals) == seconds


def some_round(number: int) -> RoundReport:
    devices = (DeviceReport("cuda:0", (0, 2), 1.5, 10), DeviceReport("cuda:1", (1,), 9.0))
    failures = ("client 3: left out of train: ValueError: x",) if number == 2 else ()
    return RoundReport(number, 2.0, 40, devices, {"loss": 0.25}, {"loss": 0.5}, {"acc": 1.0}, failures, 0.125)


def test_report_is_a_table_with_what_failed_below() -> None:
    report = FederatedReport("s", 4, 2, 1.25, (some_round(1), some_round(2)))
    head, names, first, second, failure = str(report).splitlines()
    assert head == "server_id=s clients=4 slots=2 startup_s=1.2 rounds=2 seconds=4.0"
    assert names.split("  ")[-1].strip() == "failures"
    assert names.split() == [
        *(["round", "seconds", "examples", "cuda:0", "cuda:1"]),
        *(["loss", "eval_loss", "server_acc", "lora_remainder", "failures"]),
    ]
    assert first.split() == ["1", "2.0", "40", "2", "cl", "75%", "1", "cl", "100%", "0.25", "0.5", "1", "0.12", "-"]
    assert second.split()[-1] == "1"
    assert len({len(line) for line in (names, first, second)}) == 1
    assert failure == "round 2: client 3: left out of train: ValueError: x"
    assert report.seconds == 4.0


def test_rounds_survive_the_way_over_the_disk(tmp_path: Path) -> None:
    write_rounds(tmp_path, [some_round(9)], must_append=False)
    write_rounds(tmp_path, [some_round(1)], must_append=False)
    write_rounds(tmp_path, [some_round(2)], must_append=True)
    lines = (tmp_path / "rounds.jsonl").read_text().splitlines()
    assert [json.loads(line)["server_round"] for line in lines] == [1, 2]
    assert round_from_dict(dataclasses.asdict(some_round(2))) == some_round(2)
    odd = dataclasses.replace(some_round(3), train_metrics={"loss": float("nan"), "list": [1.0, float("-inf")]})
    write_rounds(tmp_path, [odd], must_append=False)
    text = (tmp_path / "rounds.jsonl").read_text()
    assert json.loads(text, parse_constant=pytest.fail)["train_metrics"] == {"loss": None, "list": [1.0, None]}


class AppGrid(AnsweringGrid):
    """Runs a ClientApp in this process, as Flower's nodes would; node ids are not in the order of the clients."""

    def __init__(self, app: ClientApp, num_clients: int = 2) -> None:
        self.contexts = {
            1000 - client_id: Context(
                1, 1000 - client_id, {"partition-id": client_id, "num-partitions": num_clients}, RecordDict(), {}
            )
            for client_id in range(num_clients)
        }
        self.app = app

    def get_node_ids(self) -> list[int]:
        return list(self.contexts)

    def answer(self, message: Message) -> Message:
        try:
            return self.app(message, self.contexts[message.metadata.dst_node_id])
        except ValueError as error:
            return Message(Error(2, str(error)), reply_to=message)


def run_context(settings: Mapping[str, Any]) -> Context:
    return Context(1, 0, {}, RecordDict(), dict(settings))


@pytest.mark.usefixtures("may_make_messages")
def test_server_app_trains_saves_and_goes_on(tmp_path: Path) -> None:
    server = make_server(evaluate_fn=evaluate, seed=3)
    settings = {"num-server-rounds": 2, "num-clients": 2, "output-dir": str(tmp_path), "resume": "auto", "step": 2.0}
    torch.manual_seed(3)
    expected = build().state_dict()
    for rounds in (2, 3):
        server.server_app(AppGrid(server.client_app), run_context({**settings, "num-server-rounds": rounds}))
        found = load_file(tmp_path / "final" / "model.safetensors")
        # Clients 0 and 1 add 2 and 3 in every round.
        for name, value in expected.items():
            torch.testing.assert_close(found[name], value + 2.5 * rounds)
    assert len((tmp_path / "rounds.jsonl").read_text().splitlines()) == 3


@pytest.mark.parametrize(
    ("settings", "fact"),
    [
        ({"num-server-rounds": 0}, "num_rounds=0"),
        ({"num-clients": -1}, "num-clients=-1"),
        ({"num-clients": "2"}, "num-clients='2'"),
        ({"min-success": 2.0}, "min_success=2.0"),
        ({"resume": "auto"}, "resume='auto' looks for rounds"),
    ],
)
def test_settings_of_a_run_are_checked(settings: Mapping[str, Any], fact: str) -> None:
    with pytest.raises(ConfigError, match=fact):
        server_app.run_options(settings)


def test_settings_of_a_run_become_options_and_the_rest_goes_to_the_clients() -> None:
    given = {
        "num-server-rounds": 5,
        "num-clients": 3,
        "output-dir": "",
        "resume": "",
        "round-timeout-s": 9.0,
        "lr": 0.5,
    }
    options, least = server_app.run_options(given)
    assert (options, least) == (FitOptions(num_rounds=5, round_timeout_s=9.0, config={"lr": 0.5}), 3)


def test_nodes_that_do_not_come_end_the_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_app, "_POLL_S", 0.01)
    grid = AppGrid(ClientApp(), 2)
    assert server_app.wait_for_nodes(grid, 2, 5.0) == 2
    with pytest.raises(FederatedError, match=r"with 3 nodes, still waits for nodes after 0.05 s; 2 are connected"):
        server_app.wait_for_nodes(grid, 3, 0.05)


@pytest.mark.usefixtures("may_make_messages")
def test_aggregation_that_the_model_does_not_allow_is_refused_before_the_first_round() -> None:
    plan = make_plan(lora_aggregation="project")
    with pytest.raises(ConfigError, match="lora_aggregation='project' cannot work here: no pair of lora_A and lora_B"):
        training.train(plan, AppGrid(plan.client_app), 2, FitOptions())


@pytest.mark.usefixtures("may_make_messages")
def test_model_that_cannot_be_built_is_reported_with_its_reason() -> None:
    def broken() -> nn.Module:
        raise ValueError("no such weights")

    plan = make_plan(model_builder=broken)
    with pytest.raises(FederatedError, match="no client could build its model: no such weights"):
        training.train(plan, AppGrid(plan.client_app), 2, FitOptions())


@pytest.mark.usefixtures("may_make_messages")
def test_clients_that_do_not_answer_are_reported_with_the_time_that_they_had() -> None:
    class Silent(AppGrid):
        def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> list[Message]:
            assert timeout == 300.0
            return []

    with pytest.raises(FederatedError, match="no client could build its model: no answer within 300 s"):
        training.ask_for_start(Silent(ClientApp()), 1, 5.0)


def test_buffers_that_training_has_not_changed_are_no_part_of_an_adapter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved: list[list[str]] = []
    monkeypatch.setattr(training, "save_adapter", lambda folder, state, *_: saved.append(sorted(state)))
    before = {name: Array(np.zeros(2)) for name in ("lora", "moved", "same")}
    start = training.Start(ArrayRecord(before), adapter_config="{}", buffers=["moved", "same"])
    now = ArrayRecord({**before, "moved": Array(np.ones(2))})
    training.Trained(now, None, start).save(tmp_path)
    assert saved == [["lora", "moved"]]


class SlotGrid(AppGrid):
    """As if the clients were in two slots."""

    devices_of_slots = ("cpu:0", "cpu:1")

    def __init__(self, app: ClientApp) -> None:
        super().__init__(app, 4)
        self.asked: list[int] = []
        self.records: list[Any] = []

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> list[Message]:
        messages = list(messages)
        self.asked.append(len(messages))
        return super().send_and_receive(messages, timeout=timeout)


@pytest.mark.usefixtures("may_make_messages")
def test_all_slots_load_at_once() -> None:
    plan = make_plan()
    grid = SlotGrid(plan.client_app)
    training.train(plan, grid, 4, FitOptions(num_rounds=1), slots=grid)
    assert grid.asked[0] == 2


@pytest.mark.usefixtures("may_make_messages")
def test_servers_own_evaluation_gets_the_global_model(tmp_path: Path) -> None:
    seen: dict[int, float] = {}

    def measure(model: nn.Module, server_round: int) -> dict[str, Any]:
        assert not model.training
        seen[server_round] = float(model.get_parameter("bias").detach())
        return {"bias": model.get_parameter("bias").detach().sum(), "list": [1.0, 2.0]}

    plan = make_plan()
    result, trained, _ = training.train(
        plan, AppGrid(plan.client_app), 2, FitOptions(num_rounds=2), server_evaluate=measure
    )
    assert [round(seen[n] - seen[0], 5) for n in (0, 1, 2)] == [0.0, 1.5, 3.0]
    assert seen[2] == trained.state_dict()["bias"].item()
    assert dict(result.result.evaluate_metrics_serverapp[2]) == {"bias": pytest.approx(seen[2]), "list": [1.0, 2.0]}
    with pytest.raises(ConfigError, match="server_evaluate returned 'good', which are no metrics"):
        training.train(plan, AppGrid(plan.client_app), 2, FitOptions(), server_evaluate=lambda model, number: "good")


def test_what_the_servers_own_evaluation_leaves_is_gone_in_the_next_round(caplog: pytest.LogCaptureFixture) -> None:
    seen: list[float] = []

    def build_frozen() -> nn.Module:
        model = nn.Linear(2, 1)
        nn.init.ones_(model.weight.requires_grad_(False))
        return model

    def spoil(model: nn.Module, server_round: int) -> dict[str, Any]:
        seen.append(float(model.get_parameter("weight").sum()))
        model.get_parameter("weight").data += 1
        return {}

    evaluate_on_server = training.server_evaluator(make_plan(model_builder=build_frozen), spoil)
    for server_round in (0, 1):
        evaluate_on_server(server_round, ArrayRecord({"bias": Array(np.zeros(1, np.float32))}), None)
    assert seen == [2.0, 2.0]
    assert "server_evaluate changed weight (and 0 more tensors)" in caplog.text


@pytest.mark.usefixtures("may_make_messages")
def test_folder_is_written_by_one_training_at_a_time(tmp_path: Path) -> None:
    plan = make_plan()
    options = FitOptions(2, output_dir=str(tmp_path), resume="auto")
    refused: list[str] = []

    def evaluate(model: nn.Module, server_round: int) -> dict[str, Any]:
        half = tmp_path / PART_FOLDER / "round-9"  # Stands for the round that this training is writing.
        half.mkdir(parents=True)
        with pytest.raises(ConfigError, match="a training that is not over writes its rounds there") as error:
            training.train(plan, AppGrid(plan.client_app), 2, options)
        refused.append(error.value.hint)
        half.rmdir()
        return {}

    training.train(plan, AppGrid(plan.client_app), 2, options, server_evaluate=evaluate)
    assert len(refused) == 3  # Before the first round, and after each.
    assert sorted(path.name for path in tmp_path.iterdir()) == ["round-1", "round-2", "rounds.jsonl"]
    training.train(plan, AppGrid(plan.client_app), 2, options)


@pytest.mark.usefixtures("may_make_messages")
def test_saved_round_of_another_model_is_refused(tmp_path: Path) -> None:
    plan = make_plan()
    options = FitOptions(num_rounds=1, output_dir=str(tmp_path))
    training.train(plan, AppGrid(plan.client_app), 2, options)
    other = make_plan(model_builder=lambda: nn.Linear(3, 1))
    with pytest.raises(ump.ResumeError, match=r"round 1 has weight of shape \(1, 2\), the model .* has \(1, 3\)"):
        training.train(other, AppGrid(other.client_app), 2, dataclasses.replace(options, num_rounds=2, resume="auto"))

    def with_frozen() -> nn.Module:
        model = build()
        model.register_parameter("vocabulary", nn.Parameter(torch.ones(7), requires_grad=False))
        return model

    other = make_plan(model_builder=with_frozen)
    with pytest.raises(ump.ResumeError, match=r"round 1 has vocabulary of shape None, the model .* has \(7,\)"):
        training.train(other, AppGrid(other.client_app), 2, dataclasses.replace(options, num_rounds=2, resume="auto"))


@pytest.mark.usefixtures("may_make_messages")
def test_training_goes_on_with_any_config_but_not_back(tmp_path: Path) -> None:
    plan = make_plan()
    options = FitOptions(3, {"keys": [b"a", b"b"], "key": b"c", "step": 2.0}, str(tmp_path))
    training.train(plan, AppGrid(plan.client_app), 2, options)
    again = dataclasses.replace(options, resume="auto")
    result, _, _ = training.train(plan, AppGrid(plan.client_app), 2, again)
    assert len(result.rounds) == 3
    with pytest.raises(ConfigError, match=r"num_rounds=2, but .*round-3 is already the state after round 3"):
        training.train(plan, AppGrid(plan.client_app), 2, dataclasses.replace(again, num_rounds=2))


@pytest.mark.usefixtures("may_make_messages")
def test_strategy_that_changes_a_setting_of_its_own_goes_on(tmp_path: Path) -> None:
    class Slower(FedAvg):
        def __init__(self, rate: float) -> None:
            super().__init__()
            self.rate = rate

        def configure_train(self, *args: Any) -> Iterable[Message]:
            self.rate *= 0.5
            return super().configure_train(*args)

    plan = make_plan(strategy=Slower(8.0))
    options = FitOptions(2, output_dir=str(tmp_path), resume="auto")
    training.train(plan, AppGrid(plan.client_app), 2, options)
    for other in (plan, make_plan(strategy=Slower(8.0))):
        training.train(other, AppGrid(plan.client_app), 2, dataclasses.replace(options, num_rounds=3))
        assert other._strategy.rate == 1.0  # type: ignore[union-attr]
    other = make_plan(strategy=Slower(4.0))
    with pytest.raises(ump.ResumeError, match=r"strategy.rate=8.0, this training has 4.0"):
        training.train(other, AppGrid(plan.client_app), 2, dataclasses.replace(options, num_rounds=3))


@pytest.mark.usefixtures("may_make_messages")
def test_transposed_weights_are_saved(tmp_path: Path) -> None:
    def transposed() -> nn.Module:
        model = nn.Module()
        model.register_parameter("weight", nn.Parameter(torch.arange(6.0).view(3, 2).t()))
        return model

    plan = make_plan(model_builder=transposed)
    options = FitOptions(1, output_dir=str(tmp_path))
    _, trained, _ = training.train(plan, AppGrid(plan.client_app), 2, options)
    trained.save(tmp_path)
    for file in (tmp_path / "model.safetensors", tmp_path / "round-1" / "arrays.safetensors"):
        torch.testing.assert_close(load_file(file)["weight"], torch.arange(6.0).view(3, 2).t() + 1.5)
