"""The slots of a server: gives each message to a process, starts another one where a process ends."""

from __future__ import annotations

import os
import select
import sys
import time
from collections.abc import Sequence
from typing import Any

from unsloth_multigpu.errors import FederatedError, SetupError
from unsloth_multigpu.federated.device import SlotDevice, slot_environment
from unsloth_multigpu.federated.placement import Placement, choose_client
from unsloth_multigpu.federated.slot import Slot, Task
from unsloth_multigpu.logs import get_logger
from unsloth_multigpu.wire.child import read_tail

logger = get_logger(__name__)

# Flower's codes for what its own SuperNodes report; the names are in flwr.common.constant, which is not public.
CLIENT_RAISED, REPLY_UNAVAILABLE, CLIENT_CRASHED = 2, 4, 8
# How often a client is run whose process dies, and how often a slot is started that fails to start.
_MAX_ATTEMPTS = 2
_MAX_FAILED_STARTS = 2
# A slot that is not ready after this time has failed to start.
_START_LIMIT_S = 300.0
_POLL_S = 1.0


class SlotPool:
    """Runs tasks. One thread at a time.

    Args:
        app: A ClientApp, pickled by cloudpickle.
        slots: Their place is `Slot.index`.
        placement: As in `placement.choose_client`.
        seed: See `slot_environment`.

    Attributes:
        seconds: What clients took the last time, by the kind of message and client_id.
    """

    def __init__(self, app: bytes, slots: Sequence[Slot], placement: Placement, seed: int) -> None:
        self.slots = slots
        self.seconds: dict[str, dict[int, float]] = {}
        self._app = app
        self._placement = placement
        self._seed = seed
        self._waiting: list[Task] = []

    def run(self, tasks: Sequence[Task], deadline_s: float | None = None) -> None:
        """Runs tasks until each has a reply; those that have none at the deadline end with an error.

        Args:
            deadline_s: On the clock of `time.monotonic`; None = no limit.

        Raises:
            FederatedError: No slot starts any more.
            SetupError: A slot cannot load the app.
        """
        self._waiting += tasks
        try:
            self._listen(0.0)  # A process that has died meanwhile gets no client.
            while any(task.reply is None for task in tasks):
                rest_s = _POLL_S if deadline_s is None else deadline_s - time.monotonic()
                if rest_s <= 0:
                    self._give_up()
                    return
                self._feed()
                self._listen(min(_POLL_S, rest_s))
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Ends all processes and forgets the tasks; a later `run` starts new ones."""
        self._waiting.clear()
        for slot in self.slots:
            slot.end()
            slot.is_retired, slot.num_failed_starts = False, 0

    def _feed(self) -> None:
        for slot in self.slots:
            if slot.pid is None:
                if not slot.is_retired:
                    slot.start(slot_environment(slot.device, len(self.slots), self._seed, os.environ))
            elif not slot.is_ready:
                if time.monotonic() - slot.started_s > _START_LIMIT_S:
                    self._bury(slot, f"it was not ready within {_START_LIMIT_S:g} s")
            elif slot.task is None and (task := self._take(slot.device)):
                slot.give(task)

    def _take(self, device: SlotDevice) -> Task | None:
        """The next task for a free slot of a device. One that a process died with is tried elsewhere, and first."""
        devices = list(dict.fromkeys(slot.device for slot in self.slots if not slot.is_retired))
        for task in self._waiting:
            if task.record.attempts and (task.record.device != str(device) or devices == [device]):
                self._waiting.remove(task)
                return task
        fresh = [task for task in self._waiting if not task.record.attempts]
        if device not in devices or not fresh:
            return None
        ids = [task.record.client_id for task in fresh]
        chosen = choose_client(
            ids, devices.index(device), len(devices), self._placement, self.seconds.get(fresh[0].record.kind, {})
        )
        if chosen is None:
            return None
        self._waiting.remove(fresh[chosen])
        return fresh[chosen]

    def _listen(self, limit_s: float) -> None:
        """Takes in what slots say, and waits for it at most this long."""
        poll, slots = select.poll(), dict[int, Slot]()
        for slot in self.slots:
            for descriptor in slot.descriptors():
                poll.register(descriptor, select.POLLIN)
                slots[descriptor] = slot
        for slot in dict.fromkeys(slots[descriptor] for descriptor, _ in poll.poll(limit_s * 1000)):
            messages = slot.receive()
            if messages is None:
                self._bury(slot)
            for message in messages or ():
                self._take_in(slot, *message)

    def _take_in(self, slot: Slot, kind: str, *fields: Any) -> None:
        """A message of `worker.main`."""
        if kind == "hello":
            slot.send(slot.device.kind, sys.argv, self._app)
        elif kind == "ready":
            slot.is_ready = True
        elif kind == "unusable":
            self._bury(slot, *fields)
        elif kind == "unloadable":
            raise SetupError(
                f"{slot} cannot load the clients' functions: {fields[0]}\n{read_tail(slot.log)}",
                hint="Modules that they use must be importable in a process of their own, without the script.",
            )
        else:
            self._finish(slot, kind, *fields)

    def _finish(self, slot: Slot, kind: str, result: Any, more: Any) -> None:
        """Ends a task: "done" with its reply and bytes of memory, "failed" with the error in one line and in all."""
        task, slot.task, slot.num_failed_starts = slot.task, None, 0
        assert task is not None
        if kind == "failed":
            task.fail(CLIENT_RAISED, result)
            logger.warning("%s failed:\n%s", task.place(), more.rstrip())
            return
        task.answer(result)
        record = task.record
        record.peak_memory_bytes = more
        if not task.is_first:  # The time of a process's first task includes loading the model.
            self.seconds.setdefault(record.kind, {})[record.client_id] = record.seconds

    def _bury(self, slot: Slot, because: str = "") -> None:
        """Ends a process that is dead or useless: its client runs once more, and its slot starts once more."""
        task, is_fresh = slot.task, slot.is_fresh
        end = slot.end(because)
        if is_fresh:
            self._note_failed_start(slot, end)
        elif task is None:
            logger.warning("%s while it waited; a new process is started", end)
        elif task.record.attempts < _MAX_ATTEMPTS:
            text = "%s. It was in the middle of %s, which is run once more. The end of its log:\n%s"
            logger.warning(text, end, task.place(), read_tail(slot.log))
            self._waiting.append(task)
        else:
            text = f"{end}. It is the second process that this client has ended: it is left out"
            error = task.fail(CLIENT_CRASHED, text)
            logger.warning("%s\nThe end of the log of slot %d:\n%s", error, slot.index, read_tail(slot.log))

    def _note_failed_start(self, slot: Slot, end: str) -> None:
        slot.num_failed_starts += 1
        if slot.num_failed_starts < _MAX_FAILED_STARTS:
            logger.warning("%s. It has had no client yet; it is started once more", end)
            return
        slot.is_retired = True
        if all(other.is_retired for other in self.slots):
            raise FederatedError(
                f"No slot is left: {end}, and is not started a third time. The end of its log:\n{read_tail(slot.log)}",
                hint=f"See {slot.log}.",
            )
        text = "%s. It is not started a third time: its clients go to other slots. The end of its log:\n%s"
        logger.warning(text, end, read_tail(slot.log))

    def _give_up(self) -> None:
        """The round has run out of time: ends what runs, and answers all open tasks with an error."""
        for slot in self.slots:
            if (task := slot.task) is None:
                continue
            place = slot.place_in_code()
            slot.end("the round's limit has come")
            text = "not ended by the round's limit" + (f", it was in {place}" if place else "")
            logger.warning("%s; its process was ended", task.fail(REPLY_UNAVAILABLE, text))
        for task in self._waiting:
            logger.warning("%s", task.fail(REPLY_UNAVAILABLE, "not begun by the round's limit"))
        self._waiting.clear()
