"""The facts that a supervisor hands to its ranks, in environment variables. Only this module reads these."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from unsloth_multigpu.options import ENV_NOTEBOOK, ENV_RUN, ENV_RUN_DIR, ENV_TOOL

# Facts that are equal for all attempts.
_OF_RUN = ("supervisor_pid", "log_dir", "run_id", "server_port", "shard")


@dataclass(frozen=True)
class ToolRequest:
    """The tool of a run, see `tool.Tool`: its name in `plugin.tool_of`, and its arguments as JSON values."""

    name: str
    values: Mapping[str, Any]

    def variables(self) -> dict[str, str]:
        """Returns the environment variables of this request."""
        # Paths as they are, because processes are found by them.
        return {ENV_TOOL: json.dumps([self.name, self.values], ensure_ascii=False)}


@dataclass(frozen=True)
class RunContext:
    """Facts from a supervisor for its ranks. If another launcher has started them, only `tool` may be set.

    Args:
        run_dir: The run's private folder, with heartbeats, events and other files of the ranks.
        supervisor_pid: Process id of the supervisor of this node.
        log_dir: Folder of rank_N.log.
        run_id: Name of the run, equal for all its attempts.
        server_port: Port of the generation server; the next port is for weights. None = no server.
        attempt: How often the ranks were started before, in the variable of torchrun.
        tool: The tool that started the run.
        shard: The option `shard`, with the supervisor's choice in place of "auto".
        launcher: "notebook" or "unsloth_multigpu" in ranks that this package has started, else None.
    """

    run_dir: str | None = None
    supervisor_pid: int | None = None
    log_dir: str | None = None
    run_id: str | None = None
    server_port: int | None = None
    attempt: int = 0
    tool: ToolRequest | None = None
    shard: str | None = None
    launcher: str | None = None

    @classmethod
    def read(cls, environment: Mapping[str, str]) -> RunContext:
        """Reads the context from environment variables."""
        tool = environment.get(ENV_TOOL)
        launcher = "notebook" if ENV_NOTEBOOK in environment else "unsloth_multigpu"
        return cls(
            run_dir=environment.get(ENV_RUN_DIR),
            attempt=int(environment.get("TORCHELASTIC_RESTART_COUNT", 0)),
            tool=None if tool is None else ToolRequest(*json.loads(tool)),
            launcher=launcher if ENV_RUN_DIR in environment else None,
            **json.loads(environment.get(ENV_RUN, "{}")),
        )

    def variables(self) -> dict[str, str]:
        """Returns the environment variables of the run, without that of the tool."""
        return {ENV_RUN: json.dumps({name: getattr(self, name) for name in _OF_RUN}), ENV_RUN_DIR: str(self.run_dir)}
