"""The forecast of time: one rank is what was measured, nothing beats the ideal, more than samples is refused."""

import dataclasses
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from unsloth_multigpu.deal.plan import CostModel
from unsloth_multigpu.errors import ConfigError, SetupError
from unsloth_multigpu.options import MultiGPUConfig
from unsloth_multigpu.recorders.forecast_recorder import BACKWARD, Forecast, _refuse_unsupported
from unsloth_multigpu.tools.forecast.estimate import NVLINK, PCIE, Workload, advise, estimate, parse_link

GIB = 2**30


def workload(lengths=((100, 50, 200, 70),) * 3, **values):
    times = {"token_s": 1e-3, "update_s": 0.01, "loading_s": 0.0, "callbacks_s": 0.0, "hides": 0.0}
    plan = {"num_steps": 100, "regroup": True, "max_tokens": None, "cost": CostModel(overhead_tokens=32.0)}
    data = {"steps": tuple(map(tuple, lengths)), "sizes": (len(lengths[0]),), "gradient_bytes": 10**6}
    return Workload(**{**times, **plan, **data, **values})


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
        gradient_bytes=draw(st.sampled_from([0, 10**6, 10**9])),
        hides=draw(st.sampled_from([0.0, BACKWARD])),
    )


@given(workloads(), st.integers(2, 24), st.floats(1.1, 100))
@settings(max_examples=100, deadline=None)
def test_no_number_of_ranks_is_faster_than_ideal_and_a_faster_link_is_not_slower(work, num_ranks, times):
    one = estimate(work, 1, PCIE)
    assert (one.speed_up, one.efficiency, one.waiting, one.link) == (1.0, 1.0, 0.0, 0.0)
    if num_ranks > sum(work.sizes):
        with pytest.raises(ConfigError, match=rf"cannot be shared by {num_ranks} ranks"):
            estimate(work, num_ranks, PCIE)
        return
    row = estimate(work, num_ranks, PCIE)
    # Every token of a step is computed by one rank, and nothing else is.
    ideal = min(sum(map(work.cost.row_work, lengths)) for lengths in work.steps) * work.token_s / num_ranks
    assert row.step_s >= (ideal + work.update_s) * (1 - 1e-9)
    assert row.computing + row.waiting + row.link + row.update == pytest.approx(1.0)
    assert min(row.computing, row.waiting, row.link, row.update) >= -1e-9
    fast = dataclasses.replace(PCIE, bytes_per_s=PCIE.bytes_per_s * times, latency_s=PCIE.latency_s / times)
    assert estimate(work, num_ranks, fast).step_s <= row.step_s


def test_one_rank_is_the_script_as_it_was_measured():
    work = workload([(100, 50, 200, 70), (10, 20, 30, 40)], sizes=(2, 2))
    in_order = [(32 + 200) + (32 + 400), (32 + 40) + (32 + 80)]
    row = estimate(work, 1, PCIE)
    assert row.step_s == pytest.approx(1e-3 * sum(in_order) / 2 + 0.01)
    assert row.total_s == pytest.approx(100 * row.step_s)


def test_backward_hides_the_exchange_but_not_the_last_bucket():
    work = workload([(1000,) * 8] * 2, gradient_bytes=GIB)
    hidden, visible = estimate(dataclasses.replace(work, hides=BACKWARD), 2, PCIE), estimate(work, 2, PCIE)
    assert visible.link * visible.step_s == pytest.approx(GIB / PCIE.bytes_per_s, rel=0.01)
    assert hidden.link * hidden.step_s == pytest.approx(25 * 2**20 / PCIE.bytes_per_s, rel=0.02)


@pytest.mark.parametrize("text", ["infiniband", "ethernet", "ethernet:0", "ethernet:fast"])
def test_unknown_link_is_refused(text):
    with pytest.raises(ConfigError, match=r"link='.*'; expected nvlink, pcie, or ethernet"):
        parse_link("link", text)
    assert parse_link("link", "Ethernet:25").bytes_per_s == 3e9
    assert parse_link("link", "nvlink") is NVLINK


@pytest.mark.parametrize(
    ("values", "word"),
    [
        ({"gradient_bytes": 64 * GIB}, "the link"),
        ({"update_s": 60.0}, "work other than micro-batches"),
        ({"update_s": 60.0, "loading_s": 40.0}, "loading samples, 40000 ms of a step"),
        ({"update_s": 60.0, "callbacks_s": 40.0}, "callbacks, 40000 ms of a step"),
        ({"steps": ((10,) * 63 + (6000,),) * 2, "cost": CostModel(is_padded=False)}, "waiting for the slowest rank"),
        ({"cost": CostModel(overhead_tokens=0.0, floor_tokens=64_000.0)}, "too small for the device"),
    ],
)
def test_advice_names_what_limits(values, word):
    work = workload([(1000,) * 64], **{"update_s": 0.0, "gradient_bytes": 0, **values})
    head, limit = advise(work, [estimate(work, n, PCIE) for n in (1, 2, 4, 8, 64)])
    assert head.startswith("Useful up to ")
    assert word in limit
    small = workload(gradient_bytes=0)
    assert advise(small, [estimate(small, n, PCIE) for n in (1, 2)])[0].startswith("Useful up to 2 GPUs")


@pytest.mark.parametrize("options", [{"strategy": "local_sgd"}, {"shard": "on"}, {"global_batch": "scale"}])
def test_what_is_not_counted_is_refused(options):
    with pytest.raises(SetupError, match="forecast supports DDP with the global batch of one process"):
        Forecast(folder="", num_steps=16, num_gpus=1).adjusted(MultiGPUConfig(**options))
    base = {"args": SimpleNamespace(), "is_deepspeed_enabled": False, "is_fsdp_enabled": False}
    _refuse_unsupported(SimpleNamespace(**base))
    for other in ({"args": SimpleNamespace(steps_per_generation=2)}, {"is_fsdp_enabled": True}):
        with pytest.raises(SetupError):
            _refuse_unsupported(SimpleNamespace(**{**base, **other}))
