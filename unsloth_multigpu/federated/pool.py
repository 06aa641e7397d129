"""The slots of a server, each with a thread that gives it one client after the other."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from typing import Any

from unsloth_multigpu.errors import FederatedError
from unsloth_multigpu.federated.client_device import slot_environment
from unsloth_multigpu.federated.placement import choose_client
from unsloth_multigpu.federated.slot import Slot, SlotEnded, Task
from unsloth_multigpu.logs import get_logger
from unsloth_multigpu.wire.child import read_tail

logger = get_logger(__name__)

# Flower's error codes of SuperNodes; their names are in flwr.common.constant, which is not public.
CLIENT_RAISED, REPLY_UNAVAILABLE, CLIENT_CRASHED = 2, 4, 8
# Attempts of a client whose process dies.
_MAX_ATTEMPTS = 2
_POLL_S = 0.2


class SlotPool:
    """Runs tasks. One call at a time.

    Args:
        app: A ClientApp, pickled by cloudpickle.
        slots: The slots, ordered by `Slot.index`.
        placement: See `placement.choose_client`.
        seed: See `slot_environment`.
    """

    def __init__(self, app: bytes, slots: Sequence[Slot], placement: str, seed: int) -> None:
        self.slots = slots
        self._app = app
        self._placement = placement
        self._seed = seed
        self._lock = threading.Lock()
        self._waiting: list[Task] = []
        # Seconds of each client's last run, by the kind of message and client_id.
        self._seconds: dict[tuple[str, int], float] = {}
        self._is_over = False

    def run(self, tasks: Sequence[Task], limit_s: float | None = None) -> None:
        """Runs tasks until each has a reply. Tasks without one after the limit end with an error.

        Raises:
            FederatedError: No slot can be started any more.
            SetupError: A slot cannot load the app.
        """
        end_s = None if limit_s is None else time.monotonic() + limit_s
        self._waiting, self._is_over = list(tasks), False
        try:
            while self._waiting and not self._is_over:
                self._serve_all(end_s)
        except BaseException:
            self.close()
            raise
        for task in tasks:
            if task.reply is None:
                what = "ended" if task.record.attempts else "begun"
                logger.warning("%s", task.fail(REPLY_UNAVAILABLE, f"not {what} within round_timeout_s"))

    def close(self) -> None:
        """Ends all processes and drops the tasks. A later `run` starts new processes."""
        self._waiting.clear()
        for slot in self.slots:
            slot.end()
            slot.is_retired = False

    def _serve_all(self, end_s: float | None) -> None:
        """Runs the slots' threads until no task waits, or until the limit."""
        slots = [slot for slot in self.slots if not slot.is_retired]
        with ThreadPoolExecutor(len(slots)) as threads:
            futures = [threads.submit(self._serve, slot) for slot in slots]
            try:
                rest_s = None if end_s is None else max(0.0, end_s - time.monotonic())
                done, late = wait(futures, rest_s, FIRST_EXCEPTION)
                for future in done:
                    future.result()
                self._is_over = bool(late)
            except BaseException:
                self._is_over = True
                raise
            finally:
                while busy := [slot for slot, future in zip(slots, futures, strict=True) if not future.done()]:
                    for slot in busy:
                        slot.kill("the round has ended")
                    wait(futures, _POLL_S)

    def _serve(self, slot: Slot) -> None:
        """Target of a slot's thread."""
        while not (self._is_over or slot.is_retired) and (task := self._take(slot)):
            self._run(slot, task)

    def _take(self, slot: Slot) -> Task | None:
        """Removes and returns the next task for a slot, None without one."""
        with self._lock:
            if not self._waiting:
                return None
            devices = list(dict.fromkeys(other.device for other in self.slots if not other.is_retired))
            ids = [task.record.client_id for task in self._waiting]
            seconds = {i: s for (kind, i), s in self._seconds.items() if kind == self._waiting[0].record.kind}
            chosen = choose_client(ids, devices.index(slot.device), len(devices), self._placement, seconds)
            return None if chosen is None else self._waiting.pop(chosen)

    def _run(self, slot: Slot, task: Task) -> None:
        while task.reply is None:
            try:
                slot.start(self._app, slot_environment(slot.device, len(self.slots), self._seed, os.environ))
            except SlotEnded as ended:
                self._retire(slot, task, str(ended))
                return
            task.begin(slot)
            try:
                self._finish(task, *slot.call(task.message, task.context))
            except SlotEnded as ended:
                if self._is_over:
                    return
                self._try_again(slot, task, str(ended))

    def _finish(self, task: Task, kind: str, result: Any, more: Any) -> None:
        """Ends a task with the result of `client_worker.run_client`."""
        if kind == "failed":
            task.fail(CLIENT_RAISED, result)
            logger.warning("%s failed:\n%s", task.place(), more.rstrip())
            return
        task.answer(result)
        task.record.peak_memory_bytes = more
        with self._lock:
            self._seconds[task.record.kind, task.record.client_id] = task.record.seconds

    def _try_again(self, slot: Slot, task: Task, end: str) -> None:
        """Called when a client's process has died. Leaves the task for another attempt, or ends it with an error."""
        if task.record.attempts < _MAX_ATTEMPTS:
            text = "%s. It was running %s, which is run once more. The end of its log:\n%s"
            logger.warning(text, end, task.place(), read_tail(slot.log))
            return
        text = f"{end}. This is the second process that ended with this client, which is left out"
        error = task.fail(CLIENT_CRASHED, text)
        logger.warning("%s\nThe end of the log of slot %d:\n%s", error, slot.index, read_tail(slot.log))

    def _retire(self, slot: Slot, task: Task, end: str) -> None:
        """Called when a process has ended before it was ready."""
        if self._is_over:
            return
        with self._lock:
            slot.is_retired = True
            self._waiting.insert(0, task)
        log = f"The end of its log:\n{read_tail(slot.log)}"
        if all(other.is_retired for other in self.slots):
            raise FederatedError(f"No slot is left: {end}, before it was ready. {log}", hint=f"See {slot.log}.")
        logger.warning("%s, before it was ready: other slots run its clients. %s", end, log)
