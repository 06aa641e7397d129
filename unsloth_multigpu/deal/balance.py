"""Plans each step so that all ranks finish at the same time, with costs and speeds measured during training."""

from __future__ import annotations

import dataclasses
import functools
from collections import deque
from collections.abc import Sequence
from typing import Any

import torch
from torch.utils.data import IterableDataset

from unsloth_multigpu.deal.deal import Balance, MakePlan, Piece, balance_step
from unsloth_multigpu.deal.measure import Stopwatch, as_collated, attention_of, read_lengths
from unsloth_multigpu.deal.plan import CostModel, fit_cost, relative_speeds, without_outliers
from unsloth_multigpu.errors import ConfigError, SetupError
from unsloth_multigpu.group.manager import DDPManager
from unsloth_multigpu.group.waits import Lap
from unsloth_multigpu.logs import get_logger
from unsloth_multigpu.part import TrainerLike
from unsloth_multigpu.wire.digest import digest_of

logger = get_logger(__name__)

# Defaults until costs are measured: a few hundred tokens do not fill a GPU, and launching kernels takes time.
_ASSUMED = {"cpu": CostModel(overhead_tokens=32.0, floor_tokens=0.0)}
_ASSUMED_ON_DEVICE = CostModel(overhead_tokens=128.0, floor_tokens=512.0, is_unknown=True)
# Steps after which ranks exchange their measurements.
_FIRST_EXCHANGES = (4, 8, 16)
_EXCHANGE_EVERY = 32
# Exchanges whose laps are fitted together. A few laps on a busy machine are not enough.
_EXCHANGES_KEPT = 4
_WARM_UP_STEPS = 2
_FEWEST_LAPS, _MOST_LAPS = 8, 64


class Balancer:
    """Plans the steps of a training from sample lengths and from measurements of all ranks. All ranks plan alike.

    Attributes:
        balance: Costs and speeds; None if samples are dealt in order.
        lengths: Tokens of each sample of the data set.
        reason_for_order: Why samples are dealt in order; None if they are not, or if the options ask for it.
    """

    def __init__(self, trainer: TrainerLike, manager: DDPManager) -> None:
        self._trainer = trainer
        self._manager = manager
        self._config = manager.config
        self._is_lockstep = False
        num_shares = manager.identity.world_size // self._config.sequence_parallel
        self._laps: deque[tuple[float, Lap]] = deque(maxlen=_MOST_LAPS)
        # Work and seconds of micro-batches in the last exchanges, rank by rank.
        self._kept_laps: deque[Sequence[tuple[float, float]]] = deque(maxlen=_EXCHANGES_KEPT * num_shares)
        self._regroups = True
        self._last_speeds: tuple[float, ...] = (1.0,) * num_shares
        self.balance: Balance | None = None
        self.lengths: list[int] = []
        self.reason_for_order: SetupError | None = None
        self.num_steps = 0
        self.stopwatch = Stopwatch(trainer.args.device)

    def prepare(
        self, loader: Any, *, is_token_sum: bool, rows_are_independent: bool = False, is_lockstep: bool = False
    ) -> str:
        """Decides how samples are dealt, and describes it for the log. Collective.

        Args:
            loader: The loader of one process. Two of its rows are read and collated.
            is_token_sum: The loss is a sum over tokens, divided by those of the step: rows may form any micro-batches.
            rows_are_independent: The loss is a mean over rows that do not influence each other.
            is_lockstep: Ranks wait for each other in every micro-batch, so their times do not show their own speeds.

        Raises:
            SetupError: balance="tokens" is not possible.
            ConfigError: A row is longer than `max_tokens_per_micro_batch`.
        """
        if self._config.balance == "off":
            return ""
        if not self._config.is_synchronous:
            return ", dealt in order: ranks do not wait for each other"
        reason = None
        self._is_lockstep = is_lockstep
        try:
            self._regroups = is_token_sum
            if not (is_token_sum or (rows_are_independent and not self._asked)):
                raise SetupError(
                    "the loss may not be a sum over the tokens of the step (loss_reduction='token_sum' declares one)",
                    hint="Set loss_reduction='token_sum' if it is one, divided by num_items_in_batch; else "
                    "balance='auto' without max_tokens_per_micro_batch.",
                )
            self.lengths, cost = self._read(loader)
            self.balance = Balance(cost, self._last_speeds, self._config.max_tokens_per_micro_batch)
        except SetupError as error:
            reason = error
        self._manager.check_same(
            {"lengths of samples": digest_of(self.lengths), "balance": reason.args[0] if reason else str(self.balance)}
        )
        self.reason_for_order = reason
        if reason is not None:
            if self._asked:
                raise SetupError(f"{self._asked} is not possible: {reason.args[0]}.", hint=reason.hint)
            return f", dealt in order: {reason.args[0]}"
        self._check_limit()
        how = "dealt" if self._regroups else "grouped"
        return f", {how} by length ({min(self.lengths)} to {max(self.lengths)} tokens)"

    @property
    def _asked(self) -> str:
        """The option that requires a plan; "" = samples may be dealt in order."""
        if (limit := self._config.max_tokens_per_micro_batch) is not None:
            return f"max_tokens_per_micro_batch={limit}"
        return "balance='tokens'" if self._config.balance == "tokens" else ""

    def state_dict(self) -> dict[str, Any]:
        """Returns the measurements as JSON values."""
        if self.balance is None:
            return {}
        return {
            "overhead_tokens": self.balance.cost.overhead_tokens,
            "floor_tokens": self.balance.cost.floor_tokens,
            "speeds": self.balance.speeds,
        }

    def _read(self, loader: Any) -> tuple[list[int], CostModel]:
        if isinstance(loader.dataset, IterableDataset):
            raise SetupError("the lengths of a stream are unknown", hint="Use a data set with random access.")
        may_read_rows = self._config.balance == "tokens"
        found = read_lengths(loader.dataset, self._trainer.args.length_column_name, may_read_rows=may_read_rows)
        if not found:
            raise SetupError("the data set is empty", hint="Set balance='off'.")
        assumed = _ASSUMED.get(self._trainer.args.device.type, _ASSUMED_ON_DEVICE)
        return as_collated(found, loader, dataclasses.replace(assumed, attention=attention_of(self._trainer.model)))

    def _check_limit(self) -> None:
        limit, longest = self._config.max_tokens_per_micro_batch, max(self.lengths)
        if limit is not None and longest > limit:
            raise ConfigError(
                f"max_tokens_per_micro_batch={limit}, but the longest sample has {longest} tokens.",
                hint=f"Set max_tokens_per_micro_batch={longest} or more, or truncate the samples.",
            )

    def plan(self, samples: Sequence[int], sizes: Sequence[int]) -> MakePlan | None:
        """Returns a function that plans a step with these samples, alike on all ranks; None if they are dealt in order.

        Raises SetupError if the data set has grown, and an option requires a plan.
        """
        if self.balance is None:
            return None
        if max(samples, default=-1) >= len(self.lengths):
            if self._asked:
                grown = f"the data set has grown: it had {len(self.lengths)} rows when their lengths were read"
                raise SetupError(f"{self._asked} is not possible: {grown}.", hint="Set balance='off', or add no rows.")
            return None
        lengths = [self.lengths[i] for i in samples]
        how = {"regroup": self._regroups, "is_lockstep": self._is_lockstep}
        return functools.partial(balance_step, lengths, sizes, self.balance, **how)

    @property
    def varies_rows(self) -> bool:
        """True if micro-batches may have another number of rows than the script's."""
        return self.balance is not None and self._regroups and self.balance.cost.is_padded

    def note(self, piece: Piece) -> None:
        """Records the time of the micro-batch that has just been computed."""
        # Pieces dealt in order, as in a short last step, have no known cost.
        lap = self.stopwatch.lap if piece.work and self._measures() else None
        if lap is not None and self.num_steps >= _WARM_UP_STEPS:
            self._laps.append((piece.work, lap))

    def _measures(self) -> bool:
        return self.balance is not None and not torch.are_deterministic_algorithms_enabled()

    def end_step(self) -> None:
        """Exchanges the measurements of the ranks after some steps. Collective."""
        self.num_steps += 1
        is_first = self.num_steps in _FIRST_EXCHANGES
        if not self._measures() or not (is_first or self.num_steps % _EXCHANGE_EVERY == 0):
            return
        ranks = self._manager.gather_json([(work, lap.seconds()) for work, lap in self._laps])
        self._laps.clear()
        # Ranks that share samples wait for each other, so the times of the first are those of all.
        laps = ranks[:: self._config.sequence_parallel]
        if all(laps):
            assert self.balance is not None
            self._learn([without_outliers(self.balance.cost, rank) for rank in laps])

    def _learn(self, laps: Sequence[Sequence[tuple[float, float]]]) -> None:
        assert self.balance is not None
        cost = self._fitted(self.balance.cost, laps)
        is_enough = min(len(rank) for rank in laps) >= _FEWEST_LAPS
        measured = relative_speeds([throughput(cost, rank) if is_enough else 0.0 for rank in laps])
        # A rank counts as slow after two slow measurements: a single one may come from a short interruption.
        speeds = tuple(max(pair) for pair in zip(measured, self._last_speeds, strict=True))
        self._last_speeds = measured
        before, self.balance = self.balance, dataclasses.replace(self.balance, cost=cost, speeds=speeds)
        if before.speeds != speeds:
            logger.info("balance: ranks compute at relative speeds of %s", ", ".join(f"{s:g}" for s in speeds))
        if before != self.balance:
            logger.debug("balance: %s", str(self.balance))

    def _fitted(self, cost: CostModel, laps: Sequence[Sequence[tuple[float, float]]]) -> CostModel:
        """Fits the cost model to these and earlier laps."""
        self._kept_laps.extend(laps)
        # Seconds are converted to tokens, which are comparable between ranks of different speed.
        rates = [throughput(cost, rank) for rank in self._kept_laps]
        pooled = [(w, s * rate) for rank, rate in zip(self._kept_laps, rates, strict=True) for w, s in rank]
        return fit_cost(cost, pooled)


def throughput(cost: CostModel, laps: Sequence[tuple[float, float]]) -> float:
    """Returns the cost per second."""
    return sum(cost.of_work(work) for work, _ in laps) / max(sum(seconds for _, seconds in laps), 1e-9)
