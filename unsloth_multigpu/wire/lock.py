"""A lock on an open file that ends with its process, where the file system has such locks."""

from __future__ import annotations

import errno
import fcntl
from typing import Literal

# What file systems without flock answer, as some network ones and mounts of object stores.
_NO_LOCKS = {errno.ENOLCK, errno.ENOSYS, errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP}


def try_lock(descriptor: int) -> Literal["locked", "held", "no locks"]:
    """Locks it for this process alone, without waiting; "held" = another process has it.

    Raises:
        OSError: The file system fails.
    """
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):  # Some network file systems answer with the latter.
        return "held"
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
        return "no locks"
    return "locked"
