"""A parameter server without waiting: each rank's gradient is one update, which is applied when it arrives."""

from __future__ import annotations

import threading
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.hooks import RemovableHandle

from unsloth_multigpu.accelerator import CPU_BACKEND
from unsloth_multigpu.errors import SetupError
from unsloth_multigpu.group.bucket import num_bytes
from unsloth_multigpu.logs import get_logger
from unsloth_multigpu.strategies.message import DONE, GRADIENTS, break_off, pack, receive_into, send
from unsloth_multigpu.strategies.server import StepClock, WeightServer
from unsloth_multigpu.strategies.sync import GradientSync

logger = get_logger(__name__)


class AsyncParameterServerSync(GradientSync):
    """Rank 0 keeps the weights and the optimizer, and trains as well. Ranks do not meet in a step.

    A rank's `optimizer.step()` sends its clipped gradients to rank 0, whose optimizer makes one update of them, and
    returns with the newest weights: `world_size` updates for each step of the loop. Learning rate and optimizer state
    are rank 0's, so the Trainer's checkpoint holds all; the other ranks' optimizers do nothing. Stale synchronous
    parallel: a rank begins a step when it has finished at most `max_staleness_steps` more than the slowest one. A
    gradient misses at most (2 max_staleness_steps + 1) (world_size - 1) updates.

    Source: Ho et al. 2013, "More Effective Distributed ML via a Stale Synchronous Parallel Parameter Server".

    Args:
        model: See `GradientSync`.
        optimizer: One that finds its parameters in `param_groups` alone and calls step hooks, as torch's do.
        max_staleness_steps: 0 = no rank begins a step before all have finished the last one.
        timeout_s: Limit of one wait for another rank.

    Raises:
        RankTimeoutError: From `optimizer.step()`, `meet` and `end`: another rank did not arrive.
        DistributedError: From these: another rank is gone, or its update failed on rank 0.
    """

    def __init__(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, max_staleness_steps: int, timeout_s: float
    ) -> None:
        super().__init__(model, optimizer)
        if type(optimizer).__module__.startswith("bitsandbytes"):
            # It finds the options of single parameters by address, and masters have another address.
            raise SetupError(
                f"max_staleness_steps={max_staleness_steps} cannot work with bitsandbytes' {type(optimizer).__name__}.",
                hint="Set optim='adamw_torch', or leave max_staleness_steps out.",
            )
        self._timeout_s = timeout_s
        self._clock = StepClock(self.world_size, max_staleness_steps)
        self._group: dist.ProcessGroup | None = None
        self._server: WeightServer | None = None
        self._hooks: list[RemovableHandle] = []
        self._loop_thread = threading.get_ident()
        self._is_met = True

    @property
    def max_lead_steps(self) -> int:
        """How many steps more than the slowest one a rank had finished when it began one. Of all ranks, on rank 0."""
        return self._clock.max_lead_steps

    @property
    def max_missed_updates(self) -> int:
        """How many updates were made between a rank's reading of weights and its own. Of all ranks, on rank 0."""
        return self._clock.max_missed_updates

    @property
    def are_replicas_equal(self) -> bool:
        """False between a step and the next `meet`."""
        return self._is_met

    def begin(self) -> None:
        super().begin()
        self._loop_thread = threading.get_ident()
        # A group of its own: its messages come from threads, and it goes over gloo where the model's go over NCCL.
        self._group = dist.new_group(backend=CPU_BACKEND, timeout=timedelta(seconds=self._timeout_s))
        if self.rank == 0:
            self._server = WeightServer(self.optimizer, self.parameters, self._clock, self._group, self._timeout_s)
        else:
            # What a checkpoint held: this optimizer makes no step.
            self.optimizer.state.clear()
        self._hooks = [
            self.optimizer.register_step_pre_hook(self._before_step),
            self.optimizer.register_step_post_hook(self._after_step),
        ]

    def meet(self) -> None:
        """Makes all ranks' weights and buffers rank 0's. Updates wait until rank 0's next step, so that it can save.

        If no step was made since the last meeting, nothing is done: the script may have loaded other weights.
        """
        if self._is_met:
            return
        if self._server is not None:
            self._server.catch_up()
            self.sent_bytes += self._server.take_sent_bytes()
        self.broadcast([*self.parameters, *self.buffers])
        self._is_met = True

    def end(self) -> None:
        self.meet()
        if self._server is not None and self.num_steps:
            logger.info(
                "sync=parameter_server: a rank was at most %d steps ahead, a gradient missed at most %d updates",
                self.max_lead_steps,
                self.max_missed_updates,
            )
        if self._server is not None:
            self._server.join()
        elif self._group is not None:
            send([torch.full((1 + len(self.parameters),), DONE)], 0, self._group)
        self._close()

    def abort(self) -> BaseException | None:
        if self._group is None:
            return None
        failure = None
        if self._server is not None:
            self._server.is_stopping = True
            failure = self._server.failure
        break_off(self._group, [r for r in range(self.world_size) if (r == 0) != (self.rank == 0)])
        self._close()
        return failure

    def _close(self) -> None:
        if self._group is None:
            return  # Without a group, this call would destroy the default group.
        for hook in self._hooks:
            hook.remove()
        if self._server is not None:
            self._server.stop()
        self._server = None
        dist.destroy_process_group(self._group)
        self._group = None

    def _before_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if threading.get_ident() != self._loop_thread:
            return  # Rank 0 steps with another rank's gradients.
        if self._server is not None:
            self._server.begin_step()
        else:
            self._push_and_pull()

    def _after_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if threading.get_ident() != self._loop_thread:
            return
        self._is_met = False
        if self._server is not None:
            self._server.finish_step()
            self.sent_bytes += self._server.take_sent_bytes()

    def _push_and_pull(self) -> None:
        """A worker's step. Its own optimizer finds no gradient then and does nothing."""
        assert self._group is not None
        for parameter in self.parameters:
            if parameter.grad is not None and parameter.grad.layout != torch.strided:
                raise SetupError(
                    f"{self._name_of(parameter)} has a sparse gradient, which {type(self).__name__} does not send.",
                    hint="Use sync='ddp', or build its layer with sparse=False.",
                )
        has_gradient = [p.grad is not None for p in self.parameters]
        gradients = [p.grad for p in self.parameters if p.grad is not None]
        messages = [torch.tensor([GRADIENTS, *has_gradient]), *pack(gradients)]
        self.sent_bytes += num_bytes(*messages[1:])
        send(messages, 0, self._group)
        for parameter in self.parameters:
            parameter.grad = None
        receive_into(self.parameters, 0, self._group)
