"""Whole messages over one end of a pair of sockets. No name, no port: no other process can connect."""

from __future__ import annotations

import select
import socket
import struct
import threading

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
        with self._lock:
            for part in _framed(data):
                self._end.sendall(part)

    def has_more(self) -> bool:
        """`receive` would not wait."""
        poll = select.poll()
        poll.register(self._end, select.POLLIN)
        return bool(poll.poll(0))

    def receive(self) -> list[bytearray] | None:
        """Waits for bytes and returns the message that is whole by now, if one is; None when the other side is gone."""
        try:
            if self._body is None:
                if not self._read_header():
                    return None
                # A sender that was stopped in between must not hold a reader who has others to hear.
                if self._body and not self.has_more():
                    return []
            return self._read_body()
        except OSError:
            return None

    def _read_header(self) -> bool:
        data = self._end.recv(_LENGTH.size - len(self._header))
        self._header += data
        if len(self._header) == _LENGTH.size:
            self._body, self._num_filled = bytearray(_LENGTH.unpack(self._header)[0]), 0
            self._header.clear()
        return bool(data)

    def _read_body(self) -> list[bytearray] | None:
        """One read, to where the body stays: it may have gigabytes."""
        body = self._body
        if body is None:
            return []
        if body:
            num_read = self._end.recv_into(memoryview(body)[self._num_filled :])
            self._num_filled += num_read
            if num_read == 0:
                return None
        if self._num_filled < len(body):
            return []
        self._body = None
        return [body]

    def close(self) -> None:
        """Closes this end. The other side sees that the pair has ended."""
        self._end.close()


def _framed(data: bytes) -> tuple[bytes, ...]:
    header = _LENGTH.pack(len(data))
    # What is small goes at once; what is large is not copied.
    return (header + data,) if len(data) <= _CHUNK_BYTES else (header, data)
