"""Flower's strategies by name, and what is refused before a client runs."""

import pytest

pytest.importorskip("flwr", reason="Flower needs Python 3.11")

from flwr.serverapp.strategy import (
    DifferentialPrivacyClientSideFixedClipping,
    DifferentialPrivacyServerSideFixedClipping,
    FedAvg,
)

from unsloth_multigpu.errors import ConfigError
from unsloth_multigpu.federated.flower_strategy import check_strategy, checked_strategy, layers_of, make_strategy

PRIVATE = {"noise_multiplier": 1.0, "clipping_norm": 1.0, "num_sampled_clients": 3}


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


def test_named_strategy_works_with_one_client_and_flowers_default_is_refused():
    check_strategy(make_strategy("fedavg", {}), 1)
    with pytest.raises(ConfigError, match=r"min_train_nodes=2 of FedAvg, but num_clients=1: it would wait forever"):
        check_strategy(FedAvg(), 1)
    check_strategy(FedAvg(), 2)


def test_strategy_inside_another_is_checked_too():
    inner = FedAvg(min_available_nodes=5)
    outer = DifferentialPrivacyServerSideFixedClipping(inner, **PRIVATE)
    assert list(layers_of(outer)) == [outer, inner]
    with pytest.raises(ConfigError, match="min_available_nodes=5 of FedAvg, but num_clients=4"):
        check_strategy(outer, 4)
    with pytest.raises(ConfigError, match="num_sampled_clients=3 of DifferentialPrivacyServer"):
        check_strategy(DifferentialPrivacyServerSideFixedClipping(FedAvg(), **PRIVATE), 2)


def test_clipping_by_clients_needs_their_mod():
    good = DifferentialPrivacyServerSideFixedClipping(FedAvg(), **PRIVATE)
    assert checked_strategy(good, None) is good
    with pytest.raises(ConfigError, match="ClientSideFixedClipping needs clients that clip their updates") as error:
        checked_strategy(DifferentialPrivacyClientSideFixedClipping(FedAvg(), **PRIVATE), None)
    assert "DifferentialPrivacyServerSideFixedClipping" in error.value.hint


def test_strategy_with_a_loop_of_its_own_is_refused():
    class Loop(FedAvg):
        def start(self, *args, **kwargs):
            return None

    with pytest.raises(ConfigError, match=r"Loop has a start\(\) of its own"):
        check_strategy(Loop(), 2)
