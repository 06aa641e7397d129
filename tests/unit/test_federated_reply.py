"""What becomes of replies in a round: unlike models, truth values under several strategies, clients without data."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("flwr", reason="Flower needs Python 3.11")

import torch
from flwr.app import ConfigRecord, Context, Error, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp.strategy import DifferentialPrivacyServerSideFixedClipping, FedAvg
from torch import nn

import unsloth_multigpu as ump
from tests.helpers.answering_grid import AnsweringGrid
from unsloth_multigpu.errors import FederatedError
from unsloth_multigpu.federated import training
from unsloth_multigpu.federated.option import FitOptions
from unsloth_multigpu.federated.reply import judge

NUM_CLIENTS = 4
pytestmark = pytest.mark.usefixtures("may_make_messages")


class Embedding(nn.Module):
    """Its table is frozen, so models of unequal vocabularies send the same tensors; it notes which words it saw."""

    def __init__(self, num_words: int = 10) -> None:
        super().__init__()
        self.table = nn.Embedding(num_words, 3).requires_grad_(False)
        self.head = nn.Linear(3, 2)
        self.register_buffer("seen", torch.zeros(8, dtype=torch.bool))


def train(model: Any, client: Any) -> tuple[int, dict[str, float]]:
    """Moves towards a point of its own; words 0 to 3 are seen by all, the others by client 3, which has least data."""
    with torch.no_grad():
        model.head.weight += client.client_id + 1 - model.head.weight
        model.seen[: 8 if client.client_id == 3 else 4] = True
    return NUM_CLIENTS - client.client_id, {"train_loss": 1.0}


def nothing_to_evaluate(model: Any, client: Any) -> tuple[float, int, dict[str, float]]:
    return 0.0, 0, {}


class Nodes(AnsweringGrid):
    """Runs a ClientApp for each client, in this process."""

    def __init__(self, *apps: ClientApp) -> None:
        self.apps = apps

    def get_node_ids(self) -> list[int]:
        return list(range(1, len(self.apps) + 1))

    def answer(self, message: Message) -> Message:
        client_id = message.metadata.dst_node_id - 1
        config = {"partition-id": client_id, "num-partitions": len(self.apps)}
        try:
            return self.apps[client_id](message, Context(1, client_id + 1, config, RecordDict(), {}))
        except FederatedError as error:
            return Message(Error(2, str(error)), reply_to=message)


def make_server(build: Any = Embedding, **options: Any) -> ump.FederatedServer:
    return ump.create_multigpu_flower_server("s", build, train_fn=train, **options)


def fit(server: ump.FederatedServer, *apps: ClientApp) -> Any:
    grid = Nodes(*(apps or [server.client_app] * NUM_CLIENTS))
    return training.train(server._plan, grid, len(grid.apps), FitOptions(num_rounds=2))[:2]


def test_client_of_another_vocabulary_is_left_out_although_its_adapter_fits() -> None:
    server, other = make_server(), make_server(lambda: Embedding(12))
    result, trained = fit(server, server.client_app, server.client_app, other.client_app)
    for report in result.rounds:
        (failure,) = report.failures
        assert failure.startswith("client 2: left out of train: This client's base model is not that of the other")
        assert "table.weight is (12, 3) here, (10, 3) there" in failure
    # Clients 0 and 1 move to 1 and 2 and have 4 and 3 examples.
    torch.testing.assert_close(trained.state_dict()["head.weight"], torch.full((2, 3), 10 / 7))


@pytest.mark.parametrize(
    "options",
    [
        {"strategy": "fedavg"},
        {"strategy": "fedadam"},
        {"strategy": "fedmedian"},
        {"strategy": "qfedavg", "strategy_kwargs": {"client_learning_rate": 0.5, "train_loss_key": "train_loss"}},
        {"strategy": DifferentialPrivacyServerSideFixedClipping(FedAvg(), 0.0, 1.0, NUM_CLIENTS)},
    ],
    ids=["mean", "optimizer", "median", "differences", "clipped"],
)
def test_truth_values_are_put_together(options: dict[str, Any]) -> None:
    _, trained = fit(make_server(**options))
    seen = trained.state_dict()["seen"]
    assert seen.dtype == torch.bool
    # Clipped updates may be too small to turn one.
    assert seen.tolist()[4:] == [False] * 4
    if options["strategy"] in ("fedavg", "fedadam", "fedmedian"):
        assert seen.tolist()[:4] == [True] * 4


def test_clients_without_data_to_evaluate_do_not_end_the_training() -> None:
    result, _ = fit(make_server(evaluate_fn=nothing_to_evaluate))
    for report in result.rounds:
        assert report.failures == tuple(f"client {n}: no data in evaluate" for n in range(NUM_CLIENTS))
        assert report.evaluate_metrics == {}


def message(client_id: int, reason: str = "", num_examples: int = 1) -> Message:
    asked = Message(RecordDict({"config": ConfigRecord()}), client_id + 1, "train")
    if reason:
        return Message(Error(2, reason), reply_to=asked)
    return Message(RecordDict({"metrics": MetricRecord({"num-examples": num_examples})}), reply_to=asked)


@pytest.mark.parametrize(("share", "num_asked"), [(0.35, 20), (0.07, 100), (0.29, 100), (0.57, 100), (1.0, 3)])
def test_share_that_must_succeed_is_met_exactly(share: float, num_asked: int) -> None:
    def succeed(num_good: int) -> None:
        replies = [message(n, "" if n < num_good else "broken") for n in range(num_asked)]
        judge(replies, "train", 1, num_asked=num_asked, min_success=share, weight_key="num-examples")

    num_good = round(share * num_asked)
    succeed(num_good)
    with pytest.raises(FederatedError, match=f"{num_good - 1} of {num_asked} clients succeeded in train"):
        succeed(num_good - 1)


def test_failure_names_its_client_once() -> None:
    replies = [message(0), message(1, "client 1 (round 2, train) on slot 1, cpu:1: ValueError: x")]
    options: Any = {"num_asked": 2, "min_success": 0.0, "weight_key": "num-examples"}
    _, failures = judge(replies, "train", 2, **options)
    assert failures == ["client 1: left out of train: on slot 1, cpu:1: ValueError: x"]
    with pytest.raises(FederatedError) as error:
        judge(replies[1:], "evaluate", 2, **options | {"num_asked": 1})
    assert "evaluate_fn" in str(error.value.hint)
