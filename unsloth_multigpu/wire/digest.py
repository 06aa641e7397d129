"""Short digests, by which processes compare what they have without sending it."""

from __future__ import annotations

import hashlib

_NUM_BYTES = 8


def digest_hex(data: bytes) -> str:
    """16 hexadecimal digits."""
    return hashlib.blake2b(data, digest_size=_NUM_BYTES).hexdigest()


def digest_int64(data: bytes) -> int:
    """The same digest as a signed 64-bit integer, which a tensor can carry."""
    return int.from_bytes(hashlib.blake2b(data, digest_size=_NUM_BYTES).digest(), "little", signed=True)


def digest_of(value: object) -> str:
    """`digest_hex` of what Python writes for a value. Plain values only: others are written with their address."""
    return digest_hex(repr(value).encode())
