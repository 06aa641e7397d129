"""Known failures of NCCL and other libraries: patterns of their messages, and hints. Pure."""

from __future__ import annotations

import re
from typing import NamedTuple

_OF_NCCL = re.compile(r"NCCL|DistBackendError")
# NCCL's description. It follows a place in torch's sources and NCCL's kind of failure.
_LAST_ERROR = re.compile(r"^Last error:[ \t]*\n?[ \t]*(\S[^\n]*)", re.MULTILINE)
_INTERFACE = "Set NCCL_SOCKET_IFNAME to the network interface that leads to the other nodes (`ip route get ADDRESS`)"


class Remedy(NamedTuple):
    """A known failure: a regular expression that finds it in an error, and what to do.

    Args:
        is_own: It occurred on the rank that reports it.
        is_of_nccl: It is searched for only in errors of NCCL.
    """

    pattern: str
    hint: str
    is_own: bool = True
    is_of_nccl: bool = True


_REMEDIES = (
    Remedy(
        r"/dev/shm\b[^\n]*No space left|No space left[^\n]*/dev/shm",
        "NCCL needs shared memory, and a Docker container has 64 MiB by default. Start it with --ipc=host or "
        "--shm-size=8g; in Kubernetes mount an emptyDir with medium: Memory at /dev/shm.",
    ),
    Remedy(
        r"Duplicate GPU",
        "Two ranks use one GPU, and NCCL allows one rank per GPU. Start no more ranks than GPUs; MIG instances of one "
        "GPU count as one.",
    ),
    Remedy(
        r"out of memory",
        "The GPU has no memory left for NCCL's buffers. See in nvidia-smi which programs use it, and free memory: "
        "smaller micro-batches (max_tokens_per_micro_batch, per_device_train_batch_size), or shard.",
    ),
    Remedy(r"no socket interface", f"{_INTERFACE}."),
    Remedy(r"connect\b[^\n]*timed out", f"{_INTERFACE}, or open the firewall between the nodes.", is_own=False),
    Remedy(
        r"peer access|peer mapping|\bP2P\b|unhandled cuda error|ncclUnhandledCudaError",
        "`unsloth-multigpu doctor` tests copies between GPUs. If direct copies fail, set NCCL_P2P_DISABLE=1.",
    ),
    Remedy(
        r"(?s)\btrl[/\\].*(\b0 active drivers|'NoneType' object has no attribute 'apply')",
        "Trainers of trl 1.15 call Triton without a GPU, too. For a script without Unsloth: pip install 'trl>=1.16'. "
        "With Unsloth, import it before trl.",
        is_of_nccl=False,
    ),
)


def find_remedy(error: str) -> Remedy | None:
    """Finds a known failure in the text of an error or traceback; None for other errors."""
    is_of_nccl = bool(_OF_NCCL.search(error))
    possible = (remedy for remedy in _REMEDIES if is_of_nccl or not remedy.is_of_nccl)
    return next((remedy for remedy in possible if re.search(remedy.pattern, error, re.IGNORECASE)), None)


def last_error(error: str) -> str | None:
    """Returns NCCL's description of the failure; None for other errors."""
    found = _LAST_ERROR.search(error) if _OF_NCCL.search(error) else None
    return found[1].strip() if found else None
