"""The traceback of an error that ends a rank, as the user reads it: without frames of this package. Needs no torch."""

from __future__ import annotations

import logging
import time
import traceback
from collections.abc import Collection
from pathlib import Path
from types import TracebackType

from unsloth_multigpu.errors import MultiGPUError
from unsloth_multigpu.wire.event import read_events
from unsloth_multigpu.wire.wait import wait_until

# After an error Python still joins threads and runs exit handlers; a process group may block that forever.
TEARDOWN_LIMIT_S = 3.0
_PACKAGE = str(Path(__file__).parents[1]) + "/"
# Ranks that fail alike do so at nearly the same time: each has imported and computed the same.
_OTHERS_LIMIT_S = 3.0


def shown_error(
    kind: type[BaseException], error: BaseException, tb: TracebackType | None
) -> traceback.TracebackException:
    """The error with the frames that lead to its cause, without those of this package between them.

    All are kept where this package itself has failed, and where its logger is at DEBUG level.

    Args:
        kind: Class of the error.
        error: What was raised.
        tb: Its traceback.
    """
    # Works also where the exception's own str() raises.
    shown = traceback.TracebackException(kind, error, tb, compact=True)
    if not logging.getLogger("unsloth_multigpu").isEnabledFor(logging.DEBUG):
        _leave_out_own_frames(shown, error)
    return shown


def _leave_out_own_frames(shown: traceback.TracebackException, error: BaseException | None) -> None:
    # `compact` leaves out what is not printed, so the chain of texts may be shorter than that of the errors.
    for name in ("__cause__", "__context__"):
        if (before := getattr(shown, name)) is not None:
            _leave_out_own_frames(before, getattr(error, name, None))
    frames = list(shown.stack)
    # "<string>" is the __init__ that a data class of ours makes.
    is_own = [frame.filename.startswith(_PACKAGE) or frame.filename == "<string>" for frame in frames]
    others = [frame for frame, own in zip(frames, is_own, strict=True) if not own]
    is_defect = bool(is_own) and is_own[-1]
    if others and (not is_defect or isinstance(error, MultiGPUError)):
        shown.stack[:] = others


def await_others(run_dir: str, attempt: int, num_ranks: int, kinds: Collection[str]) -> None:
    """Waits a moment for the other ranks of this node to end as well: an error of all is reported as one of all.

    Args:
        run_dir: The run's private folder.
        attempt: How often the ranks were started before.
        num_ranks: Ranks of this node.
        kinds: Events by which a rank says that it ends.
    """

    def have_ended() -> bool:
        return len({e.rank for e in read_events(run_dir, attempt) if e.kind in kinds}) >= num_ranks

    wait_until(have_ended, time.monotonic() + _OTHERS_LIMIT_S)
