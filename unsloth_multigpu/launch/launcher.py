"""DDPLauncher: turns this process into the supervisor of N ranks of one command. Torch elastic is the engine."""

from __future__ import annotations

import os
import signal
import sys
import uuid
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from unsloth_multigpu.errors import LaunchError
from unsloth_multigpu.launch.allocator import allocator_variables
from unsloth_multigpu.launch.cause import INTERRUPTED, Cause
from unsloth_multigpu.launch.nodes import shared_seed, socket_interfaces
from unsloth_multigpu.launch.refusal import find_refusal
from unsloth_multigpu.launch.stop import RestartRefused, Stop, describe_stop, handlers_kept
from unsloth_multigpu.launch.watch import Watch
from unsloth_multigpu.logs import get_logger, tell
from unsloth_multigpu.options import (
    MultiGPUConfig,
)
from unsloth_multigpu.wire.beat import read_beats
from unsloth_multigpu.wire.child import read_tail
from unsloth_multigpu.wire.context import RunContext
from unsloth_multigpu.wire.folder import exclusive_log_dir, private_dir
from unsloth_multigpu.wire.process import threads_of_each
from unsloth_multigpu.wire.run import job_of, shown_command, write_run

logger = get_logger(__name__)


@dataclass(frozen=True)
class DDPLauncher:
    """Starts the ranks of one node and watches over them until the last one has ended.

    Args:
        command: What every rank executes.
        num_ranks: Ranks to start; rank r drives device r.
        config: The run's options.
        saves_when_stopped: A signal gives the ranks `config.grace_s` to save; False = it ends them at once.
    """

    command: Sequence[str]
    num_ranks: int
    config: MultiGPUConfig
    saves_when_stopped: bool = True

    def run(self) -> int:
        """Blocks until all ranks have ended.

        Returns:
            The exit code of the rank that failed first, 128 + n where signal n ended it, that of a refused training
            which no later one made up for, 0 if all went well;
            -n where signal n was sent to this process, which should then end by it.

        Raises:
            LaunchError: The log folder cannot be written.
        """
        _load_engine()
        with ExitStack() as stack:
            # Until the folder is gone.
            stack.enter_context(handlers_kept())
            run_dir = stack.enter_context(private_dir())
            log_dir = stack.enter_context(exclusive_log_dir(Path(self.config.log_dir), self.num_ranks))
            write_run(run_dir, job_of(self.command), shown_command(self.command), self.num_ranks, log_dir)
            run_id = self.config.rdzv_id or uuid.uuid4().hex
            os.environ.update(rank_environment(self.config, self.num_ranks, run_dir, log_dir, run_id, os.environ))
            logger.debug("starting ranks=%d, ranks above 0 write to %s/rank_N.log", self.num_ranks, log_dir)
            watch = stack.enter_context(
                Watch(run_dir, _tell_restart, log_dir=log_dir, num_ranks=self.num_ranks, config=self.config)
            )
            grace_s = self.config.grace_s if self.saves_when_stopped else 0.0
            stop = stack.enter_context(Stop(run_dir, self.num_ranks, grace_s, _end_engine))
            return _Supervisor(self, run_id, run_dir, log_dir, watch, stop).run()


@dataclass(frozen=True)
class _Supervisor:
    """Waits for the ranks of a run and tells the user how they ended."""

    launcher: DDPLauncher
    run_id: str
    run_dir: Path
    log_dir: Path
    watch: Watch
    stop: Stop

    def run(self) -> int:
        """See `DDPLauncher.run`."""
        from torch.distributed.elastic.multiprocessing import SignalException
        from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

        try:
            try:
                self._start()
            finally:
                self.stop.rest()
        except LaunchError as apart:
            return self._tell_apart(apart)
        except SignalException as stopped:
            self.stop.signal_number = self.stop.signal_number or int(stopped.sigval)
            self.stop.kill_forgotten()
            return self._tell_stop()
        except RestartRefused as refused:
            tell(f"\nunsloth_multigpu: {refused}\n")
            return self._tell_failure({})
        except ChildFailedError as failed:
            return self._tell_failure({rank: failure.exitcode for rank, failure in failed.failures.items()})
        # A signal makes train() raise. A script may catch that and end with exit code 0.
        if self.stop.signal_number:
            self._tell_stop()
        return self._tell_refusal()

    def _start(self) -> None:
        from unsloth_multigpu.launch.engine import run_elastic
        from unsloth_multigpu.launch.membership import make_handler
        from unsloth_multigpu.launch.rendezvous import Rounds

        self.stop.begin()

        def begin_round(attempt: int) -> None:
            self.stop.begin_round(attempt)
            self.watch.begin_round(attempt)

        def begin_start() -> None:
            self.watch.begin_start()
            self.stop.begin_start()

        def turn() -> None:
            self.watch.check()
            self.stop.turn()

        command, num_ranks, config = self.launcher.command, self.launcher.num_ranks, self.launcher.config
        rounds = Rounds(make_handler(config, self.run_id, self.watch.hear), begin_round, begin_start, turn)
        run_elastic(command, num_ranks, config, self.run_id, self.run_dir, rounds)

    def _tell_apart(self, apart: LaunchError) -> int:
        self.watch.close()
        kinds = set() if self.watch.has_failed else {event.kind for event in self.watch.events()}
        if "exception" in kinds and not self.watch.is_told:
            # This error is why the ranks were to be started again.
            _tell(self.watch.cause({}), self.log_dir, self.launcher.num_ranks)
        tell(f"\nunsloth_multigpu: {apart}\n")
        return apart.exit_code

    def _tell_refusal(self) -> int:
        """The exit code of a run of which all ranks ended with 0."""
        self.watch.close()
        refusal = find_refusal(self.watch.events())
        if refusal is None:
            return 0
        tell(f"\nunsloth_multigpu: {refusal} (exit code {refusal.exit_code})\n")
        return refusal.exit_code

    def _tell_failure(self, exit_codes: dict[int, int]) -> int:
        self.watch.close()
        kinds = {event.kind for event in self.watch.events()}
        if self.stop.is_asked() and kinds & {"stopped", INTERRUPTED} and "exception" not in kinds:
            return self._tell_stop()
        cause = self.watch.cause(exit_codes)
        _tell(cause, self.log_dir, self.launcher.num_ranks)
        return cause.exit_code

    def _tell_stop(self) -> int:
        self.watch.close()
        step = max((beat.step for beat in read_beats(self.run_dir).values()), default=-1)
        config = self.launcher.config
        text = describe_stop(self.stop, self.watch.events(), step, config.grace_s, config.resume)
        tell(f"\nunsloth_multigpu: {text}\n")
        return -self.stop.signal_number


def _load_engine() -> None:
    """Imports torch's engine before a signal has a handler: within this import, the handler could not use it."""
    import unsloth_multigpu.launch.engine
    import unsloth_multigpu.launch.membership
    import unsloth_multigpu.launch.rendezvous  # noqa: F401


def _end_engine(signal_number: signal.Signals) -> NoReturn:
    from torch.distributed.elastic.multiprocessing import SignalException

    raise SignalException(f"stopped by {signal_number.name}", signal_number)


def rank_environment(
    config: MultiGPUConfig, num_ranks: int, run_dir: Path, log_dir: Path, run_id: str, environment: Mapping[str, str]
) -> dict[str, str]:
    """The variables that all ranks get in addition to those of torch elastic. What the user has set is kept.

    CPU threads are divided: without a limit every rank would start one thread for each core.
    """
    from unsloth_multigpu.launch.draw import generator_digests

    context = RunContext(
        run_dir=str(run_dir),
        supervisor_pid=os.getpid(),
        log_dir=str(log_dir),
        seed=shared_seed(config),
        draws=generator_digests(),
        run_id=run_id,
    )
    defaults = {
        # The order of a set of strings, and choices that the script makes without a seed, are the same on all ranks.
        "PYTHONHASHSEED": str(context.seed),
        "OMP_NUM_THREADS": str(threads_of_each(num_ranks)),
        **socket_interfaces(config),
        **({} if config.device == "cpu" else allocator_variables(environment)),
    }
    # "random" asks for any order; the ranks need one.
    is_unset = {name: environment.get(name, "") in ("", "random") for name in defaults}
    return {**{name: value for name, value in defaults.items() if is_unset[name]}, **context.variables()}


def exit_like(code: int) -> None:
    """Ends this process as `DDPLauncher.run` says: with an exit code, or by the signal -code."""
    try:
        for stream in (sys.stdout, sys.stderr):
            # The reader of the stream may be gone. The stream is None or closed if the process was started so.
            with suppress(OSError, ValueError, AttributeError):
                stream.flush()
        if code < 0:
            signal.signal(-code, signal.SIG_DFL)
            os.kill(os.getpid(), -code)
    finally:
        # The script must not continue in the supervisor, not even in an `except SystemExit` around the user's line.
        os._exit(code if code >= 0 else 128 - code)


def _tell(cause: Cause, log_dir: Path, num_ranks: int) -> None:
    if cause.is_of_all:
        # Rank 0 has said it on the terminal, and the logs of the others repeat it.
        tell(f"\n{cause.traceback}unsloth_multigpu: {cause.message}.\n")
        return
    tell(f"\n{cause.traceback}unsloth_multigpu: {cause.message}. The other ranks were stopped.\n")
    log = log_dir / f"rank_{cause.rank}.log"
    if not cause.traceback:
        tell("".join(f"  [rank {cause.rank}] {line[:200]}\n" for line in read_tail(log, 15).splitlines()))
    if num_ranks > 1:
        tell(f"unsloth_multigpu: logs of ranks that have no terminal: {log_dir}/rank_N.log\n")


def _tell_restart(cause: Cause, attempt: int) -> None:
    tell(f"\n{cause.traceback}unsloth_multigpu: {cause.message}. Starting all ranks again ({attempt}).\n")
