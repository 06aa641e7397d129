"""Deals the completions of GRPO and RLOO to ranks and micro-batches by length, if that keeps the gradient.

Whether it does is measured in the training, in steps 1, 2, 4, 8 and so on: before the update, the gradient is computed
with the trainer's own micro-batches and with the dealt ones, from the same state, without dropout. In the first step
the policy is the one that generated: every ratio is 1 and nothing is clipped, so the effect of old log-probabilities
shows from step 2 on. A step whose completions have equal lengths is not compared: it cannot show a mean over tokens.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import gcd
from typing import Any

import torch
from torch import nn

from unsloth_multigpu.errors import SetupError
from unsloth_multigpu.group.manager import DDPManager
from unsloth_multigpu.group.shards import has_shards
from unsloth_multigpu.library import is_library
from unsloth_multigpu.logs import get_logger
from unsloth_multigpu.part import ArgumentsLike, ControlLike, Override, Part, StateLike, TrainerLike
from unsloth_multigpu.seam import instance_attribute, unsteered
from unsloth_multigpu.step.comparison import Difference, difference, difference_of_means, names_of, rounding_bound
from unsloth_multigpu.step.feed import StepFeed
from unsloth_multigpu.step.snapshot import ERRORS, LonePass, kept_training_state
from unsloth_multigpu.wire.heartbeat import HeartbeatPage

logger = get_logger(__name__)

_NEEDED = ("prompt_ids", "prompt_mask", "completion_ids", "completion_mask", "advantages")
# Prefix of inputs that are padded on the left. Other inputs with columns belong to completions, padded on the right.
_PROMPT = "prompt_"
# Where Unsloth keeps the number of padding columns before the shortest prompt. Its log-probabilities have these, too.
_LEFT_PAD = "max_left_pad"
# Micro-batches of a step that are compared on each rank.
_MOST_COMPARED = 8


@dataclass
class _Generation:
    """The completions of one generation, from all ranks.

    Args:
        in_order: This rank's micro-batches in TRL's order.
        rows: The completions of all ranks, rank by rank, padded to one width.
        lengths: Tokens of prompt and completion of each row.
        dealt: This rank's micro-batches, dealt; empty before that.
    """

    in_order: list[dict[str, Any]]
    rows: Mapping[str, torch.Tensor]
    lengths: Sequence[tuple[int, int]]
    dealt: list[dict[str, Any]] = field(default_factory=list)

    @property
    def batch(self) -> int:
        return len(self.in_order[0]["advantages"])

    def places(self, begin: int, count: int, world_size: int) -> list[int]:
        """Returns the indices in `rows` of the completions of `count` micro-batches of each rank, from `begin`."""
        of_rank = len(self.in_order) * self.batch
        first = [rank * of_rank + begin * self.batch for rank in range(world_size)]
        return [i for f in first for i in range(f, f + count * self.batch)]


class CompletionDeal(Part):
    """After each generation, deals the completions of an optimizer step to all ranks by length.

    TRL shuffles the completions of a rank, cuts them into micro-batches and pads all to the longest one. Here every
    micro-batch has as many completions as before, of similar length, and no column that is padding in all of them.
    The trainer, of TRL or of Unsloth, keeps the completions of a generation in `_buffered_inputs`.
    """

    place = "completions"
    may_be_missed = True

    def __init__(self, trainer: TrainerLike, manager: DDPManager, feed: StepFeed, beat: HeartbeatPage) -> None:
        super().__init__(trainer, manager)
        self._feed = feed
        self._lone = LonePass(trainer, beat)
        self._generation: _Generation | None = None
        # TRL's order is kept from now on. The reason was logged.
        self._is_over = False
        # The last comparison found equal gradients. Without comparisons: the user has set balance="tokens".
        self._is_proven = False
        # Optimizer steps of this training; the last that was compared, and the next.
        self._num_steps, self._last_step, self._next_step = 0, 0, 1
        self._is_begin = False
        # Tokens of this rank's micro-batches so far, padding included: as TRL has cut them, and as they are computed.
        self._num_before = self._num_dealt = 0
        if not is_library(getattr(unsteered(trainer._prepare_inputs), "__module__", None) or ""):
            self._keep_order("_prepare_inputs is the script's own")
        elif manager.config.check_first_step == "off":
            self._is_proven = manager.config.balance == "tokens"
            if not self._is_proven:
                self._keep_order("check_first_step='off' leaves the gradient unmeasured")

    def overrides(self) -> dict[str, Override]:
        return {} if self._is_over else {"_prepare_inputs": self._prepare_inputs}

    def on_step_begin(self, args: ArgumentsLike, state: StateLike, control: ControlLike, **kwargs: Any) -> None:
        self._num_steps += 1
        self._is_begin = True

    def on_train_end(self, *args: Any, **kwargs: Any) -> None:
        before, dealt = map(sum, zip(*self._manager.gather_json([self._num_before, self._num_dealt]), strict=True))
        if before:
            logger.info("completions dealt by length: %.0f %% of the tokens, padding included", 100 * dealt / before)
        elif not self._is_over and self._num_steps:
            logger.info("balance: completions are dealt in order: in each step they had equal lengths")

    def _keep_order(self, why: str) -> None:
        """Keeps TRL's micro-batches from now on, and logs the reason; raises SetupError with `balance="tokens"`."""
        if self._manager.config.balance == "tokens":
            raise SetupError(
                f"balance='tokens' is not possible: completions are dealt in order: {why}.",
                hint="Leave it out for this trainer.",
            )
        logger.info("balance: completions are dealt in order: %s", why)
        self._is_over = True

    def _prepare_inputs(self, original: Any, inputs: Any) -> Any:
        """Overrides `GRPOTrainer._prepare_inputs`: returns the next micro-batch, after a generation if one is due."""
        trainer = self._trainer
        before = getattr(trainer, "_buffered_inputs", None)
        prepared = original(inputs)
        if self._is_over or not trainer.model.training:
            return prepared
        made = getattr(trainer, "_buffered_inputs", None)
        if made is None:
            self._keep_order("it is not known where this trainer keeps the micro-batches of a generation")
            return prepared
        if made is not before:
            self._generation = self._gathered(made)
        is_begin, self._is_begin = self._is_begin, False
        if self._generation is None:  # Not known, or of an earlier training.
            return prepared
        place = trainer._step % len(self._generation.in_order)
        if is_begin and self._has_turn(self._generation, place):
            self._compare(self._generation, place)
        trainer._buffered_inputs = chosen = self._chosen(self._generation)
        return chosen[place]

    def _chosen(self, generation: _Generation) -> list[dict[str, Any]]:
        if not self._is_proven:
            return generation.in_order
        if not generation.dealt:
            block = self._block(generation)
            for begin in range(0, len(generation.in_order), block):
                generation.dealt += self._cut(generation, begin, block)
            self._num_before += _num_tokens(generation.in_order)
            self._num_dealt += _num_tokens(generation.dealt)
        return generation.dealt

    def _has_turn(self, generation: _Generation, place: int) -> bool:
        """True if a comparison of this step is due and possible, that is, if its completions differ in length."""
        if self._manager.config.check_first_step == "off" or self._num_steps < self._next_step:
            return False
        places = generation.places(place, self._block(generation), self._manager.identity.world_size)
        return len({generation.lengths[i][1] for i in places}) > 1

    def _compare(self, generation: _Generation, place: int) -> None:
        """Compares the gradients of this step, dealt by length and in TRL's order. Collective."""
        num_compared = min(self._block(generation), _MOST_COMPARED)
        in_order = generation.in_order[place : place + num_compared]
        off = self._difference(in_order, self._cut(generation, place, num_compared))
        is_every = self._manager.config.check_first_step == "every"
        if math.isnan(off.off):  # Both are not finite, as while a gradient scaler looks for its scale.
            self._next_step = self._num_steps + 1
            return
        was_proven, num_unproven = self._is_proven, self._num_steps - self._last_step - 1
        self._last_step, self._next_step = self._num_steps, self._num_steps + 1 if is_every else 2 * self._num_steps
        self._is_proven = off.is_within(rounding_bound(self._trainer))
        if not self._is_proven:
            what = f"dealt by length, the gradient of step {self._num_steps} differs by {off.off:.1e}"
            self._keep_order(f"{what}, most in {off.worst}" if off.worst else what)
            if was_proven and num_unproven:
                also = f"steps that were dealt since the last comparison: {num_unproven}"
                self._feed.tell("completions dealt by length", f"{what}; {also}.", "", "Set balance='off'.")
        elif not was_proven:
            logger.info("completions dealt by length: gradient differs by %.0e", off.off)

    def _difference(self, one: Sequence[Mapping[str, Any]], other: Sequence[Mapping[str, Any]]) -> Difference:
        """Compares the mean gradients of two orders of the same completions, in as many micro-batches. Collective."""
        mine = self._gradient(one)
        try:
            theirs = self._gradient(other)
        except ERRORS as error:
            raise SetupError(
                f"The loss cannot be computed for completions that are dealt by length ({type(error).__name__}: "
                f"{str(error)[:200]}).",
                hint="Set balance='off'.",
            ) from error
        finally:
            self._lone.end()
        ones, others = zip(*self._manager.gather_json([mine, theirs]), strict=True)
        # Sharded gradients are means over ranks already.
        compare = difference if has_shards(self._trainer.model) else difference_of_means
        return compare(ones, others, names_of(self._trainer.model))

    def _gradient(self, micro_batches: Sequence[Mapping[str, Any]]) -> list[float]:
        """Returns a sketch of this rank's gradient."""
        trainer, training_step = self._trainer, unsteered(self._trainer.training_step)

        def compute(bare: nn.Module, i: int) -> None:
            with instance_attribute(trainer, "_prepare_inputs", lambda *_: dict(micro_batches[i])):
                # Without a number of tokens: both orders are scaled alike.
                training_step(bare, micro_batches[i], None)

        own_loss = instance_attribute(trainer, "compute_loss", unsteered(trainer.compute_loss))
        with kept_training_state(trainer), own_loss:
            return self._lone.gradient(trainer.model_wrapped, len(micro_batches), compute)[0]

    def _gathered(self, buffered: list[dict[str, Any]]) -> _Generation | None:
        """Gathers the completions of all ranks; None if micro-batches have unknown inputs. Collective."""
        what, first = unknown_inputs(buffered), buffered[0]
        # All ranks must decide alike.
        if unknown := [theirs for theirs in self._manager.gather_json(what) if theirs]:
            self._keep_order(f"{unknown[0]} is not supported")
            return None
        accelerator, processor, rows = self._trainer.accelerator, self._trainer.processing_class, {}
        pad_id = int(getattr(processor, "tokenizer", processor).pad_token_id)
        for name in sorted(name for name, value in first.items() if _is_of_rows(value) and name != _LEFT_PAD):
            mine = torch.cat([micro_batch[name] for micro_batch in buffered])
            filling = pad_id if name.endswith("_ids") else 0
            padded = accelerator.pad_across_processes(mine, 1, filling, pad_first=name.startswith(_PROMPT))
            rows[name] = accelerator.gather(padded.to(mine.dtype).contiguous())
        return _Generation(buffered, rows, _lengths(rows))

    def _block(self, generation: _Generation) -> int:
        """Returns how many micro-batches of a rank are dealt together: those of a step, or its part of a generation."""
        return gcd(len(generation.in_order), int(self._trainer.args.gradient_accumulation_steps))

    def _cut(self, generation: _Generation, begin: int, count: int) -> list[dict[str, Any]]:
        """Deals the completions of some micro-batches; returns this rank's part."""
        world_size = self._manager.identity.world_size
        rows, lengths, batch = generation.rows, generation.lengths, generation.batch
        places = generation.places(begin, count, world_size)
        plan = deal_completions([lengths[i] for i in places], batch, world_size)
        given, micro_batches = generation.in_order[0], []
        multiple = int(getattr(self._trainer.args, "pad_to_multiple_of", None) or 1)  # Not in every version.
        for group in plan[self._manager.identity.rank]:
            mine = [places[k] for k in group]
            longest = [max(lengths[k][c] for k in mine) for c in (0, 1)]
            prompt, completion = (max(1, -(-num // multiple)) * multiple for num in longest)
            micro_batch = _taken(rows, mine, prompt, completion)
            micro_batch |= {name: value for name, value in given.items() if not _is_of_rows(value)}
            if _LEFT_PAD in given:
                micro_batch[_LEFT_PAD] = torch.full((batch, 1), prompt - min(lengths[k][0] for k in mine))
            micro_batches.append(micro_batch)
        return micro_batches


def deal_completions(lengths: Sequence[tuple[int, int]], batch: int, world_size: int) -> list[list[list[int]]]:
    """Deals the completions of (a part of) an optimizer step, so that a micro-batch has rows of similar length.

    Every micro-batch keeps its number of completions, and every rank its number of micro-batches. So the gradient does
    not change for a loss that averages over completions, or divides a sum over tokens by a number for the whole step.

    Args:
        lengths: Tokens of prompt and completion of each row.
        batch: Completions of a micro-batch; `batch x world_size` divides the number of completions.

    Returns:
        `plan[rank][micro_batch]` = indices into `lengths`, the costliest micro-batch of a rank last. So ranks that wait
        for each other in every micro-batch compute similar ones at the same time.
    """

    def cost(rows: Sequence[int]) -> int:
        """Returns the tokens of a micro-batch with padding. Prompts and completions are padded to their longest."""
        return len(rows) * (max(lengths[i][0] for i in rows) + max(lengths[i][1] for i in rows))

    def cut(order: Sequence[int]) -> list[list[int]]:
        return [list(order[begin : begin + batch]) for begin in range(0, len(order), batch)]

    every = range(len(lengths))
    by_completion = cut(sorted(every, key=lambda i: (lengths[i][1], lengths[i][0], i)))
    by_sum = cut(sorted(every, key=lambda i: (sum(lengths[i]), i)))
    groups = min(by_completion, by_sum, key=lambda groups: sum(map(cost, groups)))
    shares: list[list[list[int]]] = [[] for _ in range(world_size)]
    for group in sorted(groups, key=cost, reverse=True):
        # Costliest first, each to the rank with the least work of those that have room.
        open_to = [share for share in shares if len(share) < len(groups) // world_size]
        min(open_to, key=lambda share: sum(map(cost, share))).append(group)
    return [share[::-1] for share in shares]


def unknown_inputs(buffered: Sequence[Mapping[str, Any]]) -> str:
    """Names inputs of a generation's micro-batches that cannot be dealt; "" if there are none."""
    for micro_batch in buffered:
        if missing := [name for name in _NEEDED if micro_batch.get(name) is None]:
            return f"a micro-batch without '{missing[0]}'"
        batch, width = micro_batch["completion_ids"].shape
        for name, value in micro_batch.items():
            columns = micro_batch["prompt_ids"].shape[1:] if name.startswith(_PROMPT) else (1, width)
            is_of_row = isinstance(value, torch.Tensor) and value.dim() in (1, 2) and len(value) == batch
            if _is_of_rows(value) and not (is_of_row and (value.dim() == 1 or value.shape[1] in columns)):
                return f"'{name}'"
        others = [value for name, value in micro_batch.items() if name not in (*_NEEDED, _LEFT_PAD)]
        if _LEFT_PAD in micro_batch and any(_is_of_rows(value) for value in others):
            return "the layout of Unsloth's log-probabilities"
    return ""


def _num_tokens(micro_batches: Sequence[Mapping[str, Any]]) -> int:
    return sum(micro_batch[name].numel() for micro_batch in micro_batches for name in ("prompt_ids", "completion_ids"))


def _is_of_rows(value: Any) -> bool:
    """False for None and for a single number, which a generation has once and not for each row."""
    return not (value is None or (isinstance(value, torch.Tensor) and value.dim() == 0))


def _lengths(rows: Mapping[str, torch.Tensor]) -> list[tuple[int, int]]:
    """Returns the tokens of each row's prompt and completion, without the padding on the outer side."""
    prompt, completion = rows["prompt_mask"].bool(), rows["completion_mask"].bool()
    prompts = prompt.int().cummax(1).values.sum(1)
    completions = completion.flip(1).int().cummax(1).values.sum(1)
    return list(zip(prompts.tolist(), completions.tolist(), strict=True))


def _taken(rows: Mapping[str, torch.Tensor], places: Sequence[int], prompt: int, completion: int) -> dict[str, Any]:
    """Returns a micro-batch of these rows, as wide as its longest prompt and its longest completion."""
    taken = {name: value[torch.tensor(places, device=value.device)] for name, value in rows.items()}
    for name, value in taken.items():
        if value.dim() > 1:
            is_prompt = name.startswith(_PROMPT)
            taken[name] = value[:, max(0, value.shape[1] - prompt) :] if is_prompt else value[:, :completion]
    return taken
