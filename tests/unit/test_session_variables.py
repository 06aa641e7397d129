"""Variables of Unsloth's that give the training to it."""

import pytest

from unsloth_multigpu.session import other_parallelism


@pytest.mark.parametrize(("text", "found"), [("", []), (" ", []), ("1", []), ("2", ["2"]), (" 2 ", ["2"]), ("x", [])])
def test_tensor_parallelism_is_on_where_unsloth_takes_it_so(text, found):
    assert other_parallelism({"UNSLOTH_TP_SIZE": text}) == [f"UNSLOTH_TP_SIZE={size}" for size in found]
    assert other_parallelism({}) == []
