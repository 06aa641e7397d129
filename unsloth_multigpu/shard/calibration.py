"""Compares the forecast, by which it was decided whether to shard, with what the first step has allocated."""

from __future__ import annotations

from typing import Any

import torch

from unsloth_multigpu.logs import get_logger
from unsloth_multigpu.part import Part
from unsloth_multigpu.shard.memory import calibrate
from unsloth_multigpu.trainer_protocol import ArgumentsLike, ControlLike, StateLike
from unsloth_multigpu.wire.context import ShardChoice

logger = get_logger(__name__)


class Calibration(Part):
    """Tells, after the first step, where the forecast was off.

    Args:
        choice: What was decided, with the forecast.
    """

    place = "memory"

    def __init__(self, choice: ShardChoice) -> None:
        self._choice = choice
        self._is_done = False

    def on_step_end(self, args: ArgumentsLike, state: StateLike, control: ControlLike, **kwargs: Any) -> None:
        is_done, self._is_done = self._is_done, True
        if is_done or args.device.type == "cpu":
            return  # What CPU ranks allocate is not counted by torch.
        seen = torch.get_device_module(args.device).max_memory_allocated(args.device)
        if (text := calibrate(self._choice.allocated_bytes, seen)) is not None:
            logger.warning("%s (%s)", text, self._choice.reason)
