"""The server side of the asynchronous parameter server: masters of the weights, and a thread for each worker."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import AbstractContextManager, ExitStack, nullcontext
from datetime import timedelta
from itertools import compress
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from unsloth_multigpu.errors import DistributedError, RankTimeoutError
from unsloth_multigpu.group.bucket import num_bytes
from unsloth_multigpu.logs import get_logger
from unsloth_multigpu.strategies.message import DONE, HINT, break_off, pack, receive, receive_into, send

logger = get_logger(__name__)

# Long, because a worker may evaluate or save. A stuck worker is noticed by the ranks that wait for its steps.
_LISTEN_LIMIT = timedelta(days=30)


class StepClock:
    """Counts of finished steps by rank, and what follows from them. One update is one finished step of one rank."""

    def __init__(self, world_size: int, max_staleness_steps: int) -> None:
        self.num_steps = [0] * world_size
        self.max_lead_steps = 0
        self.max_missed_updates = 0
        self._max_staleness_steps = max_staleness_steps
        self._num_updates_read = [0] * world_size

    def finish(self, rank: int) -> None:
        """Counts an update with the gradients of `rank`."""
        self.max_missed_updates = max(self.max_missed_updates, sum(self.num_steps) - self._num_updates_read[rank])
        self.num_steps[rank] += 1

    def lead(self, rank: int) -> int:
        return self.num_steps[rank] - min(self.num_steps)

    def may_begin(self, rank: int) -> bool:
        """True if `rank` may begin its next step."""
        return self.lead(rank) <= self._max_staleness_steps

    def begin(self, rank: int) -> None:
        """Notes that `rank` reads the current weights and begins its next step."""
        self.max_lead_steps = max(self.max_lead_steps, self.lead(rank))
        self._num_updates_read[rank] = sum(self.num_steps)


class WeightServer:
    """Rank 0's masters of the weights, and a thread for each worker that updates them.

    The optimizer works on masters, so that an update never changes the model in the middle of a backward. Only the
    holder of `_turn` may use masters, optimizer and clock. On an accelerator all of that runs in its own stream: the
    loop's stream may be blocked in a collective, waiting for a rank that waits for the server.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        parameters: Sequence[nn.Parameter],
        clock: StepClock,
        group: dist.ProcessGroup,
        timeout_s: float,
    ) -> None:
        self.is_stopping = False
        self._optimizer = optimizer
        self._parameters = parameters
        self._clock = clock
        self._group = group
        self._timeout_s = timeout_s
        self._masters = [nn.Parameter(p.detach().clone()) for p in parameters]
        self._turn = threading.Condition()
        self._own_step = ExitStack()
        self._is_resting = False
        self._sent_bytes = 0
        self._failure: tuple[int, BaseException] | None = None
        device = parameters[0].device
        self._streams: Any = None if device.type == "cpu" else torch.get_device_module(device)
        self._stream = self._streams and self._streams.Stream(device)
        self._sync_streams()
        _point_at(optimizer, dict(zip(parameters, self._masters, strict=True)))
        workers = range(1, len(clock.num_steps))
        # Not daemons: Python must not end while one is inside gloo.
        self._threads = ThreadPoolExecutor(len(clock.num_steps), thread_name_prefix="parameter_server")
        self._serving = {self._threads.submit(self._serve, w): w for w in workers}
        for future in self._serving:
            future.add_done_callback(self._on_done)

    @property
    def failure(self) -> BaseException | None:
        """What ended a worker's thread."""
        return None if self._failure is None else self._failure[1]

    def begin_step(self) -> None:
        """Rank 0's own gradients are about to be used. No other gradients are used until `finish_step`."""
        self._check()
        self._sync_streams()
        if not self._turn.acquire(timeout=self._timeout_s):
            raise self._late("its turn")
        self._own_step.callback(self._turn.release)
        self._own_step.enter_context(self._in_stream())
        self._is_resting = False
        for master, parameter in zip(self._masters, self._parameters, strict=True):
            # Removed as on the workers, because `optimizer.zero_grad()` clears only the gradients of the masters.
            master.grad, parameter.grad = parameter.grad, None

    def finish_step(self) -> None:
        """Waits until rank 0 may begin its next step, and gives its model the newest weights."""
        with self._own_step:
            self._finish(0)
            self._write_model()
        self._sync_streams()

    def catch_up(self) -> None:
        """Waits for ranks that are behind rank 0, gives its model their updates, and then holds updates back."""
        self._check()
        with self._turn, self._in_stream():
            self._wait_for(lambda: self._clock.lead(0) == 0, "the slowest rank")
            self._is_resting = True
            self._write_model()
            for rank in range(len(self._clock.num_steps)):
                self._clock.begin(rank)
        self._sync_streams()

    def take_sent_bytes(self) -> int:
        """What the threads have sent since the last call."""
        with self._turn:
            sent, self._sent_bytes = self._sent_bytes, 0
        return sent

    def join(self) -> None:
        """Waits until all workers have reported that they are done."""
        wait(self._serving, timeout=self._timeout_s)
        self._check()
        if not all(future.done() for future in self._serving):
            raise self._late("the last word of the other ranks")

    def stop(self) -> None:
        """Ends the threads, whose connections are already closed, and gives the optimizer the model's parameters."""
        self.is_stopping = True
        self._own_step.close()
        with self._turn:
            self._turn.notify_all()
        _, alive = wait(self._serving, timeout=self._timeout_s)
        self._threads.shutdown(wait=not alive)
        if alive:
            logger.warning("%d threads of the parameter server did not end in %g s", len(alive), self._timeout_s)
        _point_at(self._optimizer, dict(zip(self._masters, self._parameters, strict=True)))

    def _serve(self, worker: int) -> None:
        """The thread of one worker."""
        header = torch.empty(1 + len(self._masters), dtype=torch.int64)
        try:
            with self._in_stream():
                while True:
                    receive(header, worker, self._group, _LISTEN_LIMIT)
                    kind, *has_gradient = header.tolist()
                    if kind == DONE:
                        return
                    masters = list(compress(self._masters, has_gradient))
                    gradients = [torch.empty_like(m) for m in masters]
                    receive_into(gradients, worker, self._group)
                    send(self._update(worker, masters, gradients), worker, self._group)
        except DistributedError:
            if not self.is_stopping:
                raise

    def _update(
        self, worker: int, masters: Sequence[nn.Parameter], gradients: Sequence[torch.Tensor]
    ) -> list[torch.Tensor]:
        """Steps with a worker's gradients; returns the weights with which it may begin its next step."""
        with self._turn:
            self._wait_for(lambda: not self._is_resting, f"rank 0's next step, after which rank {worker}'s counts")
            for master, gradient in zip(masters, gradients, strict=True):
                master.grad = gradient
            self._optimizer.step()
            self._finish(worker)
            weights = pack(self._masters)
            self._sent_bytes += num_bytes(*weights)
        return weights

    def _finish(self, rank: int) -> None:
        for master in self._masters:
            master.grad = None
        self._clock.finish(rank)
        self._turn.notify_all()
        self._wait_for(lambda: self._clock.may_begin(rank), f"the slowest rank, which rank {rank} is ahead of")
        self._clock.begin(rank)

    def _write_model(self) -> None:
        with torch.no_grad():
            for parameter, master in zip(self._parameters, self._masters, strict=True):
                parameter.copy_(master)

    def _wait_for(self, condition: Callable[[], bool], what: str) -> None:
        if not self._turn.wait_for(lambda: condition() or self._is_broken(), timeout=self._timeout_s):
            raise self._late(what)
        if not condition():
            self._check()
            raise DistributedError("The parameter server was stopped.", hint=HINT)

    def _is_broken(self) -> bool:
        return self.is_stopping or self._failure is not None

    def _check(self) -> None:
        if self._failure is not None:
            worker, error = self._failure
            reason = f"{type(error).__name__}: {error.args[0] if error.args else ''}"
            kind = RankTimeoutError if isinstance(error, RankTimeoutError) else DistributedError
            raise kind(f"The parameter server has lost rank {worker}. {reason}", hint=HINT) from error

    def _late(self, what: str) -> RankTimeoutError:
        steps = self._clock.num_steps
        return RankTimeoutError(
            f"The parameter server waited {self._timeout_s:g} seconds for {what}; finished steps by rank: {steps}.",
            hint=HINT,
        )

    def _on_done(self, future: Future[None]) -> None:
        error, worker = future.exception(), self._serving[future]
        with self._turn:
            # Keep the first error: others may be its consequences.
            is_first = error is not None and self._failure is None
            if error is not None and is_first:
                self._failure = worker, error
            self._turn.notify_all()
        if is_first and not self.is_stopping:
            # Logged at once: rank 0 may wait long in a collective for ranks that wait for this server.
            logger.error("the parameter server has lost rank %d", worker, exc_info=error)
            break_off(self._group, range(1, len(self._clock.num_steps)))

    def _in_stream(self) -> AbstractContextManager[Any]:
        return nullcontext() if self._stream is None else self._streams.stream(self._stream)

    def _sync_streams(self) -> None:
        # The host waits. If a stream waited for the loop's stream, it would wait for its collectives too.
        if self._stream is not None:
            self._streams.current_stream(self._stream.device).synchronize()
            self._stream.synchronize()


def _point_at(optimizer: torch.optim.Optimizer, targets: Mapping[torch.Tensor, torch.Tensor]) -> None:
    """Makes the optimizer work on other tensors and keeps its state. Checkpoints identify tensors by position."""
    for group in optimizer.param_groups:
        group["params"] = [targets.get(p, p) for p in group["params"]]
    state = {targets.get(key, key): value for key, value in optimizer.state.items()}
    optimizer.state.clear()
    optimizer.state.update(state)
