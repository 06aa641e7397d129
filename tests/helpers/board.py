"""A rank's manager with a store and without a process group, and its session."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

from torch.distributed import Store

from unsloth_multigpu.group.board import Board
from unsloth_multigpu.options import MultiGPUConfig
from unsloth_multigpu.tool import Tool
from unsloth_multigpu.wire.context import RunContext
from unsloth_multigpu.wire.heartbeat import HeartbeatPage
from unsloth_multigpu.wire.identity import RankIdentity


def manager_of(
    store: Store | None, rank: int = 0, world_size: int = 1, config: MultiGPUConfig | None = None, **identity: Any
) -> Any:
    """What parts of a training use of a `DDPManager`, on a store of the test."""
    manager: Any = Board(rank, store)
    place = {"local_rank": rank, "local_world_size": world_size, "launcher": "torchrun", **identity}
    manager.identity = RankIdentity(rank=rank, world_size=world_size, **place)
    manager.config = config or MultiGPUConfig()
    manager.waits = SimpleNamespace(counted=nullcontext)
    return manager


def session_of(manager: Any, tool: Tool | None = None) -> Any:
    """What a `DDPTrainer` uses of a `Session`, in a process without a supervisor."""
    facts = {"events": None, "beat": HeartbeatPage(None, 0), "context": RunContext(), "tool": tool or Tool()}
    return SimpleNamespace(manager=lambda: manager, **facts)
