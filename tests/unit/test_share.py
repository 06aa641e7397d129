"""The batches of an evaluation: ranks take turns, meet in each round, and a stream gives all of them the same rows."""

import math
from types import SimpleNamespace

import pytest
import torch

from unsloth_multigpu.deal.share import Turns, share_of
from unsloth_multigpu.errors import DivergenceError


@pytest.mark.parametrize("num_batches", [0, 1, 2, 3, 4])
def test_ranks_take_turns_and_have_as_many_batches(num_batches):
    batches = [[4 * i, 4 * i + 1] for i in range(num_batches)]
    ranks = [Turns(batches, lambda: batches, rank, 3) for rank in range(3)]
    found = [list(turns) for turns in ranks]
    assert {len(mine) for mine in found} == {len(ranks[0])} == {math.ceil(num_batches / 3)}
    assert {turns.num_batches for turns in ranks} == {num_batches}
    in_order = [batch for of_round in zip(*found, strict=True) for batch in of_round]
    assert in_order[:num_batches] == batches
    assert all(batch == batches[0] for batch in in_order[num_batches:])


class Stream(torch.utils.data.IterableDataset):
    def __iter__(self):
        return iter(range(5))


def test_stream_that_gives_ranks_other_rows_is_refused():
    said = []

    def gather_json(mine):
        said.append(mine)
        # The other rank's stream ends a batch earlier.
        return [mine, [mine[0] - (len(said) > 1), mine[1]]]

    config = SimpleNamespace(data_seed=None, dispatch_batches=None)
    accelerator = SimpleNamespace(use_seedable_sampler=True, dataloader_config=config)
    args = SimpleNamespace(device="cpu", batch_eval_metrics=False, eval_do_concat_batches=True)
    trainer = SimpleNamespace(accelerator=accelerator, args=args)
    manager = SimpleNamespace(identity=SimpleNamespace(rank=0, world_size=2), gather_json=gather_json)
    share = share_of(trainer, manager, torch.utils.data.DataLoader(Stream(), batch_size=2), is_whole=False)
    with pytest.raises(DivergenceError, match="rank 1 gets other rows than rank 0"):
        list(share.loader)
