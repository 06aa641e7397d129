"""Losses that are put together at random, on two ranks: each trains as in one process, or that it does not is said."""

import json
from pathlib import Path

import pytest

from tests.helpers.run import BARE, run_python

SCRIPT = Path(__file__).parent / "scripts" / "random_losses.py"


def trained(folder, num_ranks, count):
    out = folder / f"{num_ranks}.json"
    run = run_python([SCRIPT, "--num-gpus", str(num_ranks), "--count", str(count), "--out", str(out)], folder, BARE)
    assert run.code == 0, run.err
    return json.loads(out.read_text())


def difference(one, two):
    norms = [abs(a - b) / max(a, 1e-6) for a, b in zip(one["grad_norm"], two["grad_norm"], strict=True)]
    pairs = list(zip(one["weights"], two["weights"], strict=True))
    size = sum(a * a for a, _ in pairs) ** 0.5
    return max(*norms, sum((a - b) ** 2 for a, b in pairs) ** 0.5 / size)


@pytest.mark.parametrize("count", [40, pytest.param(1000, marks=pytest.mark.thorough)])
def test_loss_is_exact_or_said(tmp_path, count):
    ones, twos = (trained(tmp_path, num_ranks, count) for num_ranks in (1, 2))
    pairs = list(zip(ones, twos, strict=True))
    assert len(pairs) == count
    silent = [two["what"] for one, two in pairs if not (two["said"] or two["error"]) and difference(one, two) > 1e-5]
    assert silent == []
    exact = [two["what"] for one, two in pairs if not two["said"] and difference(one, two) <= 1e-5]
    assert count / 3 < len(exact) < count
    assert [two["error"] for two in twos if two["error"]] == []
