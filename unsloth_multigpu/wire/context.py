"""What a process of a run is told by the one that started it. The only reader of the variables that carry it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field

from unsloth_multigpu.options import (
    ENV_ATTEMPT,
    ENV_NOTEBOOK,
    ENV_RUN,
    ENV_RUN_DIR,
    ENV_SHARD_CHOICE,
    ENV_TOOL,
)

# What a supervisor tells all attempts of its ranks.
_OF_RUN = ("supervisor_pid", "log_dir", "seed", "draws", "run_id", "server_port")


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
        run_dir: The run's private folder: heartbeats, events, sockets.
        supervisor_pid: Process id of the supervisor of this node.
        log_dir: Folder of rank_N.log.
        seed: For generators that a script does not seed, the same on all ranks.
        draws: Digests of the supervisor's random generators at the line, see `launch.seeding`.
        run_id: Of this run, the same for all its attempts.
        server_port: Where the server that generates will listen; the next port is for weights. None = there is none.
        attempt: How often the ranks were started before.
        tool: Takes part in the run.
        shard_choice: What `shard="auto"` has become, "on" or "off".
        launcher: "notebook" or "unsloth_multigpu" in ranks of ours, else None.
    """

    run_dir: str | None = None
    supervisor_pid: int | None = None
    log_dir: str | None = None
    seed: int | None = None
    draws: Mapping[str, str] = field(default_factory=dict)
    run_id: str | None = None
    server_port: int | None = None
    attempt: int = 0
    tool: ToolRequest | None = None
    shard_choice: str | None = None
    launcher: str | None = None

    @classmethod
    def read(cls, environment: Mapping[str, str]) -> RunContext:
        """The context that `environment` carries."""

        tool = environment.get(ENV_TOOL)
        launcher = "notebook" if ENV_NOTEBOOK in environment else "unsloth_multigpu"
        return cls(
            run_dir=environment.get(ENV_RUN_DIR),
            attempt=int(environment.get(ENV_ATTEMPT, 0)),
            tool=None if tool is None else ToolRequest(*json.loads(tool)),
            shard_choice=environment.get(ENV_SHARD_CHOICE),
            launcher=launcher if ENV_RUN_DIR in environment else None,
            **json.loads(environment.get(ENV_RUN, "{}")),
        )

    def variables(self) -> dict[str, str]:
        """The environment that carries this context, except for the attempt, which the supervisor counts."""
        told = {ENV_RUN: json.dumps({name: getattr(self, name) for name in _OF_RUN})}
        of_dir = {} if self.run_dir is None else {ENV_RUN_DIR: self.run_dir}
        return {**told, **of_dir, **({} if self.tool is None else self.tool.variables())}


def attempt_variables(attempt: int) -> dict[str, str]:
    """Tells ranks that are about to start how often they were started before."""
    return {ENV_ATTEMPT: str(attempt)}
