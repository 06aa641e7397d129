"""The ways in which the gradients of four ranks meet: the product's strategies, and mistakes put back one at a time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from unsloth_multigpu.strategies.sync import AllReduceSync, GradientSync, ParameterServerSync

NUM_RANKS = 4
ROWS_PER_RANK = 16
# Small, so that these small models fill several.
BUCKET_BYTES = 50_000
SKIP_EVERY_STEPS = 8


class TorchDDP(GradientSync):
    """torch's own: the constructor sends rank 0's weights, the backward pass averages the gradients."""

    def begin(self) -> None:
        self.wrapped = DistributedDataParallel(self.model)


class NoBroadcast(AllReduceSync):
    """MISTAKE: the ranks begin with weights of their own. Equal updates keep the distance for ever."""

    def begin(self) -> None:
        pass


class SkippedUpdates(AllReduceSync):
    """MISTAKE: the last rank leaves out some updates, as code does that decides by the rank's own loss."""

    num_steps = 0

    def after_backward(self) -> None:
        super().after_backward()
        self.num_steps += 1
        if self.rank == self.world_size - 1 and self.num_steps % SKIP_EVERY_STEPS == 0:
            set_gradients(self.parameters, None)


class Sum(AllReduceSync):
    """MISTAKE: gradients are added up, and nobody divides."""

    def after_backward(self) -> None:
        super().after_backward()
        for parameter in self.parameters:
            parameter.grad.mul_(self.world_size)


class DoubleDivision(AllReduceSync):
    """MISTAKE: the mean is divided by the number of ranks once more."""

    def after_backward(self) -> None:
        super().after_backward()
        for parameter in self.parameters:
            parameter.grad.div_(self.world_size)


class StepPerWorker(GradientSync):
    """MISTAKE: the server takes a step with each worker's gradient, where one step with their mean was meant."""

    def after_backward(self) -> None:
        mine = parameters_to_vector([p.grad for p in self.parameters])
        is_server = self.rank == 0
        every = [torch.empty_like(mine) for _ in range(self.world_size)] if is_server else None
        dist.gather(mine, every, dst=0)
        set_gradients(self.parameters, None)
        for worker, gradient in enumerate(every or []):
            if worker > 0:
                self.optimizer.step()
            set_gradients(self.parameters, gradient)  # The last one's step is the loop's.

    def after_step(self) -> None:
        super().after_step()
        self.broadcast([*self.parameters, *self.buffers])


class DedicatedServer(GradientSync):
    """MISTAKE: rank 0 only serves, so an epoch's samples make more and smaller steps than in the run compared with."""

    def after_backward(self) -> None:
        total = parameters_to_vector([torch.zeros_like(p) if p.grad is None else p.grad for p in self.parameters])
        dist.reduce(total, dst=0)
        set_gradients(self.parameters, total / (self.world_size - 1) if self.rank == 0 else None)

    def after_step(self) -> None:
        super().after_step()
        # No buffers, as in the hand-written servers: rank 0 never sees a sample, so its BatchNorm has no statistics.
        self.broadcast(self.parameters)


def set_gradients(parameters: list[nn.Parameter], flat: torch.Tensor | None) -> None:
    """Puts the parts of `flat` into `.grad`, or None, with which an optimizer's step leaves a parameter alone."""
    for parameter in parameters:
        parameter.grad = None if flat is None else torch.empty_like(parameter)
    if flat is not None:
        vector_to_parameters(flat, [p.grad for p in parameters if p.grad is not None])


@dataclass(frozen=True)
class Variant:
    """One way to train on the ranks.

    Args:
        kind: "reference", "strategy", "mistake" or "control".
        is_bug: The mistake lets the ranks' weights drift apart, so the replica proof must catch it.
        workers: Ranks that get samples, `rows_per_worker` each.
        has_own_seeds: Each rank draws its first weights with a seed of its own.
    """

    name: str
    label: str
    kind: str
    make: Callable[[nn.Module, torch.optim.Optimizer], GradientSync]
    is_bug: bool = False
    workers: tuple[int, ...] = tuple(range(NUM_RANKS))
    rows_per_worker: int = ROWS_PER_RANK
    has_own_seeds: bool = False
    learning_rate_factor: float = 1.0

    @property
    def what(self) -> str:
        """The mistake in words: the first line of its class."""
        return (self.make.__doc__ or "").removeprefix("MISTAKE: ").partition("\n")[0]


def _no_exchange(model: nn.Module, optimizer: torch.optim.Optimizer) -> GradientSync:
    """MISTAKE: every rank trains by itself after a common start; the gradients never meet."""
    return GradientSync(model, optimizer)  # The contract's base class sends the first weights, and nothing else.


class AllReduceEach(AllReduceSync):
    bucket_bytes = 0


class AllReduceInBuckets(AllReduceSync):
    bucket_bytes = BUCKET_BYTES


VARIANTS = {
    variant.name: variant
    for variant in (
        Variant("ddp", "DDP", "reference", TorchDDP),
        Variant(
            "one_process",
            "one process",
            "reference",
            GradientSync,
            workers=(0,),
            rows_per_worker=NUM_RANKS * ROWS_PER_RANK,
        ),
        Variant("allreduce_each", "all-reduce per parameter", "strategy", AllReduceEach),
        Variant("allreduce", "all-reduce in buckets", "strategy", AllReduceInBuckets),
        Variant("parameter_server", "parameter server", "strategy", ParameterServerSync),
        Variant("no_broadcast", "no broadcast, own seeds", "mistake", NoBroadcast, is_bug=True, has_own_seeds=True),
        Variant("no_exchange", "no all-reduce at all", "mistake", _no_exchange, is_bug=True),
        Variant("skipped_updates", "unequal numbers of updates", "mistake", SkippedUpdates, is_bug=True),
        Variant("sum", "sum for mean", "mistake", Sum),
        Variant("double_division", "divided twice", "mistake", DoubleDivision),
        Variant("step_per_worker", "server steps once per worker", "mistake", StepPerWorker),
        Variant(
            "dedicated_server",
            "3 workers + dedicated server",
            "mistake",
            DedicatedServer,
            workers=tuple(range(1, NUM_RANKS)),
        ),
        Variant("ddp_times_4", "DDP, learning rate x 4", "control", TorchDDP, learning_rate_factor=NUM_RANKS),
        Variant(
            "step_per_worker_over_4",
            "once per worker, learning rate / 4",
            "control",
            StepPerWorker,
            learning_rate_factor=1 / NUM_RANKS,
        ),
    )
}
