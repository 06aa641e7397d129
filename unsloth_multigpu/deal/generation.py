"""Divides the arguments of trainers that generate their own samples (GRPO, RLOO) among the ranks. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass
from itertools import count
from math import gcd
from typing import Any

from unsloth_multigpu.errors import ConfigError
from unsloth_multigpu.logs import get_logger
from unsloth_multigpu.part import ArgumentsLike

logger = get_logger(__name__)


@dataclass(frozen=True)
class GenerationShape:
    """Numbers of completions in one process, or on each rank.

    Args:
        batch: Completions of a micro-batch.
        accumulation: Micro-batches of an optimizer step.
        generation_steps: Micro-batches that are generated at once.
    """

    batch: int
    accumulation: int
    generation_steps: int


# Arguments that are divided among the ranks, in the order of the fields of `GenerationShape`.
_ARGUMENTS = ("per_device_train_batch_size", "gradient_accumulation_steps", "steps_per_generation")


def arguments_of_one_process(arguments: Mapping[str, Any], divided: Mapping[str, Sequence[int]]) -> dict[str, Any]:
    """Returns the arguments as the script gave them, so that arguments built from them are not divided a second time.

    `divided` is what `divide_arguments` has returned. An argument that was changed since then keeps its new value.
    """
    given = {name: of_one for name, (mine, of_one) in divided.items() if arguments.get(name) == mine}
    return {**arguments, **given}


def divide_generation(one: GenerationShape, world_size: int, num_generations: int = 1) -> GenerationShape:
    """Returns the shape of each rank, with which all ranks together have the steps of one process.

    Micro-batches are the largest that divide step and generation evenly, and not larger than those of one process. The
    completions of a prompt, `num_generations`, may be on several ranks, as TRL gathers their rewards; the number is
    used in the hint only.

    Raises:
        ConfigError: The ranks cannot share a step, or a generation, evenly.
    """
    factor = gcd(one.accumulation, one.generation_steps)
    shared = one.batch * factor
    if shared % world_size:
        at_once = "" if one.generation_steps == one.accumulation else f", {one.generation_steps} generated at once"
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


def divide_arguments(args: ArgumentsLike, world_size: int, rank: int) -> dict[str, tuple[int, int]]:
    """Divides the arguments of a Trainer among the ranks, so that its global batch stays.

    Returns:
        The value of each divided argument on a rank and in one process; empty if TRL refuses these arguments.

    Raises:
        ConfigError: The ranks cannot share the completions evenly.
    """
    batch, accumulation = args.per_device_train_batch_size, args.gradient_accumulation_steps
    asked = args.steps_per_generation
    # Not in every version of TRL.
    num_generated = getattr(args, "generation_batch_size", None)
    if num_generated is not None and (asked is not None or num_generated % batch):
        return {}  # TRL refuses these in one process as well.
    steps = asked or (accumulation if num_generated is None else num_generated // batch)
    one = GenerationShape(batch, accumulation, steps)
    mine = divide_generation(one, world_size, getattr(args, "num_generations", None) or 1)
    args.per_device_train_batch_size, args.gradient_accumulation_steps = mine.batch, mine.accumulation
    args.steps_per_generation = None if asked is None else mine.generation_steps
    if rank == 0:
        shape = f"{world_size} ranks x {mine.batch} completions"
        logger.info("completions per step: %d = %s x %d accumulation", batch * accumulation, shape, mine.accumulation)
        if parts := _means_of_micro_batches(args, is_same_batch=mine.batch == batch):
            logger.warning(
                "%s: the mean is over the micro-batches that the ranks compute at the same time (%s instead of %d "
                "completions), so the gradient differs from that of one GPU",
                " and ".join(parts),
                shape,
                batch,
            )
    return {name: (m, o) for name, m, o in zip(_ARGUMENTS, astuple(mine), astuple(one), strict=True)}


def _means_of_micro_batches(args: ArgumentsLike, *, is_same_batch: bool) -> list[str]:
    """Returns options of TRL whose effect depends on the size of a micro-batch, as the script gave them."""
    loss, entropy = getattr(args, "loss_type", None), getattr(args, "entropy_coef", 0)
    quantile = getattr(args, "top_entropy_quantile", 1)  # Its limit is found among the tokens of all ranks.
    parts = [f"top_entropy_quantile={quantile!r}"] if quantile < 1 else []
    if not is_same_batch:
        parts += [f"loss_type={loss!r}"] if loss == "bnpo" else []
        parts += [f"entropy_coef={entropy!r}"] if entropy else []
    return parts
