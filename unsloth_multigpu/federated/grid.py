"""Flower's grid on one machine: each client runs in a process that sees one device."""

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
from unsloth_multigpu.federated.placement import SlotDevice
from unsloth_multigpu.federated.pool import Slot, SlotPool, Task
from unsloth_multigpu.federated.round_report import ClientRecord
from unsloth_multigpu.wire.folder import exclusive_log_dir

# The node id of Flower's SuperLink.
_SERVER_NODE_ID = 1
_IDENTITY = ("_task_id", "_run_id", "_node_id")


class ProcessGrid(Grid):
    """Runs each client's ClientApp in a slot, a process that then runs the next client.

    Clients are Flower's nodes 1 to `num_clients`; a client's `Context` has "partition-id" and "num-partitions", as in
    Flower's simulation. Slots start with the first message. An error in a round, such as Ctrl-C, ends them; the next
    round starts new ones. Messages are created within `task_identity`.

    Args:
        app: Any ClientApp.
        places: The device of each slot.
        placement: See `placement.choose_client`.
        seed: PYTHONHASHSEED, equal in all slots.
        log_dir: Folder for the clients' output, slot_N.log.

    Attributes:
        pool: The slots.
        num_clients: May change between two rounds.
        records: One per message, in the order of the messages. The reader clears them.
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
            # If the grid is never closed, this runs at exit, before the interpreter shuts down.
            self._end = weakref.finalize(self, stack.pop_all().close)
        self.num_clients = num_clients
        self.records: list[ClientRecord] = []

    def close(self) -> None:
        """Ends all slots."""
        self._end()

    @property
    def devices_of_slots(self) -> list[str]:
        """Device of each slot, such as "cuda:1", in the order of the slots."""
        return [str(slot.device) for slot in self.pool.slots]

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
        tasks = [self._make_task(message) for message in messages]
        self.pool.run(tasks, timeout)
        self.records += [task.record for task in tasks]
        return [task.reply for task in tasks if task.reply is not None]

    def _make_task(self, message: Message) -> Task:
        client_id = message.metadata.dst_node_id - 1
        # As Flower does itself: there is no setter. Replies refer to this id.
        message.metadata.__dict__["_message_id"] = uuid.uuid4().hex
        node_config: dict[str, Any] = {"partition-id": client_id, "num-partitions": self.num_clients}
        context = Context(message.metadata.run_id, client_id + 1, node_config, RecordDict(), {})
        return Task(message, context, ClientRecord(client_id, message.metadata.message_type.partition(".")[0]))

    def _has_no_such_call(self, *_: Any, **__: Any) -> Any:
        raise FederatedError(
            "ProcessGrid does not support this call.", hint="Use get_node_ids, send_and_receive and Message(...)."
        )

    set_run = create_message = push_messages = pull_messages = _has_no_such_call
    run = property(_has_no_such_call)


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
    try:
        # Flower's own simulation sets it in this place, too. It is not public.
        from flwr.supercore.task_identity import TaskIdentity

        before = [getattr(TaskIdentity, name) for name in _IDENTITY]
    except (ImportError, AttributeError) as error:
        raise VersionError(
            f"Flower's TaskIdentity differs from that of 1.41: {error}.", hint='pip install "flwr>=1.41,<2"'
        ) from error
    # Flower's identifiers have 64 bits; its databases store them signed.
    own = (1, uuid.uuid4().int >> 66, _SERVER_NODE_ID)
    try:  # By attributes, because the properties refuse None.
        for name, value in zip(_IDENTITY, own, strict=True):
            setattr(TaskIdentity, name, value)
        yield
    finally:
        for name, value in zip(_IDENTITY, before, strict=True):
            setattr(TaskIdentity, name, value)
