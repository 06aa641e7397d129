"""What a metric is made from is followed through a loss, and made again from the parts of several ranks."""

import pytest
import torch

from unsloth_multigpu.step.deal import Piece, deal_step, with_groups
from unsloth_multigpu.step.tracing import NotThere, Trace, evaluate, is_guessed, merged, plain, source_of


def both(values, gather):
    """Several metrics of a tensor, as TRL's losses make them."""
    mask = values > 0
    total, count = gather((values * mask).sum()).sum(), gather(mask.sum()).sum()
    chosen, num_chosen = gather(values[mask].sum()).sum().item(), gather(mask.sum()).sum().item()
    return {
        "quotient": (total / count).item() if count > 0 else 0.0,
        "quotient of numbers": chosen / num_chosen if num_chosen > 0 else 0.0,
        "mean": gather(values).mean().item(),
        "mean of a part": gather(values).float().detach().clamp(min=0).mean().item(),
        "difference": (gather(values) - gather(2 * values)).mean().item(),
        "difference of means": gather(values).mean().item() - gather(values * values).mean().item(),
        "least": gather(values).min().item(),
        "greatest": gather(values[:, None]).max().item(),
        "clamped": gather(values).mean().clamp(min=0.25).item(),
        "whole": gather(values.sum()).sum().item() // 2,
        "one minus": 1 - gather(values).mean().item(),
        "mean of means": gather(values.mean()).mean().item(),
    }


def parts_of(values):
    trace = Trace(len(values))
    found = both(values, trace.enter)
    return {name: source_of(value) for name, value in found.items()}, trace.parts()


@pytest.mark.parametrize("sizes", [(8,), (5, 3), (1, 7), (1, 1, 6)])
def test_metrics_of_parts_are_those_of_the_whole(sizes):
    values = torch.tensor([0.5, -1.0, 2.0, 3.5, -0.25, 1.0, 0.125, -4.0])
    expected = both(values, lambda tensor: tensor[None] if tensor.dim() == 0 else tensor)
    found = [parts_of(part) for part in values.split(sizes)]
    whole = merged([parts for _, parts in found])
    for sources, _ in found:
        for name, source in sources.items():
            assert source is not None or name.startswith("quotient"), name
            if source is not None:
                assert evaluate(source, whole) == pytest.approx(expected[name], rel=1e-6), name


def test_mean_of_means_is_told_from_a_mean():
    sources, parts = parts_of(torch.tensor([1.0, 2.0]))
    assert is_guessed(sources["mean of means"], parts)
    assert not any(is_guessed(source, parts) for name, source in sources.items() if name != "mean of means")


def test_quotient_of_no_element_is_not_there():
    def quotient(values):
        trace = Trace(len(values))
        number = trace.enter(values.sum()).sum().item() / trace.enter(values.sign().sum()).sum().item()
        return source_of(number), trace.parts()

    source, parts = quotient(torch.tensor([3.0]))
    with pytest.raises(NotThere):
        evaluate(source, {name: [0.0, 1.0, 0.0] for name in parts})
    with pytest.raises(NotThere):
        evaluate(source, {})


def test_what_is_not_understood_is_a_plain_number():
    gathered = Trace(3).enter(torch.tensor([1.0, 2.0, 3.0]))
    for value in (
        gathered.std().item(),
        gathered.mean(0, keepdim=True).item(),
        gathered[0].item(),
        gathered.tolist()[1],
    ):
        assert source_of(value) is None
    assert type(torch.tensor(1.0, requires_grad=True) * gathered.mean()) is torch.Tensor
    assert type(plain(gathered.mean().item())) is float


def test_groups_are_what_shares_a_micro_batch():
    def groups(plan, sizes):
        return [[(p.group, p.is_shared) for p in share] for share in with_groups(plan, sizes)]

    assert groups(deal_step([4, 4], 2, regroup=False), [4, 4]) == [[((0,), False)], [((1,), False)]]
    assert groups(deal_step([8], 2, regroup=False), [8]) == [[((0,), True)], [((0,), True)]]
    # The second of three is shared.
    thirds = [[((0,), False), ((1,), True)], [((1,), True), ((2,), False)]]
    assert groups(deal_step([4, 4, 4], 2, regroup=False), [4, 4, 4]) == thirds
    assert groups([[Piece((0, 3))], [Piece((1, 2))]], [2, 2]) == [[((0, 1), True)], [((0, 1), True)]]
    filler = Piece((0,), is_filler=True)
    assert groups([[Piece((0,))], [filler]], [1]) == [[((0,), False)], [((), False)]]
