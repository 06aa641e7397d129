"""Flower's grid on one machine: a client's message goes to a process that sees one device only."""

from __future__ import annotations

import sys
import time
import uuid
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Literal

from flwr.app import Context, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid

from unsloth_multigpu.errors import FederatedError, SetupError, VersionError
from unsloth_multigpu.federated.device import SlotDevice, choose_devices
from unsloth_multigpu.federated.placement import Placement
from unsloth_multigpu.federated.pool import SlotPool
from unsloth_multigpu.federated.task import ClientRecord, Task
from unsloth_multigpu.federated.user_code import pack
from unsloth_multigpu.wire.folder import locked_log_dir

if TYPE_CHECKING:
    from flwr.supercore.run import Run

__all__ = ["ClientRecord", "GridOptions", "ProcessGrid", "SlotDevice", "choose_devices"]

_RANGE_HINT = 'pip install "flwr>=1.41,<2"; tested is 1.41.0'
# The node id of Flower's SuperLink.
_SERVER_NODE_ID = 1
_IDENTITY = ("_task_id", "_run_id", "_node_id")


@dataclass(frozen=True)
class GridOptions:
    """How clients are spread over slots.

    Args:
        clients_per_gpu: Slots on each device; "auto" = as many as fit, by the memory that its first client took.
        max_workers: Upper limit of slots on all devices; None = none.
        placement: "round_robin" = client_id % number of devices; "balanced" = by measured seconds and memory.
        log_dir: Where slots write what clients print, in slot_N.log.
        seed: Of the order in sets of texts, which is the same in all slots.
        start_timeout_s: A slot that is not ready after this time has failed to start.
    """

    clients_per_gpu: int | Literal["auto"] = 1
    max_workers: int | None = None
    placement: Placement = "round_robin"
    log_dir: str = "logs"
    seed: int = 0
    start_timeout_s: float = 300.0


class ProcessGrid(Grid):
    """Runs each client's ClientApp in a slot: a process of its own, which lives on for the next client.

    Clients are Flower's nodes 1 to `num_clients`; a client's `Context` has "partition-id" and "num-partitions", as in
    Flower's simulation, and keeps its state here. Slots start with the first message. An error in a round, Ctrl-C among
    them, ends them; the next round starts new ones.

    Messages are made and sent under `identity()`, or in `with ProcessGrid(...)`, which opens it.

    Args:
        app: Any ClientApp.
        num_clients: How many there are.
        devices: See `choose_devices`.
        options: How they are used.

    Attributes:
        log_dir: Where the slots' logs are.
        pool: The slots.
        is_closed: It cannot be used any more.

    Raises:
        SetupError: The app cannot be sent to another process, or this is not Linux.
        LaunchError: The logs cannot be written.
    """

    def __init__(self, app: ClientApp, num_clients: int, devices: Sequence[SlotDevice], options: GridOptions) -> None:
        self._run_id = uuid.uuid4().int >> 66  # Flower's identifiers have 64 bits; its databases store them signed.
        self._run: Run | None = None
        self._tasks: dict[str, Task] = {}
        self._records: list[ClientRecord] = []
        self._in_with = ExitStack()
        self.is_closed = False
        if sys.platform != "linux":
            raise SetupError(f"Slots need Linux; this is {sys.platform}.", hint="Use Linux or WSL2, or SuperNodes.")
        packed = pack(app)
        with ExitStack() as stack:
            self.log_dir: Path = stack.enter_context(locked_log_dir(Path(options.log_dir)))
            self.pool = SlotPool(
                packed,
                devices,
                clients_per_gpu=options.clients_per_gpu,
                max_workers=options.max_workers,
                placement=options.placement,
                log_dir=self.log_dir,
                seed=options.seed,
                start_timeout_s=options.start_timeout_s,
            )
            stack.callback(self.pool.close)
            # If the grid is never closed, this runs when the program ends, before the interpreter shuts down.
            self._end = weakref.finalize(self, stack.pop_all().close)
        self.new_clients(num_clients)

    def __enter__(self) -> ProcessGrid:
        self._in_with.enter_context(self.identity())
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()
        self._in_with.close()

    def identity(self) -> AbstractContextManager[None]:
        """While it is open, this process can make messages of this grid's run: `Message(...)` asks who makes them."""
        return task_identity(self._run_id)

    def close(self) -> None:
        """Ends all slots."""
        self.is_closed = True
        self._tasks.clear()
        self._end()

    @property
    def devices_of_slots(self) -> list[str]:
        """Each slot's device, like "cuda:1"; its place is the slot's number."""
        return [str(slot.device) for slot in self.pool.slots]

    def new_clients(self, num_clients: int) -> None:
        """Forgets the clients, their states too; the slots stay."""
        if num_clients < 1:
            raise FederatedError(f"num_clients={num_clients}; expected 1 or more.", hint="Set num_clients.")
        self._tasks.clear()
        self.pool.costs.forget_clients()
        self._contexts = [
            Context(
                run_id=self._run_id,
                node_id=client_id + 1,
                node_config={"partition-id": client_id, "num-partitions": num_clients},
                state=RecordDict(),
                run_config={},
            )
            for client_id in range(num_clients)
        ]

    def client_states(self) -> dict[int, RecordDict]:
        """`Context.state` by client_id, of those that have put something there."""
        return {client_id: context.state for client_id, context in enumerate(self._contexts) if context.state}

    def load_client_states(self, states: Mapping[int, RecordDict]) -> None:
        """Puts back what `client_states` gave; other clients have none."""
        for client_id, context in enumerate(self._contexts):
            context.state = states.get(client_id, RecordDict())

    def take_records(self) -> list[ClientRecord]:
        """One for each message that was answered since the last call, in the order of the messages."""
        records, self._records = self._records, []
        return records

    def set_run(self, run: Run) -> None:
        """Part of Flower's interface."""
        self._run = run

    @property
    def run(self) -> Run:
        """Part of Flower's interface."""
        if self._run is None:
            with _private("Run"):
                from flwr.supercore.run import Run

            self._run = Run.create_empty(self._run_id)
        return self._run

    def create_message(
        self, content: RecordDict, message_type: str, dst_node_id: int, group_id: str, ttl: float | None = None
    ) -> Message:
        """A message to a client."""
        return Message(content, dst_node_id, message_type, group_id=group_id, ttl=ttl)

    def get_node_ids(self) -> list[int]:
        """All clients: client_id + 1."""
        return [context.node_id for context in self._contexts]

    def push_messages(self, messages: Iterable[Message]) -> list[str]:
        """Lets messages wait for slots, which get them during `pull_messages` and `send_and_receive`."""
        if self.is_closed:
            raise FederatedError("The grid was closed.", hint="Make a new one.")
        tasks = {uuid.uuid4().hex: message for message in messages}
        made = {name: self._make_task(name, message) for name, message in tasks.items()}
        with self._ended_by_errors():
            self._tasks |= made
            self.pool.submit(list(made.values()))
        return list(made)

    def pull_messages(self, message_ids: Iterable[str]) -> list[Message]:
        """The replies that are there by now; each once."""
        wanted = [name for name in message_ids if name in self._tasks]
        with self._ended_by_errors():
            self.pool.step(0.0)
        return [self._take_reply(name) for name in wanted if self._tasks[name].reply is not None]

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> list[Message]:
        """Sends messages and waits for all replies.

        Args:
            timeout: Seconds; what has not ended by then is ended. None = no limit.

        Returns:
            A reply to every message, in the order of the messages: Flower's error reply where a client raised, ended
            its process twice, or was not done in time.

        Raises:
            FederatedError: No slot starts any more, or a message is for a client that does not exist.
            SetupError: A slot cannot load the app.
        """
        deadline_s = None if timeout is None else time.monotonic() + timeout
        names = self.push_messages(messages)
        with self._ended_by_errors():
            tasks = [self._tasks[name] for name in names]
            self.pool.run(lambda: all(task.reply is not None for task in tasks), deadline_s)
        return [self._take_reply(name) for name in names]

    @contextmanager
    def _ended_by_errors(self) -> Iterator[None]:
        """An error, Ctrl-C among them, ends all processes and forgets the messages."""
        try:
            yield
        except BaseException:
            self.pool.close()
            self._tasks.clear()
            raise

    def _make_task(self, name: str, message: Message) -> Task:
        client_id = message.metadata.dst_node_id - 1
        if not 0 <= client_id < len(self._contexts):
            raise FederatedError(
                f"A message is for node {client_id + 1}, but the nodes are 1 to {len(self._contexts)}.",
                hint="Send to the nodes of grid.get_node_ids().",
            )
        # Flower has no setter and writes it there itself. Replies refer to the message by it.
        message.metadata.__dict__["_message_id"] = name
        return Task(message, self._contexts[client_id])

    def _take_reply(self, name: str) -> Message:
        task = self._tasks.pop(name)
        assert task.reply is not None
        self._records.append(task.record())
        return task.reply


@contextmanager
def _private(name: str) -> Iterator[None]:
    """Around an import that is not public in Flower, and may be elsewhere in another version."""
    try:
        yield
    except ImportError as error:
        raise VersionError(
            f"This version of Flower has no {name} where 1.41 has it ({error}).", hint=_RANGE_HINT
        ) from error


@contextmanager
def task_identity(run_id: int) -> Iterator[None]:
    """Lets this process make messages, as a process that Flower has started for a ServerApp may.

    Flower keeps the identity for the whole process; what was there before is put back at the end.
    """
    with _private("TaskIdentity"):
        # Flower's own simulation sets it in this place, too.
        from flwr.supercore.task_identity import TaskIdentity
    missing = [name for name in _IDENTITY if not hasattr(TaskIdentity, name)]
    if missing:
        raise VersionError(f"Flower's TaskIdentity has no {', '.join(missing)}.", hint=_RANGE_HINT)
    before = [getattr(TaskIdentity, name) for name in _IDENTITY]
    # Set as attributes: the properties do not accept None.
    try:
        for name, value in zip(_IDENTITY, (1, run_id, _SERVER_NODE_ID), strict=True):
            setattr(TaskIdentity, name, value)
        yield
    finally:
        for name, value in zip(_IDENTITY, before, strict=True):
            setattr(TaskIdentity, name, value)
