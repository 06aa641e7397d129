"""Flower's grid on one machine: each client runs in a slot, which is a process that sees one device."""

from __future__ import annotations

import json
import os
import pickle
import sys
import threading
import time
import uuid
import weakref
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from flwr.app import Context, Error, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid

from unsloth_multigpu.accelerator import HIDDEN, KINDS, variables_for
from unsloth_multigpu.errors import FederatedError, SetupError
from unsloth_multigpu.federated.rounds import ClientRecord
from unsloth_multigpu.logs import get_logger
from unsloth_multigpu.options import ENV_PREFIX
from unsloth_multigpu.seam import instance_attribute
from unsloth_multigpu.start import visible_accelerators
from unsloth_multigpu.wire.child import Child, read_tail
from unsloth_multigpu.wire.process import threads_of_each
from unsloth_multigpu.wire.run import exclusive_log_dir, make_log

logger = get_logger(__name__)

# The program of a slot, with the sys.path of this process, to import the user's modules and this package.
_PROGRAM = """import json, sys
sys.path[:] = json.loads(sys.argv[3])
from unsloth_multigpu.federated.client_worker import main
main()"""
# Flower's error codes of SuperNodes; their names are in flwr.common.constant, which is not public.
CLIENT_RAISED, REPLY_UNAVAILABLE, CLIENT_CRASHED = 2, 4, 8
# Attempts of a client whose process dies.
_MAX_ATTEMPTS = 2
_POLL_S = 0.2
# Variables of launchers for ranks: with these a Trainer in a slot would look for other ranks.
_OF_RANKS = {"GROUP_RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE"}
_OF_LAUNCHERS = (ENV_PREFIX, "GROUP_WORLD_", "OMPI_COMM_", "PMI_", "PMIX_", "ROLE_", "TORCHELASTIC_")
_NO_DEVICE = {**HIDDEN, "ACCELERATE_USE_CPU": "true"}


class ProcessGrid(Grid):
    """Runs each client's ClientApp in a slot, which then runs the next client.

    Clients are Flower's nodes 1 to `num_clients`; a client's `Context` has "partition-id" and "num-partitions", as in
    Flower's simulation. Slots start with the first message. Each has a thread that gives it one client after the other.
    An error in a round, such as Ctrl-C, ends them; the next round starts new ones. Messages are created within
    `task_identity`, and one call of `send_and_receive` runs at a time.

    Args:
        app: Any ClientApp.
        places: The device of each slot.
        placement: "round_robin" = client_id % number of devices; "balanced" = the longest client first, on any device.
        seed: PYTHONHASHSEED, equal in all slots.
        log_dir: Folder for the clients' output, slot_N.log.

    Attributes:
        slots: The slots, ordered by `Slot.index`.
        num_clients: May change between two rounds.
        records: One per message, in the order of the messages. The reader clears them.
    """

    def __init__(
        self,
        app: ClientApp,
        num_clients: int,
        places: Sequence[torch.device],
        placement: str = "round_robin",
        seed: int = 0,
        log_dir: str = "logs",
    ) -> None:
        if sys.platform != "linux":
            raise SetupError(f"Slots need Linux; this is {sys.platform}.", hint="Use Linux or WSL2, or SuperNodes.")
        self._app = pack(app)
        self._placement = placement
        self._seed = seed
        self._lock = threading.Lock()
        self._waiting: list[Task] = []
        # Seconds of each client's last run: kind of message -> client_id -> seconds.
        self._seconds: defaultdict[str, dict[int, float]] = defaultdict(dict)
        self._is_over = False
        self.num_clients = num_clients
        self.records: list[ClientRecord] = []
        with ExitStack() as stack:
            logs = stack.enter_context(exclusive_log_dir(Path(log_dir)))
            self.slots = [Slot(index, device, logs) for index, device in enumerate(places)]
            stack.callback(_end_all, self.slots)
            # Without `close` this runs when the grid is garbage, at the latest at exit.
            self._end = weakref.finalize(self, stack.pop_all().close)

    def close(self) -> None:
        """Ends all slots."""
        self._end()

    @property
    def devices_of_slots(self) -> list[str]:
        """Device of each slot, such as "cuda:1", in the order of the slots."""
        return [str(slot.device) for slot in self.slots]

    def get_node_ids(self) -> list[int]:
        """Returns the node ids of all clients: client_id + 1."""
        return list(range(1, self.num_clients + 1))

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> list[Message]:
        """Sends messages and waits for all replies.

        Args:
            timeout: Limit in seconds, after which clients are ended. None = no limit.

        Returns:
            A reply to every message, in the order of the messages: Flower's error reply if a client raised, ended its
            process twice, or was not done in time.

        Raises:
            FederatedError: No slot can be started any more, or the grid was closed.
            SetupError: A slot cannot load the app.
        """
        if not self._end.alive:
            raise FederatedError("The grid was closed.", hint="Create a new one.")
        tasks = [_make_task(message) for message in messages]
        end_s = None if timeout is None else time.monotonic() + timeout
        self._waiting, self._is_over = list(tasks), False
        if self._placement == "balanced" and tasks:
            # The longest first, by the time of the client's last run; without one it counts as the mean. On devices of
            # equal speed the last client then ends within 4/3 of the optimal time (Graham 1969, "Bounds on
            # Multiprocessing Timing Anomalies").
            seconds = self._seconds[tasks[0].record.kind]
            mean_s = sum(seconds.values()) / max(1, len(seconds))
            self._waiting.sort(key=lambda task: -seconds.get(task.record.client_id, mean_s))
        try:
            while self._waiting and not self._is_over:
                self._serve_all(end_s)
        except BaseException:
            _end_all(self.slots)
            raise
        for task in tasks:
            if task.reply is None:
                what = "ended" if task.record.attempts else "begun"
                logger.warning("%s", task.fail(REPLY_UNAVAILABLE, f"not {what} within round_timeout_s"))
        self.records += [task.record for task in tasks]
        return [task.reply for task in tasks if task.reply is not None]

    def _serve_all(self, end_s: float | None) -> None:
        """Runs the slots' threads until no task waits, or until the limit."""
        slots = [slot for slot in self.slots if not slot.is_retired]
        with ThreadPoolExecutor(len(slots)) as threads:
            slot_of = {threads.submit(self._serve, slot): slot for slot in slots}
            try:
                wait(slot_of, None if end_s is None else max(0.0, end_s - time.monotonic()), FIRST_EXCEPTION)
            finally:
                while late := [future for future in slot_of if not future.done()]:
                    self._is_over = True
                    for future in late:
                        slot_of[future].kill("the round has ended")
                    wait(late, _POLL_S)
            for future in slot_of:
                future.result()

    def _serve(self, slot: Slot) -> None:
        """Target of a slot's thread."""
        while not (self._is_over or slot.is_retired) and (task := self._take(slot)):
            while task.reply is None and not (self._is_over or slot.is_retired):
                self._run(slot, task)

    def _take(self, slot: Slot) -> Task | None:
        """Removes and returns the next task for a slot, None without one."""
        with self._lock:
            devices = list(dict.fromkeys(other.device for other in self.slots if not other.is_retired))
            for n, task in enumerate(self._waiting):
                if self._placement == "balanced" or devices[task.record.client_id % len(devices)] == slot.device:
                    return self._waiting.pop(n)
        return None

    def _run(self, slot: Slot, task: Task) -> None:
        """Runs a client once. The task has a reply then, or is left for another attempt."""
        record, note_end = task.record, self._retire
        node_config: dict[str, Any] = {"partition-id": record.client_id, "num-partitions": self.num_clients}
        context = Context(task.message.metadata.run_id, record.client_id + 1, node_config, RecordDict(), {})
        try:
            slot.start(self._app, slot_environment(slot.device, len(self.slots), self._seed, os.environ))
            note_end = _note_death
            record.slot, record.device, record.begin_s = slot.index, str(slot.device), time.monotonic()
            record.attempts += 1
            kind, result, more = slot.call(task.message, context)
        except SlotEnded as ended:
            if not self._is_over:
                note_end(slot, task, str(ended))
            return
        if kind == "failed":
            task.fail(CLIENT_RAISED, result)
            logger.warning("%s failed:\n%s", task.place(), more.rstrip())
            return
        task.answer(result)
        record.peak_memory_bytes = more
        self._seconds[record.kind][record.client_id] = record.seconds

    def _retire(self, slot: Slot, task: Task, end: str) -> None:
        """Called when a process has ended before it was ready."""
        with self._lock:
            slot.is_retired = True
            self._waiting.insert(0, task)
        if all(other.is_retired for other in self.slots):
            text = f"No slot is left: {end}, before it was ready. {slot.shown_log()}"
            raise FederatedError(text, hint=f"See {slot.log}.")
        logger.warning("%s, before it was ready: other slots run its clients. %s", end, slot.shown_log())

    def _has_no_such_call(self, *_: Any, **__: Any) -> Any:
        raise NotImplementedError("Of Flower's grid, ProcessGrid has get_node_ids and send_and_receive.")

    set_run = create_message = push_messages = pull_messages = _has_no_such_call
    run = property(_has_no_such_call)


@dataclass(eq=False)
class Task:
    """A message to a client, and its reply; None until it has arrived."""

    message: Message
    record: ClientRecord
    reply: Message | None = None

    def answer(self, reply: Message) -> None:
        """Ends the task with a reply."""
        self.reply = reply
        if self.record.attempts:
            self.record.seconds = time.monotonic() - self.record.begin_s

    def fail(self, code: int, error: str) -> str:
        """Ends the task with an error reply, which strategies leave out. Returns the error with `place()`."""
        self.record.error = f"{self.place()}: {error}"
        self.answer(Message(Error(code=code, reason=self.record.error), reply_to=self.message))
        return self.record.error

    def place(self) -> str:
        """Describes the task: "client 3 (round 2, train) on slot 1, cuda:1"."""
        record, configs = self.record, self.message.content.config_records.values()
        server_round = next((str(config["server-round"]) for config in configs if "server-round" in config), "0")
        where = f" on slot {record.slot}, {record.device}" if record.attempts else ""
        return f"client {record.client_id} (round {server_round}, {record.kind}){where}"


def _make_task(message: Message) -> Task:
    # As Flower does itself: there is no setter. Replies refer to this id.
    message.metadata.__dict__["_message_id"] = uuid.uuid4().hex
    kind = message.metadata.message_type.partition(".")[0]
    return Task(message, ClientRecord(message.metadata.dst_node_id - 1, kind))


class SlotEnded(Exception):
    """The slot's process has ended; the text describes how."""


class Slot:
    """Starts and ends the slot's processes, one after the other. One thread uses it; any thread may call `kill`.

    Its processes see only its device; `log_dir` has their output, slot_N.log.

    Attributes:
        is_retired: A process has failed to start, and no other one will be started.
    """

    def __init__(self, index: int, device: torch.device, log_dir: Path) -> None:
        self.index = index
        self.device = device
        self.log = log_dir / f"slot_{index}.log"
        self.is_retired = False
        self._process: Child | None = None
        make_log(self.log)

    def __str__(self) -> str:
        return f"slot {self.index} on {self.device}"

    def start(self, app: bytes, environment: Mapping[str, str]) -> None:
        """Starts a process unless there is one, and waits until it is ready.

        Raises SlotEnded if it has ended, for example because its device does not work; SetupError if it cannot load the
        app.
        """
        if self._process is not None:
            return
        arguments = [str(os.getpid()), json.dumps([str(folder) for folder in sys.path])]
        self._process = Child(str(self), _PROGRAM, self.log, environment, arguments)
        kind, *error = self.call(self.device.type, sys.argv, app)
        if kind == "unloadable":
            raise SetupError(
                f"{self} cannot load the clients' functions: {error[0]}\n{read_tail(self.log)}",
                hint="Modules that they use must be importable in another process, without the script.",
            )

    def call(self, *fields: Any) -> tuple[Any, ...]:
        """Sends a message to the process and waits for its answer.

        Raises SlotEnded if the process has ended, or was killed because it is unusable.
        """
        assert self._process is not None
        child = self._process
        with suppress(OSError, EOFError):  # Raised if it has ended.
            child.connection.send_bytes(pickle.dumps(fields, pickle.HIGHEST_PROTOCOL))
            # Safe to unpickle: it comes from our own child process of the same user.
            answer: tuple[Any, ...] = pickle.loads(child.connection.recv_bytes())
            if answer[0] != "unusable":
                return answer
            child.kill(answer[1])
        raise SlotEnded(self.end())

    def kill(self, because: str) -> None:
        """Kills the process and its children. A thread that waits for its answer gets SlotEnded."""
        if (child := self._process) is not None:  # Its thread may forget it meanwhile.
            child.kill(because)

    def end(self) -> str:
        """Kills the process and its children, and collects it. Returns how it ended, in one line."""
        child, self._process = self._process, None
        if child is None:
            return ""
        child.close()
        return child.describe_end()

    def shown_log(self) -> str:
        """Returns the end of the log, for a message."""
        return f"The end of its log:\n{read_tail(self.log)}"


def _note_death(slot: Slot, task: Task, end: str) -> None:
    """Called when a client's process has died. Leaves the task for another attempt, or ends it with an error."""
    if task.record.attempts < _MAX_ATTEMPTS:
        text = "%s. It was running %s, which is run once more. %s"
        logger.warning(text, end, task.place(), slot.shown_log())
        return
    text = f"{end}. This is the second process that ended with this client, which is left out"
    logger.warning("%s\n%s", task.fail(CLIENT_CRASHED, text), slot.shown_log())


def _end_all(slots: Sequence[Slot]) -> None:
    """Ends all processes. A later message starts new ones."""
    for slot in slots:
        slot.end()
        slot.is_retired = False


def pack(app: Any) -> bytes:
    """Pickles the app: functions of `__main__` by value with the globals that they use, others by reference.

    By cloudpickle, not dill, which gives each function its own copy of the globals: one would not see what another
    assigns.
    """
    import cloudpickle  # type: ignore[import-untyped]

    try:
        return bytes(cloudpickle.dumps(app))
    except Exception as error:
        raise SetupError(
            f"The clients' functions cannot be sent to a slot: {error}.",
            hint="Create such an object inside the function that uses it, or in model_builder: these run in the slot.",
        ) from error


@contextmanager
def task_identity() -> Iterator[None]:
    """Within the context this process may create messages, like a process of Flower's ServerApp.

    Flower keeps the identity for the whole process; the earlier one is restored at the end.
    """
    # Flower's own simulation sets it in this place, too. It is not public.
    from flwr.supercore.task_identity import TaskIdentity

    # Flower's identifiers have 64 bits; its databases store them signed. Node 1 is its SuperLink.
    own = {"_task_id": 1, "_run_id": uuid.uuid4().int >> 66, "_node_id": 1}
    with ExitStack() as stack:  # By attributes, because the properties refuse None.
        for name, value in own.items():
            stack.enter_context(instance_attribute(TaskIdentity, name, value))
        yield


def choose_devices(num_gpus: int | None, device: str | None = None, *, auto_gpu: bool = True) -> list[torch.device]:
    """Returns the devices for clients, each once; "cpu" slots are numbered likewise. Opens none of them.

    Raises SetupError if fewer are visible.

    Args:
        num_gpus: Number of visible devices to use; None = all. Without a visible device, number of CPU slots; None = 1.
        device: The device to use without `auto_gpu`, as torch names it; None = the first visible one, else the CPU.
    """
    kind, num_visible = visible_accelerators()
    if kind not in KINDS:  # No variable can hide all devices but one.
        kind, num_visible = "cpu", 0
    first, num_asked = 0, num_gpus or num_visible or 1
    if not auto_gpu:
        if num_gpus is not None:
            raise SetupError(f"auto_gpu=False, but num_gpus={num_gpus}.", hint="Set auto_gpu=True, or device alone.")
        asked_kind, _, index = (device or kind).partition(":")
        kind, num_visible = (kind, num_visible) if asked_kind == kind else (asked_kind, 0)
        first, num_asked = (0 if kind == "cpu" else int(index or 0)), 1
    if kind != "cpu" and first + num_asked > num_visible:
        raise SetupError(
            f"{kind}:{first + num_asked - 1} was requested, but {num_visible} {kind} device(s) are visible.",
            hint="Lower num_gpus, set clients_per_gpu to run several clients on one device, or check "
            "CUDA_VISIBLE_DEVICES, the driver and the installed torch.",
        )
    return [torch.device(kind, index) for index in range(first, first + num_asked)]


def slot_environment(device: torch.device, num_slots: int, seed: int, environment: Mapping[str, str]) -> dict[str, str]:
    """Returns the variables of a slot's process, which show it one device and no launcher.

    `num_slots` slots share the machine's cores; `seed` is PYTHONHASHSEED, equal in all of them. Raises SetupError if
    `environment`, that of this process, does not show the device.
    """
    defaults = {"OMP_NUM_THREADS": str(threads_of_each(num_slots)), "PYTHONHASHSEED": str(seed)}
    given = {name: value for name, value in environment.items() if value or name not in defaults}
    of_ranks = {name for name in given if name in _OF_RANKS or name.startswith(_OF_LAUNCHERS)}
    own = defaults | {name: value for name, value in given.items() if name not in of_ranks}
    try:
        return own | (_NO_DEVICE if device.type == "cpu" else variables_for(device.type, [device.index], environment))
    except IndexError as hiding:
        name = str(hiding)
        raise SetupError(
            f"{device} was chosen, but {name}={environment[name]!r} does not show it.",
            hint=f"Do not change {name} after torch has counted the devices.",
        ) from hiding
