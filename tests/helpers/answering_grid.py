"""The one base of the grids of Flower that tests answer for, in this process."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from flwr.app import Message
from flwr.serverapp import Grid

from unsloth_multigpu.federated.rounds import ClientRecord


class AnsweringGrid(Grid):
    """A test's own class says who is there, `get_node_ids`, and what each message is answered with.

    It has what `ProcessGrid` has beyond Flower's grid.
    """

    devices_of_slots = ("cpu:0",)

    def __init__(self) -> None:
        self.records: list[ClientRecord] = []

    def answer(self, message: Message) -> Message:
        raise NotImplementedError

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> list[Message]:
        return [self.answer(message) for message in messages]

    def _unused(self, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError

    set_run = create_message = push_messages = pull_messages = _unused
    run = property(_unused)
