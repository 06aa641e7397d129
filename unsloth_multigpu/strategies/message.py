"""Tensors from rank to rank, by gloo's point-to-point operations. Errors name the rank and the cause.

gloo tells the end of a connection only to a receive of which nothing has arrived. It forgets a send in its queue and a
receive of which a part has arrived: these wait for their whole limit then. So every wait here begins with a short
receive: of the mark that follows a tensor, or of the peer's receipt.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta

import torch
import torch.distributed as dist

from unsloth_multigpu.errors import DistributedError, RankTimeoutError
from unsloth_multigpu.group.bucket import buckets, flatten, unflatten_into

# First number of a worker's header.
DONE, GRADIENTS = 0, 1
HINT = "Read the first error of the other ranks; raise timeout_s if a step only takes long."

_BUCKET_BYTES = 25 * 2**20
_SILENT_TAG = 1  # No message has this tag.


def pack(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Copies in main memory, few and long."""
    return [flatten(bucket).cpu() for bucket in buckets(tensors, _BUCKET_BYTES)]


def send(messages: Sequence[torch.Tensor], peer: int, group: dist.ProcessGroup) -> None:
    """Waits at most the group's limit for each message to be taken.

    Raises:
        RankTimeoutError: The peer did not take it.
        DistributedError: The connection ended.
    """
    for message in messages:
        mark, receipt = torch.zeros(1), torch.empty(1)
        with _named_errors(peer):
            taken = _begin(dist.irecv, receipt, peer, group)
            sent = [_begin(dist.isend, tensor, peer, group) for tensor in (message, mark)]
            for work in (taken, *sent):
                work.wait()


def receive(message: torch.Tensor, peer: int, group: dist.ProcessGroup, limit: timedelta | None = None) -> None:
    """Fills a tensor in main memory. Raises as `send` does.

    Args:
        limit: None = the group's.
    """
    mark = torch.empty(1)
    with _named_errors(peer):
        filled, ended = (_begin(dist.irecv, tensor, peer, group) for tensor in (message, mark))
        _ = ended.wait() if limit is None else ended.wait(limit)
        filled.wait()
        # The peer has asked for it before it sent, so that it is written at once, or the peer is gone.
        _begin(dist.isend, mark, peer, group)


def receive_into(tensors: Sequence[torch.Tensor], peer: int, group: dist.ProcessGroup) -> None:
    """Fills tensors, on any device, with what the peer sends by its `pack`. Raises as `send` does."""
    for bucket in buckets(tensors, _BUCKET_BYTES):
        message = torch.empty(sum(t.numel() for t in bucket), dtype=bucket[0].dtype)
        receive(message, peer, group)
        unflatten_into(bucket, message.to(bucket[0].device))


def break_off(group: dist.ProcessGroup, peers: Sequence[int]) -> None:
    """Ends all waits of this group: at once in this process, and at the peers as a closed connection.

    gloo has no other way: a wait that times out closes all connections of its group, and only of its group.
    """
    for peer in peers:
        with suppress(RuntimeError):
            work = dist.irecv(torch.empty(1), src=peer, group=group, tag=_SILENT_TAG)
            assert work is not None
            work.wait(timedelta(milliseconds=1))


def _begin(
    operation: Callable[..., dist.Work | None], tensor: torch.Tensor, peer: int, group: dist.ProcessGroup
) -> dist.Work:
    work = operation(tensor, peer, group)
    assert work is not None
    return work


@contextmanager
def _named_errors(peer: int) -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        fact = str(error).split("\n")[0]
        kind = RankTimeoutError if "Timed out" in fact else DistributedError
        raise kind(f"The exchange with rank {peer} broke off: {fact}", hint=HINT) from error
