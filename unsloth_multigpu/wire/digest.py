"""Short digests, with which processes compare data without sending it."""

from __future__ import annotations

import hashlib

_NUM_BYTES = 8


def digest_hex(data: bytes) -> str:
    """Returns a digest of 16 hexadecimal digits."""
    return hashlib.blake2b(data, digest_size=_NUM_BYTES).hexdigest()


def digest_int64(data: bytes) -> int:
    """Returns the same digest as a signed 64-bit integer, for tensors."""
    return int.from_bytes(hashlib.blake2b(data, digest_size=_NUM_BYTES).digest(), "little", signed=True)


def digest_of(value: object) -> str:
    """Returns `digest_hex` of `repr(value)`. For plain values only: the repr of other objects has their address."""
    return digest_hex(repr(value).encode())
