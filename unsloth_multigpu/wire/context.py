"""What a process of a run is told by the one that started it: read from the environment in one place, and handed on."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field

from unsloth_multigpu.options import (
    ENV_ATTEMPT,
    ENV_LOG_DIR_OF_RUN,
    ENV_RUN_DIR,
    ENV_RUN_DRAWS,
    ENV_RUN_ID,
    ENV_RUN_SEED,
    ENV_SHARD_CHOICE,
    ENV_SUPERVISOR_PID,
    ENV_TOOL,
)


@dataclass(frozen=True)
class ToolRequest:
    """A tool that takes part in a run, see `tool.Tool`.

    Args:
        name: Where its class is, as "module:class".
        values: What it is made from, as JSON values.
    """

    name: str
    values: Mapping[str, object]

    def variables(self) -> dict[str, str]:
        """The environment that carries this request."""
        return {ENV_TOOL: json.dumps([self.name, self.values])}


@dataclass(frozen=True)
class RunContext:
    """What a supervisor tells its ranks. Without a supervisor of ours only `tool` may be set.

    Args:
        run_dir: The run's private folder: pages, events, sockets.
        supervisor_pid: Process id of the supervisor of this node.
        log_dir: Folder of rank_N.log.
        seed: Of what a script draws without a seed, the same on all ranks.
        draws: Digests of the supervisor's random generators at the line, see `launch.draw`.
        run_id: Of this run, the same for all its attempts.
        attempt: How often the ranks were started before.
        tool: Takes part in the run.
        shard_choice: What `shard="auto"` has become, "on" or "off".
    """

    run_dir: str | None = None
    supervisor_pid: int | None = None
    log_dir: str | None = None
    seed: int | None = None
    draws: Mapping[str, str] = field(default_factory=dict)
    run_id: str | None = None
    attempt: int = 0
    tool: ToolRequest | None = None
    shard_choice: str | None = None

    @classmethod
    def read(cls, environment: Mapping[str, str]) -> RunContext:
        """The context that `environment` carries."""
        pid, seed = environment.get(ENV_SUPERVISOR_PID), environment.get(ENV_RUN_SEED)
        tool = environment.get(ENV_TOOL)
        return cls(
            run_dir=environment.get(ENV_RUN_DIR),
            supervisor_pid=None if pid is None else int(pid),
            log_dir=environment.get(ENV_LOG_DIR_OF_RUN),
            seed=None if seed is None else int(seed),
            draws=json.loads(environment.get(ENV_RUN_DRAWS, "{}")),
            run_id=environment.get(ENV_RUN_ID),
            attempt=int(environment.get(ENV_ATTEMPT, "0")),
            tool=None if tool is None else ToolRequest(*json.loads(tool)),
            shard_choice=environment.get(ENV_SHARD_CHOICE),
        )

    def variables(self) -> dict[str, str]:
        """The environment that carries this context, but for the attempt, which the supervisor counts."""
        told = {
            ENV_RUN_DIR: self.run_dir,
            ENV_SUPERVISOR_PID: self.supervisor_pid,
            ENV_LOG_DIR_OF_RUN: self.log_dir,
            ENV_RUN_SEED: self.seed,
            ENV_RUN_DRAWS: json.dumps(dict(self.draws)),
            ENV_RUN_ID: self.run_id,
        }
        of_tool = {} if self.tool is None else self.tool.variables()
        return {**{name: str(value) for name, value in told.items() if value is not None}, **of_tool}


def attempt_variables(attempt: int) -> dict[str, str]:
    """What tells ranks that are about to start how often they were started before."""
    return {ENV_ATTEMPT: str(attempt)}
