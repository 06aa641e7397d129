"""Records a run for `unsloth-multigpu forecast`: seconds and samples of micro-batches and steps."""

from __future__ import annotations

import dataclasses
import functools
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch

from unsloth_multigpu.deal.balance import throughput
from unsloth_multigpu.deal.deal import Balance, MakePlan, Plan, balance_step, deal_step
from unsloth_multigpu.deal.plan import fit_cost
from unsloth_multigpu.errors import SetupError
from unsloth_multigpu.group.model import num_bytes
from unsloth_multigpu.group.waits import Lap, moment
from unsloth_multigpu.options import MultiGPUConfig
from unsloth_multigpu.part import ArgumentsLike, ControlLike, Override, Part, StateLike, TrainerLike
from unsloth_multigpu.recorders.first_steps import FirstSteps
from unsloth_multigpu.step.feed import StepFeed
from unsloth_multigpu.strategy import DDP
from unsloth_multigpu.wire.heartbeat import Phase

# First steps, which are not timed: libraries compile, and caches are empty.
WARM_UP_STEPS = 2
# Numbers of ranks whose micro-batches the one rank computes, in turn, to measure the sizes that the forecast needs.
_TRIED = (1, 2, 4, 8, 16)
# Fraction of a micro-batch's time that is its backward pass, which overlaps with the all-reduce: twice the work of the
# forward pass, or as much with frozen weights (see `measure.attention_of`).
BACKWARD, BACKWARD_FROZEN = 2 / 3, 1 / 2


class Forecast(FirstSteps):
    """Times the first steps of a run on one rank, and ends it.

    The rank computes each step with the micro-batches of some number of ranks, one after the other.
    """

    name = "forecast"
    plans_one_process = True

    def adjusted(self, config: MultiGPUConfig) -> MultiGPUConfig:
        others = {
            f"strategy={config.strategy}": not isinstance(config.strategy, DDP),
            f"shard={config.shard!r}": config.shard != "off",
            "global_batch='scale'": not config.keeps_global_batch,
        }
        if asked := [name for name, is_asked in others.items() if is_asked]:
            raise SetupError(
                f"forecast supports DDP with the global batch of one process; the script sets {asked[0]}.",
                hint="Leave it out for the forecast.",
            )
        return self.alone(config)

    def part(self, trainer: TrainerLike, session: Any, steps: StepFeed) -> Part:
        """Returns itself. Raises SetupError if the training cannot be forecast."""
        _refuse_unsupported(trainer)
        self._beat = session.beat
        # Step, positions of the micro-batch's samples in the step, and its time.
        self._laps: list[tuple[int, Sequence[int], Lap]] = []
        self._ends: list[Any] = []
        # Seconds of the main thread in each phase since the start, at the end of each step.
        self._spent_s: list[dict[Phase, float]] = []
        self._lengths: list[list[int]] = []
        return super().part(trainer, session, steps)

    def overrides(self) -> dict[str, Override]:
        return {"training_step": self._training_step}

    def _training_step(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        begin = moment(self._trainer.args.device)
        loss = original(*args, **kwargs)
        current = self._steps.passes.current
        if current is not None and not current.piece.is_filler:
            lap = Lap(begin, moment(self._trainer.args.device))
            self._laps.append((self._step(), current.piece.positions, lap))
        return loss

    def on_train_begin(self, args: ArgumentsLike, state: StateLike, control: ControlLike, **kwargs: Any) -> None:
        super().on_train_begin(args, state, control, **kwargs)
        loader = self._steps.loader
        if loader is None:
            raise SetupError(
                f"{type(self._trainer).__name__} builds batches of its own, so ranks cannot keep its global batch.",
                hint="Time some steps on one GPU and on two.",
            )
        if self._steps.balancer.balance is None:
            reason = self._steps.balancer.reason_for_order
            raise SetupError(
                "A forecast needs the tokens of each sample, and here they are not used: "
                f"{reason.args[0] if reason is not None else 'balance=' + repr(self._config.balance)}.",
                hint=f"{reason.hint if reason is not None and reason.hint else 'Set balance=auto.'} Or let "
                "`unsloth-multigpu verify` time some steps on one GPU and on all.",
            )
        loader.steps.planner = self._planner

    def _planner(self, samples: Sequence[int], sizes: Sequence[int]) -> MakePlan:
        """Returns the planner of a step, by which the one rank gets the micro-batches of several."""
        balancer = self._steps.balancer
        assert balancer.balance is not None
        lengths = [balancer.lengths[i] for i in samples]
        self._lengths.append(lengths)
        number = len(self._lengths)
        tried = [n for n in _TRIED if n <= len(samples)]
        num_ranks = 1 if number <= WARM_UP_STEPS else tried[number % len(tried)]
        regroup = self._steps.passes.reduction.is_token_normalized
        return functools.partial(_of_all_ranks, lengths, sizes, num_ranks, balancer.balance, regroup=regroup)

    def on_step_end(self, args: ArgumentsLike, state: StateLike, control: ControlLike, **kwargs: Any) -> None:
        self._ends.append(moment(self._trainer.args.device))
        self._spent_s.append(dict(self._beat.spent_s))
        super().on_step_end(args, state, control, **kwargs)

    def record(self) -> dict[str, Any]:
        first = min(WARM_UP_STEPS, max(1, len(self._ends) - 1))
        seconds = {k: Lap(self._ends[k - 1], self._ends[k]).seconds() for k in range(first, len(self._ends))}
        return {
            "rank": self._rank,
            "steps": list(seconds.values()),
            **(self._measured(seconds) if seconds else {}),
        }

    def _measured(self, step_s: Mapping[int, float]) -> dict[str, Any]:
        """Returns the measured costs, from the steps whose seconds are `step_s[step]`."""
        trainer, balancer = self._trainer, self._steps.balancer
        assert balancer.balance is not None
        cost = balancer.balance.cost
        laps = [
            (k, cost.work([self._lengths[k][p] for p in positions]), lap.seconds())
            for k, positions, lap in self._laps
            if k in step_s
        ]
        samples = [(work, seconds) for _, work, seconds in laps]
        cost = fit_cost(cost, samples)
        token_s = 1 / throughput(cost, samples)
        computed = {k: sum(s for n, _, s in laps if n == k) for k in step_s}
        fitted = {k: sum(token_s * cost.of_work(work) for n, work, _ in laps if n == k) for k in step_s}
        sizes = (int(trainer._train_batch_size),) * self._steps.num_accumulated
        trained = [p for p in trainer.model.parameters() if p.requires_grad]
        is_frozen = sum(p.numel() for p in trained) < sum(p.numel() for p in trainer.model.parameters()) / 2
        is_cpu = trainer.args.device.type == "cpu"
        work = {
            "cost": dataclasses.asdict(cost),
            "token_s": token_s,
            "update_s": statistics.median_high(max(0.0, step_s[k] - computed[k]) for k in step_s),
            "loading_s": self._median_s(step_s, Phase.DATA, Phase.FILL),
            "callbacks_s": self._median_s(step_s, Phase.CALLBACKS),
            "steps": [lengths for lengths in self._lengths if len(lengths) == sum(sizes)],
            "sizes": sizes,
            "num_steps": int(trainer.state.max_steps),
            "regroup": self._steps.passes.reduction.is_token_normalized,
            "max_tokens": balancer.balance.max_tokens,
            "gradient_bytes": num_bytes(*trained),
            "hides": 0.0 if is_cpu else BACKWARD_FROZEN if is_frozen else BACKWARD,
        }
        return {
            "work": work,
            "misfit": statistics.median_high(abs(fitted[k] / (computed[k] or 1.0) - 1) for k in step_s),
            "device": "CPU" if is_cpu else torch.get_device_module(trainer.args.device).get_device_name(),
            "trainer": type(trainer).__name__,
            "num_trained": sum(p.numel() for p in trained),
        }

    def _median_s(self, steps: Iterable[int], *phases: Phase) -> float:
        """Returns the median seconds of a step in some phases."""
        spent = [sum(at_end[phase] for phase in phases) for at_end in self._spent_s]
        return statistics.median(spent[k] - spent[k - 1] for k in steps)


def _of_all_ranks(
    lengths: Sequence[int], sizes: Sequence[int], num_ranks: int, balance: Balance, *, regroup: bool
) -> Plan:
    """Returns a plan in which one rank has the pieces of all ranks; for one rank, the script's own micro-batches."""
    if num_ranks == 1:
        return deal_step(sizes, 1, regroup=False)
    plan = balance_step(lengths, sizes, dataclasses.replace(balance, speeds=(1.0,) * num_ranks), regroup=regroup)
    return [[piece for share in plan for piece in share if not piece.is_filler]]


def _refuse_unsupported(trainer: TrainerLike) -> None:
    if trainer.is_deepspeed_enabled or trainer.is_fsdp_enabled:
        raise SetupError(
            "forecast supports DDP only; the script uses FSDP or DeepSpeed.",
            hint="Leave it out of the script for this forecast.",
        )
    if hasattr(trainer.args, "steps_per_generation"):
        raise SetupError(
            f"{type(trainer).__name__} generates its samples during the training, so their lengths are not known.",
            hint="Time some steps on one GPU and on two.",
        )
