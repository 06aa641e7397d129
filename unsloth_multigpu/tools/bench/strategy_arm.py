"""The gradient strategies as arms of a benchmark: one script, one line, other options."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from unsloth_multigpu.strategy import AllReduce, DiLoCo, LocalSGD
from unsloth_multigpu.tools.bench.arm import ARMS, ONE_GPU, REFERENCE, Arm

DDP = "ddp"
# Prefixes of the arms that show this package's defaults.
OURS = ("ours", DDP)


def _strategy(name: str, text: str, has_one_process: bool = False, note: str = "", **options: Any) -> Arm:
    # With samples dealt in order, each micro-batch has the same rows as without the line.
    line = {"balance": "off", **options}
    return Arm(name, text, line=line, has_one_process=has_one_process, note=note, **ONE_GPU)


STRATEGIES: Mapping[str, Arm] = {
    arm.name: arm
    for arm in (
        ARMS[REFERENCE],
        _strategy(
            "legacy",
            "one process, a replica per device, one after the other",
            has_one_process=True,
            note="what it sends are gradients to the CPU and back, and weights to the replicas",
            enable_ddp=False,
        ),
        _strategy(DDP, "all-reduce during backward", sync="ddp"),
        _strategy("allreduce_each", "all-reduce per parameter, after backward", sync=AllReduce(bucket_mb=0)),
        _strategy("allreduce", "all-reduce in buckets, after backward", sync="allreduce"),
        _strategy("parameter_server", "rank 0 steps, the others get its weights", sync="parameter_server"),
        _strategy(
            "local_sgd",
            "ranks step alone, weights are averaged",
            note="ranks meet every 8 steps and at an epoch's end",
            sync=LocalSGD(every_steps=8),
        ),
        _strategy(
            "diloco",
            "that with an outer Nesterov step",
            note="ranks meet every 8 steps and at an epoch's end",
            sync=DiLoCo(every_steps=8),
        ),
    )
}


def find_arm(name: str) -> Arm:
    """The arm or strategy of this name."""
    return ARMS[name] if name in ARMS else STRATEGIES[name]
