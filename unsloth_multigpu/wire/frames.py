"""Whole messages over one end of a pair of sockets. No name, no port: no other process can connect."""

from __future__ import annotations

import socket
import struct
import threading

from unsloth_multigpu.wire.wait import is_readable

_LENGTH = struct.Struct("!Q")
_CHUNK_BYTES = 2**20


class Frames:
    """Sends and receives bytes, each message with its length before it.

    Any thread may send; one thread receives.

    Args:
        end: A connected stream socket, owned from now on.
        limit_s: How long a message may wait for a reader that does not read; None = no limit.
    """

    def __init__(self, end: socket.socket, limit_s: float | None = None) -> None:
        self._end = end
        self._end.settimeout(limit_s)
        self._lock = threading.Lock()
        self._header = bytearray()
        self._body: bytearray | None = None
        self._num_filled = 0

    def fileno(self) -> int:
        """Readable when there is something to receive."""
        return self._end.fileno()

    def send(self, data: bytes) -> None:
        """Sends a message.

        Raises:
            OSError: The other side is gone, or does not read. A message that was cut off ends the pair.
        """
        header = _LENGTH.pack(len(data))
        with self._lock:
            # What is small is sent at once; what is large is not copied.
            for part in (header + data,) if len(data) <= _CHUNK_BYTES else (header, data):
                self._end.sendall(part)

    def has_more(self) -> bool:
        """`receive` would not wait."""
        return is_readable(self._end)

    def receive(self) -> list[bytearray] | None:
        """Waits for bytes and returns the message that is complete now, if one is; None if the other side is gone."""
        try:
            if self._body is None:
                data = self._end.recv(_LENGTH.size - len(self._header))
                if not data:
                    return None
                self._header += data
                if len(self._header) < _LENGTH.size:
                    return []
                self._body, self._num_filled = bytearray(_LENGTH.unpack(self._header)[0]), 0
                self._header.clear()
                # A sender that was stopped in between must not block a reader of several connections.
                if self._body and not self.has_more():
                    return []
            if self._body:
                # Read into the buffer of the message, which may have gigabytes.
                num_read = self._end.recv_into(memoryview(self._body)[self._num_filled :])
                self._num_filled += num_read
                if num_read == 0:
                    return None
            if self._num_filled < len(self._body):
                return []
            body, self._body = self._body, None
            return [body]
        except OSError:
            return None

    def close(self) -> None:
        """Closes this end. The other side sees that the pair has ended."""
        self._end.close()
