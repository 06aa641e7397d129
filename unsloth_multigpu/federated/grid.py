"""Flower's grid on one machine: a client's message goes to a process that sees one device only."""

from __future__ import annotations

import sys
import uuid
import weakref
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from flwr.app import Context, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid

from unsloth_multigpu.errors import FederatedError, SetupError, VersionError
from unsloth_multigpu.federated.client_device import SlotDevice
from unsloth_multigpu.federated.pool import SlotPool
from unsloth_multigpu.federated.round_report import ClientRecord
from unsloth_multigpu.federated.slot import Slot, Task
from unsloth_multigpu.wire.folder import exclusive_log_dir

# The node id of Flower's SuperLink.
_SERVER_NODE_ID = 1
_IDENTITY = ("_task_id", "_run_id", "_node_id")


class ProcessGrid(Grid):
    """Runs each client's ClientApp in a slot: a process of its own, which lives on for the next client.

    Clients are Flower's nodes 1 to `num_clients`; a client's `Context` has "partition-id" and "num-partitions", as in
    Flower's simulation. Slots start with the first message. An error in a round, Ctrl-C among them, ends them; the next
    round starts new ones. Messages are made under `task_identity`.

    Args:
        app: Any ClientApp.
        places: The device of each slot.
        placement: As in `placement.choose_client`.
        seed: Of the order in sets of texts, which is the same in all slots.
        log_dir: Where slots write what clients print, in slot_N.log.

    Attributes:
        pool: The slots.
        num_clients: May change between two rounds.
        records: One for each message, in the order of the messages; who reads them clears them.
    """

    def __init__(
        self,
        app: ClientApp,
        num_clients: int,
        places: Sequence[SlotDevice],
        *,
        placement: str = "round_robin",
        seed: int = 0,
        log_dir: str = "logs",
    ) -> None:
        if sys.platform != "linux":
            raise SetupError(f"Slots need Linux; this is {sys.platform}.", hint="Use Linux or WSL2, or SuperNodes.")
        packed = pack(app)
        with ExitStack() as stack:
            logs = stack.enter_context(exclusive_log_dir(Path(log_dir)))
            slots = [Slot(index, device, logs) for index, device in enumerate(places)]
            self.pool = SlotPool(packed, slots, placement, seed)
            stack.callback(self.pool.close)
            # If the grid is never closed, this runs when the program ends, before the interpreter shuts down.
            self._end = weakref.finalize(self, stack.pop_all().close)
        self.num_clients = num_clients
        self.records: list[ClientRecord] = []

    def close(self) -> None:
        """Ends all slots."""
        self._end()

    @property
    def devices_of_slots(self) -> list[str]:
        """Each slot's device, like "cuda:1"; its place is the slot's number."""
        return [str(slot.device) for slot in self.pool.slots]

    def get_node_ids(self) -> list[int]:
        """All clients: client_id + 1."""
        return list(range(1, self.num_clients + 1))

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> list[Message]:
        """Sends messages and waits for all replies.

        Args:
            timeout: Seconds; what has not ended by then is ended. None = no limit.

        Returns:
            A reply to every message, in the order of the messages: Flower's error reply where a client raised, ended
            its process twice, or was not done in time.

        Raises:
            FederatedError: No slot starts any more, or the grid was closed.
            SetupError: A slot cannot load the app.
        """
        if not self._end.alive:
            raise FederatedError("The grid was closed.", hint="Make a new one.")
        tasks = [self._make_task(message) for message in messages]
        self.pool.run(tasks, timeout)
        self.records += [task.record for task in tasks]
        return [task.reply for task in tasks if task.reply is not None]

    def _make_task(self, message: Message) -> Task:
        client_id = message.metadata.dst_node_id - 1
        # Flower has no setter and writes it there itself. Replies refer to the message by it.
        message.metadata.__dict__["_message_id"] = uuid.uuid4().hex
        node_config: dict[str, Any] = {"partition-id": client_id, "num-partitions": self.num_clients}
        context = Context(message.metadata.run_id, client_id + 1, node_config, RecordDict(), {})
        return Task(message, context, ClientRecord(client_id, message.metadata.message_type.partition(".")[0]))

    def _has_no_such_call(self, *_: Any, **__: Any) -> Any:
        raise FederatedError("Slots have no such call.", hint="Use get_node_ids, send_and_receive and Message(...).")

    set_run = create_message = push_messages = pull_messages = _has_no_such_call
    run = property(_has_no_such_call)


def pack(app: Any) -> bytes:
    """Pickles the app: functions of `__main__` travel with what they use of it, others by their module's name.

    By cloudpickle and not by dill, which gives each function globals of its own: what one assigns to a global, another
    one would not see.
    """
    import cloudpickle  # type: ignore[import-untyped]

    try:
        return bytes(cloudpickle.dumps(app))
    except Exception as error:
        raise SetupError(
            f"The clients' functions cannot be sent to a slot: {error}.",
            hint="Make such an object inside the function that uses it, or in model_builder: these run in the slot.",
        ) from error


@contextmanager
def task_identity() -> Iterator[None]:
    """Lets this process make messages, as a process that Flower has started for a ServerApp may.

    Flower keeps the identity for the whole process; what was there before is put back at the end.
    """
    try:
        # Flower's own simulation sets it in this place, too. It is not public.
        from flwr.supercore.task_identity import TaskIdentity

        before = [getattr(TaskIdentity, name) for name in _IDENTITY]
    except (ImportError, AttributeError) as error:
        raise VersionError(
            f"Flower's TaskIdentity is not that of 1.41: {error}.", hint='pip install "flwr>=1.41,<2"'
        ) from error
    # Flower's identifiers have 64 bits; its databases store them signed.
    own = (1, uuid.uuid4().int >> 66, _SERVER_NODE_ID)
    try:  # As attributes: the properties take no None.
        for name, value in zip(_IDENTITY, own, strict=True):
            setattr(TaskIdentity, name, value)
        yield
    finally:
        for name, value in zip(_IDENTITY, before, strict=True):
            setattr(TaskIdentity, name, value)
