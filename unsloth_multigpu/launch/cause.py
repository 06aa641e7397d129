"""Finds the rank that failed first, its error and what to do. A pure function of the ranks' events and exit codes."""

from __future__ import annotations

import re
import signal
import textwrap
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from unsloth_multigpu.errors import DistributedError, RankTimeoutError
from unsloth_multigpu.wire.event import Event
from unsloth_multigpu.wire.heartbeat import Heartbeat
from unsloth_multigpu.words import signal_name

# Errors of gloo, NCCL and similar backends, and of the store. They are raised because *another* rank is gone: a
# consequence, not the cause.
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
# NCCL's own description of an error. Before it stand a place in torch's sources and the kind of failure.
_LAST_ERROR = re.compile(r"^Last error:[ \t]*\n?[ \t]*(\S[^\n]*)", re.MULTILINE)
_INTERFACE = "Set NCCL_SOCKET_IFNAME to the network interface that leads to the other nodes (`ip route get ADDRESS`)"

# NCCL reports this for a lost rank, too. Its other known failures occurred on the rank that reports them.
_TIMED_OUT = r"connect\b[^\n]*timed out"
# Known failures of NCCL: a regular expression that finds one in an error, and what to do.
_REMEDIES = {
    r"/dev/shm\b[^\n]*No space left|No space left[^\n]*/dev/shm": (
        "NCCL needs shared memory, and a Docker container has 64 MiB by default. Start it with --ipc=host or "
        "--shm-size=8g; in Kubernetes mount an emptyDir with medium: Memory at /dev/shm."
    ),
    r"Duplicate GPU": (
        "Two ranks use one GPU, and NCCL allows one rank per GPU. Start no more ranks than GPUs; MIG instances of one "
        "GPU count as one."
    ),
    r"out of memory": (
        "The GPU has no memory left for NCCL's buffers. See in nvidia-smi which programs use it, and free memory: "
        "smaller micro-batches (max_tokens_per_micro_batch, per_device_train_batch_size), or shard."
    ),
    r"no socket interface": f"{_INTERFACE}.",
    _TIMED_OUT: f"{_INTERFACE}, or open the firewall between the nodes.",
    r"peer access|peer mapping|\bP2P\b|unhandled cuda error|ncclUnhandledCudaError": (
        "`unsloth-multigpu doctor` tests copies between GPUs. If direct copies fail, set NCCL_P2P_DISABLE=1."
    ),
}


@dataclass(frozen=True)
class Cause:
    """Why a run ended, in one sentence.

    Args:
        rank: The rank that failed first; -1 if several ranks hang and none is to blame.
        exit_code: Exit code of the whole command, 1..255.
        traceback: Text of the exception, or the stacks of a hang; "" if there is none.
    """

    rank: int
    exit_code: int
    message: str
    traceback: str = ""


def find_cause(
    events: Sequence[Event],
    exit_codes: Mapping[int, int],
    gone: Collection[int] = (),
    beats: Mapping[int, Heartbeat] | None = None,
    *,
    num_memory_kills: int = 0,
    is_one_node: bool = True,
) -> Cause:
    """Finds the cause in this order: hangs, a rank's own errors, early exits, kills by a signal, broken connections.

    Args:
        events: All ranks' events of one attempt, oldest first.
        exit_codes: Exit code of each failed rank; -N = ended by signal N.
        gone: Ranks that had exited before the supervisor stopped the others.
        num_memory_kills: Processes killed by the kernel for lack of memory during this attempt.
        is_one_node: False if a rank of another node, whose events are not known here, may be the cause.
    """
    hang = next((e for e in events if e.kind == HANG), None)
    if hang is not None:
        return Cause(hang.rank, RankTimeoutError.exit_code, str(hang.facts["message"]), str(hang.facts["stacks"]))
    events = [replace(e, kind="exception") if e.kind == INTERRUPTED else e for e in events]
    steps = {rank: beat.step for rank, beat in (beats or {}).items()}
    exceptions = [e for e in events if e.kind == "exception"]
    own = [e for e in exceptions if not _is_communication_error(e)]
    if own:
        return _from_exception(next((e for e in own if not _SECOND_HAND.match(_error(e))), own[0]))
    # An exiting rank causes a connection error on another rank, and may end only after it, perhaps by the signal that
    # the supervisor sends to the survivors.
    leaving = {e.rank for e in events if e.kind == "exiting" and exceptions and e.time_s < exceptions[0].time_s}
    codes = {rank: exit_codes.get(rank, 0) for rank in {*gone, *exit_codes, *leaving}}
    ended = {r for r, code in codes.items() if code >= 0 or (r in leaving and code in _SENT_TO_SURVIVORS)}
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
        # A hang or a refusal does not show where a rank is.
        if not is_repeated and event.kind not in (HANG, "refused"):
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
    # Failures of NCCL itself look like broken connections. Our own error about memory may contain such texts, too.
    is_own = "ran out of memory" in _error(event) or _find_failure(_error(event)) not in (None, _TIMED_OUT)
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


def _first_line(error: str) -> str:
    """Shortens an error to one line. The whole text is in the traceback."""
    line = error.strip().split("\n")[0].rstrip(".: ")
    if "ran out of memory" not in line and _OF_NCCL.search(error) and (said := _LAST_ERROR.search(error)):
        line = f"{line.partition(':')[0]}: {said[1].strip()}"
    return textwrap.shorten(_SOURCE_LINE.sub("", line), _MAX_CHARACTERS, placeholder=" ...")


def _traceback(event: Event) -> str:
    """Returns the traceback, with the hint for a known failure if the error has none."""
    text = str(event.facts["traceback"])
    # An error of the script may come from one of NCCL, which is in the traceback alone.
    failure = None if "Hint: " in _error(event) else _find_failure(text + _error(event))
    return text + ("" if failure is None else f"Hint: {_REMEDIES[failure]}\n")


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


def _find_failure(error: str) -> str | None:
    """Finds a known failure of NCCL in the text of an error, as a key of `_REMEDIES`; None for others."""
    possible = _REMEDIES if _OF_NCCL.search(error) else ()
    return next((pattern for pattern in possible if re.search(pattern, error, re.IGNORECASE)), None)


def find_refusal(events: Sequence[Event]) -> tuple[int, str] | None:
    """Returns exit code and text of a training that was refused, in a run whose ranks all exited with 0; else None.

    A script that catches the refusal and saves its untrained model would exit with 0. A later "trained" of the rank
    withdraws it.
    """
    last = {event.rank: event for event in events if event.kind in ("refused", "trained")}
    for _, event in sorted(last.items()):
        if event.kind == "refused":
            step = int(event.facts["num_steps"])
            what = "train() was refused" if step < 1 else f"train() was ended after step {step}"
            return int(event.facts["exit_code"]), f"{what}: {event.facts['error']}; the script continued without it"
    return None
