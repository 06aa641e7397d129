"""Formats the error that ends a rank without the frames of this package. Needs no torch."""

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

# After an error Python joins threads and runs exit handlers, which a process group may block forever.
TEARDOWN_LIMIT_S = 3.0
_PACKAGE = str(Path(__file__).parents[1]) + "/"
# An error in this file comes from a Python function that it calls for the user.
_PASSES_ON = _PACKAGE + "launch/question.py"
# Ranks with the same error fail at nearly the same time.
_OTHERS_LIMIT_S = 3.0


def shown_error(
    kind: type[BaseException], error: BaseException, tb: TracebackType | None
) -> traceback.TracebackException:
    """Returns the traceback of an error without the frames of this package.

    All frames are kept if this package itself has failed, and if its logger is at DEBUG level.
    """
    # TracebackException works even if the error's own str() raises.
    shown = traceback.TracebackException(kind, error, tb, compact=True)
    if not logging.getLogger("unsloth_multigpu").isEnabledFor(logging.DEBUG):
        _leave_out_own_frames(shown, error)
    return shown


def _leave_out_own_frames(shown: traceback.TracebackException, error: BaseException | None) -> None:
    # `compact` leaves out errors that are not printed, so `shown` may have a shorter chain than `error`.
    for name in ("__cause__", "__context__"):
        if (before := getattr(shown, name)) is not None:
            _leave_out_own_frames(before, getattr(error, name, None))
    frames = list(shown.stack)
    # "<string>" is the generated __init__ of a dataclass.
    is_own = [frame.filename.startswith(_PACKAGE) or frame.filename == "<string>" for frame in frames]
    others = [frame for frame, own in zip(frames, is_own, strict=True) if not own]
    is_defect = bool(is_own) and is_own[-1] and frames[-1].filename != _PASSES_ON
    if others and (not is_defect or isinstance(error, MultiGPUError)):
        shown.stack[:] = others


def await_others(run_dir: str, attempt: int, num_ranks: int, kinds: Collection[str]) -> None:
    """Waits a few seconds for the other ranks of this node to fail, too: an error of all ranks is reported as such.

    `kinds` are the events with which a rank ends.
    """

    def have_ended() -> bool:
        return len({e.rank for e in read_events(run_dir, attempt) if e.kind in kinds}) >= num_ranks

    wait_until(have_ended, time.monotonic() + _OTHERS_LIMIT_S)
