"""Deals the completions of trainers that generate their own samples (GRPO, RLOO). Pure: numbers in and out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass
from itertools import count
from math import gcd
from typing import Any

from unsloth_multigpu.errors import ConfigError
from unsloth_multigpu.trainer_protocol import TrainerLike


@dataclass(frozen=True)
class GenerationShape:
    """How one process, or each rank, goes through its completions.

    Args:
        batch: Completions of a micro-batch.
        accumulation: Micro-batches of an optimizer step.
        generation_steps: Micro-batches that are generated at once.
    """

    batch: int
    accumulation: int
    generation_steps: int


# The arguments that a rank has a part of, in the order of a shape's fields.
_ARGUMENTS = ("per_device_train_batch_size", "gradient_accumulation_steps", "steps_per_generation")


def draws_completions(trainer: TrainerLike) -> bool:
    """True where a trainer trains on completions that each rank draws by itself: GRPO, RLOO, and GKD where it does."""
    is_on_policy = getattr(trainer, "lmbda", 0) > 0 or getattr(trainer, "seq_kd", False)
    return hasattr(trainer.args, "steps_per_generation") or (
        hasattr(trainer, "generate_on_policy_outputs") and is_on_policy
    )


def divided_arguments(one: GenerationShape, mine: GenerationShape) -> dict[str, tuple[int, int]]:
    """What each argument is on a rank, and in one process: kept with arguments that were divided, as plain numbers."""
    return {name: (m, o) for name, m, o in zip(_ARGUMENTS, astuple(mine), astuple(one), strict=True)}


def arguments_of_one_process(arguments: Mapping[str, Any], divided: Mapping[str, Sequence[int]]) -> dict[str, Any]:
    """The arguments as the script gave them, so that others built from them are divided once and not again.

    What has been given another value since `divided_arguments` is left alone.
    """
    given = {name: of_one for name, (mine, of_one) in divided.items() if arguments.get(name) == mine}
    return {**arguments, **given}


def divide_generation(one: GenerationShape, world_size: int, num_generations: int = 1) -> GenerationShape:
    """The shape of each rank with which all ranks together have the steps of one process.

    A step and a generation keep their number of completions, and so the number of steps that a generation serves. TRL
    deals a generation in equal parts, and a prompt's completions may lie on several ranks: it gathers their rewards.
    `num_generations`, completions of a prompt, are for the hint alone: a generation must hold whole prompts.

    Returns:
        The largest micro-batches that divide both evenly and are not larger than those of one process.

    Raises:
        ConfigError: The ranks cannot share a step, or a generation, evenly.
    """
    shared = one.batch * gcd(one.accumulation, one.generation_steps)
    if shared % world_size:
        at_once = "" if one.generation_steps == one.accumulation else f", {one.generation_steps} generated at once"
        factor = gcd(one.accumulation, one.generation_steps)
        step = world_size // gcd(factor, world_size)
        batch = next(
            b for b in count(step * -(-one.batch // step), step) if b * one.generation_steps % num_generations == 0
        )
        most_ranks = max(ranks for ranks in range(1, world_size) if shared % ranks == 0)
        raise ConfigError(
            f"per_device_train_batch_size={one.batch} x gradient_accumulation_steps={one.accumulation}{at_once}: the "
            f"completions of a step, or of a generation, cannot be shared evenly by {world_size} ranks.",
            hint=f"Set num_gpus={most_ranks} (of all nodes together); or per_device_train_batch_size={batch} works "
            "with this accumulation; or use global_batch='scale'.",
            most_ranks=most_ranks,
        )
    mine = shared // world_size
    batch = next(b for b in range(min(one.batch, mine), 0, -1) if mine % b == 0)
    divisor = world_size * batch
    return GenerationShape(batch, one.batch * one.accumulation // divisor, one.batch * one.generation_steps // divisor)
