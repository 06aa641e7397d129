"""Messages between a notebook's kernel and a worker: JSON over a pair of sockets. No name, no port, no pickle."""

from __future__ import annotations

import json
import socket
import struct
import threading
from typing import Any

_LENGTH = struct.Struct("!I")
_CHUNK_BYTES = 2**20


class Channel:
    """One end of a pair. Any thread may send; one thread receives.

    Args:
        end: A connected stream socket, owned from now on.
        send_limit_s: How long a message may wait for a reader that does not read; None = for ever.
    """

    def __init__(self, end: socket.socket, send_limit_s: float | None = None) -> None:
        self._end = end
        self._end.settimeout(send_limit_s)
        self._lock = threading.Lock()
        self._received = bytearray()

    def fileno(self) -> int:
        """Readable when there is something to receive."""
        return self._end.fileno()

    def send(self, kind: str, **fields: Any) -> None:
        """Sends one message: its kind and what JSON can say.

        Raises:
            OSError: The other side is gone, or does not read. A message that was cut off ends the pair.
        """
        data = json.dumps({"kind": kind, **fields}).encode()
        with self._lock:
            self._end.sendall(_LENGTH.pack(len(data)) + data)

    def receive(self) -> list[dict[str, Any]] | None:
        """Waits for bytes and returns the messages that are whole by now; None when the other side is gone."""
        try:
            data = self._end.recv(_CHUNK_BYTES)
        except OSError:
            return None
        if not data:
            return None
        self._received += data
        messages = []
        while len(self._received) >= _LENGTH.size:
            end = _LENGTH.size + _LENGTH.unpack_from(self._received)[0]
            if len(self._received) < end:
                break
            messages.append(json.loads(self._received[_LENGTH.size : end]))
            del self._received[:end]
        return messages

    def close(self) -> None:
        """Closes this end. The other side sees that the pair has ended."""
        self._end.close()
