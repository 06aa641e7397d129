"""What NCCL says of its own failures, and what a user does about them. Pure."""

from __future__ import annotations

import re
from dataclasses import dataclass

_OF_NCCL = re.compile(r"NCCL|DistBackendError")
# Behind it NCCL has written what happened; before it torch has where, and NCCL what kind of failure it is.
_LAST_ERROR = re.compile(r"^Last error:[ \t]*\n?[ \t]*(\S[^\n]*)", re.MULTILINE)


@dataclass(frozen=True)
class Remedy:
    """A failure of NCCL.

    Args:
        pattern: In the text of the error.
        hint: What to do.
        is_own: It began on the rank that reports it. False where a rank that has gone looks the same.
    """

    pattern: re.Pattern[str]
    hint: str
    is_own: bool = True


_REMEDIES = tuple(
    Remedy(re.compile(pattern, re.IGNORECASE), hint, is_own)
    for pattern, hint, is_own in (
        (
            r"/dev/shm\b[^\n]*No space left|No space left[^\n]*/dev/shm",
            "NCCL passes data through shared memory, of which Docker gives a container 64 MiB. Start it with "
            "--ipc=host or --shm-size=8g; in Kubernetes mount an emptyDir with medium: Memory at /dev/shm.",
            True,
        ),
        (
            r"Duplicate GPU",
            "Two ranks have one card, and NCCL takes one rank on each. Start no more ranks than there are cards; "
            "parts of one card (MIG) count as that card.",
            True,
        ),
        (
            r"out of memory",
            "NCCL found no memory for its buffers on the card. Look with nvidia-smi what else is there, and make room: "
            "smaller micro-batches (max_tokens_per_micro_batch, per_device_train_batch_size), or shard.",
            True,
        ),
        (
            r"no socket interface",
            "Set NCCL_SOCKET_IFNAME to the network interface that leads to the other nodes: `ip route get ADDRESS` "
            "names it.",
            True,
        ),
        (
            r"connect\b[^\n]*timed out",
            "A firewall may be in the way, or NCCL has chosen a network interface that does not lead to the other "
            "nodes: set NCCL_SOCKET_IFNAME to the one that does (`ip route get ADDRESS` names it).",
            False,
        ),
        (
            r"peer access|peer mapping|\bP2P\b|unhandled cuda error|ncclUnhandledCudaError",
            "`unsloth-multigpu doctor` tests the copies between cards. Where direct ones fail, set NCCL_P2P_DISABLE=1.",
            True,
        ),
    )
)


def find_remedy(error: str) -> Remedy | None:
    """The failure of NCCL that an error tells of, None for another error.

    Args:
        error: Its class and text.
    """
    if not _OF_NCCL.search(error):
        return None
    return next((remedy for remedy in _REMEDIES if remedy.pattern.search(error)), None)


def last_error(error: str) -> str | None:
    """What happened, in NCCL's words, without the place in its sources; None where the text has none."""
    found = _LAST_ERROR.search(error) if _OF_NCCL.search(error) else None
    return found[1].strip() if found else None
