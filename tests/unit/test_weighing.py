"""Weighings of a loss where a part of a micro-batch has other shapes than the rows by which it was chosen."""

import pytest
import torch

from unsloth_multigpu.errors import SetupError
from unsloth_multigpu.step.loss import LossReduction
from unsloth_multigpu.step.weighing import candidates, obstacle, weight_of

TWO_BY_THREE = torch.tensor([[1, 2, -100], [4, -100, -100]])
ALIGNED = {"labels": TWO_BY_THREE, "weights": torch.ones(2, 3), "row_weights": torch.ones(2)}
CLASSES = {"labels": torch.tensor([0, 2]), "row_weights": torch.tensor([1.0, 2.0])}
NARROW = torch.tensor([[1, 2]])
TOGETHER = ("labelled sum of weights", "next labelled sum of weights")
OF_CLASSES = ("class weights", "class weights of next tokens")


@pytest.mark.parametrize("inputs", [ALIGNED, CLASSES, {"x": torch.ones(2, 3), "labels": torch.ones(2, 3)}])
def test_what_is_offered_can_be_computed_for_the_same_rows(inputs):
    for name in candidates(inputs, 5):
        assert obstacle(inputs, name) == ""
        assert weight_of(inputs, name, (1.0,) * 5) >= 0


@pytest.mark.parametrize(
    ("changed", "lost"),
    [
        # Labels and inputs are padded to widths of their own.
        ({"labels": NARROW, "weights": torch.ones(1, 3)}, TOGETHER),
        # torch would broadcast these.
        ({"labels": torch.tensor([[1]]), "weights": torch.ones(1, 3)}, TOGETHER),
        ({"labels": TWO_BY_THREE, "weights": torch.ones(3)}, (*TOGETHER, "sum after first of weights")),
        # Labels of one row that a collator has squeezed, and lists where rows differ in length.
        (
            {"labels": torch.tensor([1, 2, 3])},
            (*TOGETHER, "labelled rows", "rows with a next token", "class weights of next tokens"),
        ),
        ({"weights": [[1.0, 1.0], [1.0]]}, (*TOGETHER, "sum of weights", "sum after first of weights")),
        ({"weights": None}, (*TOGETHER, "sum of weights", "sum after first of weights")),
        ({"row_weights": torch.tensor(1.0)}, ("sum of row_weights",)),
        ({"labels": TWO_BY_THREE.float()}, OF_CLASSES),
        (
            {"labels": [[1, 2], [3]]},
            (*TOGETHER, *OF_CLASSES, "next tokens", "tokens", "labelled rows", "rows with a next token"),
        ),
    ],
)
def test_weighings_that_other_shapes_do_not_have_are_named(changed, lost):
    inputs = {**ALIGNED, **changed}
    offered = [*candidates(ALIGNED, 5)]
    assert {name for name in offered if obstacle(inputs, name)} == set(lost)
    for name in offered:
        if name in lost:
            with pytest.raises(SetupError, match=f'counts by "{name}".*cannot be computed here: '):
                weight_of(inputs, name, (1.0,) * 5)
        else:
            assert weight_of(inputs, name, (1.0,) * 5) >= 0


def test_micro_batch_of_the_training_without_the_weighing_says_what_is_wrong():
    scale = LossReduction("auto", "labelled sum of weights")
    with pytest.raises(SetupError) as info:
        scale.weight({"labels": NARROW, "weights": torch.ones(1, 3)})
    assert "labels are 1 x 2 of int64 and weights is 1 x 3 of float32" in str(info.value)
    assert "num_items_in_batch" in info.value.hint
