"""What the mean in a loss may be taken over, and parts of a micro-batch that do not have it."""

import pytest
import torch

from unsloth_multigpu.errors import SetupError
from unsloth_multigpu.step.loss import LossReduction

LABELS = torch.tensor([[1, 2, -100], [4, -100, -100]])


def test_micro_batch_of_the_training_that_lacks_it_says_what_is_wrong():
    with pytest.raises(SetupError, match=r'counts by "sum of weights".*weights is one number of float32') as info:
        LossReduction("auto", "sum of weights").count({"labels": LABELS, "weights": torch.tensor(1.0)})
    assert "num_items_in_batch" in info.value.hint
