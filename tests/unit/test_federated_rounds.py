"""Rounds over clients in this process: who is drawn, what is put together, what is kept, how it goes on."""

from __future__ import annotations

import gc
import json
import logging
import os
import random
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("flwr", reason="Flower needs Python 3.11")

from flwr.app import Array, ArrayRecord, ConfigRecord, Error, Message, MetricRecord, RecordDict
from flwr.serverapp.strategy import (
    DifferentialPrivacyServerSideAdaptiveClipping,
    DifferentialPrivacyServerSideFixedClipping,
    FedAvg,
    Strategy,
    strategy_utils,
)

from tests.helpers.answering_grid import AnsweringGrid
from unsloth_multigpu.checkpoint.manifest import PART_FOLDER
from unsloth_multigpu.errors import ConfigError, FederatedError, ResumeError
from unsloth_multigpu.federated import rounds
from unsloth_multigpu.federated.checkpoint import open_folder, read_round, rounds_in
from unsloth_multigpu.federated.option import FitOptions
from unsloth_multigpu.federated.reply import CHANGED, client_of, name_of
from unsloth_multigpu.federated.report import ClientRecord, FederatedResult
from unsloth_multigpu.federated.rounds import LimitedGrid, Rounds
from unsloth_multigpu.federated.strategy import make_strategy
from unsloth_multigpu.federated.training import Start

Reply = tuple[dict[str, np.ndarray[Any, Any]], dict[str, Any]]
START = {
    "weight": np.linspace(-1, 1, 6, dtype=np.float32).reshape(2, 3),
    "running_var": np.ones(3, np.float32),
    "num_batches_tracked": np.array(0),
}
NUM_CLIENTS = 4
pytestmark = pytest.mark.usefixtures("may_make_messages")


@pytest.fixture(scope="module", autouse=True)
def quick_collections() -> Iterator[None]:
    """Flower collects garbage with every array; the libraries that other tests have loaded are none."""
    gc.freeze()
    yield
    gc.unfreeze()


def pulled(client_id: int, server_round: int, arrays: dict[str, np.ndarray[Any, Any]]) -> Reply:
    """A client's training: towards a point of its own, by a step that depends on the round."""
    target = np.float32(client_id + 1)
    found = {
        "weight": arrays["weight"] + (target - arrays["weight"]) / np.float32(2 + server_round),
        "running_var": np.full(3, 0.25 * client_id + 0.25, np.float32),
        "num_batches_tracked": arrays["num_batches_tracked"] + client_id,
    }
    return found, {"num-examples": client_id + 1, "loss": float(np.abs(found["weight"] - target).mean())}


class LocalGrid(AnsweringGrid):
    """Runs `behave` for each message, the last client first; a client that raises becomes an error reply."""

    def __init__(self, behave: Callable[..., Reply] = pulled, num_clients: int = NUM_CLIENTS) -> None:
        self.behave, self.num_clients = behave, num_clients
        self.asked: list[tuple[str, list[int]]] = []
        self.records: list[ClientRecord] = []

    def get_node_ids(self) -> list[int]:
        return [client_id + 1 for client_id in range(self.num_clients)]

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> list[Message]:
        messages = list(messages)
        if messages:
            kind = messages[0].metadata.message_type
            self.asked.append((kind, [message.metadata.dst_node_id - 1 for message in messages]))
        return [self.answer(message) for message in reversed(messages)]

    def answer(self, message: Message) -> Message:
        client_id, kind = message.metadata.dst_node_id - 1, message.metadata.message_type
        number = int(message.content["config"]["server-round"])
        arrays = {name: array.numpy() for name, array in message.content["arrays"].items()}
        try:
            found, metrics = self.behave(client_id, number, arrays)
        except ArithmeticError as error:
            return Message(Error(2, f"ArithmeticError: {error}"), reply_to=message)
        self.records.append(ClientRecord(client_id, kind, 0, "cpu:0", 10.0 * number, 1.0, 5, "", 1))
        content = RecordDict({"metrics": MetricRecord(metrics)})
        if kind == "train":
            content["arrays"] = ArrayRecord({name: Array(np.asarray(value)) for name, value in found.items()})
        return Message(content, reply_to=message)

    devices_of_slots = ("cpu:0",)


def start_arrays() -> ArrayRecord:
    return ArrayRecord({name: Array(value) for name, value in START.items()})


def make_rounds(
    strategy: Strategy,
    num_rounds: int,
    grid: LocalGrid,
    arrays: ArrayRecord | None = None,
    *,
    buffers: Sequence[str] = ("running_var", "num_batches_tracked"),
    facts: Mapping[str, Any] | None = None,
    server_evaluate: Any = None,
    saved: Any = None,
    output_dir: Path | None = None,
    min_success: float = 0.0,
    timeout_s: float = 5.0,
    **plan: Any,
) -> Rounds:
    """Of the server's plan what rounds read; `plan` = what is not the default."""
    read = {"server_id": "server", "seed": 0, "evaluates": True, "lora_aggregation": "mean", **plan}
    folder = None if output_dir is None else str(output_dir)
    options = FitOptions(num_rounds, output_dir=folder, min_success=min_success, round_timeout_s=timeout_s)
    start = Start(start_arrays() if arrays is None else arrays, buffers=buffers)
    given: Any = SimpleNamespace(**read)
    where = {"evaluate": server_evaluate, "saved": saved, "slots": grid}
    return Rounds(given, options, start, grid, grid.num_clients, strategy, facts=facts or {}, **where)


def run(strategy: Strategy, num_rounds: int = 2, grid: LocalGrid | None = None, **options: Any) -> FederatedResult:
    return make_rounds(strategy, num_rounds, grid or LocalGrid(), **options).run()


def weights(result: FederatedResult) -> dict[str, np.ndarray[Any, Any]]:
    return {name: array.numpy() for name, array in result.result.arrays.items()}


def assert_same_bits(left: FederatedResult, right: FederatedResult) -> None:
    one, other = weights(left), weights(right)
    assert list(one) == list(other)
    for name, value in one.items():
        assert value.dtype == other[name].dtype
        assert value.tobytes() == other[name].tobytes(), name
    for metrics in ("train_metrics_clientapp", "evaluate_metrics_clientapp", "evaluate_metrics_serverapp"):
        assert getattr(left.result, metrics) == getattr(right.result, metrics)


def test_result_is_the_weighted_mean_in_the_dtypes_of_the_start() -> None:
    found = weights(run(make_strategy("fedavg", {}), 1))
    replies = [pulled(client_id, 1, START)[0] for client_id in range(NUM_CLIENTS)]
    mean = {name: sum((i + 1) * reply[name].astype(float) for i, reply in enumerate(replies)) / 10 for name in START}
    np.testing.assert_allclose(found["weight"], mean["weight"], rtol=0, atol=1e-6)
    np.testing.assert_allclose(found["running_var"], mean["running_var"], rtol=0, atol=1e-6)
    assert mean["num_batches_tracked"] == 2.0
    assert found["num_batches_tracked"] == 2
    assert {name: value.dtype for name, value in found.items()} == {n: v.dtype for n, v in START.items()}


@pytest.mark.parametrize("name", ["fedadam", "fedyogi", "fedavgm"])
def test_server_optimizer_leaves_running_statistics_to_the_mean(name: str) -> None:
    settings = {"server_momentum": 0.9} if name == "fedavgm" else {"eta": 2.0}
    found = weights(run(make_strategy(name, settings), 3))
    mean = weights(run(make_strategy("fedavg", {}), 3))
    np.testing.assert_allclose(found["running_var"], mean["running_var"], rtol=0, atol=1e-6)
    assert np.abs(found["weight"] - mean["weight"]).max() > 1e-3
    assert found["weight"].dtype == np.float32


def test_draw_of_clients_is_repeatable_and_leaves_the_random_state_alone() -> None:
    grids = [LocalGrid(), LocalGrid(), LocalGrid()]
    for grid, seed, noise in zip(grids, (0, 0, 1), (1, 2, 3), strict=True):
        random.seed(noise)
        np.random.seed(noise)
        before = random.getstate(), np.random.get_state()[1].tolist()  # type: ignore[union-attr]
        run(make_strategy("fedavg", {"fraction_train": 0.5, "fraction_evaluate": 0.5}), 4, grid, seed=seed)
        assert (random.getstate(), np.random.get_state()[1].tolist()) == before  # type: ignore[union-attr]
    assert grids[0].asked == grids[1].asked
    assert grids[0].asked != grids[2].asked
    assert len({tuple(clients) for _, clients in grids[0].asked}) > 1


def test_failed_client_is_left_out_and_named() -> None:
    def behave(client_id: int, number: int, arrays: Any) -> Reply:
        if client_id == 2 and number == 1:
            raise ArithmeticError("no luck")
        return pulled(client_id, number, arrays)

    result = run(make_strategy("fedavg", {}), 2, LocalGrid(behave), evaluates=False)
    assert result.rounds[0].failures == ("client 2: left out of train: ArithmeticError: no luck",)
    assert result.rounds[0].num_examples == 1 + 2 + 4
    assert result.rounds[1].failures == ()
    with pytest.raises(FederatedError, match=r"round 1: 3 of 4 clients succeeded in train, min_success=0.8"):
        run(make_strategy("fedavg", {}), 2, LocalGrid(behave), min_success=0.8)
    run(make_strategy("fedavg", {}), 2, LocalGrid(behave), min_success=0.75)


def test_client_that_changes_what_does_not_travel_is_named(caplog: pytest.LogCaptureFixture) -> None:
    class Careless(LocalGrid):
        def answer(self, message: Message) -> Message:
            reply = super().answer(message)
            if message.metadata.dst_node_id == 3:
                reply.content["client"] = ConfigRecord({"client-id": 2, CHANGED: ["base.weight", "base.bias"]})
            return reply

    with caplog.at_level(logging.WARNING):
        result = run(make_strategy("fedavg", {}), 1, Careless(), evaluates=False)
    assert result.rounds[0].failures == ("client 2: changed base.weight in train, one of 2 that must not change",)
    assert f"round 1: {result.rounds[0].failures[0]}" in caplog.text


def test_round_in_which_all_fail_ends_the_training() -> None:
    def behave(client_id: int, number: int, arrays: Any) -> Reply:
        if number == 2:
            raise ArithmeticError("broken")
        return pulled(client_id, number, arrays)

    with pytest.raises(FederatedError, match=r"round 2: 0 of 4 clients .* client 0: ArithmeticError: broken"):
        run(make_strategy("fedavg", {}), 3, LocalGrid(behave))


def test_client_that_does_not_answer_counts_as_failed() -> None:
    class Silent(LocalGrid):
        def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> list[Message]:
            return super().send_and_receive(messages, timeout=timeout)[2:]

    result = run(make_strategy("fedavg", {}), 1, Silent(), evaluates=False)
    assert result.rounds[0].failures == ("2 clients: left out of train: no answer in time",)
    with pytest.raises(FederatedError, match=r"round 1: 2 of 4 clients succeeded in train, min_success=0.6"):
        run(make_strategy("fedavg", {}), 1, Silent(), min_success=0.6)
    with pytest.raises(FederatedError, match=r"0 of 2 clients succeeded in train. The first failure: 2 clients: no"):
        run(make_strategy("fedavg", {}), 1, Silent(num_clients=2))


def test_client_without_data_does_not_count() -> None:
    def behave(client_id: int, number: int, arrays: Any) -> Reply:
        if client_id == 1:
            return arrays, {"num-examples": 0}
        return pulled(client_id, number, arrays)

    result = run(make_strategy("fedavg", {}), 1, LocalGrid(behave))
    assert result.rounds[0].failures == ("client 1: no data in train", "client 1: no data in evaluate")
    # A median counts heads: of clients 0, 2 and 3 it is that of client 2.
    median = weights(run(make_strategy("fedmedian", {}), 1, LocalGrid(behave)))
    np.testing.assert_array_equal(median["weight"], pulled(2, 1, START)[0]["weight"])
    with pytest.raises(FederatedError, match="no client had data in train"):
        run(make_strategy("fedavg", {}), 1, LocalGrid(lambda c, n, arrays: (arrays, {"num-examples": 0})))


def test_replies_that_do_not_fit_are_an_error_with_flowers_reason() -> None:
    def behave(client_id: int, number: int, arrays: Any) -> Reply:
        found, metrics = pulled(client_id, number, arrays)
        return found, {**metrics, **({"extra": 1.0} if client_id == 3 else {})}

    with pytest.raises(FederatedError, match=r"round 1: FedAvg.aggregate_train: All MetricRecords must have the same"):
        run(make_strategy("fedavg", {}), 1, LocalGrid(behave))


def test_weights_that_are_no_numbers_are_an_error_and_not_saved(tmp_path: Path) -> None:
    with pytest.raises(FederatedError, match="weight is infinite or no number after aggregation"):
        run(make_strategy("fedavgm", {"server_learning_rate": 1e39}), 1, output_dir=tmp_path)
    assert rounds_in(tmp_path) == []


def test_strategy_that_uses_no_reply_is_reported_and_keeps_the_weights() -> None:
    def behave(client_id: int, number: int, arrays: Any) -> Reply:
        if client_id == 2:
            raise ArithmeticError("no luck")
        return pulled(client_id, number, arrays)

    strategy = DifferentialPrivacyServerSideFixedClipping(make_strategy("fedavg", {}), 1.0, 1.0, NUM_CLIENTS)
    result = run(strategy, 1, LocalGrid(behave), evaluates=False)
    assert [f for f in result.rounds[0].failures if "used no reply: the weights stay" in f]
    np.testing.assert_array_equal(weights(result)["weight"], START["weight"])


def test_noise_is_not_that_of_the_seed_and_is_on_counters_too() -> None:
    def private() -> Strategy:
        return DifferentialPrivacyServerSideFixedClipping(make_strategy("fedavg", {}), 1.0, 1.0, NUM_CLIENTS)

    one, other = weights(run(private(), 1)), weights(run(private(), 1))
    assert not np.array_equal(one["weight"], other["weight"])
    # Flower leaves a number without a dimension as it is, so this is the mean; a list of counters is clipped to 1.
    assert one["num_batches_tracked"] == 2
    counters = {"counters": Array(np.zeros(2, np.int64))}

    def counted(client_id: int, number: int, arrays: Any) -> Reply:
        return {"counters": arrays["counters"] + 100}, {"num-examples": 1}

    strategy = DifferentialPrivacyServerSideFixedClipping(make_strategy("fedavg", {}), 1e9, 1.0, NUM_CLIENTS)
    options: Any = {"buffers": ("counters",), "evaluates": False}
    result = make_rounds(strategy, 1, LocalGrid(counted), ArrayRecord(counters), **options).run()
    found = result.result.arrays["counters"].numpy()
    assert found.dtype == np.int64
    assert found[0] != found[1]  # Noise for each its own, of 2.5e8.


def test_nodes_that_leave_end_the_training_and_the_wait_is_logged(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    class Left(LocalGrid):
        def get_node_ids(self) -> list[int]:
            return super().get_node_ids()[: 1 if len(self.asked) > 1 else None]

    monkeypatch.setattr(rounds, "_FIRST_LINE_S", 0.0)
    monkeypatch.setattr(strategy_utils, "sleep", lambda seconds: None)
    training = make_rounds(FedAvg(), 2, Left(), timeout_s=0.2)
    with caplog.at_level(logging.INFO), pytest.raises(FederatedError) as error:
        training.run()
    assert str(error.value).startswith(
        "round 2: FedAvg.configure_train still waits for nodes after 0.2 s; 1 are connected."
    )
    waits = [r.getMessage() for r in caplog.records if "waits for nodes" in r.getMessage()]
    assert waits[-1] == "round 2: FedAvg.configure_train waits for nodes: connected=1"
    assert len([line for line in waits if line.startswith("round 2")]) == 1


def test_limit_of_the_wait_for_nodes_can_be_lifted() -> None:
    limited = LimitedGrid(LocalGrid(), "who", 0.0)
    assert limited.get_node_ids() == [1, 2, 3, 4]  # It may have come to the first look too late.
    with pytest.raises(FederatedError, match="who still waits for nodes after 0 s; 4 are connected"):
        limited.get_node_ids()
    limited.timeout_s = float("inf")
    assert limited.get_node_ids() == [1, 2, 3, 4]
    assert limited.send_and_receive([]) == []


def test_one_client_trains_alone_and_nobody_evaluates_without_a_function() -> None:
    grid = LocalGrid(num_clients=1)
    result = run(make_strategy("fedavg", {}), 2, grid, evaluates=False)
    assert grid.asked == [("train", [0]), ("train", [0])]
    assert result.result.evaluate_metrics_clientapp == {}


def test_report_counts_clients_and_busy_seconds() -> None:
    result = run(
        make_strategy("fedavg", {}), 1, server_evaluate=lambda number, arrays, residual: MetricRecord({"m": 2.0})
    )
    (report,) = result.rounds
    assert report.devices[0].device == "cpu:0"
    assert report.devices[0].client_ids == (3, 2, 1, 0)  # This grid begins with the last one.
    assert report.devices[0].busy_s == 1.0  # The eight records of one second begin together.
    assert report.server_metrics == {"m": 2.0}
    assert result.result.evaluate_metrics_serverapp == {0: MetricRecord({"m": 2.0}), 1: MetricRecord({"m": 2.0})}
    assert "server_id=server clients=4 slots=1" in str(result.report)
    assert str(result.report).isascii()


SETTINGS: Mapping[str, Mapping[str, Any]] = {
    "fedavg": {"fraction_train": 0.5},
    "fedadam": {},
    "fedyogi": {},
    "fedavgm": {"server_momentum": 0.9, "server_learning_rate": 0.5},
    "fedmedian": {},
    "krum": {},
    "qfedavg": {"client_learning_rate": 0.1, "train_loss_key": "loss"},
}


def saved_in(folder: Path, facts: Mapping[str, Any] | None = None, resume: str = "auto") -> Any:
    found = round_to_resume(folder, resume)
    assert found is not None
    return read_round(found, facts or {}, 9)


def round_to_resume(folder: Path, resume: str | None) -> Path | None:
    with open_folder(folder, resume) as found:
        return found


@pytest.mark.parametrize("name", SETTINGS)
def test_training_that_was_stopped_goes_on_to_the_same_bits(name: str, tmp_path: Path) -> None:
    def evaluated(number: int, arrays: ArrayRecord, residual: Any) -> MetricRecord:
        return MetricRecord({"sum": float(arrays["weight"].numpy().sum()), "round": number})

    whole = run(make_strategy(name, SETTINGS[name]), 4, server_evaluate=evaluated)

    def behave(client_id: int, number: int, arrays: Any) -> Reply:
        if number == 3:
            raise KeyboardInterrupt
        return pulled(client_id, number, arrays)

    with pytest.raises(KeyboardInterrupt):
        run(make_strategy(name, SETTINGS[name]), 4, LocalGrid(behave), server_evaluate=evaluated, output_dir=tmp_path)
    saved = saved_in(tmp_path)
    assert saved.server_round == 2
    strategy = make_strategy(name, SETTINGS[name])
    saved.restore(strategy)
    again = run(strategy, 4, saved=saved, server_evaluate=evaluated, output_dir=tmp_path)
    assert_same_bits(again, whole)
    assert [report.server_round for report in again.rounds] == [1, 2, 3, 4]
    assert [path.name for path in rounds_in(tmp_path)] == ["round-3", "round-4"]


def test_clipping_norm_that_adapts_goes_on(tmp_path: Path) -> None:
    def private() -> Strategy:
        # Noise is drawn again in every run; without it a resumed run has the same bits.
        inner = make_strategy("fedavg", {})
        return DifferentialPrivacyServerSideAdaptiveClipping(inner, 0.0, NUM_CLIENTS, clipped_count_stddev=0.0)

    whole = run(private(), 3)
    run(private(), 2, output_dir=tmp_path)
    strategy = private()
    saved = saved_in(tmp_path)
    saved.restore(strategy)
    assert_same_bits(run(strategy, 3, saved=saved, output_dir=tmp_path), whole)


class RestsGrid(LocalGrid):
    """Notes the rest of exact aggregation that each client gets."""

    def __init__(self) -> None:
        super().__init__(lambda client_id, number, arrays: (moved(client_id, number, arrays), {"num-examples": 1}))
        self.rests: list[Any] = []

    def answer(self, message: Message) -> Message:
        self.rests.append(message.content.array_records.get("residual"))
        return super().answer(message)


def moved(client_id: int, number: int, arrays: dict[str, np.ndarray[Any, Any]]) -> dict[str, np.ndarray[Any, Any]]:
    draw = np.random.default_rng([client_id, number])
    return {name: (value + draw.normal(size=value.shape)).astype(np.float32) for name, value in arrays.items()}


def test_rest_of_exact_aggregation_goes_to_the_clients_and_on_from_a_saved_round(tmp_path: Path) -> None:
    start = {"q.lora_A.default.weight": np.ones((1, 4), np.float32), "q.lora_B.default.weight": np.ones((3, 1), "f4")}

    def train(num_rounds: int, saved: Any = None, folder: Path | None = None) -> tuple[Any, list[Any]]:
        grid, arrays = RestsGrid(), ArrayRecord({name: Array(value) for name, value in start.items()})
        options: Any = {"evaluates": False, "lora_aggregation": "exact", "output_dir": folder, "buffers": ()}
        training = make_rounds(make_strategy("fedavg", {}), num_rounds, grid, arrays, saved=saved, **options)
        training.run()
        return training.residual, grid.rests

    first, _ = train(1)
    whole, rests = train(2)
    assert rests == [None] * NUM_CLIENTS + [first] * NUM_CLIENTS
    assert len(first) == 2
    assert train(1, folder=tmp_path)[0] == first
    assert train(2, saved_in(tmp_path)) == (whole, [first] * NUM_CLIENTS)


def test_state_of_an_accountant_is_kept_and_what_cannot_be_is_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def with_parts(spent: float) -> Strategy:
        strategy = FedAvg()
        parts = {"spent": spent}
        strategy.accountant = SimpleNamespace(  # type: ignore[attr-defined]
            parts=parts, state_dict=lambda: dict(parts), load_state_dict=parts.update
        )
        strategy.cache = object()  # type: ignore[attr-defined]
        strategy.seen = {(1, "a"): b"\x00", 2: np.float32(0.5)}  # type: ignore[attr-defined]
        return strategy

    with caplog.at_level(logging.WARNING, "unsloth_multigpu"):
        run(with_parts(3.5), 2, output_dir=tmp_path)
    assert [r.getMessage() for r in caplog.records if "FedAvg.cache" in r.getMessage()] == [
        "not saved, so a resumed training starts with its initial value: FedAvg.cache"
    ]
    strategy: Any = with_parts(0.0)
    strategy.seen = {}
    saved_in(tmp_path).restore(strategy)
    assert strategy.accountant.parts == {"spent": 3.5}
    assert strategy.seen == {(1, "a"): b"\x00", 2: np.float32(0.5)}
    assert type(strategy.seen[2]) is np.float32
    with pytest.raises(ResumeError, match=r"made with strategy FedAvg with accountant, this is FedAdam"):
        saved_in(tmp_path).restore(make_strategy("fedadam", {}))


def test_training_goes_on_neither_without_an_accountant_nor_with_a_new_one(tmp_path: Path) -> None:
    def with_part(part: Any) -> Strategy:
        strategy = FedAvg()
        strategy.part = part  # type: ignore[attr-defined]
        return strategy

    known = SimpleNamespace(state_dict=dict, load_state_dict=dict)
    for name, before, others in (("without", FedAvg(), (known,)), ("with", with_part(known), (None, 2.0))):
        (tmp_path / name).mkdir()
        run(before, 1, output_dir=tmp_path / name)
        for other in others:
            with pytest.raises(ResumeError, match=r"made with strategy FedAvg.*, this is FedAvg") as error:
                saved_in(tmp_path / name).restore(with_part(other))
            assert str(error.value).count("FedAvg with part") == 1


def test_other_settings_are_refused_by_name(tmp_path: Path) -> None:
    run(make_strategy("fedavg", {}), 1, output_dir=tmp_path, facts={"num_clients": 4, "seed": 0})
    with pytest.raises(ResumeError, match=r"round-1 was made with num_clients=4, this training has 5"):
        saved_in(tmp_path, {"num_clients": 5, "seed": 0})
    with pytest.raises(ResumeError, match=r"was made with config\['lr'\]=None, this training has 0.1"):
        saved_in(tmp_path, {"num_clients": 4, "seed": 0, "config['lr']": 0.1})


def damage(folder: Path, name: str) -> None:
    path = folder / name
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize("name", ["arrays.safetensors", "state.pt", "unsloth_multigpu.json"])
def test_round_that_is_not_whole_is_passed_over(name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    run(make_strategy("fedadam", {}), 3, output_dir=tmp_path)
    (tmp_path / PART_FOLDER / "round-4").mkdir(parents=True)
    damage(tmp_path / "round-3", name)
    with caplog.at_level(logging.WARNING, "unsloth_multigpu"):
        assert saved_in(tmp_path).server_round == 2
    assert f"round-3 is left out: {name}" in caplog.text
    assert not (tmp_path / PART_FOLDER).exists()
    shutil.rmtree(tmp_path / "round-2")
    assert round_to_resume(tmp_path, "auto") is None


def test_folder_of_an_earlier_training_is_not_written_over(tmp_path: Path) -> None:
    run(make_strategy("fedavg", {}), 1, output_dir=tmp_path)
    with pytest.raises(ConfigError, match="holds round-1 of an earlier training"):
        round_to_resume(tmp_path, None)
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="cannot be written: Not a directory"):
        round_to_resume(tmp_path / "file" / "below", None)


def test_folder_is_free_when_its_server_is_killed_and_a_child_lives(tmp_path: Path) -> None:
    code = (
        "import os, pathlib, sys, time\n"
        "from unsloth_multigpu.federated.checkpoint import open_folder\n"
        "with open_folder(pathlib.Path(sys.argv[1]), 'auto'):\n"
        "    if not os.fork():\n"
        "        print(os.getpid(), flush=True)\n"
        "        time.sleep(600)\n"
        "    input()\n"
    )
    command = [sys.executable, "-c", code, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        child = int(process.stdout.readline())
        try:
            with pytest.raises(ConfigError, match="a training that is not over"):
                round_to_resume(tmp_path, "auto")
            process.kill()
            process.wait()
            assert round_to_resume(tmp_path, "auto") is None
        finally:
            os.kill(child, signal.SIGKILL)


def test_rounds_are_lines_of_json_as_they_happen(tmp_path: Path) -> None:
    seen: list[int] = []

    def behave(client_id: int, number: int, arrays: Any) -> Reply:
        if (tmp_path / "rounds.jsonl").exists():
            seen.append(len((tmp_path / "rounds.jsonl").read_text().splitlines()))
        return pulled(client_id, number, arrays)

    result = run(make_strategy("fedavg", {}), 3, LocalGrid(behave), output_dir=tmp_path)
    lines = [json.loads(line) for line in (tmp_path / "rounds.jsonl").read_text().splitlines()]
    assert sorted(set(seen)) == [1, 2]
    assert [line["server_round"] for line in lines] == [1, 2, 3]
    assert lines[2]["train_metrics"] == dict(result.rounds[2].train_metrics)


def test_global_weights_can_be_read_by_others(tmp_path: Path) -> None:
    from safetensors.numpy import load_file

    result = run(make_strategy("fedadam", {}), 2, output_dir=tmp_path)
    stored = load_file(tmp_path / "round-2" / "arrays.safetensors")
    assert {name: value.tobytes() for name, value in stored.items()} == {
        name: value.tobytes() for name, value in weights(result).items()
    }


def test_reply_is_counted_for_the_client_that_it_names() -> None:
    message = Message(RecordDict(), 2**60, "train")
    content = RecordDict({"client": ConfigRecord({"client-id": 3})})
    assert client_of(Message(content, reply_to=message)) == 3
    assert name_of(Message(content, reply_to=message)) == "client 3"
    assert name_of(Message(Error(2, "no"), reply_to=message)) == f"node {2**60}"
    assert name_of(Message(Error(2, "no"), reply_to=Message(RecordDict(), 4, "train"))) == "client 3"


def test_one_line_of_each_round_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        run(make_strategy("fedavg", {}), 2)
    lines: Sequence[str] = [r.getMessage() for r in caplog.records if r.name.startswith("unsloth_multigpu")]
    assert [line.split()[0] for line in lines] == ["round=1", "round=2"]
    assert not [r for r in caplog.records if r.name == "flwr"]
