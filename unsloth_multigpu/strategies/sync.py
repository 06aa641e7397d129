"""The strategies other than DDP, and their contract.

Two synchronize in every optimizer step, as DDP does. With the other two, ranks step independently between rare
synchronizations.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from unsloth_multigpu.errors import SetupError
from unsloth_multigpu.group.model import all_reduce_bytes, num_bytes
from unsloth_multigpu.strategy import DiLoCo, LocalSGD, Strategy

SERVER_RANK = 0


class GradientSync:
    """Base of the strategies that train one model on all ranks of the default process group.

    A loop calls `begin` once. In every optimizer step it calls `after_backward`, when `.grad` has the rank's gradients
    of the whole step, not yet clipped, and `after_step` when the optimizer has stepped. It calls `synchronize` before
    weights are saved, evaluated or compared, and at the end. All ranks make the same calls in the same order, since
    each may be a collective. Ranks count equally in every mean, as in DDP.

    Args:
        model: The model without a wrapper. Its trainable parameters and buffers are synchronized.
        optimizer: This rank's torch optimizer, on those parameters.
        strategy: The options, if the strategy has any.
        is_loss_scaled: A GradScaler scales the loss: mixed precision with fp16.

    Attributes:
        bucket_bytes: Limit up to which tensors share a message; a larger one is a message of its own.
        sent_bytes: Bytes that this rank has sent so far, computed for the usual algorithms of collectives.
    """

    bucket_bytes = 25 * 2**20

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        strategy: Strategy | None = None,
        *,
        is_loss_scaled: bool = False,
    ) -> None:
        self.model = model
        self.optimizer = optimizer
        self.strategy = strategy
        self.is_loss_scaled = is_loss_scaled
        self.parameters = [p for p in model.parameters() if p.requires_grad]
        self.buffers = list(model.buffers())
        self.rank = dist.get_rank()
        self.world_size = dist.get_world_size()
        self.sent_bytes = 0
        # A thread of gloo drops its reference to the tensor after a collective is done. Without this reference it would
        # need the GIL to free the tensor, and a process that is exiting would abort.
        self._last_work: Any = None

    def begin(self) -> None:
        """Copies rank 0's weights and buffers to all ranks, including frozen ones, as DDP does."""
        self.broadcast([*self.model.parameters(), *self.buffers])

    def after_backward(self) -> None:
        """Called when the gradients of this rank's part of the step are complete."""

    def after_step(self) -> None:
        """Called when the optimizer has stepped."""
        # The work holds gradients, whose memory the next forward pass needs.
        self._last_work = None

    @property
    def are_replicas_equal(self) -> bool:
        """True if the weights of all ranks are equal. Valid between `after_step` and the next backward pass."""
        return True

    def synchronize(self) -> None:
        """Makes weights and buffers of all ranks equal. May be a collective."""

    def state_dict(self) -> dict[str, Any]:
        """Returns the state besides weights and optimizer, of tensors, numbers and str. A checkpoint holds rank 0's."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resumes from a `state_dict()`. Called after `begin`, when the weights are those of the checkpoint."""

    def shared_gradients(self) -> list[torch.Tensor]:
        """Returns `.grad` of the parameters that have one on any rank, in the order of `parameters`; zeros if not here.

        A `.grad` that no rank has stays None, so that no optimizer decays an unused weight. Collective: sends one byte
        for each tensor of `parameters`. Raises SetupError for a sparse gradient.
        """
        if not self.parameters:
            return []
        for name, parameter in self.model.named_parameters():
            if parameter.grad is not None and parameter.grad.layout != torch.strided:
                raise SetupError(
                    f"{name} has a sparse gradient, which {type(self).__name__} does not send.",
                    hint="Use strategy='ddp', or build its layer with sparse=False.",
                )
        has_gradient = [p.grad is not None for p in self.parameters]
        seen = torch.tensor(has_gradient, dtype=torch.uint8, device=self.parameters[0].device)
        self.exchange([seen], lambda flat: self._all_reduce(flat, dist.ReduceOp.MAX))
        gradients = []
        for parameter, is_on_any_rank in zip(self.parameters, seen.tolist(), strict=True):
            if is_on_any_rank:
                parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
                gradients.append(parameter.grad)
        return gradients

    def average(self, tensors: Sequence[torch.Tensor], *, dtype: torch.dtype | None = None) -> None:
        """Replaces each tensor by its mean over the ranks, computed in `dtype`; None = its own. Collective."""
        self.exchange(tensors, lambda flat: self._all_reduce(flat.div_(self.world_size)), dtype)

    def broadcast(self, tensors: Sequence[torch.Tensor]) -> None:
        """Copies rank 0's values to all ranks. Collective."""
        # As bytes, since backends do not support all dtypes.
        self.exchange(tensors, lambda flat: self._broadcast(flat.view(torch.uint8)))

    def exchange(
        self, tensors: Sequence[torch.Tensor], start: Callable[[torch.Tensor], Any], dtype: torch.dtype | None = None
    ) -> None:
        """Runs a collective on tensors, bucket by bucket, and writes the results back.

        Args:
            tensors: The same shapes in the same order on all ranks.
            start: Starts an in-place collective on a flat tensor, and returns its work handle.
            dtype: dtype of the messages; None = that of the tensors.
        """
        for bucket in buckets(tensors, self.bucket_bytes):
            # A contiguous tensor alone is sent without a copy.
            is_flat = len(bucket) == 1 and bucket[0].is_contiguous()
            flat = bucket[0].detach().view(-1) if is_flat else torch.cat([t.detach().reshape(-1) for t in bucket])
            flat = flat if dtype is None else flat.to(dtype)
            work = self._last_work = start(flat)
            work.wait()
            if flat.data_ptr() != bucket[0].data_ptr():
                with torch.no_grad():
                    for tensor, part in zip(bucket, flat.split([t.numel() for t in bucket]), strict=True):
                        tensor.copy_(part.view(tensor.shape))

    def _all_reduce(self, flat: torch.Tensor, op: Any = dist.ReduceOp.SUM) -> Any:
        self.sent_bytes += all_reduce_bytes(num_bytes(flat), self.world_size)
        return dist.all_reduce(flat, op=op, async_op=True)

    def _reduce(self, flat: torch.Tensor) -> Any:
        # In a chain or a tree, every rank but the server sends the tensor once.
        self.sent_bytes += num_bytes(flat) if self.rank != SERVER_RANK else 0
        return dist.reduce(flat, dst=SERVER_RANK, async_op=True)

    def _broadcast(self, flat: torch.Tensor) -> Any:
        # As in a chain, where every rank but the last sends the tensor once; a tree sends as many copies in total.
        self.sent_bytes += num_bytes(flat) if self.rank < self.world_size - 1 else 0
        return dist.broadcast(flat, src=SERVER_RANK, async_op=True)


class AllReduceSync(GradientSync):
    """Averages the gradients over all ranks after the backward pass. Every rank makes the same optimizer step.

    Equal to DDP up to rounding, but communication does not overlap with the backward pass. As in DDP, buffers are those
    of rank 0, and the gradient of a parameter that a rank has not used counts as zeros.
    """

    def after_backward(self) -> None:
        """Averages `.grad` over the ranks. Collective."""
        self.average(self.shared_gradients())

    def after_step(self) -> None:
        """Copies rank 0's buffers to all ranks. Collective."""
        super().after_step()
        self.broadcast(self.buffers)


class ParameterServerSync(GradientSync):
    """Rank 0 averages the gradients of all ranks, steps, and sends the weights to the other ranks.

    Equal to DDP up to rounding. Only rank 0 has optimizer state: the optimizers of the other ranks get no gradient, so
    their steps do nothing. The gradient norm of a step is valid on rank 0 only.

    A GradScaler needs a gradient on every rank, and the same scale on all. So each other rank gets a gradient of its
    smallest parameter: zeros, or NaN if rank 0's gradients overflowed.
    """

    def begin(self) -> None:
        """Copies rank 0's weights and buffers to all ranks. The others drop optimizer state from a checkpoint."""
        super().begin()
        if self.rank != SERVER_RANK:
            self.optimizer.state.clear()

    def after_backward(self) -> None:
        """Averages the gradients on rank 0 and removes them on the other ranks. Collective."""
        gradients = self.shared_gradients()
        self.exchange(gradients, lambda flat: self._reduce(flat.div_(self.world_size)))
        if self.rank != SERVER_RANK:
            for parameter in self.parameters:
                parameter.grad = None
        if self.is_loss_scaled and gradients:
            self._share_overflow([g for g in gradients if g.numel()])

    def _share_overflow(self, gradients: list[torch.Tensor]) -> None:
        # The largest absolute value times zero: zero, or NaN if any element is infinite or NaN.
        overflow = torch.nn.utils.get_total_norm(gradients, math.inf).float() * 0
        self.broadcast([overflow])
        if self.rank != SERVER_RANK:
            stepped = (p for group in self.optimizer.param_groups for p in group["params"])
            smallest = min((p for p in stepped if p.requires_grad and p.numel()), key=torch.Tensor.numel)
            smallest.grad = torch.zeros_like(smallest) + overflow

    def after_step(self) -> None:
        """Copies rank 0's trained weights and buffers to all ranks. Collective."""
        super().after_step()
        self.broadcast([*self.parameters, *self.buffers])


class LocalSGDSync(GradientSync):
    """Each rank steps on its own gradients; every `every_steps` steps the trained weights are averaged.

    Only trainable weights and buffers are sent. Each rank keeps its own optimizer state; a checkpoint holds rank 0's.
    An earlier synchronization, for a save or an evaluation, restarts the count of steps. Source: Stich 2019, "Local SGD
    Converges Fast and Communicates Little".
    """

    strategy: LocalSGD
    _num_local_steps = 0

    @property
    def are_replicas_equal(self) -> bool:
        """False from the first step after a synchronization until the next one."""
        return self._num_local_steps == 0

    def after_step(self) -> None:
        """Synchronizes after `every_steps` steps. Collective in that step."""
        super().after_step()
        self._num_local_steps += 1
        if self._num_local_steps == self.strategy.every_steps:
            self.synchronize()

    def synchronize(self) -> None:
        """Makes weights and buffers of all ranks equal, if a step was made since the last time. Collective then."""
        if self._num_local_steps:
            self._combine_weights()
            # In 64 bits the mean of equal numbers is exact, so that buffers which are constants do not change.
            self.average([b for b in self.buffers if b.is_floating_point()], dtype=torch.float64)
            self.broadcast([b for b in self.buffers if not b.is_floating_point()])
        self._num_local_steps = 0

    def _combine_weights(self) -> None:
        # A mean in 16 bits would lose most of the change of a few steps.
        for dtype in sorted({p.dtype for p in self.parameters}, key=str):
            same = [p for p in self.parameters if p.dtype == dtype]
            self.average(same, dtype=torch.promote_types(dtype, torch.float32))


class DiLoCoSync(LocalSGDSync):
    """Local steps as in LocalSGDSync, and an outer step in each synchronization.

    The mean change of the weights since the last synchronization is the gradient of an outer SGD with Nesterov
    momentum, whose state is equal on all ranks. The weights of the last synchronization and the momentum are kept in 32
    bits: 8 bytes for each trainable weight, 4 more during a synchronization. Source: Douillard et al. 2023, "DiLoCo:
    Distributed Low-Communication Training of Language Models".

    An earlier synchronization, for a save or an evaluation, is an outer step as well, in which the momentum moves the
    weights once more. So saves and evaluations should fall on multiples of `every_steps`.
    """

    strategy: DiLoCo

    def begin(self) -> None:
        """Copies rank 0's weights and buffers to all ranks. The first local steps begin with them."""
        super().begin()
        # In 32 bits also for 16-bit weights, which an outer step may change by less than their rounding.
        self._start = [p.detach().to(torch.promote_types(p.dtype, torch.float32), copy=True) for p in self.parameters]
        rate, momentum = self.strategy.outer_learning_rate, self.strategy.outer_momentum
        self._outer = torch.optim.SGD(self._start, lr=rate, momentum=momentum, nesterov=momentum > 0)

    def _combine_weights(self) -> None:
        with torch.no_grad():
            for start, parameter in zip(self._start, self.parameters, strict=True):
                # The local steps began at `start` rounded to the dtype of the weights.
                start.grad = start.to(parameter.dtype).to(start.dtype) - parameter
            self.average([s.grad for s in self._start if s.grad is not None])
            self._outer.step()
            self._outer.zero_grad()
            for start, parameter in zip(self._start, self.parameters, strict=True):
                parameter.copy_(start)

    def state_dict(self) -> dict[str, Any]:
        """Returns the outer momentum; for 16-bit weights also their values at the last synchronization in 32 bits."""
        state: dict[str, Any] = {"momentum": self._outer.state_dict()["state"]}
        if any(s.dtype != p.dtype for s, p in zip(self._start, self.parameters, strict=True)):
            state["start"] = self._start
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resumes from a `state_dict()`. Called before the first local step."""
        with torch.no_grad():
            for start, saved in zip(self._start, state.get("start", self._start), strict=True):
                start.copy_(saved)
        self._outer.load_state_dict({**self._outer.state_dict(), "state": state["momentum"]})


def buckets(tensors: Sequence[torch.Tensor], bucket_bytes: int) -> Iterator[list[torch.Tensor]]:
    """Yields buckets: tensors of one dtype and device, with at most `bucket_bytes` together, or one larger tensor.

    The buckets are the same on all ranks if the tensors are. A tensor of another dtype or device does not end a bucket,
    since a BatchNorm has an integer after two floats. Empty tensors are left out. With 0, each tensor is a bucket.
    """
    unfinished: dict[tuple[torch.dtype, torch.device], list[torch.Tensor]] = {}
    filled_bytes: Counter[tuple[torch.dtype, torch.device]] = Counter()
    for tensor in filter(torch.Tensor.numel, tensors):
        kind = (tensor.dtype, tensor.device)
        if kind in unfinished and filled_bytes[kind] + num_bytes(tensor) > bucket_bytes:
            yield unfinished.pop(kind)
            filled_bytes[kind] = 0
        unfinished.setdefault(kind, []).append(tensor)
        filled_bytes[kind] += num_bytes(tensor)
    yield from unfinished.values()
