"""Clients in processes of their own: the result is that of a plain loop, wherever and whenever they run; it goes on."""

import functools
import json
import os
import random
import signal
from itertools import chain
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

pytest.importorskip("flwr", reason="Flower needs Python 3.11")

from flwr.serverapp.strategy import FedAvg

import unsloth_multigpu as ump
from tests.dist.scripts import federated_clients as clients
from tests.helpers.run import LIGHT, finish, start
from unsloth_multigpu.federated.aggregation import mean_of_products
from unsloth_multigpu.federated.client import FederatedClient, client_seed
from unsloth_multigpu.federated.grid import ProcessGrid

pytestmark = pytest.mark.slow
SEEDS = (0, 7)


@pytest.fixture(scope="module", autouse=True)
def on_the_cpu(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CUDA_VISIBLE_DEVICES", "")
        for name, value in {"OMP_NUM_THREADS": "1", **LIGHT}.items():
            patch.setenv(name, value)
        patch.chdir(tmp_path_factory.mktemp("federated"))
        yield


def weighted_mean(states, num_examples):
    total = sum(num_examples)
    mean = {
        name: sum(n * s[name].double() for n, s in zip(num_examples, states, strict=True)) / total for name in states[0]
    }
    return {name: value.to(states[0][name].dtype) for name, value in mean.items()}


def loop_by_hand(build, train, config, num_rounds, *, num_clients, seed=0, aggregate=weighted_mean):
    """Federated averaging: one client after the other, in any order; means in float64."""
    torch.manual_seed(seed)
    model = build()
    is_sent = (lambda name: ".lora_" in name) if hasattr(model, "peft_config") else (lambda name: True)
    weights = {name: value.detach().clone() for name, value in model.state_dict().items() if is_sent(name)}
    for number in range(1, num_rounds + 1):
        found = {}
        for client_id in random.SystemRandom().sample(range(num_clients), num_clients):
            model.load_state_dict(weights, strict=False)
            model.train()
            torch.manual_seed(client_seed(seed, number, client_id))
            client = FederatedClient(client_id, num_clients, number, torch.device("cpu"), config)
            num_examples, _ = train(model, client)
            found[client_id] = {name: model.state_dict()[name].clone() for name in weights}, num_examples
        weights = aggregate(*zip(*(found[client_id] for client_id in range(num_clients)), strict=True))
    return weights


@functools.cache
def plain_loop(seed, num_rounds):
    functions = (clients.build, clients.train, clients.CONFIG)
    return loop_by_hand(*functions, num_rounds, num_clients=clients.NUM_CLIENTS, seed=seed)


def difference(one, other):
    assert one.keys() == other.keys()
    return max(float((one[name].double() - other[name].double()).abs().max()) for name in one)


def assert_same_bits(one, other):
    assert one.keys() == other.keys()
    assert [name for name in one if not torch.equal(one[name], other[name])] == []


def watch(patch):
    """Messages come to the slots in any order; returns slot -> device, of those that have had a client."""
    slots, send = {}, ProcessGrid.send_and_receive

    def send_and_receive(grid, messages, **options):
        messages = list(messages)
        replies = send(grid, random.SystemRandom().sample(messages, len(messages)), **options)
        slots.update((record.slot, record.device) for record in grid.records)
        return replies

    patch.setattr(ProcessGrid, "send_and_receive", send_and_receive)
    return slots


@pytest.fixture(scope="module")
def server():
    with clients.make_server(FedAvg(), seed=SEEDS[0]) as server:
        yield server


@pytest.fixture(scope="module")
def averaged(server):
    """A training on two slots."""
    with pytest.MonkeyPatch.context() as patch:
        watch(patch)
        result = server.fit(clients.NUM_CLIENTS, 3, config=clients.CONFIG, server_evaluate=count)
    server.save("plain")
    return {"result": result, "weights": server.state_dict()}


def count(model, server_round):
    return {"round": server_round, "is_training": float(model.training)}


@pytest.fixture(scope="module")
def spread():
    """The same clients on two devices with three slots, dealt again in each round: results, weights and slots."""
    results, weights = [], []
    options = {"clients_per_gpu": 2, "max_workers": 3, "placement": "balanced"}
    with pytest.MonkeyPatch.context() as patch, clients.make_server(seed=SEEDS[1], **options) as server:
        slots = watch(patch)
        # One slot may be ready long after the others.
        while len(results) < 4 or (len(slots) < 3 and len(results) < 50):
            results.append(server.fit(clients.NUM_CLIENTS, 3, config=clients.CONFIG))
            weights.append(server.state_dict())
    return results, weights, slots


def test_weights_are_those_of_a_plain_loop(averaged):
    expected = plain_loop(SEEDS[0], 3)
    assert difference(averaged["weights"], expected) < 1e-6
    assert difference(averaged["weights"], plain_loop(SEEDS[1], 3)) > 1e-3
    # Only what the training changed counts as a result.
    assert difference(expected, plain_loop(SEEDS[0], 0)) > 1e-2
    assert_same_bits(load_file("plain/model.safetensors"), averaged["weights"])


def test_round_robin_puts_clients_where_their_number_says(averaged):
    for report in averaged["result"].rounds:
        assert {d.device: set(d.client_ids) for d in report.devices} == {"cpu:0": {0, 2, 4}, "cpu:1": {1, 3}}
        assert report.num_examples == sum(8 + 3 * client_id for client_id in range(clients.NUM_CLIENTS))
        assert all(0 < report.utilisation(device) <= 1 for device in report.devices)


@pytest.mark.thorough
def test_weights_do_not_depend_on_the_place(spread):
    results, weights, slots = spread
    assert difference(weights[0], plain_loop(SEEDS[1], 3)) < 1e-6
    for again in weights[1:]:
        assert_same_bits(weights[0], again)
    places = [{d.device: sorted(d.client_ids) for d in r.devices} for result in results for r in result.rounds]
    assert len(set(map(str, places))) > 1
    for place in places:
        assert sorted(chain(*place.values())) == list(range(clients.NUM_CLIENTS))
    assert results[-1].report.num_slots == 3
    assert slots == {0: "cpu:0", 1: "cpu:1", 2: "cpu:0"}


def test_metrics_of_clients_and_server_are_in_the_result(averaged):
    result = averaged["result"].result
    assert [set(m) for m in result.train_metrics_clientapp.values()] == [{"loss"}] * 3
    assert [set(m) for m in result.evaluate_metrics_clientapp.values()] == [{"loss", "right"}] * 3
    assert {n: dict(m) for n, m in result.evaluate_metrics_serverapp.items()} == {
        number: {"round": number, "is_training": 0.0} for number in range(4)
    }


def test_training_that_was_killed_goes_on_to_the_same_bits(server):
    fit = {"config": clients.CONFIG}
    whole = server.fit(clients.NUM_CLIENTS, 4, **fit)
    weights = server.state_dict()
    killed = finish(start([clients.__file__, "killed"], Path.cwd(), {"KILLS": "1"}))
    assert killed.code == -signal.SIGKILL, killed.err
    lines = Path("killed", "rounds.jsonl").read_text().splitlines()
    assert [json.loads(line)["server_round"] for line in lines] == [1, 2]
    again = server.fit(clients.NUM_CLIENTS, 4, output_dir="killed", resume="auto", **fit)
    assert_same_bits(server.state_dict(), weights)
    assert again.result.train_metrics_clientapp == whole.result.train_metrics_clientapp
    assert again.result.evaluate_metrics_clientapp == whole.result.evaluate_metrics_clientapp
    assert [report.server_round for report in again.rounds] == [1, 2, 3, 4]
    assert sorted(os.listdir("killed")) == [".rounds.lock", "round-3.pt", "round-4.pt", "rounds.jsonl"]


LORA = {"lr": 10.0, "steps": 3}


@pytest.fixture(scope="module")
def lora():
    """Name of the aggregation -> report, adapter and folder of a training of four clients."""
    found = {}
    for mode in ("mean", "project"):
        options = {"train_fn": clients.train_lora, "lora_aggregation": mode}
        with ump.create_multigpu_flower_server("lora", clients.build_lora, **options) as server:
            server.fit(4, 2, config=LORA, output_dir=mode)
            result = server.fit(4, 3, config=LORA, output_dir=mode, resume="auto")
            server.save(f"adapter_{mode}")
            found[mode] = result, server.state_dict()
    return found


def lora_loop(num_rounds, **options):
    return loop_by_hand(clients.build_lora, clients.train_lora, LORA, num_rounds, num_clients=4, **options)


@pytest.mark.thorough
def test_adapters_alone_travel_and_their_mean_is_that_of_a_plain_loop(lora):
    result, weights = lora["mean"]
    assert difference(weights, lora_loop(3)) < 1e-6
    assert difference(weights, lora_loop(0)) > 1e-2
    # What the mean of the factors misses.
    assert all(0.01 < r.lora_remainder < 1 for r in result.rounds)


@pytest.mark.thorough
def test_projection_averages_the_products_and_goes_on(lora):
    def project(states, num_examples):
        found = {}
        for a in (name for name in states[0] if ".lora_A." in name):
            b = a.replace(".lora_A.", ".lora_B.")
            factors = mean_of_products([(state[a], state[b]) for state in states], num_examples)
            found |= {a: factors[0].float(), b: factors[1].float()}
        return found

    result, weights = lora["project"]
    assert difference(weights, lora_loop(3, aggregate=project)) < 1e-4
    saved = load_file("adapter_project/adapter_model.safetensors")
    assert_same_bits(saved, {name.replace(".default.", "."): value for name, value in weights.items()})
    # The mean of the factors is another adapter.
    assert difference(weights, lora["mean"][1]) > 1e-2
    assert all(report.lora_remainder > 0.01 for report in result.rounds)
