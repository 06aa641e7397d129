"""What the user reads of an error that ends a rank: the frames of the user's program, and whether all ranks have it.

Needs no torch.
"""

from __future__ import annotations

import logging
import time
import traceback
from collections.abc import Collection
from pathlib import Path
from types import TracebackType

from unsloth_multigpu.errors import MultiGPUError
from unsloth_multigpu.wire.event import read_events

_PACKAGE = str(Path(__file__).parents[1]) + "/"
# Calls a function of Python for the user, whose error it passes on.
_PASSES_ON = _PACKAGE + "launch/question.py"
_POLL_S = 0.02
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
    # Gives a text also where the exception's own str() raises.
    shown = traceback.TracebackException(kind, error, tb, compact=True)
    if not logging.getLogger("unsloth_multigpu").isEnabledFor(logging.DEBUG):
        _leave_out_own_frames(shown, error)
    return shown


def _leave_out_own_frames(shown: traceback.TracebackException, error: BaseException | None) -> None:
    # `compact` leaves out what is not printed, so the chain of texts may be shorter than that of the errors.
    if shown.__cause__ is not None:
        _leave_out_own_frames(shown.__cause__, None if error is None else error.__cause__)
    if shown.__context__ is not None:
        _leave_out_own_frames(shown.__context__, None if error is None else error.__context__)
    frames = list(shown.stack)
    # A data class makes its __init__ from a text, without a file.
    is_own = [frame.filename.startswith(_PACKAGE) for frame in frames]
    near = [any(is_own[max(0, i - 1) : i + 2]) for i in range(len(frames))]
    is_own = [near[i] if frame.filename == "<string>" else is_own[i] for i, frame in enumerate(frames)]
    # A call of ours that fails in torch: without it nobody could tell what was called.
    last = max((i for i, own in enumerate(is_own) if own), default=-1)
    if last >= 0 and last < len(frames) - 1 and all("/torch/" in frame.filename for frame in frames[last + 1 :]):
        is_own[last] = False
    others = [frame for frame, own in zip(frames, is_own, strict=True) if not own]
    is_defect = bool(is_own) and is_own[-1] and frames[-1].filename != _PASSES_ON
    is_defect = is_defect and not isinstance(error, MultiGPUError)
    if others and not is_defect:
        shown.stack[:] = others


def await_others(run_dir: str, attempt: int, num_ranks: int, kinds: Collection[str]) -> None:
    """Waits a moment for the other ranks of this node to end as well: an error of all is told as one of all.

    Args:
        run_dir: The run's private folder.
        attempt: How often the ranks were started before.
        num_ranks: Ranks of this node.
        kinds: Events by which a rank says that it ends.
    """
    deadline_s = time.monotonic() + _OTHERS_LIMIT_S
    while time.monotonic() < deadline_s:
        if len({e.rank for e in read_events(run_dir, attempt) if e.kind in kinds}) >= num_ranks:
            return
        time.sleep(_POLL_S)
