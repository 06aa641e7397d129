"""The slots of a server: keeps them alive while messages wait, and gives each message to one of them."""

from __future__ import annotations

import functools
import os
import select
import sys
import time
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

from unsloth_multigpu.errors import FederatedError, SetupError
from unsloth_multigpu.federated.device import SlotDevice, slot_environment
from unsloth_multigpu.federated.dispatch import MeasuredCosts, Queues, slots_to_have
from unsloth_multigpu.federated.placement import Placement
from unsloth_multigpu.federated.slot import Slot
from unsloth_multigpu.federated.task import CLIENT_CRASHED, REPLY_UNAVAILABLE, Task
from unsloth_multigpu.logs import get_logger

logger = get_logger(__name__)

# How often a client is run whose process dies, and how often a slot is started that fails to start.
_MAX_ATTEMPTS = 2
_MAX_FAILED_STARTS = 2
_POLL_S = 1.0
# Time for a process to write its stacks after the signal. A stopped process writes none.
_STACK_S = 0.2


class SlotPool:
    """Runs tasks. One thread at a time.

    Args:
        app: `user_code.pack`'s.
        devices: Each once.
        clients_per_gpu: Slots of each device; "auto" = one until its memory is known.
        max_workers: Upper limit of all slots.
        placement: As in `placement.deal`.
        log_dir: Where the slots' logs are.
        seed: See `slot_environment`.
        start_timeout_s: For a slot to be ready.

    Attributes:
        slots: All of them; their place is `Slot.index`.
        costs: What clients took so far.
    """

    def __init__(
        self,
        app: bytes,
        devices: Sequence[SlotDevice],
        *,
        clients_per_gpu: int | Literal["auto"],
        max_workers: int | None,
        placement: Placement,
        log_dir: Path,
        seed: int,
        start_timeout_s: float,
    ) -> None:
        self._app = app
        self._is_auto = clients_per_gpu == "auto"
        self._max_slots = max_workers or sys.maxsize
        self._log_dir = log_dir
        self._seed = seed
        self._start_timeout_s = start_timeout_s
        self._memory_bytes: dict[SlotDevice, int] = {}
        self._shrunk: set[SlotDevice] = set()
        self.costs = MeasuredCosts()
        self._queues = Queues(placement, self.costs)
        self.slots: list[Slot] = []
        # Cannot be unregistered; it holds only a weak reference.
        os.register_at_fork(after_in_child=functools.partial(_forget, weakref.ref(self)))
        # One on each device, then a second on each: max_workers cuts off the last ones.
        for _ in range(1 if clients_per_gpu == "auto" else clients_per_gpu):
            for device in devices:
                self._add_slot(device)

    def submit(self, tasks: Sequence[Task]) -> None:
        """Lets tasks wait for a slot."""
        self._deal(tasks)

    def run(self, has_ended: Callable[[], bool], deadline_s: float | None = None) -> None:
        """Works until `has_ended`, or until all tasks that run or wait have ended by the deadline.

        After an error, Ctrl-C among them, `close` ends what runs.

        Args:
            deadline_s: On the clock of `time.monotonic`.

        Raises:
            FederatedError: No slot starts any more.
            SetupError: A slot cannot load the app.
        """
        while not has_ended():
            if deadline_s is not None and time.monotonic() >= deadline_s:
                self._give_up()
                return
            self.step(_POLL_S if deadline_s is None else min(_POLL_S, deadline_s - time.monotonic()))

    def step(self, limit_s: float) -> None:
        """Starts and feeds slots, and takes in what they say within `limit_s`."""
        for slot in self.slots:
            if slot.is_live and slot.task is None and slot.has_ended():
                # Noticed before it gets a client, which would otherwise count as the one that ended it.
                self._listen(slot)
                if slot.is_live and slot.has_ended():
                    self._bury(slot)
            if not slot.is_live and not slot.is_retired:
                self._start(slot)
        self._feed()
        poll, ends = select.poll(), dict[int, Slot]()
        for slot in self.slots:
            ends |= slot.register(poll)
        for slot in dict.fromkeys(ends[descriptor] for descriptor, _ in poll.poll(max(0.0, limit_s) * 1000)):
            self._listen(slot)
        for slot in self.slots:
            late_s = time.monotonic() - slot.started_s - self._start_timeout_s
            if slot.is_live and not slot.is_ready and late_s > 0:
                self._bury(slot, f"it was not ready within {self._start_timeout_s:g} s")

    def close(self) -> None:
        """Ends all processes and forgets the tasks; a later `run` starts new ones."""
        self._queues.take_all()
        for slot in self.slots:
            slot.end()
            slot.is_retired, slot.num_failed_starts = False, 0

    def _add_slot(self, device: SlotDevice) -> None:
        if len(self.slots) < self._max_slots:
            self.slots.append(Slot(len(self.slots), device, self._log_dir))

    def _start(self, slot: Slot) -> None:
        num_slots = len(self.slots)
        if self._is_auto and slot.device.kind == "cpu":
            # Threads for as many slots as there can be later: sums depend on the number of threads.
            num_slots = max(num_slots, min(self._max_slots, len(os.sched_getaffinity(0))))
        environment = slot_environment(slot.device, num_slots, self._seed, os.environ)
        slot.start(environment, (slot.device.kind, sys.argv, self._app))

    def _deal(self, tasks: Sequence[Task] = ()) -> None:
        counts: dict[SlotDevice, int] = {}
        for slot in self.slots:
            if not slot.is_retired:
                counts[slot.device] = counts.get(slot.device, 0) + 1
        self._queues.deal(tasks, counts, self._memory_bytes)

    def _feed(self) -> None:
        for slot in self.slots:
            if slot.is_ready and slot.task is None:
                beside = [s.task for s in self.slots if s.device == slot.device and s.task is not None]
                task = self._queues.take(slot.device, beside, self._memory_bytes)
                if task is not None:
                    slot.give(task)

    def _listen(self, slot: Slot) -> None:
        messages = slot.receive()
        if messages is None:
            self._bury(slot)
            return
        for kind, *fields in messages:
            if kind == "ready":
                slot.is_ready = True
                shared_by = self._num_devices("cpu") if slot.device.kind == "cpu" else 1
                self._memory_bytes.setdefault(slot.device, fields[0] // shared_by)
            elif kind == "done":
                self._finish(slot, *fields)
            elif kind == "unloadable":
                raise SetupError(
                    f"{slot} cannot load the clients' functions: {fields[0]}\n{slot.tail()}",
                    hint="Modules that they use must be importable in a process of their own, without the script.",
                )
            else:  # "unusable", "lost"
                self._bury(slot, fields[0])
                return

    def _finish(
        self,
        slot: Slot,
        reply: Any,
        state: Any,
        peak_bytes: int,
        error: str,
        lines: str,
        is_out_of_memory: bool,
    ) -> None:
        task, slot.task, slot.num_failed_starts = slot.task, None, 0
        assert task is not None
        if self._is_auto and is_out_of_memory and self._shrink(slot, task):
            return
        task.peak_memory_bytes = peak_bytes
        if error:
            task.fail(reply.error.code, error)
            logger.warning("%s failed:\n%s", task.place(), lines.rstrip())
        else:
            task.context.state = state
            task.answer(reply)
        self.costs.note(task)
        if self._is_auto and task.kind == "train" and not error:
            self._grow(slot.device)

    def _grow(self, device: SlotDevice) -> None:
        """Adds the slots that fit on a device where clients wait, and one has shown what it takes."""
        num_waiting, num_devices = self._queues.num_waiting(device), self._num_devices(device.kind)
        if not num_waiting or device in self._shrunk:
            return
        own = [slot for slot in self.slots if slot.device == device]
        # An equal share of `max_workers` for each device, so that none is left without slots.
        limit = min(1 + num_waiting + sum(slot.task is not None for slot in own), -(-self._max_slots // num_devices))
        if device.kind == "cpu":
            limit = min(limit, max(1, len(os.sched_getaffinity(0)) // num_devices))
        peak_bytes = self.costs.held_bytes(device)
        num_slots = slots_to_have(self._memory_bytes[device], peak_bytes, device, limit)
        if num_slots > len(own):
            logger.info("device=%s peak_bytes=%d slots=%d", device, peak_bytes, num_slots)
        for _ in range(num_slots - len(own)):
            self._add_slot(device)

    def _num_devices(self, kind: str) -> int:
        return len({slot.device for slot in self.slots if slot.device.kind == kind and not slot.is_retired})

    def _shrink(self, slot: Slot, task: Task) -> bool:
        """Removes a slot of a device that has too many. False if it is the only one: the client itself is too large."""
        others = [s for s in self.slots if s.device == slot.device and s is not slot and not s.is_retired]
        if not others or task.attempts >= _MAX_ATTEMPTS:
            return False
        logger.warning(
            "%s ran out of memory with others on its device; it is run once more, %s goes away", task.place(), slot
        )
        slot.end()
        slot.is_retired = True
        self._shrunk.add(slot.device)
        self._queues.put_first(task, [slot.device])
        return True

    def _bury(self, slot: Slot, because: str = "") -> None:
        """Ends a process that is dead or useless: its client runs once more, and its slot starts once more."""
        task = slot.task
        end = slot.end(because)
        if slot.is_fresh:
            self._note_failed_start(slot, end)
        elif task is None:
            logger.warning("%s while it waited; a new process is started", end)
        elif task.attempts < _MAX_ATTEMPTS:
            logger.warning(
                "%s. It was in the middle of %s, which is run once more. The end of its log:\n%s",
                end,
                task.place(),
                slot.tail(),
            )
            self._queues.put_first(task, [s.device for s in self.slots if not s.is_retired])
        else:
            task.fail(CLIENT_CRASHED, f"{end}. It is the second process that this client has ended: it is left out")
            logger.warning("%s\nThe end of the log of slot %d:\n%s", task.error, slot.index, slot.tail())

    def _note_failed_start(self, slot: Slot, end: str) -> None:
        slot.num_failed_starts += 1
        if slot.num_failed_starts < _MAX_FAILED_STARTS:
            logger.warning("%s. It has had no client yet; it is started once more", end)
            return
        slot.is_retired = True
        if all(other.is_retired for other in self.slots):
            raise FederatedError(
                f"No slot is left: {end}, and is not started a third time. The end of its log:\n{slot.tail()}",
                hint=f"See {slot.log}.",
            )
        logger.warning(
            "%s. It is not started a third time: its clients go to other slots. The end of its log:\n%s",
            end,
            slot.tail(),
        )
        self._deal()

    def _give_up(self) -> None:
        """The round has run out of time: ends what runs, and answers all open tasks with an error."""
        busy = [slot for slot in self.slots if slot.task is not None]
        begins = {slot: slot.ask_for_stack() for slot in busy}
        if busy:
            time.sleep(_STACK_S)
        for slot in busy:
            task, place = slot.task, slot.place_in_code(begins[slot])
            assert task is not None
            slot.end("the round's limit has come")
            task.fail(REPLY_UNAVAILABLE, "not ended by the round's limit" + (f", it was in {place}" if place else ""))
            logger.warning("%s; its process was ended", task.error)
        for task in self._queues.take_all():
            task.fail(REPLY_UNAVAILABLE, "not begun by the round's limit")
            logger.warning("%s", task.error)


def _forget(pool: weakref.ref[SlotPool]) -> None:
    """Runs in a forked child, whose copies of the descriptors would keep slots alive that the server has closed."""
    alive = pool()
    if alive is not None:
        for slot in alive.slots:
            slot.end()
