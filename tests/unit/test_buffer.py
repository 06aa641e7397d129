"""Which buffers are kept equal."""

import torch

from unsloth_multigpu.train.buffer import kept_buffers


def test_kept_buffers_are_those_of_a_checkpoint():
    model = torch.nn.Module()
    model.inner = torch.nn.BatchNorm1d(2)
    model.register_buffer("table", torch.zeros(3), persistent=False)
    model.register_buffer("placeholder", torch.zeros(3, device="meta"))
    model.register_buffer("ignored", torch.zeros(3))
    model._ddp_params_and_buffers_to_ignore = ["ignored"]
    names = [name for name, *_ in kept_buffers(model)]
    assert names == ["inner.running_mean", "inner.running_var", "inner.num_batches_tracked"]
