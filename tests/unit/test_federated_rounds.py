"""Rounds over clients in this process: which strategies, who is drawn, what is aggregated, kept and resumed."""

import dataclasses
import gc
import json
import logging
import random

import numpy as np
import pytest

pytest.importorskip("flwr", reason="Flower needs Python 3.11")

from flwr.app import Array, ArrayRecord, Message, MetricRecord, RecordDict
from flwr.serverapp.strategy import (
    DifferentialPrivacyClientSideFixedClipping,
    DifferentialPrivacyServerSideAdaptiveClipping,
    DifferentialPrivacyServerSideFixedClipping,
    FedAvg,
)

from tests.helpers.answering_grid import LocalGrid
from unsloth_multigpu.errors import ConfigError, FederatedError, ResumeError
from unsloth_multigpu.federated.flower_strategy import check_strategy, checked_strategy, make_strategy
from unsloth_multigpu.federated.rounds import rounds_in
from unsloth_multigpu.federated.server import FitOptions, ServerOptions
from unsloth_multigpu.federated.training import FederatedServer, InitialState, Training

START = {
    "weight": np.linspace(-1, 1, 6, dtype=np.float32).reshape(2, 3),
    "running_var": np.ones(3, np.float32),
    "num_batches_tracked": np.array(0),
    "seen": np.array([False, False]),
}
NUM_CLIENTS = 4
pytestmark = pytest.mark.usefixtures("may_make_messages")


@pytest.fixture(scope="module", autouse=True)
def quick_collections():
    """Flower collects garbage with every array; the libraries that other tests have loaded are none."""
    gc.freeze()
    yield
    gc.unfreeze()


def pulled(client_id, server_round, arrays):
    """A client's training: towards a point of its own, by a step that depends on the round."""
    target = np.float32(client_id + 1)
    found = {
        "weight": arrays["weight"] + (target - arrays["weight"]) / np.float32(2 + server_round),
        "running_var": np.full(3, 0.25 * client_id + 0.25, np.float32),
        "num_batches_tracked": arrays["num_batches_tracked"] + float(client_id),
        "seen": np.array([1.0, float(client_id == 0)]),  # The second by the client with the least data.
    }
    return found, {"num-examples": client_id + 1, "loss": float(np.abs(found["weight"] - target).mean())}


def failing(clients, number):
    """As `pulled`, but some clients raise in one round."""

    def behave(client_id, server_round, arrays):
        if client_id in clients and server_round == number:
            raise ArithmeticError("no luck")
        return pulled(client_id, server_round, arrays)

    return behave


def grid_of(behave=pulled, num_clients=NUM_CLIENTS):
    """A grid whose clients call `behave` with client, round and arrays."""

    def app(message, context):
        number = int(message.content["config"]["server-round"])
        arrays = {name: array.numpy() for name, array in message.content["arrays"].items()}
        found, metrics = behave(context.node_id - 1, number, arrays)
        content = RecordDict({"metrics": MetricRecord(metrics)})
        if message.metadata.message_type == "train":
            content["arrays"] = ArrayRecord({name: Array(np.asarray(value)) for name, value in found.items()})
        return Message(content, reply_to=message)

    return LocalGrid(app, num_clients)


def make_training(strategy, num_rounds=2, grid=None, *, output_dir=None, min_success=0.0, config=None, **options):
    server = FederatedServer(ServerOptions("server", print, print, **{"evaluate_fn": len, **options}), strategy)
    folder, resume = (None, None) if output_dir is None else (str(output_dir), "auto")
    grid = grid or grid_of()
    fit = FitOptions(grid.num_clients, num_rounds, config, folder, resume, min_success, 5.0)
    arrays = ArrayRecord({name: Array(value) for name, value in START.items()})
    initial = InitialState(arrays, frozen=ArrayRecord(), buffers=("running_var", "num_batches_tracked", "seen"))
    return Training(server, grid, fit, initial)


def run(*args, **options):
    return make_training(*args, **options).run()


def weights(result):
    return {name: array.numpy() for name, array in result.result.arrays.items()}


def assert_same_bits(left, right):
    one, other = weights(left), weights(right)
    assert list(one) == list(other)
    for name, value in one.items():
        assert value.dtype == other[name].dtype
        assert value.tobytes() == other[name].tobytes(), name
    for metrics in ("train_metrics_clientapp", "evaluate_metrics_clientapp", "evaluate_metrics_serverapp"):
        assert getattr(left.result, metrics) == getattr(right.result, metrics)


def test_server_optimizer_leaves_running_statistics_to_the_mean():
    found = weights(run(make_strategy("fedadam", {"eta": 2.0}), 3))
    mean = weights(run(make_strategy("fedavg", {}), 3))
    np.testing.assert_allclose(found["running_var"], mean["running_var"], rtol=0, atol=1e-6)
    assert np.abs(found["weight"] - mean["weight"]).max() > 1e-3
    for name, value in START.items():
        assert found[name].dtype == mean[name].dtype == value.dtype
    assert found["seen"].tolist() == mean["seen"].tolist() == [True, False]


def test_draw_of_clients_is_repeatable_and_leaves_the_random_state_alone():
    grids = [grid_of() for _ in range(3)]
    for grid, seed, noise in zip(grids, (0, 0, 1), (1, 2, 3), strict=True):
        random.seed(noise)
        np.random.seed(noise)
        before = random.getstate(), np.random.get_state()[1].tolist()
        run(make_strategy("fedavg", {"fraction_train": 0.5, "fraction_evaluate": 0.5}), 4, grid, seed=seed)
        assert (random.getstate(), np.random.get_state()[1].tolist()) == before
    assert grids[0].asked == grids[1].asked
    assert grids[0].asked != grids[2].asked
    assert {len(clients) for _, clients in grids[0].asked} == {2}
    assert len({tuple(clients) for _, clients in grids[0].asked}) > 1


def test_failed_client_is_left_out_and_named():
    result = run(make_strategy("fedavg", {"weighted_by_key": "loss"}), 2, grid_of(failing({2}, 1)), evaluate_fn=None)
    assert result.rounds[0].failures == ("left out: client 2: no luck",)
    assert result.rounds[0].num_examples == 1 + 2 + 4
    assert result.rounds[1].failures == ()
    with pytest.raises(FederatedError, match=r"round 1: 3 of 4 clients succeeded in train, min_success=0.8"):
        run(make_strategy("fedavg", {}), 2, grid_of(failing({2}, 1)), min_success=0.8)
    with pytest.raises(FederatedError, match=r"round 2: 0 of 4 clients .* client 0: no luck"):
        run(make_strategy("fedavg", {}), 3, grid_of(failing(range(4), 2)))


def test_client_without_data_does_not_count():
    def behave(client_id, number, arrays):
        return (arrays, {"num-examples": 0}) if client_id == 1 else pulled(client_id, number, arrays)

    result = run(make_strategy("fedavg", {}), 1, grid_of(behave))
    assert result.rounds[0].failures == ("client 1: no data in train", "client 1: no data in evaluate")
    # A median counts heads: of clients 0, 2 and 3 it is that of client 2.
    median = weights(run(make_strategy("fedmedian", {}), 1, grid_of(behave)))
    np.testing.assert_array_equal(median["weight"], pulled(2, 1, START)[0]["weight"])
    with pytest.raises(FederatedError, match="no client had data in train"):
        run(make_strategy("fedavg", {}), 1, grid_of(lambda c, n, arrays: (arrays, {"num-examples": 0})))


def test_replies_that_do_not_fit_are_an_error_with_flowers_reason():
    def behave(client_id, number, arrays):
        found, metrics = pulled(client_id, number, arrays)
        return found, {**metrics, **({"extra": 1.0} if client_id == 3 else {})}

    with pytest.raises(FederatedError, match=r"round 1: FedAvg.aggregate_train: All MetricRecords must have the same"):
        run(make_strategy("fedavg", {}), 1, grid_of(behave))


def test_weights_that_are_no_numbers_are_an_error_and_not_saved(tmp_path):
    with pytest.raises(FederatedError, match="weight is infinite or NaN after aggregation"):
        run(make_strategy("fedavgm", {"server_learning_rate": 1e39}), 1, output_dir=tmp_path)
    assert rounds_in(tmp_path) == []


def clipping(inner, num_sampled=3):
    return DifferentialPrivacyServerSideFixedClipping(inner, 1.0, 1.0, num_sampled)


def test_noise_is_not_that_of_the_seed():
    one, other = (weights(run(clipping(make_strategy("fedavg", {}), NUM_CLIENTS), 1)) for _ in range(2))
    assert not np.array_equal(one["weight"], other["weight"])
    # Flower leaves a number without a dimension as it is, so this is the mean.
    assert one["num_batches_tracked"] == 2


SETTINGS = {
    "fedavg": {"fraction_train": 0.5},
    "fedadam": {},
    "fedavgm": {"server_momentum": 0.9, "server_learning_rate": 0.5},
    "krum": {},
    "qfedavg": {"client_learning_rate": 0.1, "train_loss_key": "loss"},
}


@pytest.mark.parametrize("name", [*SETTINGS, "clipping"])
def test_training_that_was_stopped_goes_on_to_the_same_bits(name, tmp_path):
    def strategy():
        if name in SETTINGS:
            return make_strategy(name, SETTINGS[name])
        # Noise is drawn again in every run; without it a resumed run has the same bits.
        inner = make_strategy("fedavg", {})
        return DifferentialPrivacyServerSideAdaptiveClipping(inner, 0.0, NUM_CLIENTS, clipped_count_stddev=0.0)

    def behave(client_id, number, arrays):
        if number == 3:
            raise KeyboardInterrupt
        return pulled(client_id, number, arrays)

    whole = run(strategy(), 4)
    with pytest.raises(KeyboardInterrupt):
        run(strategy(), 4, grid_of(behave), output_dir=tmp_path)
    lines = (tmp_path / "rounds.jsonl").read_text().splitlines()
    assert [json.loads(line)["server_round"] for line in lines] == [1, 2]
    grid = grid_of()
    again = run(strategy(), 4, grid, output_dir=tmp_path)
    assert_same_bits(again, whole)
    assert len([kind for kind, _ in grid.asked if kind == "train"]) == 2
    assert [report.server_round for report in again.rounds] == [1, 2, 3, 4]
    assert [path.name for path in rounds_in(tmp_path)] == ["round-3.pt", "round-4.pt"]


def test_state_of_a_strategy_is_kept_and_what_cannot_be_is_named(tmp_path, caplog):
    strategy = FedAvg()
    strategy.cache, strategy.seen = object(), {(1, "a"): b"\x00", 2: np.float32(0.5)}
    with caplog.at_level(logging.WARNING, "unsloth_multigpu"):
        run(strategy, 2, output_dir=tmp_path)
    told = "not saved, so a resumed training begins with the initial value: FedAvg.cache"
    assert [message for message in caplog.messages if "FedAvg.cache" in message] == [told]
    strategy.seen = {}
    run(strategy, 2, output_dir=tmp_path)
    assert strategy.seen == {(1, "a"): b"\x00", 2: np.float32(0.5)}
    assert type(strategy.seen[2]) is np.float32


def test_other_settings_are_refused_by_name(tmp_path):
    strategy = make_strategy("fedavg", {})
    run(strategy, 2, output_dir=tmp_path)
    with pytest.raises(ResumeError, match=r"written with strategy='FedAvg', this training has 'FedAdam'"):
        run(make_strategy("fedadam", {}), 2, output_dir=tmp_path)
    with pytest.raises(ResumeError, match=r"round-2.pt was written with num_clients=4, this training has 5"):
        run(strategy, 2, grid_of(num_clients=5), output_dir=tmp_path)
    with pytest.raises(ResumeError, match=r"was written with config\['lr'\]=None, this training has 0.1"):
        run(strategy, 2, output_dir=tmp_path, config={"lr": 0.1})
    with pytest.raises(ConfigError, match=r"num_rounds=1, but .*round-2.pt is already the state after round 2"):
        run(strategy, 1, output_dir=tmp_path)
    training = make_training(strategy, 2, output_dir=tmp_path)
    adapter = json.dumps({"name": "default", "config": {"lora_alpha": 16}})
    training._known_initial = dataclasses.replace(training._known_initial, adapter_config=adapter)
    with pytest.raises(ResumeError, match="was written with lora_alpha=None, this training has 16"):
        training.run()


def test_damaged_round_is_passed_over(tmp_path, caplog):
    whole = run(make_strategy("fedadam", {}), 3)
    run(make_strategy("fedadam", {}), 3, output_dir=tmp_path)
    intact = (tmp_path / "round-3.pt").read_bytes()
    flipped = bytearray(intact)
    flipped[intact.index(b"server_round")] ^= 1
    for damaged in (bytes(flipped), intact[: len(intact) // 2]):
        (tmp_path / "round-3.pt").write_bytes(damaged)
        caplog.clear()
        assert_same_bits(run(make_strategy("fedadam", {}), 3, output_dir=tmp_path), whole)
        assert "round-3.pt is skipped, because it is damaged: " in caplog.text


@pytest.mark.parametrize(
    ("name", "settings", "fact"),
    [
        ("fedsgd", {}, r"strategy='fedsgd'; expected one of bulyan, .*fedavg, .*krum"),
        ("fedavg", {"fraction_fit": 0.5}, "strategy='fedavg' refuses its arguments: .*'fraction_fit'"),
        ("qfedavg", {}, "strategy='qfedavg' refuses its arguments: .*'client_learning_rate'"),
        ("fedprox", {}, "strategy='fedprox' needs 'proximal_mu'"),
        (FedAvg, None, "strategy=<class .*expected a name such as 'fedavg' or a flwr.serverapp"),
        (FedAvg(), {"fraction_train": 0.5}, "together with an instance as strategy"),
        ("fedavg", ["a"], r"strategy_kwargs=\['a'\]; expected a dict"),
    ],
)
def test_wrong_arguments_are_named(name, settings, fact):
    with pytest.raises(ConfigError, match=fact):
        checked_strategy(name, settings)


class Loop(FedAvg):
    def start(self, *args, **kwargs):
        return None


@pytest.mark.parametrize(
    ("strategy", "num_clients", "fact"),
    [
        (FedAvg(), 1, "min_train_nodes=2 of FedAvg, but num_clients=1: it would wait forever"),
        (clipping(FedAvg(min_available_nodes=5)), 4, "min_available_nodes=5 of FedAvg, but num_clients=4"),
        (clipping(FedAvg()), 2, "num_sampled_clients=3 of DifferentialPrivacyServer"),
        (Loop(), 2, r"Loop has a start\(\) of its own"),
    ],
)
def test_strategy_that_would_wait_or_has_a_loop_is_refused_also_inside_another(strategy, num_clients, fact):
    with pytest.raises(ConfigError, match=fact):
        check_strategy(strategy, num_clients)
    for good, enough in ((make_strategy("fedavg", {}), 1), (FedAvg(), 2), (clipping(FedAvg()), 3)):
        check_strategy(good, enough)


def test_clipping_by_clients_needs_their_mod():
    good = clipping(FedAvg())
    assert checked_strategy(good, None) is good
    with pytest.raises(ConfigError, match="ClientSideFixedClipping needs clients that clip their updates") as error:
        checked_strategy(DifferentialPrivacyClientSideFixedClipping(FedAvg(), 1.0, 1.0, 3), None)
    assert "DifferentialPrivacyServerSideFixedClipping" in error.value.hint
