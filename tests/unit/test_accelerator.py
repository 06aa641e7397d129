"""Accelerators other than CUDA's, pretended: what this package asks of each kind, it asks of all."""

from types import SimpleNamespace

import pytest
import torch

from unsloth_multigpu.accelerator import CPU_BACKEND, KINDS, among, backend_of, kind_of
from unsloth_multigpu.step.comparison import sum_dtype


def test_backend_and_kind_lead_to_each_other():
    assert [kind_of(backend_of(kind)) for kind in KINDS] == list(KINDS)
    assert (backend_of("cpu"), kind_of(CPU_BACKEND), kind_of("undefined")) == (CPU_BACKEND, None, None)


def test_one_device_is_named_as_the_variable_names_it():
    assert among("npu", [1], {}) == {"ASCEND_RT_VISIBLE_DEVICES": "1"}
    assert among("xpu", [1], {"ZE_AFFINITY_MASK": "4, 5"}) == {"ZE_AFFINITY_MASK": "5"}
    with pytest.raises(IndexError, match="ZE_AFFINITY_MASK"):
        among("xpu", [2], {"ZE_AFFINITY_MASK": "4,5"})


@pytest.mark.parametrize(
    ("properties", "dtype"),
    [({"has_fp64": False}, torch.float32), ({"has_fp64": True}, torch.float64), ({}, torch.float64)],
)
def test_sums_are_as_wide_as_the_device(monkeypatch, properties, dtype):
    module = SimpleNamespace(get_device_properties=lambda device: SimpleNamespace(**properties))
    monkeypatch.setattr(torch, "get_device_module", lambda device: module)
    assert sum_dtype(torch.device("xpu", 0)) == dtype
    assert sum_dtype(torch.device("cpu")) == torch.float64
