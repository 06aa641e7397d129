"""Flower's grid on one machine: clients run in slots. A slot is a process that sees one device."""

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

# The program of a slot. It gets this process's sys.path, to import the user's modules and this package.
_PROGRAM = """import json, sys
sys.path[:] = json.loads(sys.argv[3])
from unsloth_multigpu.federated.client_worker import main
main()"""
# Error codes of Flower's SuperNodes. Flower has names for them in flwr.common.constant, which is not public.
CLIENT_RAISED, REPLY_UNAVAILABLE, CLIENT_CRASHED = 2, 4, 8
# Attempts with a client whose process dies.
_MAX_ATTEMPTS = 2
_POLL_S = 0.2
# Variables of ranks: with these a Trainer in a slot would look for other ranks.
_RANK_VARIABLES = {"GROUP_RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE"}
_RANK_PREFIXES = (ENV_PREFIX, "GROUP_WORLD_", "OMPI_COMM_", "PMI_", "PMIX_", "ROLE_", "TORCHELASTIC_")
_CPU_ONLY = {**HIDDEN, "ACCELERATE_USE_CPU": "true"}


class ProcessGrid(Grid):
    """Runs the ClientApp for all clients: each slot runs one client after the other.

    Client c is Flower's node c + 1; its `Context` has "partition-id" and "num-partitions", as in Flower's simulation.
    Slots start with the first message. An error in `send_and_receive`, such as Ctrl-C, ends them; the next call starts
    new ones. Create messages within `task_identity`, and make one call of `send_and_receive` at a time.

    Args:
        app: Any ClientApp.
        slot_devices: The device of each slot.
        placement: See `create_multigpu_flower_server`.
        seed: PYTHONHASHSEED of all slots.
        log_dir: Folder for the clients' output: slot_K.log of slot K.

    Attributes:
        slots: The slots, ordered by `Slot.index`.
        num_clients: May change between two rounds.
        records: One for each message, in the order of the messages. Who reads them clears them.
    """

    def __init__(
        self,
        app: ClientApp,
        num_clients: int,
        slot_devices: Sequence[torch.device],
        placement: str = "round_robin",
        seed: int = 0,
        log_dir: str = "logs",
    ) -> None:
        if sys.platform != "linux":
            raise SetupError(f"Slots need Linux; this is {sys.platform}.", hint="Use Linux or WSL2, or SuperNodes.")
        self._app = pickle_app(app)
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
            self.slots = [Slot(index, device, logs) for index, device in enumerate(slot_devices)]
            stack.callback(_end_all, self.slots)
            # Without `close` this runs when the grid is collected as garbage, at the latest at exit.
            self._end = weakref.finalize(self, stack.pop_all().close)

    def close(self) -> None:
        """Ends all slots, for good."""
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
            messages: Each to a node id of `get_node_ids`.
            timeout: Limit in seconds, after which the slots of clients that still run are killed. None = no limit.

        Returns:
            A reply to every message, in the order of the messages. It is an error reply if a client raised, if its
            process died twice, or if it had not replied within the limit.

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
            # The longest first, by the time of the client's last run, or the mean if it had none. On devices of equal
            # speed the round then takes at most 4/3 of the optimal time (Graham 1969, "Bounds on Multiprocessing Timing
            # Anomalies").
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
                state = "finished" if task.record.attempts else "started"
                logger.warning("%s", task.fail(REPLY_UNAVAILABLE, f"not {state} within round_timeout_s"))
        self.records += [task.record for task in tasks]
        return [task.reply for task in tasks if task.reply is not None]

    def _serve_all(self, end_s: float | None) -> None:
        """Runs the slots' threads until no task is left for them. Kills processes that still run at the limit."""
        slots = [slot for slot in self.slots if not slot.is_retired]
        with ThreadPoolExecutor(len(slots)) as threads:
            slot_of = {threads.submit(self._serve, slot): slot for slot in slots}
            try:
                wait(slot_of, None if end_s is None else max(0.0, end_s - time.monotonic()), FIRST_EXCEPTION)
            finally:
                while running := [future for future in slot_of if not future.done()]:
                    self._is_over = True
                    for future in running:
                        slot_of[future].kill("the round has ended")
                    wait(running, _POLL_S)
            for future in slot_of:
                future.result()

    def _serve(self, slot: Slot) -> None:
        """Runs tasks on a slot, in a thread of its own, until none is left for it."""
        while not (self._is_over or slot.is_retired) and (task := self._take(slot)):
            while task.reply is None and not (self._is_over or slot.is_retired):
                self._run(slot, task)

    def _take(self, slot: Slot) -> Task | None:
        """Removes and returns the next task for a slot; None if there is none."""
        with self._lock:
            devices = list(dict.fromkeys(other.device for other in self.slots if not other.is_retired))
            for n, task in enumerate(self._waiting):
                if self._placement == "balanced" or devices[task.record.client_id % len(devices)] == slot.device:
                    return self._waiting.pop(n)
        return None

    def _run(self, slot: Slot, task: Task) -> None:
        """Runs a client once. Without a reply afterwards, the task needs another attempt."""
        record, on_end = task.record, self._retire
        node_config: dict[str, Any] = {"partition-id": record.client_id, "num-partitions": self.num_clients}
        context = Context(task.message.metadata.run_id, record.client_id + 1, node_config, RecordDict(), {})
        try:
            slot.start(self._app, slot_environment(slot.device, len(self.slots), self._seed, os.environ))
            on_end = _note_death
            record.slot, record.device, record.begin_s = slot.index, str(slot.device), time.monotonic()
            record.attempts += 1
            outcome, result, more = slot.call(task.message, context)
        except SlotEnded as ended:
            if not self._is_over:
                on_end(slot, task, str(ended))
            return
        if outcome == "failed":
            task.fail(CLIENT_RAISED, result)
            logger.warning("%s failed:\n%s", task, more.rstrip())
            return
        task.answer(result)
        record.peak_memory_bytes = more
        self._seconds[record.kind][record.client_id] = record.seconds

    def _retire(self, slot: Slot, task: Task, end: str) -> None:
        """Retires a slot whose process has ended before it was ready, and puts the task back."""
        with self._lock:
            slot.is_retired = True
            self._waiting.insert(0, task)
        if all(other.is_retired for other in self.slots):
            text = f"No slot is left: {end}, before it was ready. {slot.shown_log()}"
            raise FederatedError(text, hint=f"See {slot.log}.")
        logger.warning("%s, before it was ready: other slots run its clients. %s", end, slot.shown_log())

    def _not_implemented(self, *_: Any, **__: Any) -> Any:
        raise NotImplementedError("ProcessGrid has only get_node_ids and send_and_receive of Flower's Grid.")

    set_run = create_message = push_messages = pull_messages = _not_implemented
    run = property(_not_implemented)


@dataclass(eq=False)
class Task:
    """A message to a client, and its reply; None until it has arrived."""

    message: Message
    record: ClientRecord
    reply: Message | None = None

    def answer(self, reply: Message) -> None:
        """Sets the reply, which ends the task, and the record's time."""
        self.reply = reply
        if self.record.attempts:
            self.record.seconds = time.monotonic() - self.record.begin_s

    def fail(self, code: int, error: str) -> str:
        """Ends the task with an error reply. Returns its text, which begins with the task."""
        self.record.error = f"{self}: {error}"
        self.answer(Message(Error(code=code, reason=self.record.error), reply_to=self.message))
        return self.record.error

    def __str__(self) -> str:
        """Returns a text such as "client 3 (round 2, train) on slot 1, cuda:1"."""
        record, configs = self.record, self.message.content.config_records.values()
        server_round = next((str(config["server-round"]) for config in configs if "server-round" in config), "0")
        where = f" on slot {record.slot}, {record.device}" if record.attempts else ""
        return f"client {record.client_id} (round {server_round}, {record.kind}){where}"


def _make_task(message: Message) -> Task:
    # Replies refer to this id. Flower sets it in this way, too: there is no setter.
    message.metadata.__dict__["_message_id"] = uuid.uuid4().hex
    kind = message.metadata.message_type.partition(".")[0]
    return Task(message, ClientRecord(message.metadata.dst_node_id - 1, kind))


class SlotEnded(Exception):
    """The slot's process has ended. The message says how."""


class Slot:
    """Starts and ends the slot's processes, one after the other. One thread uses it; any thread may call `kill`.

    Its processes see only its device. They write what they print to slot_K.log in `log_dir`, where K is `index`.

    Attributes:
        is_retired: A process has ended before it was ready. None is started until all slots have been ended.
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

        Raises SlotEnded if it ends before, SetupError if it cannot load the app.
        """
        if self._process is not None:
            return
        arguments = [str(os.getpid()), json.dumps([str(folder) for folder in sys.path])]
        self._process = Child(str(self), _PROGRAM, self.log, environment, arguments)
        outcome, *error = self.call(self.device.type, sys.argv, app)
        if outcome == "unloadable":
            raise SetupError(
                f"{self} cannot load the clients' functions: {error[0]}\n{read_tail(self.log)}",
                hint="Modules that they use must be importable in another process, without running the script.",
            )

    def call(self, *fields: Any) -> tuple[Any, ...]:
        """Sends the fields to the process and waits for its answer, see `client_worker.run_client`.

        Raises SlotEnded if the process has ended; one whose device does not work is killed.
        """
        assert self._process is not None
        child = self._process
        with suppress(OSError, EOFError):  # Raised if the process has ended.
            child.connection.send_bytes(pickle.dumps(fields, pickle.HIGHEST_PROTOCOL))
            # Safe to unpickle: it comes from our own child process of the same user.
            answer: tuple[Any, ...] = pickle.loads(child.connection.recv_bytes())
            if answer[0] != "unusable":
                return answer
            child.kill(answer[1])
        raise SlotEnded(self.end())

    def kill(self, because: str) -> None:
        """Kills the process and its children. A thread that waits for its answer gets SlotEnded."""
        if (child := self._process) is not None:  # The slot's thread may set it to None meanwhile.
            child.kill(because)

    def end(self) -> str:
        """Kills the process and its children, and waits for it. Returns how it ended, in one line."""
        child, self._process = self._process, None
        if child is None:
            return ""
        child.close()
        return child.describe_end()

    def shown_log(self) -> str:
        """Returns the end of the log, for a message."""
        return f"The end of its log:\n{read_tail(self.log)}"


def _note_death(slot: Slot, task: Task, end: str) -> None:
    """Logs that a process has died with a client. Ends the task with an error if this was the last attempt."""
    if task.record.attempts < _MAX_ATTEMPTS:
        text = "%s. It was running %s, which is run once more. %s"
        logger.warning(text, end, task, slot.shown_log())
        return
    text = f"{end}. This is the second process that ended with this client, which is left out"
    logger.warning("%s\n%s", task.fail(CLIENT_CRASHED, text), slot.shown_log())


def _end_all(slots: Sequence[Slot]) -> None:
    """Ends the processes of all slots, which may start new ones."""
    for slot in slots:
        slot.end()
        slot.is_retired = False


def pickle_app(app: Any) -> bytes:
    """Pickles the app: functions of `__main__` by value with the globals that they use, others by reference.

    With cloudpickle, not dill, which gives each function a copy of the globals of its own: one would not see what
    another assigns. Raises SetupError for what cannot be pickled.
    """
    import cloudpickle  # type: ignore[import-untyped]

    try:
        return bytes(cloudpickle.dumps(app))
    except Exception as error:
        raise SetupError(
            f"The clients' functions cannot be sent to a slot: {error}.",
            hint="Create the object inside train_fn, evaluate_fn or model_builder, which run in the slot.",
        ) from error


@contextmanager
def task_identity() -> Iterator[None]:
    """Lets this process create messages within the context, like a process of Flower's ServerApp.

    Flower has one identity per process; the earlier one is restored at the end.
    """
    # Not public. Flower's simulation sets it here, too.
    from flwr.supercore.task_identity import TaskIdentity

    # Flower's ids have 64 bits, and its databases store them as signed integers. Node 1 is the SuperLink.
    own = {"_task_id": 1, "_run_id": uuid.uuid4().int >> 66, "_node_id": 1}
    with ExitStack() as stack:  # Private attributes, because the properties refuse None.
        for name, value in own.items():
            stack.enter_context(instance_attribute(TaskIdentity, name, value))
        yield


def choose_devices(num_gpus: int | None, device: str | None = None, *, auto_gpu: bool = True) -> list[torch.device]:
    """Returns the devices for clients, each once, without opening them. CPU slots are cpu:0, cpu:1 and so on.

    Raises SetupError if fewer are visible, or if `num_gpus` is set without `auto_gpu`.

    Args:
        num_gpus: Number of visible devices to use; None = all. Without a visible device, number of CPU slots; None = 1.
        device: The device to use without `auto_gpu`, such as "cuda:1"; None = the first visible one, else the CPU.
    """
    kind, num_visible = visible_accelerators()
    if kind not in KINDS:  # Without a variable that hides all devices but one.
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
    """Returns the environment of a slot's process: that of this process, with one visible device and no launcher.

    `num_slots` slots share the machine's cores; `seed` is their PYTHONHASHSEED. Raises SetupError if the device is not
    visible in `environment`, that of this process.
    """
    defaults = {"OMP_NUM_THREADS": str(threads_of_each(num_slots)), "PYTHONHASHSEED": str(seed)}
    given = {name: value for name, value in environment.items() if value or name not in defaults}
    of_ranks = {name for name in given if name in _RANK_VARIABLES or name.startswith(_RANK_PREFIXES)}
    own = defaults | {name: value for name, value in given.items() if name not in of_ranks}
    try:
        return own | (_CPU_ONLY if device.type == "cpu" else variables_for(device.type, [device.index], environment))
    except IndexError as error:
        name = str(error)  # Of the variable.
        raise SetupError(
            f"{device} was chosen, but {name}={environment[name]!r} does not show it.",
            hint=f"Do not change {name} after torch has counted the devices.",
        ) from error
