"""Which rank failed first, and of what? A pure decision over what the ranks said and how their processes ended."""

from __future__ import annotations

import re
import signal
import textwrap
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

from unsloth_multigpu.errors import DistributedError, RankTimeoutError
from unsloth_multigpu.launch.refusal import MADE_UP_FOR, REFUSED
from unsloth_multigpu.launch.remedy import find_remedy, last_error
from unsloth_multigpu.wire.event import Event
from unsloth_multigpu.wire.heartbeat import Heartbeat
from unsloth_multigpu.words import gib, signal_name

# Errors of gloo, NCCL, its like on other devices, and the store that say that *another* rank went away: a consequence,
# never the cause.
_COMMUNICATION_ERROR = re.compile(
    r"gloo/transport|Connection (closed|reset|refused)|connectFullMesh|[NXH]CCL|oneCCL|DistBackendError"
    r"|DistNetworkError|DistStoreError|Timed out waiting|Broken pipe|Socket Timeout|RankTimeoutError",
    re.IGNORECASE,
)

# Events by which a rank says why it ends.
_ENDS = ("left_training", "exception")
# Exit codes of ranks that the supervisor has stopped.
_SENT_TO_SURVIVORS = (-signal.SIGTERM, -signal.SIGINT)
# A signal has asked the run to stop.
STOPS = ("stopping", "stopped")
# A KeyboardInterrupt has ended the script. It is the script's own unless the supervisor received a signal.
INTERRUPTED = "interrupted"
# Of an error, in the line that names its rank.
_MAX_CHARACTERS = 160
_LONG_PATH = re.compile(r"(?<![^\s'\"(])/\S{24,}/([^/\s]+)")
# The line of C++ that gloo and c10d put before what has happened; it is longer than that, and in one word.
_OF_C = re.compile(r"\[[^\s\]]+\.(?:cc|cpp|h|hpp|cu):\d+\] ")
# A script computes with weights of a sharded model as if they were whole.
_OF_SHARDS = re.compile(
    r"^\w*RuntimeError: .*(mixed torch\.Tensor and DTensor"
    r"|FSDP (requires a single root module|state has already been lazily initialized))"
)
# Of the ranks that wait for another one before there is a process group (`group.board`).
_HAS_NOT_COME = re.compile(r"^RankTimeoutError: (ranks? (\d+)[\d, ]* did not come to open the process group .*)\.")
# A hang is reported by the supervisor, not by the rank.
HANG = "hang"


@dataclass(frozen=True)
class Memory:
    """What is known of the memory when a rank died.

    Args:
        num_kills: Processes that the kernel has killed for lack of memory since the run began.
        held_bytes: What each rank held of the machine's memory when it was last seen.
    """

    num_kills: int = 0
    held_bytes: Mapping[int, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Cause:
    """Why a run ended.

    Args:
        rank: The rank that failed first; -1 where ranks hang together and none is to blame.
        exit_code: What the whole command exits with, 1..255.
        message: One sentence.
        traceback: The exception's text, or the stacks of a hang; "" where the process left none.
        is_of_all: All ranks of this node ended in the same way: the number of ranks is not the reason.
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
    memory: Memory | None = None,
    is_one_node: bool = True,
    num_ranks: int | None = None,
) -> Cause:
    """Orders what is known by blame: hangs, errors of a rank's own, early exits, deaths, then broken connections.

    Args:
        events: All ranks' events of one attempt, oldest first.
        exit_codes: Exit code of each rank that failed; negative = the number of the signal that ended it.
        gone: Ranks whose process had ended before the supervisor stopped the others.
        beats: Where each rank was last.
        memory: What is known of the memory.
        is_one_node: False where ranks of other nodes, whose events are not here, can be the cause.
        num_ranks: Ranks of this node; None = those that have reached the line.
    """
    memory = memory or Memory()
    events = [replace(e, kind="exception") if e.kind == INTERRUPTED else e for e in events]
    hang = next((e for e in events if e.kind == HANG), None)
    if hang is not None:
        return Cause(hang.rank, RankTimeoutError.exit_code, str(hang.facts["message"]), str(hang.facts["stacks"]))
    steps = {rank: beat.step for rank, beat in (beats or {}).items()}
    exceptions = [e for e in events if e.kind == "exception"]
    own = sorted((e for e in exceptions if not _is_communication_error(e)), key=_is_second_hand)
    ranks = {e.rank for e in events if e.kind == "started"}
    if num_ranks is not None and len(ranks) < num_ranks:
        ranks = set()  # The others are still on their way: nothing is known to be of all.
    if own:
        return _from_exceptions_of_all(own, ranks) or _from_exception(own[0])
    # A process may take longer to end than the connection error that its exit makes elsewhere.
    leaving = {e.rank for e in events if e.kind == "exiting" and exceptions and e.time_s < exceptions[0].time_s}
    # One that was leaving may be ended by what the supervisor sends to the survivors.
    leaving = {r for r in leaving if exit_codes.get(r, 0) >= 0 or exit_codes[r] in _SENT_TO_SURVIVORS}
    left = find_early_exit(events, {r for r in {*gone, *exit_codes} if exit_codes.get(r, 0) >= 0} | leaving)
    if left is not None:
        return _from_early_exit(left, exit_codes, left.rank in gone, steps.get(left.rank, -1))
    # One that has said why it ends was killed because its teardown took too long.
    silent = {r: c for r, c in exit_codes.items() if r not in {e.rank for e in exceptions}}
    if alike := _from_exits_of_all(events, silent, ranks, steps):
        return alike
    if ended := _from_exit_codes(silent, gone, steps, memory):
        return ended
    if missing := next(filter(None, map(_from_missing, exceptions)), None):
        return missing
    if exceptions and not is_one_node:
        rank, step = exceptions[0].rank, exceptions[0].step
        lost = f"rank {rank} lost its connection to another node{where(step)}"
        return Cause(rank, DistributedError.exit_code, f"{lost}; that node's own message names the cause")
    if exceptions:
        return _from_exception(exceptions[0])
    failed = {r for r, c in exit_codes.items() if c}
    rank = min(failed & set(gone) or failed)
    return Cause(rank, 128 - exit_codes[rank], _death_message(rank, exit_codes[rank], steps.get(rank, -1), memory))


def find_early_exit(events: Sequence[Event], gone: Collection[int]) -> Event | None:
    """The last word of a rank that is gone without an error while another rank is inside `train()`.

    Training is collective: the other ranks would wait forever for a rank that is missing.

    Args:
        events: All ranks' events of one attempt, oldest first.
        gone: Ranks whose process has ended.
    """
    if any(event.kind in STOPS for event in events):
        return None  # While the run stops, one rank may leave while another still saves; `grace_s` limits that.
    last: dict[int, Event] = {}
    for event in events:
        if event.kind in (HANG, REFUSED, MADE_UP_FOR):  # These say nothing of where a rank is.
            continue
        is_repeated = event.kind == "exiting" and event.rank in last and last[event.rank].kind in _ENDS
        if not is_repeated:
            last[event.rank] = event
    waits = {r for r, e in last.items() if e.kind == "training" or _is_communication_error(e)}
    for event in sorted(last.values(), key=lambda e: e.time_s):
        has_left = event.kind == "left_training" or (event.rank in gone and event.kind != "exception")
        if has_left and not _is_communication_error(event) and waits - {event.rank}:
            return event
    return None


def _from_early_exit(left: Event, exit_codes: Mapping[int, int], is_gone: bool, step: int) -> Cause:
    code = int(left.facts.get("exit_code", max(0, exit_codes.get(left.rank, 0))))
    if left.kind == "left_training" and "exit_code" not in left.facts:
        # The process has not exited: train() raised an error, and the script caught it.
        error = str(left.facts["error"]).strip().split("\n")[0].rstrip(".: ")
        ended = f" and ended with exit code {code}" if is_gone else ""
        message = f"rank {left.rank} left train() by an error{where(step)}, which its script caught{ended}"
        hint = "Hint: Catch errors of train() on all ranks or on none; the others wait for the one that has left.\n"
        return Cause(left.rank, code or 1, f"{message}, while other ranks were training: {error}", hint)
    how = f"left with exit code {code}{where(step)}"
    return Cause(left.rank, code or 1, f"rank {left.rank} {how}, while other ranks were training")


def _is_communication_error(event: Event) -> bool:
    error = str(event.facts.get("error", ""))
    remedy = find_remedy(error)
    # NCCL's own failures read like broken connections; one of memory is told in our words.
    is_own = "ran out of memory" in error or (remedy is not None and remedy.is_own)
    return not is_own and bool(_COMMUNICATION_ERROR.search(error))


def _is_second_hand(event: Event) -> bool:
    """True for an error that says that another rank's error caused it."""
    return re.match(r"DistributedError: rank \d+ failed ", str(event.facts.get("error", ""))) is not None


def _from_exception(event: Event) -> Cause:
    message = f"rank {event.rank} failed{where(event.step)}: {_first_line(event)}"
    return Cause(event.rank, int(event.facts["exit_code"]), message, str(event.facts["traceback"]) + _hint(event))


def _from_missing(event: Event) -> Cause | None:
    """A rank that another one has waited for; None where the error is another one."""
    found = _HAS_NOT_COME.match(str(event.facts["error"]))
    if found is None:
        return None
    code, text = int(event.facts["exit_code"]), str(event.facts["traceback"])
    return Cause(int(found[2]), code, f"{found[1]}; it hangs, or takes long, before the training", text)


def _from_exceptions_of_all(own: Sequence[Event], ranks: Collection[int]) -> Cause | None:
    """An error that every rank has raised by itself, as of a missing file; None where it is that of some."""
    of_rank = {event.rank: event for event in reversed(own)}
    first = of_rank[min(of_rank)]
    is_of_all = not set(ranks) - set(of_rank) and len({str(e.facts["traceback"]) for e in of_rank.values()}) == 1
    # Later the text of such an error tells what one rank has found, and which ranks still raise it is chance.
    if len(ranks) < 2 or not is_of_all or first.step > 0:
        return None
    message = f"all {len(ranks)} ranks failed alike{where(first.step)}: {_first_line(first)}"
    text = str(first.facts["traceback"]) + _hint(first)
    return Cause(first.rank, int(first.facts["exit_code"]), message, text, is_of_all=True)


def _from_exits_of_all(
    events: Sequence[Event], exit_codes: Mapping[int, int], ranks: Collection[int], steps: Mapping[int, int]
) -> Cause | None:
    """All ranks left with one code of their own, as after wrong arguments; None where it is not so."""
    exiting = {event.rank for event in events if event.kind == "exiting"}
    codes = set(exit_codes.values())
    is_known = not set(ranks) - exiting and not set(ranks) - set(exit_codes)
    if len(ranks) < 2 or not is_known or len(codes) != 1 or min(codes) <= 0:
        return None
    step = max((steps.get(rank, -1) for rank in ranks), default=-1)
    if step > 0:
        return None
    (code,) = codes
    return Cause(0, code, f"all {len(ranks)} ranks exited with code {code}{where(step)}", is_of_all=True)


def _first_line(event: Event) -> str:
    """The text above has all of a long one."""
    error = str(event.facts["error"]).strip()
    line = error.split("\n")[0].rstrip(".: ")
    if "ran out of memory" not in line and (said := last_error(error)):
        line = f"{line.partition(':')[0]}: {said}"
    line = _OF_C.sub("", line)
    if len(line) > _MAX_CHARACTERS:  # What has happened may stand behind a path.
        line = _LONG_PATH.sub(r".../\1", line)
    return textwrap.shorten(line, _MAX_CHARACTERS, placeholder=" ...")


def _hint(event: Event) -> str:
    """What to do about an error whose text does not say it; "" for others."""
    error = str(event.facts["error"])
    if "Hint: " not in error and (remedy := find_remedy(error)):
        return f"Hint: {remedy.hint}\n"
    if error.startswith("EOFError: EOF when reading a line"):
        return "Hint: Rank 0 has no terminal or no more input; pass the value as an argument.\n"
    if _OF_SHARDS.search(error):
        return (
            "Hint: Weights of a sharded model are DTensors, of which each rank has a part. Compute with "
            "p.full_tensor() or, on the part, p.to_local(); make other tensors DTensors with "
            "torch.distributed.tensor.distribute_tensor(t, p.device_mesh, p.placements); call the model itself, not "
            "its layers. Or train without shard, as with a loss over weights, which is exact there.\n"
        )
    return ""


def _from_exit_codes(
    exit_codes: Mapping[int, int], gone: Collection[int], steps: Mapping[int, int], memory: Memory
) -> Cause | None:
    """A death by signal, else an exit with a code of its own; None where there is neither."""
    deaths = {r: c for r, c in exit_codes.items() if c < 0 and c not in _SENT_TO_SURVIVORS}
    # A survivor that did not listen to SIGTERM was killed as well.
    for rank, code in sorted(deaths.items(), key=lambda death: (death[0] not in gone, death[0])):
        return Cause(rank, 128 - code, _death_message(rank, code, steps.get(rank, -1), memory))
    for rank, code in sorted((r, c) for r, c in exit_codes.items() if c > 0):
        return Cause(rank, code, f"rank {rank} exited with code {code}{where(steps.get(rank, -1))}")
    return None


def _death_message(rank: int, code: int, step: int, memory: Memory) -> str:
    held = f"it held {gib(memory.held_bytes[rank], 1)}" if memory.held_bytes.get(rank) else ""
    likely = ""
    if code == -signal.SIGKILL and memory.num_kills > 0:
        likely = "; the kernel killed it for lack of memory" + (held and f", {held}")
    elif code == -signal.SIGKILL:
        likely = "; the usual cause is that the machine ran out of memory (see dmesg" + (held and f"; {held}") + ")"
    elif code in (-signal.SIGSEGV, -signal.SIGBUS, -signal.SIGILL):
        likely = "; a native library crashed, its stack is in the rank's log"
    elif code == -signal.SIGABRT:
        likely = "; NCCL's watchdog or an assertion on the device does that, the reason is in the rank's log"
    return f"rank {rank} was killed by {signal_name(-code)}{where(step)}{likely}"


def where(step: int) -> str:
    """After which step, with a space in front; "" where no Trainer has begun, since a plain loop counts no steps.

    Args:
        step: The last finished one; 0 = `train()` has begun, -1 = it has not.
    """
    if step < 0:
        return ""
    return f" after step {step}" if step else " before the first step"
