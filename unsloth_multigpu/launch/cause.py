"""Finds the rank that failed first, its error and what to do. A pure function of the ranks' events and exit codes."""

from __future__ import annotations

import re
import signal
import textwrap
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from unsloth_multigpu.errors import DistributedError, RankTimeoutError
from unsloth_multigpu.launch.refusal import REFUSED
from unsloth_multigpu.wire.event import Event
from unsloth_multigpu.wire.heartbeat import Heartbeat
from unsloth_multigpu.words import signal_name

# Errors of gloo, NCCL and similar backends, and of the store, raised because *another* rank is gone: a consequence, not
# the cause.
_COMMUNICATION_ERROR = re.compile(
    r"gloo/transport|Connection (closed|reset|refused)|connectFullMesh|[NXH]CCL|oneCCL|DistBackendError"
    r"|DistNetworkError|DistStoreError|Timed out waiting|Broken pipe|Socket Timeout|RankTimeoutError",
    re.IGNORECASE,
)
# An error of this package raised because of another rank's error.
_SECOND_HAND = re.compile(r"DistributedError: rank \d+ failed ")
# Places in C++ sources, which gloo and c10d put before their messages.
_SOURCE_LINE = re.compile(r"\[[^\s\]]+\.(?:cc|cpp|h|hpp|cu):\d+\] ")

# Exit codes of ranks that the supervisor has stopped.
_SENT_TO_SURVIVORS = (-signal.SIGTERM, -signal.SIGINT)
# A signal has asked the run to stop.
STOPS = ("stopping", "stopped")
# A KeyboardInterrupt has ended the script. It is the script's own unless the supervisor received a signal.
INTERRUPTED = "interrupted"
# A hang is reported by the supervisor, not by the rank.
HANG = "hang"
# Length of an error in the line that names its rank.
_MAX_CHARACTERS = 200
_LIKELY = {
    -signal.SIGABRT: "NCCL's watchdog or an assertion on the device aborted it, see the rank's log",
    **dict.fromkeys(
        (-signal.SIGSEGV, -signal.SIGBUS, -signal.SIGILL), "a native library crashed, see the stack in the rank's log"
    ),
}


_OF_NCCL = re.compile(r"NCCL|DistBackendError")
# NCCL's description. It follows a place in torch's sources and NCCL's kind of failure.
_LAST_ERROR = re.compile(r"^Last error:[ \t]*\n?[ \t]*(\S[^\n]*)", re.MULTILINE)
_INTERFACE = "Set NCCL_SOCKET_IFNAME to the network interface that leads to the other nodes (`ip route get ADDRESS`)"


class _Remedy(NamedTuple):
    """A known failure of NCCL or another library: a regular expression that finds it in an error, and what to do.

    Args:
        is_own: It occurred on the rank that reports it.
        is_of_nccl: It is searched for only in errors of NCCL.
    """

    pattern: str
    hint: str
    is_own: bool = True
    is_of_nccl: bool = True


_REMEDIES = (
    _Remedy(
        r"/dev/shm\b[^\n]*No space left|No space left[^\n]*/dev/shm",
        "NCCL needs shared memory, and a Docker container has 64 MiB by default. Start it with --ipc=host or "
        "--shm-size=8g; in Kubernetes mount an emptyDir with medium: Memory at /dev/shm.",
    ),
    _Remedy(
        r"Duplicate GPU",
        "Two ranks use one GPU, and NCCL allows one rank per GPU. Start no more ranks than GPUs; MIG instances of one "
        "GPU count as one.",
    ),
    _Remedy(
        r"out of memory",
        "The GPU has no memory left for NCCL's buffers. See in nvidia-smi which programs use it, and free memory: "
        "smaller micro-batches (max_tokens_per_micro_batch, per_device_train_batch_size), or shard.",
    ),
    _Remedy(r"no socket interface", f"{_INTERFACE}."),
    _Remedy(r"connect\b[^\n]*timed out", f"{_INTERFACE}, or open the firewall between the nodes.", is_own=False),
    _Remedy(
        r"peer access|peer mapping|\bP2P\b|unhandled cuda error|ncclUnhandledCudaError",
        "`unsloth-multigpu doctor` tests copies between GPUs. If direct copies fail, set NCCL_P2P_DISABLE=1.",
    ),
    _Remedy(
        r"(?s)\btrl[/\\].*(\b0 active drivers|'NoneType' object has no attribute 'apply')",
        "Trainers of trl 1.15 call Triton without a GPU, too. For a script without Unsloth: pip install 'trl>=1.16'. "
        "With Unsloth, import it before trl.",
        is_of_nccl=False,
    ),
)


@dataclass(frozen=True)
class Cause:
    """Why a run ended, in one sentence.

    Args:
        rank: The rank that failed first; -1 if several ranks hang and none is to blame.
        exit_code: Exit code of the whole command, 1..255.
        traceback: Text of the exception, or the stacks of a hang; "" if there is none.
        is_of_all: All ranks of this node failed with the same error.
    """

    rank: int
    exit_code: int
    message: str
    traceback: str = ""
    is_of_all: bool = False


def find_cause(
    events: Sequence[Event],
    exit_codes: Mapping[int, int],
    gone: Collection[int] = (),
    beats: Mapping[int, Heartbeat] | None = None,
    *,
    num_memory_kills: int = 0,
    is_one_node: bool = True,
    num_ranks: int | None = None,
) -> Cause:
    """Finds the cause in this order: hangs, a rank's own errors, early exits, kills by a signal, broken connections.

    Args:
        events: All ranks' events of one attempt, oldest first.
        exit_codes: Exit code of each failed rank; -N = ended by signal N.
        gone: Ranks that had exited before the supervisor stopped the others.
        num_memory_kills: Processes killed by the kernel for lack of memory during this attempt.
        is_one_node: False if a rank of another node, whose events are not known here, may be the cause.
        num_ranks: Ranks of this node; None = those that have called `enable_multi_gpu()`.
    """
    hang = next((e for e in events if e.kind == HANG), None)
    if hang is not None:
        return Cause(hang.rank, RankTimeoutError.exit_code, str(hang.facts["message"]), str(hang.facts["stacks"]))
    events = [replace(e, kind="exception") if e.kind == INTERRUPTED else e for e in events]
    steps = {rank: beat.step for rank, beat in (beats or {}).items()}
    exceptions = [e for e in events if e.kind == "exception"]
    own = [e for e in exceptions if not _is_communication_error(e)]
    ranks = {e.rank for e in events if e.kind == "started"}
    if own:
        first_hand = next((e for e in own if not _SECOND_HAND.match(_error(e))), own[0])
        return _from_exceptions_of_all(own, max(num_ranks or 0, len(ranks))) or _from_exception(first_hand)
    # An exiting rank may end only after the connection error that it causes on another rank, perhaps by the signal for
    # the survivors.
    leaving = {e.rank for e in events if e.kind == "exiting" and exceptions and e.time_s < exceptions[0].time_s}
    ended = {r for r in {*gone, *exit_codes} if exit_codes.get(r, 0) >= 0}
    ended |= {r for r in leaving if exit_codes.get(r, 0) in _SENT_TO_SURVIVORS or exit_codes.get(r, 0) >= 0}
    has_begun = any(event.kind in ("training", "exception") for event in events)
    if (left := find_early_exit(events, ended)) is not None:
        others = f"while other ranks {'were training' if has_begun else 'were waiting for it to begin a training'}"
        return _from_early_exit(left, exit_codes, left.rank in gone, steps.get(left.rank, -1), others)
    # Ranks that had reported an error were killed because their teardown took too long.
    silent = {r: c for r, c in exit_codes.items() if r not in {e.rank for e in exceptions}}
    if found := _from_exit_codes(silent, gone, steps, num_memory_kills):
        return found
    if exceptions and not is_one_node and not _error(exceptions[0]).startswith("RankTimeoutError"):
        lost = f"rank {exceptions[0].rank} lost its connection to another node{where(exceptions[0].step)}"
        message = f"{lost}; that node's own message names the cause"
        return Cause(exceptions[0].rank, DistributedError.exit_code, message)
    if exceptions:
        return _from_exception(exceptions[0])
    failed = {r for r, c in exit_codes.items() if c}
    return _from_death(min(failed & set(gone) or failed), exit_codes, steps, num_memory_kills)


def find_early_exit(events: Sequence[Event], gone: Collection[int]) -> Event | None:
    """Finds a rank that has left without an error while another is in `train()` or waits to open a process group.

    Training is collective: the other ranks would wait for it forever. `gone` are ranks whose process has ended.

    Returns:
        Its last event, or None.
    """
    if any(event.kind in STOPS for event in events):
        return None  # A stopped rank may leave while another still saves; `grace_s` limits that.
    last: dict[int, Event] = {}
    for event in events:
        before = last.get(event.rank)
        is_repeated = event.kind == "exiting" and before is not None and before.kind in ("left_training", "exception")
        # A hang or a refusal does not tell where a rank is.
        if not is_repeated and event.kind not in (HANG, REFUSED):
            last[event.rank] = event
    waits = {r for r, e in last.items() if e.kind in ("training", "meeting") or _is_communication_error(e)}
    for event in sorted(last.values(), key=lambda e: e.time_s):
        has_left = event.kind == "left_training" or (event.rank in gone and event.kind != "exception")
        if has_left and not _is_communication_error(event) and waits - {event.rank}:
            return event
    return None


def where(step: int) -> str:
    """Returns " after step N" for messages; "" before a training, and in loops without a Trainer, which count no steps.

    `step` is the last finished one; 0 = `train()` has begun, -1 = it has not.
    """
    if step < 0:
        return ""
    return f" after step {step}" if step else " before the first step"


def _error(event: Event) -> str:
    return str(event.facts.get("error", ""))


def _is_communication_error(event: Event) -> bool:
    remedy = _find_remedy(_error(event))
    # Failures of NCCL itself look like broken connections. Our own error about memory may contain such text, too.
    is_own = "ran out of memory" in _error(event) or (remedy is not None and remedy.is_own)
    return not is_own and bool(_COMMUNICATION_ERROR.search(_error(event)))


def _from_early_exit(left: Event, exit_codes: Mapping[int, int], is_gone: bool, step: int, others: str) -> Cause:
    code = int(left.facts.get("exit_code", max(0, exit_codes.get(left.rank, 0))))
    if left.kind == "left_training" and "exit_code" not in left.facts:
        # train() raised an error, and the script caught it.
        ended = f" and ended with exit code {code}" if is_gone else ""
        message = f"rank {left.rank} left train() by an error{where(step)}, which its script caught{ended}, {others}"
        hint = "Hint: Catch errors of train() on all ranks or on none: the other ranks wait for the one that left.\n"
        return Cause(left.rank, code or 1, f"{message}: {_first_line(_error(left))}", hint)
    return Cause(left.rank, code or 1, f"rank {left.rank} left with exit code {code}{where(step)}, {others}")


def _from_exception(event: Event) -> Cause:
    message = f"rank {event.rank} failed{where(event.step)}: {_first_line(_error(event))}"
    if _error(event).startswith("RankTimeoutError: rank"):
        message = _first_line(_error(event)).partition(": ")[2]  # The error itself names the rank.
    return Cause(event.rank, int(event.facts["exit_code"]), message, _traceback(event))


def _from_exceptions_of_all(own: Sequence[Event], num_ranks: int) -> Cause | None:
    """Returns the cause if every rank has raised the same error, such as a missing file; else None."""
    of_rank = {event.rank: event for event in reversed(own)}
    first = of_rank[min(of_rank)]
    is_of_all = 1 < num_ranks == len(of_rank) and len({str(e.facts["traceback"]) for e in of_rank.values()}) == 1
    # In later steps it is a matter of chance how many ranks raise it before they are stopped.
    if not is_of_all or first.step > 0:
        return None
    message = f"all {num_ranks} ranks failed alike{where(first.step)}: {_first_line(_error(first))}"
    return Cause(first.rank, int(first.facts["exit_code"]), message, _traceback(first), is_of_all=True)


def _first_line(error: str) -> str:
    """Shortens an error to one line. The whole text is in the traceback."""
    line = error.strip().split("\n")[0].rstrip(".: ")
    if "ran out of memory" not in line and (said := _last_error(error)):
        line = f"{line.partition(':')[0]}: {said}"
    return textwrap.shorten(_SOURCE_LINE.sub("", line), _MAX_CHARACTERS, placeholder=" ...")


def _traceback(event: Event) -> str:
    """Returns the traceback, with the hint for a known failure if the error has none."""
    traceback = str(event.facts["traceback"])
    remedy = None if "Hint: " in _error(event) else _find_remedy(traceback + _error(event))
    return traceback + ("" if remedy is None else f"Hint: {remedy.hint}\n")


def _from_exit_codes(
    exit_codes: Mapping[int, int], gone: Collection[int], steps: Mapping[int, int], num_memory_kills: int
) -> Cause | None:
    """Returns the first kill by a signal, else the first exit with a code above 0, else None."""
    deaths = [r for r, c in exit_codes.items() if c < 0 and c not in _SENT_TO_SURVIVORS]
    if deaths:
        # A survivor that did not react to SIGTERM was killed, too.
        return _from_death(min(deaths, key=lambda r: (r not in gone, r)), exit_codes, steps, num_memory_kills)
    for rank, code in sorted(exit_codes.items()):
        if code > 0:
            return Cause(rank, code, f"rank {rank} exited with code {code}{where(steps.get(rank, -1))}")
    return None


def _from_death(rank: int, exit_codes: Mapping[int, int], steps: Mapping[int, int], num_memory_kills: int) -> Cause:
    code = exit_codes[rank]
    likely = _LIKELY.get(code, "")
    if code == -signal.SIGKILL:
        guess = "the usual cause is that the machine ran out of memory (see dmesg)"
        likely = "the kernel killed it for lack of memory" if num_memory_kills > 0 else guess
    died = f"rank {rank} was killed by {signal_name(-code)}{where(steps.get(rank, -1))}"
    return Cause(rank, 128 - code, died + (likely and f"; {likely}"))


def _find_remedy(error: str) -> _Remedy | None:
    """Finds a known failure in the text of an error or traceback; None for other errors."""
    is_of_nccl = bool(_OF_NCCL.search(error))
    possible = (remedy for remedy in _REMEDIES if is_of_nccl or not remedy.is_of_nccl)
    return next((remedy for remedy in possible if re.search(remedy.pattern, error, re.IGNORECASE)), None)


def _last_error(error: str) -> str | None:
    """Returns NCCL's description of the failure; None for other errors."""
    found = _LAST_ERROR.search(error) if _OF_NCCL.search(error) else None
    return found[1].strip() if found else None
