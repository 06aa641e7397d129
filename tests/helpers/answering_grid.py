"""A grid of Flower whose clients run in this process."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from flwr.app import Context, Error, Message, RecordDict
from flwr.serverapp import Grid

from unsloth_multigpu.errors import FederatedError
from unsloth_multigpu.federated.rounds import ClientRecord


class LocalGrid(Grid):
    """Calls a ClientApp, or a function like it, the last client first; a client that raises becomes an error reply.

    It has what `ProcessGrid` has beyond Flower's grid. `asked` has the kind and the clients of each call.
    """

    devices_of_slots = ("cpu:0",)

    def __init__(self, app: Callable[[Message, Context], Message], num_clients: int = 4) -> None:
        self.app, self.num_clients = app, num_clients
        self.records: list[ClientRecord] = []
        self.asked: list[tuple[str, list[int]]] = []

    def get_node_ids(self) -> list[int]:
        return list(range(1, self.num_clients + 1))

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> list[Message]:
        messages = list(messages)
        if messages:
            ids = [message.metadata.dst_node_id - 1 for message in messages]
            self.asked.append((messages[0].metadata.message_type, ids))
        return [self._answer(message) for message in reversed(messages)]

    def _answer(self, message: Message) -> Message:
        client_id, kind = message.metadata.dst_node_id - 1, message.metadata.message_type
        node_config: Any = {"partition-id": client_id, "num-partitions": self.num_clients}
        try:
            reply = self.app(message, Context(1, client_id + 1, node_config, RecordDict(), {}))
        except (ValueError, ArithmeticError, FederatedError) as error:
            return Message(Error(2, f"client {client_id}: {error}"), reply_to=message)
        self.records.append(ClientRecord(client_id, kind, 0, "cpu:0", 0.0, 1.0, 5, attempts=1))
        return reply

    def _unused(self, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError

    set_run = create_message = push_messages = pull_messages = _unused
    run = property(_unused)
