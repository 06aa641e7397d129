"""The cost of a micro-batch: what it is made of, and that it is found in measurements."""

import pytest

from unsloth_multigpu.deal.cost import CostModel, attention_factor, fit_cost, relative_speeds, without_outliers


@pytest.mark.parametrize(
    ("options", "lengths", "cost", "num_tokens"),
    [
        # Padded rows cost as the longest, rows end to end what they are, and few of them the floor.
        ({"floor_tokens": 0, "attention": 0.01}, [100, 50, 1], 10 + 3 * (100 + 0.01 * 100**2), 300),
        ({"is_padded": False, "attention": 0.01}, [100, 50], 10 + 150 + 0.01 * (100**2 + 50**2), 150),
        ({"floor_tokens": 500}, [100], 510, 100),
        ({"floor_tokens": 500}, [10], 510, 10),
        ({"floor_tokens": 500}, [600], 610, 600),
    ],
)
def test_micro_batch_costs_what_its_rows_take(options, lengths, cost, num_tokens):
    model = CostModel(overhead_tokens=10, **options)
    assert (model.of(lengths), model.tokens(lengths)) == (cost, num_tokens)


def test_attention_follows_the_shape_of_the_model():
    # 7B: hidden 4096, 32 layers, 6.6e9 weights in matrices; attention equals the matrices near 12,600 tokens in full.
    full = attention_factor(4096, 32, 6_600_000_000, is_frozen=False)
    frozen = attention_factor(4096, 32, 6_600_000_000, is_frozen=True)
    assert full == pytest.approx(2 * 4096 * 32 / 6.6e9)
    assert frozen == pytest.approx(1.5 * full)
    assert attention_factor(4096, 32, 6_600_000_000, is_frozen=True, is_causal=True) == pytest.approx(0.75 * full)
    assert attention_factor(4096, 32, 0, is_frozen=True) == 0


def test_one_slow_micro_batch_changes_nothing():
    samples = [(float(w), (32 + w) * 1e-5) for w in range(50, 3000, 100)]
    assert fit_cost(CostModel(), [*samples, (60.0, 5.0)]) == fit_cost(CostModel(), samples)
    assert without_outliers(CostModel(), [*samples, (60.0, 5.0)]) == samples


def test_small_micro_batches_that_show_the_floor_are_kept():
    samples = [(float(w), (500 + max(2000, w)) * 1e-5) for w in range(50, 6000, 100)]
    assert without_outliers(CostModel(), samples) == samples
    found = fit_cost(CostModel(), samples)
    assert found.of_work(60) == pytest.approx(2500, rel=0.2)


@pytest.mark.parametrize(
    ("rates", "speeds"),
    [
        ([100.0, 100.0], (1.0, 1.0)),
        ([100.0, 88.0], (1.0, 1.0)),
        ([100.0, 84.0], (1.0, 0.85)),
        ([100.0, 50.0], (1.0, 0.5)),
        ([33.0, 100.0, 71.0], (0.35, 1.0, 0.7)),
        ([100.0, 0.0], (1.0, 1.0)),
        ([100.0, 0.1], (1.0, 0.05)),
    ],
)
def test_speeds_are_rounded_and_equal_where_nearly_so(rates, speeds):
    assert relative_speeds(rates) == pytest.approx(speeds)
