"""Heartbeats: a page of shared memory per rank. The rank writes it without a system call; its supervisor reads it."""

from __future__ import annotations

import enum
import mmap
import os
import struct
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from unsloth_multigpu.report import Figures


class Phase(enum.IntEnum):
    """What the main thread of a rank is doing: a number, in words, and its limit as a multiple of `hang_timeout_s`."""

    doing: str
    limit_factor: int

    def __new__(cls, number: int, doing: str, limit_factor: int) -> Phase:
        phase = int.__new__(cls, number)
        phase._value_, phase.doing, phase.limit_factor = number, doing, limit_factor
        return phase

    SCRIPT = 0, "outside train()", 10  # The user's own code.
    SETUP = 1, "before the first step", 10  # From the call of `train()` to its first step.
    DATA = 2, "getting samples", 1
    COMPUTE = 3, "computing", 1  # Forward and backward passes.
    UPDATE = 4, "updating weights", 1  # Optimizer and logging after the last backward pass of a step.
    EVALUATE = 5, "evaluating", 5
    SAVE = 6, "saving", 10
    COMPILE = 7, "compiling", 10  # torch.compile.
    ENDED = 8, "after the last step", 10  # No more batches.
    GENERATE = 9, "generating samples", 10  # Completions, as in GRPO.
    WARM_UP = 10, "computing", 10  # COMPUTE in the first step, which compiles kernels and allocates memory.
    FILL = 11, "getting the first samples of an epoch", 5  # DATA of a stream, which fills its buffer.
    AGREE = 12, "asking the other ranks what comes next", 1  # After a step: stop, save or evaluate?
    # Callbacks of the script and of libraries, which may generate a sample or wait for a tracker's server.
    CALLBACKS = 13, "in a callback", 5


@dataclass(frozen=True)
class Heartbeat:
    """The content of a page.

    Args:
        step: Last finished optimizer step, -1 before the first training.
        phase: What the main thread is doing.
        micro_batch: Forward-backward passes finished in the current step.
        progress_s: Last report of the main thread, on `time.monotonic`'s clock.
        alive_s: Last report of the pulse thread, on the same clock; 0.0 before the first one.
        collective: Number of the last collective that this rank began; -1 if not known.
        longest_s: Longest time between two reports of the main thread within the work of a step: a micro-batch, or all
            of the device's queued work when the main thread waited for it. 0.0 before the first step.
        figures: Figures of the training.
        pid: Process id of the rank.
        device: Name of the device of the training, "" before the first training.
        device_id: The driver's id of that device; "" without one, as for the CPU.
        first_step: Short result of the comparison of the first step with one process; "" before it.
    """

    step: int = -1
    phase: Phase = Phase.SCRIPT
    micro_batch: int = 0
    progress_s: float = 0.0
    alive_s: float = 0.0
    collective: int = -1
    longest_s: float = 0.0
    figures: Figures = field(default_factory=Figures)
    pid: int = -1
    device: str = ""
    device_id: str = ""
    first_step: str = ""


# Written by the main thread in `mark`: step, phase, micro-batch, time, longest time.
_MAIN = struct.Struct("@qqqdd")
# Written by the pulse thread: time, number of the collective.
_PULSE = struct.Struct("@dq")
# Written by the main thread once a step: the fields of `Figures`, -1 for None; process id, device, its id, first step.
_TRAINING = struct.Struct("@qqqqqdqqddd q64s48s64s")
_PULSE_OFFSET, _TRAINING_OFFSET, _SIZE = 64, 128, 512
# Phases in which the main thread launches work or waits for the device.
_WORKING = (Phase.COMPUTE, Phase.WARM_UP, Phase.UPDATE)
# The time of the first step, in which kernels are compiled, is ignored after this many more steps.
_NUM_STEPS_TO_FORGET = 4


class HeartbeatPage:
    """Writes a rank's page. Without a `run_dir` the page is not shared, and nobody reads it.

    Attributes:
        spent_s: Seconds of the main thread in each phase so far. A device works asynchronously: its time counts for the
            phase that waits for it.
    """

    def __init__(self, run_dir: str | os.PathLike[str] | None, rank: int) -> None:
        self._memory = mmap.mmap(-1, _SIZE) if run_dir is None else _map(Path(run_dir, f"beat_rank_{rank}"))
        self.step = -1
        self.phase = Phase.SCRIPT
        self.micro_batch = 0
        self._is_working = False
        self._marked_s = time.monotonic()
        self.spent_s = dict.fromkeys(Phase, 0.0)
        self._num_steps = 0
        self._longest_s = {"first step": 0.0, "later": 0.0}
        self._figures = Figures()
        self._texts = dict.fromkeys(("device", "device_id", "first_step"), b"")
        # Clear the page of an earlier attempt.
        self._put(_PULSE_OFFSET, _PULSE.pack(0.0, -1))
        self.note()
        self.mark(Phase.SCRIPT)

    def mark(
        self,
        phase: Phase | None = None,
        *,
        step: int | None = None,
        micro_batch: int | None = None,
        is_done: bool = False,
    ) -> None:
        """Reports progress of the main thread; see `Heartbeat`. Omitted values stay. Takes a microsecond.

        `is_done`: the work of a step is done. Until the next phase, callbacks run.
        """
        now_s = time.monotonic()
        if self._is_working:
            key = "later" if self._num_steps else "first step"
            self._longest_s[key] = max(self._longest_s[key], now_s - self._marked_s)
        self.spent_s[self.phase] += now_s - self._marked_s
        self.phase = self.phase if phase is None else phase
        self.step = self.step if step is None else step
        self.micro_batch = self.micro_batch if micro_batch is None else micro_batch
        self._marked_s = now_s
        if is_done:
            self._num_steps += 1
            self._is_working = False
        elif phase is not None:
            # Before the first micro-batch of a step, UPDATE means the time between two steps.
            self._is_working = phase in _WORKING and not (phase == Phase.UPDATE and self.micro_batch == 0)
        forgets = self._num_steps > _NUM_STEPS_TO_FORGET
        longest_s = self._longest_s["later"] if forgets else max(self._longest_s.values())
        self._put(0, _MAIN.pack(self.step, self.phase, self.micro_batch, now_s, longest_s))

    def note(self, figures: Figures | None = None, **texts: str) -> None:
        """Writes the figures of the training, and texts: `device` and `first_step` (64 characters), `device_id` (48).

        See `Heartbeat`. Omitted values stay. Called by the main thread once a step; takes some microseconds.
        """
        self._figures = figures or self._figures
        self._texts |= {name: text.encode("ascii", "replace") for name, text in texts.items()}
        values = (-1 if value is None else value for value in vars(self._figures).values())
        self._put(_TRAINING_OFFSET, _TRAINING.pack(*values, os.getpid(), *self._texts.values()))

    @contextmanager
    def within(self, phase: Phase | None) -> Iterator[None]:
        """Marks `phase` within the context, None = the current one, and the earlier phase at its end."""
        before = self.phase
        self.mark(phase)
        try:
            yield
        finally:
            self.mark(before)

    def pulse(self, collective: int) -> None:
        """Called only by the pulse thread; see `Heartbeat`."""
        self._put(_PULSE_OFFSET, _PULSE.pack(time.monotonic(), collective))

    def _put(self, offset: int, data: bytes) -> None:
        # Not `pack_into`, which first writes zeros that a reader could see.
        self._memory[offset : offset + len(data)] = data


def read_beats(run_dir: str | os.PathLike[str]) -> dict[int, Heartbeat]:
    """Returns the latest heartbeat of every rank that has created its page, in order. Pages outlive their ranks."""
    found = {}
    for path in Path(run_dir).glob("beat_rank_*"):
        with suppress(FileNotFoundError):  # The run has ended meanwhile.
            data = path.read_bytes()
            if len(data) == _SIZE:  # A shorter page is just being created, or the disk is full.
                found[int(path.name.rpartition("_")[2])] = _parse(data)
    return dict(sorted(found.items()))


def _parse(data: bytes) -> Heartbeat:
    step, phase, micro_batch, progress_s, longest_s = _MAIN.unpack_from(data, 0)
    alive_s, collective = _PULSE.unpack_from(data, _PULSE_OFFSET)
    *values, pid, device, device_id, first_step = _TRAINING.unpack_from(data, _TRAINING_OFFSET)
    figures = Figures(*(None if value < 0 else value for value in values))
    texts = [text.rstrip(b"\0").decode("ascii") for text in (device, device_id, first_step)]
    main = (step, Phase(phase), micro_batch, progress_s)  # type: ignore[call-arg]
    return Heartbeat(*main, alive_s, collective, longest_s, figures, pid, *texts)


def _map(path: Path) -> mmap.mmap:
    file = os.open(path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
    try:
        # Allocates the page now: on a full disk, writing to it later would kill the rank by SIGBUS.
        os.posix_fallocate(file, 0, _SIZE)
        return mmap.mmap(file, _SIZE)
    finally:
        os.close(file)
