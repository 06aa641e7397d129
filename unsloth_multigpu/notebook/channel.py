"""Messages between a notebook's kernel and a worker: JSON over a pair of sockets. No pickle."""

from __future__ import annotations

import json
import socket
from typing import Any

from unsloth_multigpu.wire.frames import Frames


class Channel:
    """One end of a pair. Any thread may send; one thread receives.

    Args:
        end: A connected stream socket, owned from now on.
        send_limit_s: How long a message may wait for a reader that does not read; None = for ever.
    """

    def __init__(self, end: socket.socket, send_limit_s: float | None = None) -> None:
        self._frames = Frames(end, send_limit_s)

    def fileno(self) -> int:
        """Readable when there is something to receive."""
        return self._frames.fileno()

    def send(self, kind: str, **fields: Any) -> None:
        """Sends one message: its kind and what JSON can say.

        Raises:
            OSError: The other side is gone, or does not read. A message that was cut off ends the pair.
        """
        self._frames.send(json.dumps({"kind": kind, **fields}).encode())

    def receive(self) -> list[dict[str, Any]] | None:
        """Waits for bytes and returns the messages that are whole by now; None when the other side is gone."""
        messages = self._frames.receive()
        if messages is None:
            return None
        # All of them: who hears of the other side's end next is to know what it said before.
        while self._frames.has_more() and (more := self._frames.receive()) is not None:
            messages += more
        return [json.loads(message) for message in messages]

    def close(self) -> None:
        """Closes this end. The other side sees that the pair has ended."""
        self._frames.close()
