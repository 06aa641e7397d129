"""DDPLauncher: the supervisor of the ranks of one node."""

from __future__ import annotations

import itertools
import os
import signal
import time
import uuid
import zlib
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

from unsloth_multigpu.accelerator import allocator_variables
from unsloth_multigpu.errors import ConfigError, LaunchError, PatchError, SetupError, VersionError
from unsloth_multigpu.group.random_state import RANDOM_STATE_FILE, read_seeded_state
from unsloth_multigpu.launch.cause import INTERRUPTED, Cause, find_refusal
from unsloth_multigpu.launch.generation_server import GenerationServer, free_ports
from unsloth_multigpu.launch.nodes import Rendezvous, socket_interfaces
from unsloth_multigpu.launch.stop import Stop, describe_stop, how_to_resume, signals_queued
from unsloth_multigpu.launch.watch import POLL_S, Ranks, Watch, start_ranks
from unsloth_multigpu.logs import get_logger, tell
from unsloth_multigpu.options import MultiGPUConfig
from unsloth_multigpu.wire.child import read_tail
from unsloth_multigpu.wire.context import RunContext
from unsloth_multigpu.wire.event import Event
from unsloth_multigpu.wire.heartbeat import read_beats
from unsloth_multigpu.wire.process import threads_of_each, write_private
from unsloth_multigpu.wire.run import exclusive_log_dir, job_of, private_dir, shown_command, write_run

logger = get_logger(__name__)

# Exit codes of failures that would repeat at each start. The script's own exit codes may mean anything, so after them
# ranks are restarted.
_PERMANENT = frozenset(error.exit_code for error in (ConfigError, SetupError, VersionError, PatchError))


@dataclass
class DDPLauncher:
    """Starts the ranks of one node, watches them until the last one has ended, and restarts them after failures.

    Args:
        command: The command line of every rank.
        num_ranks: Ranks to start; rank r uses device r.
        saves_when_stopped: A signal gives the ranks `config.grace_s` to save; False = it ends them at once.
        devices: Variables that show the generation server its devices.

    Attributes:
        most_ranks: If num_gpus was not given and the first training has too few samples per step for `num_ranks`: the
            number of ranks that it is enough for. Else None.
    """

    command: Sequence[str]
    num_ranks: int
    config: MultiGPUConfig
    saves_when_stopped: bool = True
    devices: Mapping[str, str] = field(default_factory=dict)
    most_ranks: int | None = field(init=False, compare=False, default=None)
    run_dir: Path = field(init=False, compare=False, repr=False)
    log_dir: Path = field(init=False, compare=False, repr=False)
    stop: Stop = field(init=False, compare=False, repr=False)
    rendezvous: Rendezvous = field(init=False, compare=False, repr=False)
    server: GenerationServer = field(init=False, compare=False, repr=False)

    def run(self) -> int:
        """Blocks until all ranks have ended.

        Returns:
            0 after success. The exit code of the rank that failed first, 128 + n if signal n ended it. The exit code of
            a refused training if no later training succeeded. -n if this process received signal n and should now exit
            by it.

        Raises:
            LaunchError: The log folder cannot be written.
        """
        with ExitStack() as stack:
            # First, so that it is closed last, after the folder is removed.
            signals = stack.enter_context(signals_queued())
            self.run_dir = stack.enter_context(private_dir())
            self.log_dir = stack.enter_context(exclusive_log_dir(Path(self.config.log_dir), self.num_ranks))
            write_run(self.run_dir, job_of(self.command), shown_command(self.command), self.num_ranks, self.log_dir)
            run_id = self.config.rdzv_id or uuid.uuid4().hex
            variables = rank_environment(self.config, self.num_ranks, self.run_dir, self.log_dir, run_id, os.environ)
            environment = {**os.environ, **variables, "TORCHELASTIC_RUN_ID": run_id}
            grace_s = self.config.grace_s if self.saves_when_stopped else 0.0
            self.stop = Stop(signals, self.run_dir, self.num_ranks, grace_s)
            self.rendezvous = stack.enter_context(Rendezvous(self.config, run_id, self.num_ranks, read_seeded_state()))
            try:
                codes = (self._run_attempt(attempt, environment) for attempt in itertools.count())
                return next(code for code in codes if code is not None)
            except LaunchError as error:
                self.rendezvous.fail(str(error))
                tell(f"\nunsloth_multigpu: {error}\n")
                return error.exit_code

    def _run_attempt(self, attempt: int, environment: Mapping[str, str]) -> int | None:
        """Runs the ranks once. Returns the exit code of the run, or None if the ranks are to be restarted."""
        first = self.rendezvous.meet(attempt, self.stop.is_asked)
        if first is None or self.stop.is_asked():
            return self._report_stop([])
        write_private(self.run_dir / RANDOM_STATE_FILE, self.rendezvous.random_state)
        # The variables of torchrun. TORCHELASTIC_USE_AGENT_STORE: no rank serves the store at MASTER_ADDR.
        variables = {
            "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1",
            **environment,
            "GROUP_RANK": str(self.rendezvous.node),
            "TORCHELASTIC_RESTART_COUNT": str(attempt),
            "TORCHELASTIC_MAX_RESTARTS": str(self.config.max_restarts),
            "TORCHELASTIC_USE_AGENT_STORE": "True",
        }
        self.server = GenerationServer(self.config, self.devices, self.run_dir, self.log_dir, attempt)
        with self.server, start_ranks(self.command, first, variables, self.log_dir) as ranks:
            watch = Watch(ranks, self.run_dir, self.log_dir, self.config, attempt, self.rendezvous.unheard_s)
            trouble = self._watch_ranks(ranks, watch)
        return self._conclude(attempt, watch, trouble)

    def _watch_ranks(self, ranks: Ranks, watch: Watch) -> str:
        """Waits until all ranks of this node have ended. Returns why another node or the server ended them, or ""."""
        trouble = ""
        try:
            while ranks.living():
                events = watch.look()
                if (signal_number := self.stop.poll(events)) is not None:
                    ranks.send(signal_number)
                # A signal that stops the run may also reach the server, whose end is then not a failure.
                server_error = "" if self.stop.signal_number else self.server.poll(events)
                if not trouble and not watch.has_failed and (trouble := self.rendezvous.trouble() or server_error):
                    watch.must_end = True
                time.sleep(POLL_S)
            watch.look()
        except OSError as error:
            raise LaunchError(
                f"The supervisor can no longer watch its ranks, so it ended them ({type(error).__name__}: {error}).",
                hint=f"If a clean-up job deleted files in {self.run_dir}, exclude this folder from it.",
            ) from error
        return trouble

    def _conclude(self, attempt: int, watch: Watch, trouble: str) -> int | None:
        events, stop = watch.events(), self.stop
        kinds = {event.kind for event in events}
        if stop.signal_number and stop.how != "saved":
            return self._report_stop(events)
        if not watch.has_failed and not trouble:
            trouble = self.rendezvous.finish(stop.is_asked)
            if not trouble:
                return self._report_end(events)
        elif stop.is_asked() and kinds & {"stopped", INTERRUPTED} and "exception" not in kinds:
            return self._report_stop(events)
        if not trouble:
            return self._report_failure(attempt, watch.cause(), events)
        if attempt >= self.config.max_restarts or self.rendezvous.is_over():
            if self.server.error is not None:
                raise self.server.error
            raise LaunchError(f"The run has ended: {trouble}.", hint="Start the command again on all nodes.")
        tell(f"\nunsloth_multigpu: {trouble}. Starting all ranks again ({attempt + 1}).\n")
        return None

    def _report_failure(self, attempt: int, cause: Cause, events: Sequence[Event]) -> int | None:
        if self._needs_fewer_ranks(events):
            return cause.exit_code
        self.rendezvous.fail(cause.message)
        what = f"\n{cause.traceback}unsloth_multigpu: {cause.message}."
        if attempt < self.config.max_restarts:
            is_permanent = any(e.kind == "exception" and e.facts.get("exit_code") in _PERMANENT for e in events)
            if not is_permanent and not self.stop.is_asked():
                tell(f"{what} Starting all ranks again ({attempt + 1}).\n")
                return None
            after = signal.Signals(self.stop.signal_number).name if self.stop.is_asked() else ""
            why = f" after {after}" if after else ": the ranks would fail the same way"
            tell(f"\nunsloth_multigpu: no restart{why}\n")
        tell(f"{what} The other ranks were stopped.\n")
        if not cause.traceback:
            lines = read_tail(self.log_dir / f"rank_{cause.rank}.log", 15).splitlines()
            tell("".join(f"  [rank {cause.rank}] {line[:200]}\n" for line in lines))
            resumes = how_to_resume("the last complete checkpoint, if there is one", self.config.resume)
            tell(f"unsloth_multigpu: {resumes}\n")
        if self.num_ranks > 1:
            tell(f"unsloth_multigpu: logs of ranks without a terminal: {self.log_dir}/rank_N.log\n")
        return cause.exit_code

    def _needs_fewer_ranks(self, events: Sequence[Event]) -> bool:
        refusal = next((event for event in events if "most_ranks" in event.facts), None)
        is_asked_for = self.config.num_gpus is not None or self.config.nnodes > 1
        has_trained = any(event.kind == "trained" for event in events)  # A restart would repeat it.
        if refusal is None or is_asked_for or has_trained or self.stop.is_asked():
            return False
        self.most_ranks = int(refusal.facts["most_ranks"])
        why = str(refusal.facts["error"]).split("\n")[0].partition(": ")[2]
        how = f"Starting again with {self.most_ranks} of {self.num_ranks} devices"
        tell(f"\nunsloth_multigpu: warning: {why} {how}. global_batch='scale' uses all.\n")
        return True

    def _report_end(self, events: Sequence[Event]) -> int:
        """Returns the exit code of a run whose ranks all ended with 0."""
        # A signal makes train() raise; the script may catch that and end with exit code 0.
        if self.stop.signal_number:
            code = self._report_stop(events)
            if self.stop.how == "at once":
                return code
        refusal = find_refusal(events)
        if refusal is None:
            return 0
        code, what = refusal
        tell(f"\nunsloth_multigpu: {what} (exit code {code})\n")
        return code

    def _report_stop(self, events: Sequence[Event]) -> int:
        step = max((beat.step for beat in read_beats(self.run_dir).values()), default=-1)
        text = describe_stop(self.stop, events, step, self.config.grace_s, self.config.resume)
        self.rendezvous.fail(text)
        tell(f"\nunsloth_multigpu: {text}\n")
        return -self.stop.signal_number


def rank_environment(
    config: MultiGPUConfig, num_ranks: int, run_dir: Path, log_dir: Path, run_id: str, environment: Mapping[str, str]
) -> dict[str, str]:
    """Returns the variables that are equal for all ranks and attempts. Values that the user has set are kept.

    OMP_NUM_THREADS divides the CPU threads: without it every rank would start one thread per core.
    """
    context = RunContext(
        run_dir=str(run_dir),
        supervisor_pid=os.getpid(),
        log_dir=str(log_dir),
        run_id=run_id,
        server_port=free_ports(2) if config.generators else None,
        shard=config.shard,
    )
    defaults = {
        # Makes the iteration order of sets of strings equal on all ranks, and different in each run.
        "PYTHONHASHSEED": str(zlib.crc32(run_id.encode())),
        "OMP_NUM_THREADS": str(threads_of_each(num_ranks)),
        **socket_interfaces(config),
        **({} if config.device == "cpu" else allocator_variables(environment)),
    }
    # PYTHONHASHSEED=random allows any order, but all ranks need the same one.
    is_unset = {name: environment.get(name, "") in ("", "random") for name in defaults}
    return {**{name: value for name, value in defaults.items() if is_unset[name]}, **context.variables()}
