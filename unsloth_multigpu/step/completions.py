"""Deals the completions of GRPO and RLOO to ranks and micro-batches by their length, before the first backward pass."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import gcd
from typing import Any, cast

import torch
from torch import nn

from unsloth_multigpu.errors import SetupError
from unsloth_multigpu.group.manager import DDPManager
from unsloth_multigpu.logs import get_logger
from unsloth_multigpu.part import Override, Part
from unsloth_multigpu.step.own_code import is_library
from unsloth_multigpu.trainer_protocol import OptionalArguments, OptionalTrainer, TrainerLike

logger = get_logger(__name__)

# Means over completions, constants, and sums divided by the tokens of a generation: micro-batches of other completions,
# but of as many, have the same gradient together.
_LOSSES = ("grpo", "dr_grpo", "dapo")
# What the inputs of a micro-batch hold: padded on the left, padded on the right, one number a completion.
_PROMPT = ("prompt_ids", "prompt_mask")
_COMPLETION = ("completion_ids", "completion_mask", "old_per_token_logps", "ref_per_token_logps")
_ROW = ("advantages", "old_logps")
# One number of the generation, equal on all ranks.
_OF_ALL = "num_items_in_batch"
# Unsloth's note of the columns of padding before the shortest prompt: log-probabilities that it keeps have them, too.
_LEFT_PAD = "max_left_pad"


class CompletionDeal(Part):
    """After each generation, deals its completions again: within an optimizer step, among all ranks, by length.

    TRL shuffles the completions of a rank, cuts them into micro-batches and pads all to the longest one. Here every
    micro-batch has as many completions as before, of similar length, and no column that is padding in all of them.

    Args:
        trainer: A trainer of TRL, or of Unsloth, that keeps the completions of a generation in `_buffered_inputs`.
        manager: This rank's manager.

    Raises:
        SetupError: `balance="tokens"` is asked for, and the trainer's loss, or its model, does not allow it.
    """

    place = "completions"

    def __init__(self, trainer: TrainerLike, manager: DDPManager) -> None:
        self._trainer = cast(OptionalTrainer, trainer)
        self._manager = manager
        self._is_told = False
        # Tokens of all ranks' micro-batches so far, padding included: as TRL has cut them, and as they are computed.
        self._num_before = self._num_dealt = 0
        self._reason = _why_not(trainer)
        if self._reason:
            self._tell(f"completions are dealt in order: {self._reason}")

    def overrides(self) -> dict[str, Override]:
        return {} if self._reason else {"_prepare_inputs": self._prepare_inputs}

    def is_needed(self, seam: str) -> bool:
        return False

    def on_train_end(self, *args: Any, **kwargs: Any) -> None:
        if self._num_before:
            part = 100 * self._num_dealt / self._num_before
            logger.info("completions dealt by length: %.0f %% of the tokens, padding included", part)

    def _tell(self, what: str) -> None:
        """Says once why this training keeps TRL's micro-batches.

        Raises:
            SetupError: They were not to be kept.
        """
        if self._manager.config.balance == "tokens":
            raise SetupError(f"balance='tokens' is not possible: {what}.", hint="Leave it out for this trainer.")
        if not self._is_told:
            logger.info("balance: %s", what)
        self._is_told = True

    def _prepare_inputs(self, original: Any, inputs: Any) -> Any:
        """`GRPOTrainer._prepare_inputs`: the micro-batch that is next, after a generation if it is time for one."""
        trainer = self._trainer
        before = trainer._buffered_inputs
        prepared = original(inputs)
        made = trainer._buffered_inputs
        if made is before or not made:  # An evaluation, or a generation that was dealt before.
            return prepared
        dealt = self._dealt(made)
        if dealt is None:
            return prepared
        trainer._buffered_inputs = dealt
        return dealt[trainer._step % len(dealt)]

    def _dealt(self, buffered: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]] | None:
        """The micro-batches of a generation, dealt again; None where they hold what is not known here. Collective."""
        what, batch = unknown_inputs(buffered), len(buffered[0]["advantages"])
        widths = [buffered[0][name].shape[1] for name in ("prompt_ids", "completion_ids")]
        # All ranks decide alike, and send tensors of one shape.
        ranks = self._manager.gather_int64([bool(what), *widths])
        if any(is_unknown for is_unknown, *_ in ranks):
            self._tell(f"completions are dealt in order: {what or 'a micro-batch of another rank'} is not known here")
            return None
        most_prompt, most_completion = (max(rank[i] for rank in ranks) for i in (1, 2))
        rows = self._gathered(buffered, most_prompt, most_completion)
        lengths = _lengths(rows)
        world_size, rank = self._manager.identity.world_size, self._manager.identity.rank
        block = gcd(len(buffered), int(self._trainer.args.gradient_accumulation_steps))
        micro_batches = []
        for begin in range(0, len(buffered), block):
            # Rows of all ranks lie rank by rank.
            first = [r * len(buffered) * batch + begin * batch for r in range(world_size)]
            places = [i for f in first for i in range(f, f + block * batch)]
            plan = deal_completions([lengths[i] for i in places], batch, world_size)
            for i, group in enumerate(group for share in plan for group in share):
                mine = [places[k] for k in group]
                prompt, completion = (self._width(max(lengths[k][c] for k in mine)) for c in (0, 1))
                self._num_dealt += batch * (prompt + completion)
                if i // block != rank:
                    continue
                micro_batch = _taken(rows, mine, prompt, completion)
                micro_batch |= {n: v for n, v in buffered[0].items() if v is None or n == _OF_ALL}
                if _LEFT_PAD in buffered[0]:
                    micro_batch[_LEFT_PAD] = torch.full((batch, 1), prompt - min(lengths[k][0] for k in mine))
                micro_batches.append(micro_batch)
        self._num_before += len(buffered) * batch * sum(p + c for _, p, c in ranks)
        return micro_batches

    def _gathered(
        self, buffered: Sequence[Mapping[str, Any]], most_prompt: int, most_completion: int
    ) -> dict[str, torch.Tensor]:
        """The rows of all ranks, rank by rank, padded to one width. Collective."""
        rows = {}
        for name in sorted(
            n for n, value in buffered[0].items() if value is not None and n not in (_OF_ALL, _LEFT_PAD)
        ):
            mine = torch.cat([micro_batch[name] for micro_batch in buffered])
            filling = self._pad_id if name.endswith("_ids") else 0
            if name in _PROMPT:
                mine = nn.functional.pad(mine, (most_prompt - mine.shape[1], 0), value=filling)
            elif name in _COMPLETION:
                mine = nn.functional.pad(mine, (0, most_completion - mine.shape[1]), value=filling)
            rows[name] = self._trainer.accelerator.gather(mine.contiguous())
        return rows

    @property
    def _pad_id(self) -> int:
        """What stands in rows behind their end; the tokenizer of a processor has it."""
        processor = self._trainer.processing_class
        return int(getattr(processor, "tokenizer", processor).pad_token_id)

    def _width(self, longest: int) -> int:
        """Columns for the longest row: at least one, and a multiple of what the trainer pads to."""
        multiple = getattr(self._trainer.args, "pad_to_multiple_of", None) or 1  # Not in every version.
        return max(1, -(-longest // multiple)) * int(multiple)


def deal_completions(lengths: Sequence[tuple[int, int]], batch: int, world_size: int) -> list[list[list[int]]]:
    """Deals the completions of (a part of) an optimizer step: those of a micro-batch are of similar length.

    Every micro-batch keeps its number of completions and every rank its number of micro-batches. So a loss that is a
    mean over completions, or a sum of tokens divided by a number of the whole step, has the gradient that it had.

    Args:
        lengths: Tokens of the prompt and of the completion of each.
        batch: Completions of a micro-batch.
        world_size: Number of ranks; `batch x world_size` divides the number of completions.

    Returns:
        `plan[rank][micro_batch]` = indices into `lengths`, the costliest micro-batch of a rank last: ranks that wait
        for each other in every one have similar ones at a time.
    """

    def cost(rows: Sequence[int]) -> int:
        """Tokens of a micro-batch, padding included: prompts are padded to the longest, and so are completions."""
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
    """What the micro-batches of a generation hold that cannot be dealt; "" where all of it is known."""
    for micro_batch in buffered:
        batch = len(micro_batch["advantages"])
        prompt, completion = (micro_batch[name].shape for name in ("prompt_ids", "completion_ids"))
        of_row = torch.Size([batch])
        shapes = dict.fromkeys(_PROMPT, prompt) | dict.fromkeys(_COMPLETION, completion) | dict.fromkeys(_ROW, of_row)
        shapes |= {_OF_ALL: torch.Size([]), _LEFT_PAD: torch.Size([batch, 1])}
        has_old = any(micro_batch.get(name) is not None for name in _COMPLETION[2:])
        for name, value in micro_batch.items():
            if value is None:
                continue
            if name not in shapes or not isinstance(value, torch.Tensor):
                return f"'{name}'"
            if value.shape != shapes[name]:
                return f"the shape of '{name}'"
            if name == _LEFT_PAD and has_old:
                return "the layout of Unsloth's log-probabilities"
    return ""


def _lengths(rows: Mapping[str, torch.Tensor]) -> list[tuple[int, int]]:
    """Columns of each row from the first token of its prompt, and up to the last of its completion."""
    prompt, completion = rows["prompt_mask"].bool(), rows["completion_mask"].bool()
    prompts = prompt.int().cummax(1).values.sum(1)
    completions = completion.flip(1).int().cummax(1).values.sum(1)
    return list(zip(prompts.tolist(), completions.tolist(), strict=True))


def _taken(rows: Mapping[str, torch.Tensor], places: Sequence[int], prompt: int, completion: int) -> dict[str, Any]:
    """A micro-batch of these rows, as wide as its longest prompt and its longest completion."""
    taken = {name: value[torch.tensor(places, device=value.device)] for name, value in rows.items()}
    for name, value in taken.items():
        if name in _PROMPT:
            taken[name] = value[:, max(0, value.shape[1] - prompt) :]
        elif name in _COMPLETION:
            taken[name] = value[:, :completion]
    return taken


def _why_not(trainer: TrainerLike) -> str:
    """Why other micro-batches would change the gradient, or might; "" where they do not."""
    args = cast(OptionalArguments, trainer.args)
    for method in ("_prepare_inputs", "compute_loss", "_compute_loss"):
        owner = next((cls for cls in type(trainer).__mro__ if method in vars(cls)), None)
        name = "" if owner is None else owner.__name__.removeprefix("_Unsloth").removeprefix("Unsloth")
        if owner is not None and (name not in ("GRPOTrainer", "RLOOTrainer") or not is_library(owner.__module__)):
            return f"{owner.__name__}.{method} is not known"
        if method in vars(trainer):
            return f"{method} of this trainer was replaced"
    if (loss := getattr(args, "loss_type", None)) is not None and loss not in _LOSSES:
        return f"loss_type={loss!r}"
    quantile = getattr(args, "top_entropy_quantile", 1)
    of_micro_batches = {
        f"top_entropy_quantile={quantile!r}": quantile < 1,
        "an entropy bonus": bool(getattr(args, "entropy_coef", 0)) or bool(getattr(args, "use_adaptive_entropy", 0)),
        "an auxiliary loss of experts": bool(getattr(trainer, "aux_loss_enabled", False)),
        "use_liger_loss": bool(getattr(args, "use_liger_loss", False)),
    }
    if what := next((name for name, is_on in of_micro_batches.items() if is_on), ""):
        return f"{what} is one of a micro-batch"
    num_tokens = trainer.model.get_input_embeddings().weight.shape[0]
    if any(isinstance(m, nn.Embedding) and m.num_embeddings != num_tokens for m in trainer.model.modules()):
        return "the model has embeddings of other things than tokens, and padding before a prompt may move them"
    return ""
