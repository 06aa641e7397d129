"""Failures of the libraries below: what they say of them, and what a user does about them. Pure."""

from __future__ import annotations

import re
from typing import NamedTuple

_OF_NCCL = re.compile(r"NCCL|DistBackendError")
# What happened, in NCCL's words. Before it torch has written the place in its sources, and NCCL the kind of failure.
_LAST_ERROR = re.compile(r"^Last error:[ \t]*\n?[ \t]*(\S[^\n]*)", re.MULTILINE)
_INTERFACE = "Set NCCL_SOCKET_IFNAME to the network interface that leads to the other nodes (`ip route get ADDRESS`)"


class Remedy(NamedTuple):
    """A known failure: a pattern in its text, what to do, and whether it began on the rank that reports it."""

    pattern: str
    hint: str
    is_own: bool = True
    is_of_nccl: bool = True


_REMEDIES = (
    Remedy(
        r"/dev/shm\b[^\n]*No space left|No space left[^\n]*/dev/shm",
        "NCCL uses shared memory, of which Docker gives a container 64 MiB. Start it with --ipc=host or --shm-size=8g; "
        "in Kubernetes mount an emptyDir with medium: Memory at /dev/shm.",
    ),
    Remedy(
        r"Duplicate GPU",
        "Two ranks have one card, and NCCL takes one rank on each. Start no more ranks than there are cards; parts of "
        "one card (MIG) count as that card.",
    ),
    Remedy(
        r"out of memory",
        "NCCL found no memory for its buffers on the card. Look with nvidia-smi what else is there, and make room: "
        "smaller micro-batches (max_tokens_per_micro_batch, per_device_train_batch_size), or shard.",
    ),
    Remedy(r"no socket interface", f"{_INTERFACE}."),
    Remedy(r"connect\b[^\n]*timed out", f"{_INTERFACE}, or open the firewall between the nodes.", is_own=False),
    Remedy(
        r"peer access|peer mapping|\bP2P\b|unhandled cuda error|ncclUnhandledCudaError",
        "`unsloth-multigpu doctor` tests the copies between cards. Where direct ones fail, set NCCL_P2P_DISABLE=1.",
    ),
    Remedy(
        r"(?s)\btrl[/\\].*(\b0 active drivers|'NoneType' object has no attribute 'apply')",
        "Trainers of trl 1.15 call Triton without a GPU, too. For a script without Unsloth: pip install 'trl>=1.16'. "
        "With Unsloth, import it before trl.",
        is_of_nccl=False,
    ),
    Remedy(
        r"EOF when reading a line|, in _raw_input\n",
        "Ranks above 0 have no terminal. Give what is asked as a variable or an argument (a login: HF_TOKEN), or ask "
        "under `if ump.is_main_process():` where rank 0 alone needs it.",
        is_of_nccl=False,
    ),
)


def find_remedy(error: str) -> Remedy | None:
    """The known failure in the text of an error or of its traceback, None for another error."""
    is_of_nccl = bool(_OF_NCCL.search(error))
    possible = (remedy for remedy in _REMEDIES if is_of_nccl or not remedy.is_of_nccl)
    return next((remedy for remedy in possible if re.search(remedy.pattern, error, re.IGNORECASE)), None)


def last_error(error: str) -> str | None:
    """What happened, in NCCL's words, without the place in its sources; None where the text has none."""
    found = _LAST_ERROR.search(error) if _OF_NCCL.search(error) else None
    return found[1].strip() if found else None
