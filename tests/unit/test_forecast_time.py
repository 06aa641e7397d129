"""The forecast of time: one rank is what was measured, nothing beats the ideal, more than samples is refused."""

from __future__ import annotations

import dataclasses
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from unsloth_multigpu.errors import ConfigError
from unsloth_multigpu.step.advice import advise, compare_two, useful_up_to
from unsloth_multigpu.step.cost import CostModel, fit_time
from unsloth_multigpu.step.forecast import BACKWARD, Epochs, Workload, curve, expected_maximum, forecast_time, ladder
from unsloth_multigpu.step.link import NODE_LINK, NVLINK, PCIE, Link, Network, ethernet, fit_link, parse_link

NETWORK = Network(PCIE)
GIB = 2**30


def workload(lengths=((100, 50, 200, 70),) * 3, **values) -> Workload:
    cost = values.pop("cost", CostModel(overhead_tokens=32.0))
    base = {
        "cost": cost,
        "timing": cost,
        "token_s": 1e-3,
        "update_s": 0.01,
        "steps": tuple(tuple(step) for step in lengths),
        "sizes": (len(lengths[0]),),
        "num_steps": 100,
        "gradient_bytes": 10**6,
        "weight_bytes": 10**6,
    }
    return Workload(**{**base, **values})


@st.composite
def workloads(draw):
    num_micro, rows = draw(st.integers(1, 4)), draw(st.integers(1, 6))
    step = st.tuples(*[st.integers(1, 500)] * (num_micro * rows))
    cost = CostModel(
        overhead_tokens=draw(st.sampled_from([0.0, 32.0, 128.0])),
        floor_tokens=draw(st.sampled_from([0.0, 256.0])),
        is_padded=draw(st.booleans()),
    )
    return workload(
        draw(st.lists(step, min_size=1, max_size=3)),
        cost=cost,
        sizes=(rows,) * num_micro,
        update_s=draw(st.sampled_from([0.0, 0.05])),
        is_planned=draw(st.booleans()),
        keeps_batch=draw(st.booleans()),
        exchange=draw(st.sampled_from(["gradients", "through one rank", "now and then"])),
        every_steps=draw(st.sampled_from([1, 2, 16])),
        gradient_bytes=draw(st.sampled_from([0, 10**6, 10**9])),
        hides=draw(st.sampled_from([0.0, BACKWARD])),
        num_units=draw(st.sampled_from([1, 24])),
    )


ranks = st.integers(2, 24)
modes = st.sampled_from(["ddp", "sharded"])


@given(workloads())
@settings(max_examples=60, deadline=None)
def test_one_rank_is_the_script_as_it_was_measured(work):
    row = forecast_time(work, 1, NETWORK)
    in_order = []
    for lengths in work.steps:
        rows = iter(lengths)
        in_order.append(sum(work.seconds([next(rows) for _ in range(size)]) for size in work.sizes))
    assert row.step_s == pytest.approx(sum(in_order) / len(in_order) + work.update_s)
    assert (row.speed_up, row.efficiency, row.waiting, row.link) == (1.0, 1.0, 0.0, 0.0)
    assert row.total_s == pytest.approx(row.step_s * work.num_steps)


@given(workloads(), ranks, modes)
@settings(max_examples=150, deadline=None)
def test_no_number_of_ranks_is_faster_than_ideal(work, num_ranks, mode):
    if not work.has_samples(num_ranks):
        return
    row = forecast_time(work, num_ranks, NETWORK, mode)
    # Every token of a step is computed by one rank, and nothing else is.
    steps = work.steps[:: max(1, len(work.steps))] if len(work.steps) == 1 else work.steps
    ideal = min(sum(map(work.timing.row_work, lengths)) for lengths in steps) * work.token_s
    ideal = ideal / num_ranks if work.keeps_batch else ideal
    assert row.step_s >= (ideal + work.update_s) * (1 - 1e-9)
    assert row.computing + row.waiting + row.link + row.update == pytest.approx(1.0)
    assert min(row.computing, row.waiting, row.link, row.update, row.padding) >= -1e-9


@given(workloads(), ranks, modes, st.floats(1.1, 100))
@settings(max_examples=100, deadline=None)
def test_a_faster_link_is_never_slower(work, num_ranks, mode, times):
    if not work.has_samples(num_ranks):
        return
    slow = Link("slow", 1e9, 2e-5, "test")
    fast = dataclasses.replace(slow, bytes_per_s=slow.bytes_per_s * times)
    shorter = dataclasses.replace(slow, latency_s=slow.latency_s / times)
    step_s = forecast_time(work, num_ranks, Network(slow), mode).step_s
    assert forecast_time(work, num_ranks, Network(fast), mode).step_s <= step_s
    assert forecast_time(work, num_ranks, Network(shorter), mode).step_s <= step_s


def test_more_ranks_than_samples_are_refused_as_by_the_run():
    work = workload()
    assert forecast_time(work, 4, NETWORK).num_ranks == 4
    with pytest.raises(ConfigError, match=r"4 sample\(s\) cannot be shared by 5 ranks"):
        forecast_time(work, 5, NETWORK)
    assert [row.num_ranks for row in curve(work, NETWORK)] == [1, 2, 3, 4]
    assert forecast_time(dataclasses.replace(work, keeps_batch=False), 1024, NETWORK).num_steps == 100


@pytest.mark.parametrize("drops_last", [False, True])
@pytest.mark.parametrize("num_rows", [3, 21, 64])
@pytest.mark.parametrize("num_epochs", [1.0, 2.5, 3.0])
def test_larger_steps_are_as_many_as_accelerate_and_transformers_make(num_rows, num_epochs, drops_last):
    from accelerate.data_loader import BatchSamplerShard
    from torch.utils.data import BatchSampler, SequentialSampler

    batches = BatchSampler(SequentialSampler(range(num_rows)), 2, drops_last)
    epochs = Epochs(len(batches), drops_last=drops_last, num_epochs=num_epochs)
    work = workload([(100, 50, 200, 70)], sizes=(2, 2), keeps_batch=False, epochs=epochs)
    for num_ranks in (1, 2, 3, 8):
        mine = len(BatchSamplerShard(batches, num_ranks, 0))
        if not mine:  # Then transformers finds a loader without a batch.
            assert not work.has_samples(num_ranks)
            with pytest.raises(ConfigError, match=rf"cannot be dealt to {num_ranks} ranks: dataloader_drop_last"):
                forecast_time(work, num_ranks, NETWORK)
            continue
        row = forecast_time(work, num_ranks, NETWORK)
        assert row.num_steps == math.ceil(num_epochs * -(-mine // 2))
        assert row.speed_up <= num_ranks * 1.001


def test_ranks_beyond_the_data_set_are_not_faster():
    work = workload([(100,) * 4], sizes=(2, 2), keeps_batch=False, epochs=Epochs(8, num_epochs=3.0), gradient_bytes=0)
    four, eight, many = (forecast_time(work, n, NETWORK) for n in (4, 8, 64))
    assert (four.num_steps, eight.num_steps, many.num_steps) == (3, 3, 3)
    assert four.speed_up == pytest.approx(eight.speed_up, rel=0.05)
    assert many.efficiency < 0.1
    text = told(work)
    assert "What limits is the data set: an epoch has 8 micro-batches for 8 GPUs" in text
    text = told(dataclasses.replace(work, sizes=(4,), epochs=Epochs(4, drops_last=True, num_epochs=1.0)), most=8)
    assert "Useful up to 4 GPUs: an epoch has 4 whole batches, and the run refuses more GPUs than that" in text


def test_equal_samples_without_overhead_are_divided_evenly():
    work = workload([(100,) * 8] * 2, cost=CostModel(overhead_tokens=0.0), update_s=0.0, gradient_bytes=0)
    row = forecast_time(work, 8, Network(Link("free", math.inf, 0.0, "test")))
    assert row.efficiency == pytest.approx(1.0)
    assert row.speed_up == pytest.approx(8.0)


def test_ranks_that_meet_seldom_wait_less_and_send_less():
    work = workload([(300, 10), (10, 300)] * 8, is_planned=False, gradient_bytes=GIB)
    together = forecast_time(work, 2, NETWORK)
    apart = forecast_time(dataclasses.replace(work, exchange="now and then", every_steps=16), 2, NETWORK)
    assert apart.waiting < together.waiting / 10
    assert apart.link == pytest.approx(together.link * together.step_s / apart.step_s / 16, rel=0.01)


def test_backward_hides_the_exchange_but_not_the_last_bucket():
    work = workload([(1000,) * 8] * 2, gradient_bytes=GIB)
    hidden = forecast_time(dataclasses.replace(work, hides=BACKWARD), 2, NETWORK)
    open_s = forecast_time(work, 2, NETWORK)
    assert open_s.link * open_s.step_s == pytest.approx(NETWORK.all_reduce_s(GIB, 2), rel=0.01)
    assert hidden.link * hidden.step_s == pytest.approx(NETWORK.all_reduce_s(25 * 2**20, 2), rel=0.1)


def test_sharded_ranks_send_all_weights_in_each_micro_batch():
    work = workload([(1000,) * 8] * 2, sizes=(1,) * 8, is_planned=False, gradient_bytes=GIB, weight_bytes=GIB)
    row = forecast_time(work, 2, NETWORK, "sharded")
    # Four micro-batches on each rank: two passes over half of the weights in each, one of the gradients in the last.
    assert row.link * row.step_s == pytest.approx((4 * 2 + 1) * 0.5 * GIB / PCIE.bytes_per_s, rel=0.01)


@pytest.mark.parametrize("num_ranks", [2, 3, 8])
def test_all_reduce_is_the_ring_of_one_machine(num_ranks):
    n, size = num_ranks, 10**9
    wanted = 2 * (n - 1) / n * size / PCIE.bytes_per_s + 2 * (n - 1) * PCIE.latency_s
    assert NETWORK.all_reduce_s(size, n) == pytest.approx(wanted)


def test_machines_send_over_their_own_link():
    network = Network(NVLINK, ethernet(100))
    within, between = network.all_reduce_s(10**9, 8), network.all_reduce_s(10**9, 16)
    assert between - within == pytest.approx(10**9 / NODE_LINK.bytes_per_s + 2 * NODE_LINK.latency_s)
    assert Network(ethernet(25), ethernet(25), 1).all_reduce_s(10**9, 4) == pytest.approx(1.5 * 10**9 / 3e9 + 6 * 14e-6)


@given(st.floats(1e8, 1e12), st.floats(1e-7, 1e-3), st.integers(2, 64))
def test_a_link_is_found_from_two_sizes(bytes_per_s, latency_s, num_ranks):
    network = Network(Link("true", bytes_per_s, latency_s, "test"), gpus_per_node=1024)
    small, large = ((size, network.all_reduce_s(size, num_ranks)) for size in (2**20, 2**28))
    found = fit_link("found", small, large, num_ranks)
    assert found.bytes_per_s == pytest.approx(bytes_per_s, rel=1e-3)
    assert found.latency_s == pytest.approx(latency_s, rel=0.01, abs=1e-9)


def test_a_link_from_noise_is_still_one():
    found = fit_link("noise", (2**20, 0.02), (2**24, 0.01), 2)
    assert found.bytes_per_s > 0
    assert found.latency_s >= 0


@pytest.mark.parametrize("text", ["infiniband", "ethernet", "ethernet:0", "ethernet:fast"])
def test_unknown_link_is_refused(text):
    with pytest.raises(ConfigError, match=r"is no link; expected nvlink, pcie, or ethernet"):
        parse_link(text)
    assert parse_link("Ethernet:25").bytes_per_s == 3e9
    assert parse_link("nvlink") is NVLINK


ROWS = [(n,) * k for n in (16, 60, 100, 350, 900) for k in (1, 2, 4, 8)]


@given(st.floats(0, 5000), st.sampled_from([0.0, 512.0, 2048.0]), st.floats(1e-7, 1e-2))
def test_time_is_fitted_without_rounding(overhead, floor, token_s):
    true = CostModel(overhead_tokens=overhead, floor_tokens=floor)
    timing, found_s = fit_time(CostModel(), [(rows, token_s * true.of(rows)) for rows in ROWS])
    for rows in ROWS:
        assert found_s * timing.of(rows) == pytest.approx(token_s * true.of(rows), rel=0.05)


@pytest.mark.parametrize("is_joined", [False, True])
@pytest.mark.parametrize("factor", [0.5, 1.0, 4.0])
def test_attention_that_costs_more_than_its_shape_is_found(is_joined, factor):
    assumed = CostModel(overhead_tokens=100.0, attention=1e-3, is_padded=False)
    true = dataclasses.replace(assumed, attention=factor * assumed.attention, is_joined=is_joined)
    timing, token_s = fit_time(assumed, [(rows, 1e-4 * true.of(rows)) for rows in ROWS])
    assert (timing.is_joined, timing.attention) == (is_joined, true.attention)
    assert token_s * timing.of((300, 200, 700)) == pytest.approx(1e-4 * true.of((300, 200, 700)), rel=0.01)


def test_time_of_equal_micro_batches_is_their_median():
    rows = (450, 450)
    timing, token_s = fit_time(CostModel(overhead_tokens=100.0), [(rows, 1.0), (rows, 1.2), (rows, 1.1)])
    assert token_s * timing.of(rows) == pytest.approx(1.1)


def test_expected_maximum_is_that_of_the_draws():
    assert expected_maximum([3.0], 7) == 3.0
    # Of two draws from 1 and 2 three of four pairs have a 2.
    assert expected_maximum([2.0, 1.0], 2) == pytest.approx(1.75)


def test_ladder_goes_up_in_half_doublings():
    assert ladder(13) == [1, 2, 3, 4, 6, 8, 12]
    assert ladder(1024)[-1] == 1024


def told(work, network=NETWORK, most=1024, mode="ddp"):
    return " ".join(advise(work, curve(work, network, mode, most), network, most))


def test_advice_names_the_samples_of_a_step():
    text = told(workload([(100,) * 4], gradient_bytes=0, cost=CostModel(overhead_tokens=0.0)))
    assert text.startswith("Useful up to 4 GPUs: a step has 4 samples, and the run refuses more GPUs than that.")
    assert 'global_batch="scale"' in text


def test_advice_names_the_link_and_lora():
    text = told(workload([(1000,) * 64], sizes=(8,) * 8, gradient_bytes=16 * GIB, weight_bytes=16 * GIB))
    assert "What limits is the link" in text
    assert "LoRA" in text
    assert "PCIe 4 x16" in text


def test_advice_names_what_each_rank_does_beside_computing():
    text = told(workload([(100,) * 512], update_s=10.0, gradient_bytes=0))
    assert "what each rank does beside computing" in text


def test_advice_names_ragged_lengths():
    lengths = [[10] * 63 + [6000]] * 2
    text = told(workload(lengths, sizes=(8,) * 8, is_planned=False, gradient_bytes=0, update_s=0.0))
    assert "waiting for the slowest rank" in text
    assert "Tokenize before the training" in text


def test_useful_ends_before_the_first_row_below_half():
    rows = curve(workload([(1000,) * 64], gradient_bytes=0, update_s=1.0), NETWORK)
    useful = useful_up_to(rows)
    assert all(row.efficiency >= 0.5 for row in rows if row.num_ranks <= useful)
    assert next(row for row in rows if row.num_ranks > useful).efficiency < 0.5


def test_line_about_a_second_gpu_is_for_long_trainings():
    work = workload([(1000,) * 8], num_steps=1740, gradient_bytes=0)
    assert compare_two(work, NETWORK) == "2 GPUs would take 1 h 57 min instead of 3 h 53 min (forecast, pcie assumed)"
    assert compare_two(dataclasses.replace(work, num_steps=3), NETWORK) is None
    assert compare_two(dataclasses.replace(work, update_s=1000.0), NETWORK) is None
    assert compare_two(workload([(1000,)], num_steps=10**6), NETWORK) is None
