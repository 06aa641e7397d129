"""Lets accelerate's FSDP2 shard CPU ranks, so that its code runs without a card. Call `allow_cpu_ranks()` first.

accelerate gives a plugin for FSDP to ranks on accelerators only (`AcceleratorState.__init__`, 1.15). What it then does
asks for no device: `torch.distributed.fsdp.fully_shard` works over gloo.
"""

import functools


def allow_cpu_ranks() -> None:
    from accelerate.state import AcceleratorState, PartialState
    from accelerate.utils import DistributedType
    from torch.distributed.fsdp import CPUOffloadPolicy

    original = AcceleratorState.__init__

    @functools.wraps(original)
    def __init__(self, *args, fsdp_plugin=None, **kwargs):
        original(self, *args, fsdp_plugin=fsdp_plugin, **kwargs)
        if fsdp_plugin is None or self.distributed_type != DistributedType.MULTI_CPU:
            return
        self.distributed_type = PartialState._shared_state["distributed_type"] = DistributedType.FSDP
        self.fsdp_plugin = fsdp_plugin
        if isinstance(fsdp_plugin.cpu_offload, CPUOffloadPolicy):
            # Pinned memory is an accelerator's.
            fsdp_plugin.cpu_offload = CPUOffloadPolicy(pin_memory=False)
        if self._mixed_precision != "no":
            fsdp_plugin.set_mixed_precision(self._mixed_precision)

    AcceleratorState.__init__ = __init__
