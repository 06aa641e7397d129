"""What the mean in a loss may be taken over, and parts of a micro-batch that do not have it."""

import pytest
import torch

from unsloth_multigpu.errors import SetupError
from unsloth_multigpu.step.loss import LossReduction, count_of, possible_means

LABELS = torch.tensor([[1, 2, -100], [4, -100, -100]])
ALIGNED = {"labels": LABELS, "mask": torch.ones(2, 3), "weights": torch.tensor([1.0, 2.0])}
COUNTS = {
    "class weights": 10.0,
    "next tokens": 1.0,
    "tokens": 3.0,
    "rows": 2.0,
    "sum": 1.0,
    "sum of mask": 6.0,
    "sum after the first of mask": 4.0,
    "sum of weights": 3.0,
}


def test_what_is_offered_can_be_counted_for_the_same_rows():
    assert {name: count_of(ALIGNED, name, (1.0, 2.0, 3.0, 4.0, 5.0)) for name in possible_means(ALIGNED, 5)} == COUNTS
    assert list(possible_means({"x": torch.ones(2, 3), "labels": torch.ones(2)})) == [
        *("rows", "sum", "sum of x", "sum after the first of x")
    ]


@pytest.mark.parametrize(
    ("changed", "lost"),
    [
        # Labels of one row that a collator has squeezed, and lists where rows differ in length.
        ({"labels": torch.tensor([1, 2, 3])}, {"next tokens"}),
        ({"labels": LABELS.float()}, {"class weights"}),
        ({"labels": [[1, 2], [3]]}, {"class weights", "next tokens", "tokens"}),
        ({"mask": [[1.0, 1.0], [1.0]]}, {"sum of mask", "sum after the first of mask"}),
        ({"mask": torch.ones(3)}, {"sum after the first of mask"}),
        ({"weights": torch.tensor(1.0)}, {"sum of weights"}),
    ],
)
def test_what_other_shapes_do_not_have_is_not_counted(changed, lost):
    inputs = {**ALIGNED, **changed}
    assert {name for name in COUNTS if count_of(inputs, name, (1.0,) * 5) is None} == lost


def test_micro_batch_of_the_training_that_lacks_it_says_what_is_wrong():
    with pytest.raises(SetupError, match=r'counts by "sum of weights".*weights is one number of float32') as info:
        LossReduction("auto", "sum of weights").count({"labels": LABELS, "weights": torch.tensor(1.0)})
    assert "num_items_in_batch" in info.value.hint
