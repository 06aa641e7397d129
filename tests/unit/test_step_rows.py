"""Whether a data set draws: its rows are read twice, and compared by what they hold."""

from types import SimpleNamespace

import numpy
import pytest
import torch
from PIL import Image

from unsloth_multigpu.deal.step import Step
from unsloth_multigpu.step.step_rows import StepRows


def pixels(seed):
    return numpy.random.default_rng(seed).random((40, 40)).astype(numpy.float32)


@pytest.mark.parametrize(
    "row_of",
    [
        pixels,
        lambda seed: Image.fromarray((pixels(seed) * 255).astype(numpy.uint8)),
        lambda seed: torch.from_numpy(pixels(seed)),
        lambda seed: {"image": [pixels(seed)]},
        str,
    ],
    ids=["array", "picture", "tensor", "nested", "text"],
)
@pytest.mark.parametrize("is_drawn", [False, True])
def test_only_rows_with_other_values_are_drawn(row_of, is_drawn):
    calls = []

    def rows_of(samples):
        calls.append(samples)
        return [row_of(sample + 10 * len(calls) * is_drawn) for sample in samples]

    step = Step([], 1, sizes=(2,))
    step.samples = [0, 1]
    rows = StepRows(SimpleNamespace(rows_of=rows_of), step, 0, lambda: None)
    assert rows.are_rows_drawn == is_drawn
