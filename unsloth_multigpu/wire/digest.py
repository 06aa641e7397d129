"""Short digests, by which processes compare data without sending it."""

from __future__ import annotations

import hashlib


def digest_hex(data: bytes) -> str:
    """Returns a digest of 16 hexadecimal digits."""
    return hashlib.blake2b(data, digest_size=8).hexdigest()


def digest_of(value: object) -> str:
    """Returns `digest_hex` of `repr(value)`. For plain values only: other reprs may contain a memory address."""
    return digest_hex(repr(value).encode())
