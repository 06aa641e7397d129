"""What trainings of tests/dist/scripts left behind, and how far two of them are apart."""

from __future__ import annotations

import json
from collections.abc import Container, Iterable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file


def facts_of(path: Path, num_ranks: int = 2) -> list[Any]:
    """Of each rank, as `write_facts` of tests/dist/scripts/common.py wrote them."""
    return [json.loads(Path(f"{path}_{rank}.json").read_text()) for rank in range(num_ranks)]


def outcome(out: Path, job: str, rank: int = 0) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """Facts and weights of one rank, as `write_outcome` of tests/dist/scripts/common.py wrote them."""
    path = out / f"{job.replace(':', '_')}_{rank}"
    return json.loads(path.with_suffix(".json").read_text()), load_file(path.with_suffix(".safetensors"))


def each(names: Iterable[str], more: Container[str]) -> list[Any]:
    """The parameters of a test: those in `more` belong to the thorough suite."""
    return [pytest.param(name, marks=pytest.mark.thorough if name in more else ()) for name in names]


def distance(first: Mapping[str, torch.Tensor], second: Mapping[str, torch.Tensor]) -> float:
    """Euclidean, between all weights of two models, relative to the norm of the first one's."""
    difference = sum(float(((first[n].double() - second[n].double()) ** 2).sum()) for n in first) ** 0.5
    return difference / sum(float((first[n].double() ** 2).sum()) for n in first) ** 0.5


def assert_near(found: Any, expected: Any, rel: float = 1e-5, most: float = 1e-6) -> None:
    """Equal in form and texts, and in numbers to a relative bound or to an absolute one."""
    if isinstance(expected, dict):
        assert found.keys() == expected.keys()
        for name in expected:
            assert_near(found[name], expected[name], rel, most)
    elif isinstance(expected, list):
        assert len(found) == len(expected)
        for pair in zip(found, expected, strict=True):
            assert_near(*pair, rel, most)
    else:
        assert found == (pytest.approx(expected, rel=rel, abs=most) if isinstance(expected, float) else expected)


def assert_trained_as_one(
    one: Path, many: Path, job: str, num_ranks: int = 2, *, norms: float = 1e-5, weights: float = 1e-6, of_one: str = ""
) -> list[dict[str, Any]]:
    """Ranks have the gradient norms and weights of one process, to these bounds, and end with equal weights.

    `of_one`: the job of one process where it is another.

    Returns:
        Facts of one process, and those of each rank.
    """
    expected, model = outcome(one, of_one or job)
    ranks, replicas = zip(*(outcome(many, job, rank) for rank in range(num_ranks)), strict=True)
    for found in ranks:
        assert len(found["grad_norm"]) > 0
        assert found["grad_norm"] == pytest.approx(expected["grad_norm"], rel=norms), job
    assert distance(model, replicas[0]) < weights, job
    assert all(distance(replicas[0], replica) == 0 for replica in replicas), job
    return [expected, *ranks]


def largest_difference(first: Path, second: Path, *, relative: bool = False, least: float = 0.0) -> float:
    """Between two numbers in the same place of two files. NaN where one of them is NaN.

    `relative`: to the largest value of each tensor of the first file, or to `least` where all values are smaller.
    """
    one, other = load_file(first), load_file(second)
    assert one.keys() == other.keys()
    scales = {name: one[name].abs().max().clamp(min=least) if relative else 1 for name in one}
    return float(torch.tensor([float((one[n] - other[n]).abs().max() / scales[n]) for n in one]).max())
