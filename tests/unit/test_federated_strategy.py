"""Flower's strategies by name, and what is refused before a client runs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

pytest.importorskip("flwr", reason="Flower needs Python 3.11")

from flwr.serverapp.strategy import (
    DifferentialPrivacyClientSideFixedClipping,
    DifferentialPrivacyServerSideFixedClipping,
    FedAdam,
    FedAvg,
    FedAvgM,
    FedMedian,
    FedProx,
    Krum,
    Strategy,
)

from unsloth_multigpu.errors import ConfigError
from unsloth_multigpu.federated.flower_strategy import (
    check_strategy,
    checked_strategy,
    describe,
    has_server_optimizer,
    is_weighted_mean,
    layers_of,
    make_strategy,
    weight_key,
)

PRIVATE: Mapping[str, Any] = {"noise_multiplier": 1.0, "clipping_norm": 1.0, "num_sampled_clients": 3}


@pytest.mark.parametrize(
    ("name", "kind"), [("FedAvgM", FedAvgM), ("fed-median", FedMedian), ("fed_adam", FedAdam), ("KRUM", Krum)]
)
def test_strategy_has_the_name_of_its_class(name: str, kind: type[Strategy]) -> None:
    assert type(make_strategy(name, {})) is kind


@pytest.mark.parametrize(
    ("name", "settings", "fact"),
    [
        ("fedsgd", {}, r"strategy='fedsgd'; expected one of bulyan, .*fedavg, .*krum"),
        ("fedavg", {"fraction_fit": 0.5}, "strategy='fedavg' refuses its arguments: .*'fraction_fit'"),
        ("qfedavg", {}, "strategy='qfedavg' refuses its arguments: .*'client_learning_rate'"),
        ("fedprox", {}, "strategy='fedprox' needs 'proximal_mu'"),
        (FedAvg, None, "strategy=<class .*expected a name such as 'fedavg' or a flwr.serverapp"),
        (FedAvg(), {"fraction_train": 0.5}, "together with an object as strategy"),
        ("fedavg", ["a"], r"strategy_kwargs=\['a'\]; expected a dict"),
    ],
)
def test_wrong_arguments_are_named(name: Any, settings: Any, fact: str) -> None:
    with pytest.raises(ConfigError, match=fact):
        checked_strategy(name, settings)


def test_proximal_term_is_what_was_asked_for() -> None:
    strategy = make_strategy("fedprox", {"proximal_mu": 0.3})
    assert isinstance(strategy, FedProx)
    assert strategy.proximal_mu == 0.3


def test_named_strategy_works_with_one_client_and_flowers_default_is_refused() -> None:
    check_strategy(make_strategy("fedavg", {}), 1)
    with pytest.raises(ConfigError, match=r"min_train_nodes=2 of FedAvg, but num_clients=1: it would wait forever"):
        check_strategy(FedAvg(), 1)
    check_strategy(FedAvg(), 2)


def test_strategy_inside_another_is_checked_too() -> None:
    inner = FedAvg(min_available_nodes=5)
    outer = DifferentialPrivacyServerSideFixedClipping(inner, **PRIVATE)
    assert list(layers_of(outer)) == [outer, inner]
    with pytest.raises(ConfigError, match="min_available_nodes=5 of FedAvg, but num_clients=4"):
        check_strategy(outer, 4)
    with pytest.raises(ConfigError, match="num_sampled_clients=3 of DifferentialPrivacyServer"):
        check_strategy(DifferentialPrivacyServerSideFixedClipping(FedAvg(), **PRIVATE), 2)


def test_clipping_by_clients_needs_their_mod() -> None:
    good = DifferentialPrivacyServerSideFixedClipping(FedAvg(), **PRIVATE)
    assert checked_strategy(good, None) is good
    with pytest.raises(ConfigError, match="ClientSideFixedClipping needs clients that clip their updates") as error:
        checked_strategy(DifferentialPrivacyClientSideFixedClipping(FedAvg(), **PRIVATE), None)
    assert "DifferentialPrivacyServerSideFixedClipping" in error.value.hint


def test_strategy_with_a_loop_of_its_own_is_refused() -> None:
    class Loop(FedAvg):
        def start(self, *args: Any, **kwargs: Any) -> Any:
            return None

    with pytest.raises(ConfigError, match=r"Loop has a start\(\) of its own"):
        check_strategy(Loop(), 2)


def test_kinds_of_aggregation_are_told_apart_and_described() -> None:
    assert [is_weighted_mean(s) for s in (FedAvg(), make_strategy("fedprox", {"proximal_mu": 1.0}))] == [True, True]
    assert not any(is_weighted_mean(s) for s in (FedAdam(), FedAvgM(), Krum(), FedMedian()))
    assert [has_server_optimizer(s) for s in (FedAdam(), FedAvgM(), FedAvg(), Krum())] == [True, True, False, False]
    private = DifferentialPrivacyServerSideFixedClipping(FedAdam(eta=0.5, weighted_by_key="n"), **PRIVATE)
    assert not is_weighted_mean(private)
    assert weight_key(private) == "n"
    described = describe(private)
    assert described["strategy"] == "DifferentialPrivacyServerSideFixedClipping"
    assert described["strategy.strategy"] == "FedAdam"
    assert described["strategy.strategy.eta"] == 0.5
    assert not [name for name in described if "m_t" in name]
