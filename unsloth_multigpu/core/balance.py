"""Deals each step so that all ranks finish together, with costs and speeds measured while training."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils.data import IterableDataset

from unsloth_multigpu.core.loss import LossScale, kept_random_state
from unsloth_multigpu.core.manager import DDPManager
from unsloth_multigpu.core.stopwatch import Lap, Stopwatch
from unsloth_multigpu.data.cost import CostModel, attention_factor, fit_cost, relative_speeds, without_outliers
from unsloth_multigpu.data.deal import Balance, Piece, balance_step
from unsloth_multigpu.data.length import read_lengths
from unsloth_multigpu.errors import ConfigError, SetupError
from unsloth_multigpu.logs import get_logger

logger = get_logger(__name__)

# Until it is measured: a GPU is not full below some hundred tokens, and launching its kernels takes a while.
_ASSUMED = {"cpu": CostModel(overhead_tokens=32.0, floor_tokens=0.0)}
_ASSUMED_ON_DEVICE = CostModel(overhead_tokens=128.0, floor_tokens=512.0)
# Steps after which ranks tell each other their times; costs are found in the first ones, speeds may change for ever.
_FIRST_EXCHANGES = (4, 8, 16)
_EXCHANGE_EVERY = 32
_WARM_UP_STEPS = 2
_MOST_LAPS = 64


class Balancer:
    """The plan of each step, and what it is made from.

    All ranks make the same plan from the same numbers: lengths that each has read, and measurements that they exchange
    every few steps.

    Args:
        trainer: A `transformers.Trainer` or subclass.
        manager: This rank's manager.
    """

    def __init__(self, trainer: Any, manager: DDPManager) -> None:
        self._trainer = trainer
        self._manager = manager
        self._config = manager.config
        self._lengths: list[int] = []
        self._regroup = True
        self._laps: list[tuple[float, Lap]] = []
        self._num_steps = 0
        self._last_speeds: tuple[float, ...] = (1.0,) * manager.identity.world_size
        self.balance: Balance | None = None
        self.stopwatch = Stopwatch(trainer.model, trainer.args.device)

    def prepare(self, loader: Any, scale: LossScale) -> str:
        """Decides how samples are dealt; returns it in words. Collective.

        Raises:
            SetupError: balance="tokens" cannot be done; the message says why.
            ConfigError: A row is longer than `max_tokens_per_micro_batch`, or `rank_speeds` are not one per rank.
        """
        world_size = self._manager.identity.world_size
        speeds = self._config.rank_speeds or (1.0,) * world_size
        if len(speeds) != world_size:
            raise ConfigError(
                f"rank_speeds={speeds!r} has {len(speeds)} numbers, but there are {world_size} ranks.",
                hint="Give one number for each rank, or leave it out.",
            )
        if self._config.balance == "off":
            return ""
        limit = self._config.max_tokens_per_micro_batch
        is_demanded = self._config.balance == "tokens" or limit is not None
        try:
            self._regroup = _may_regroup(scale, is_demanded=is_demanded)
            self._lengths, cost = self._read(loader)
        except SetupError as reason:
            if is_demanded:
                asked = "balance='tokens'" if limit is None else f"max_tokens_per_micro_batch={limit}"
                raise SetupError(f"{asked} is not possible: {reason.args[0]}.", hint=reason.hint) from None
            logger.info("balance: samples are dealt in order: %s", reason.args[0])
            return ""
        self._check_limit()
        self.balance = Balance(cost, tuple(speeds), limit)
        digest = hashlib.blake2b(repr(self._lengths).encode(), digest_size=8).hexdigest()
        self._manager.check_same({"lengths of samples": digest, "balance": self.state()})
        dealt = "dealt" if self._regroup else "exchanged between micro-batches"
        return f", {dealt} by length ({min(self._lengths)} to {max(self._lengths)} tokens)"

    def _read(self, loader: Any) -> tuple[list[int], CostModel]:
        if isinstance(loader.dataset, IterableDataset):
            raise SetupError("a streaming data set does not say what comes", hint="Use a data set with random access.")
        cache, key = self._manager.lengths_of, getattr(loader.dataset, "_fingerprint", None)
        if key is None or key not in cache:
            with kept_random_state():
                may_read_rows = self._config.balance == "tokens"
                column = self._trainer.args.length_column_name
                found = read_lengths(loader.dataset, column, may_read_rows=may_read_rows)
            if key is not None:
                cache[key] = found
        else:
            found = cache[key]
        if not found:
            raise SetupError("the data set is empty", hint="Set balance='off'.")
        with kept_random_state():
            return _as_collated(found, loader, self._cost())

    def _cost(self) -> CostModel:
        assumed = _ASSUMED.get(self._trainer.args.device.type, _ASSUMED_ON_DEVICE)
        given: dict[str, Any] = {
            "overhead_tokens": self._config.micro_batch_overhead_tokens,
            "floor_tokens": self._config.micro_batch_floor_tokens,
        }
        given = {name: value for name, value in given.items() if value is not None}
        return dataclasses.replace(assumed, attention=_attention_of(self._trainer.model), **given)

    def _check_limit(self) -> None:
        limit, longest = self._config.max_tokens_per_micro_batch, max(self._lengths)
        if limit is not None and longest > limit:
            raise ConfigError(
                f"max_tokens_per_micro_batch={limit}, but the longest sample has {longest} tokens.",
                hint=f"Set max_tokens_per_micro_batch={longest} or more, or truncate the samples.",
            )

    def deal(self, samples: Sequence[int], sizes: Sequence[int]) -> list[list[Piece]] | None:
        """The plan of a step with these samples; None where they are dealt in order."""
        if self.balance is None:
            return None
        return balance_step([self._lengths[i] for i in samples], sizes, self.balance, regroup=self._regroup)

    def note(self, piece: Piece) -> None:
        """Keeps the time of a micro-batch, which has just been computed."""
        lap = self.stopwatch.lap() if self._measures() and not piece.is_filler else None
        if lap is not None and self._num_steps >= _WARM_UP_STEPS:
            self._laps.append((piece.work, lap))

    def _measures(self) -> bool:
        if self.balance is None or torch.are_deterministic_algorithms_enabled():
            return False
        given = (self._config.micro_batch_overhead_tokens, self._config.micro_batch_floor_tokens)
        return self._config.rank_speeds is None or None in given

    def end_step(self) -> None:
        """Puts the measurements of all ranks together after some steps. Collective."""
        self._num_steps += 1
        is_first = self._num_steps in _FIRST_EXCHANGES
        if not self._measures() or not (is_first or self._num_steps % _EXCHANGE_EVERY == 0):
            return
        mine = [(work, lap.seconds()) for work, lap in self._laps[-_MOST_LAPS:]]
        self._laps.clear()
        flat = [value for pair in mine for value in pair]
        rows = self._manager.gather_floats([len(mine), *flat, *[0.0] * (2 * _MOST_LAPS - len(flat))])
        laps = [list(zip(row[1::2], row[2::2], strict=True))[: int(row[0])] for row in rows]
        if all(laps):
            self._learn([without_outliers(rank) for rank in laps], may_fit=is_first)

    def _learn(self, laps: Sequence[Sequence[tuple[float, float]]], *, may_fit: bool) -> None:
        assert self.balance is not None
        cost, speeds, config = self.balance.cost, self.balance.speeds, self._config
        if may_fit:
            exact = [_throughput(cost, rank) for rank in laps]
            pooled = [(work, s * rate / exact[0]) for rank, rate in zip(laps, exact, strict=True) for work, s in rank]
            found = fit_cost(cost, pooled)
            if config.micro_batch_overhead_tokens is None:
                cost = dataclasses.replace(cost, overhead_tokens=found.overhead_tokens)
            if config.micro_batch_floor_tokens is None:
                cost = dataclasses.replace(cost, floor_tokens=found.floor_tokens)
        if config.rank_speeds is None:
            measured = relative_speeds([_throughput(cost, rank) for rank in laps])
            # Slow is who was slow twice: a rank may lose its processor for a moment.
            speeds = tuple(max(pair) for pair in zip(measured, self._last_speeds, strict=True))
            self._last_speeds = measured
        before, self.balance = self.balance, dataclasses.replace(self.balance, cost=cost, speeds=speeds)
        if before.speeds != speeds:
            logger.info("balance: ranks compute at relative speeds of %s", ", ".join(f"{s:g}" for s in speeds))
        if before != self.balance:
            logger.debug("balance: %s", self.state())

    def state(self) -> str:
        """What plans are made from, in words; equal on all ranks."""
        return str(self.balance)


def _may_regroup(scale: LossScale, *, is_demanded: bool) -> bool:
    """True where micro-batches can be made anew, False where only rows can be exchanged between them."""
    if scale.is_token_normalised:
        return True
    if scale.rows_are_independent and not is_demanded:
        return False
    raise SetupError(
        "the loss is a mean over the rows of a micro-batch, not a sum over the tokens of the step"
        if scale.rows_are_independent
        else "the loss of a micro-batch may depend on which rows are in it together",
        hint="Set balance='auto', and leave max_tokens_per_micro_batch out.",
    )


def _as_collated(lengths: list[int], loader: Any, cost: CostModel) -> tuple[list[int], CostModel]:
    """Compares the lengths with what the collator makes of the shortest and the longest row, and learns how it pads.

    Raises:
        SetupError: It makes more of them than their lengths say, so that a plan would not hold the limit of memory.
    """
    shortest = min(range(len(lengths)), key=lengths.__getitem__)
    longest = max(range(len(lengths)), key=lengths.__getitem__)
    alone, both = (_collated(loader, rows) for rows in ([shortest], [shortest, longest]))
    multiple = _pad_multiple(loader.collate_fn)
    padded = dataclasses.replace(cost, pad_multiple=multiple)
    if len(both) == len(alone) and both.shape[-1] > alone.shape[-1]:
        # One row of both: nothing is padded, but for the end.
        total = lengths[shortest] + lengths[longest]
        if both.numel() <= padded.padded(total):
            return lengths, dataclasses.replace(cost, is_padded=False)
    widest = both.shape[-1]
    # A collator may cut what is too long.
    cut = [min(length, widest) for length in lengths]
    if alone.shape[-1] > padded.padded(cut[shortest]) or widest > padded.padded(cut[longest]):
        raise SetupError(
            f"the collator makes {alone.shape[-1]} tokens of a row of {lengths[shortest]} and {widest} of one of "
            f"{lengths[longest]}",
            hint="Let it pad to the longest row of the batch.",
        )
    return cut, padded


def _collated(loader: Any, rows: Sequence[int]) -> torch.Tensor:
    batch = loader.collate_fn([loader.dataset[i] for i in rows])
    ids = batch.get("input_ids") if isinstance(batch, Mapping) else None
    if not isinstance(ids, torch.Tensor) or ids.dim() != 2:
        raise SetupError("the collator makes no input_ids", hint="Set balance='off'.")
    return ids


def _pad_multiple(collate: Any) -> int:
    # The Trainer wraps a collator that takes columns away.
    inner = getattr(collate, "data_collator", collate)
    return int(getattr(inner, "pad_to_multiple_of", None) or 1)


def _attention_of(model: nn.Module) -> float:
    """The `q` of the cost from the model's shape; 0 for a model that does not tell it."""
    config: Any = getattr(model, "config", None)
    config = config.get_text_config() if hasattr(config, "get_text_config") else config
    hidden_size, num_layers = (getattr(config, n, None) for n in ("hidden_size", "num_hidden_layers"))
    # By the names of their sizes: weights of quantised layers are packed.
    matrices: list[Any] = [m for m in model.modules() if hasattr(m, "in_features") and hasattr(m, "out_features")]
    num_weights = sum(int(m.in_features) * int(m.out_features) for m in matrices)
    if not isinstance(hidden_size, int) or not isinstance(num_layers, int):
        return 0.0
    num_trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    return attention_factor(hidden_size, num_layers, num_weights, is_frozen=num_trained < num_weights / 2)


def _throughput(cost: CostModel, laps: Sequence[tuple[float, float]]) -> float:
    """Cost per second: of half of the time it was more, of half less."""
    rates = sorted((cost.of_work(work) / max(s, 1e-9), s) for work, s in laps)
    half, passed = sum(s for _, s in rates) / 2, 0.0
    for rate, s in rates:
        passed += s
        if passed >= half:
            return rate
    return 0.0
