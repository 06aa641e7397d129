"""What a training did, as plain data: the figures of each rank."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

# Said where the number is missing.
NO_WAITING = "waiting is not measured where ranks hold parts of the weights"


@dataclass(frozen=True)
class Rates:
    """What was done in a time. None = it is not known.

    Args:
        steps_per_s: Optimizer steps.
        samples_per_s: Samples whose gradient counted.
        tokens_per_s: Tokens.
        waiting: Part of the time in which it waited for others, the mean of all ranks: 0.0 to 1.0.
        padding: Part of the places of its micro-batches that is padding: 0.0 to 1.0.
    """

    steps_per_s: float | None = None
    samples_per_s: float | None = None
    tokens_per_s: float | None = None
    waiting: float | None = None
    padding: float | None = None

    def values(self) -> dict[str, float | None]:
        """JSON values."""
        return {name: value for name, value in vars(self).items() if name != "steps_per_s"}


def rates_of(ranks: Sequence[Mapping[str, Any]]) -> Rates:
    """The combined rates of several ranks: counts are summed, then divided by the first rank's `loop_s`."""
    seconds = ranks[0]["loop_s"] if ranks else None
    if not seconds:
        return Rates()
    names = ("num_samples", "num_tokens", "num_padding_tokens")
    num_samples, num_tokens, num_padding = (_total(rank[name] for rank in ranks) for name in names)
    return Rates(
        ranks[0]["num_steps"] / seconds,
        None if num_samples is None else num_samples / seconds,
        None if num_tokens is None else num_tokens / seconds,
        _share((rank["waiting_s"], rank["loop_s"]) for rank in ranks),
        None if num_tokens is None or num_padding is None else num_padding / ((num_tokens + num_padding) or 1),
    )


@dataclass(frozen=True)
class RankReport:
    """One rank's share of a training. None = it is not known.

    Args:
        rank: Which rank.
        num_steps: Optimizer steps.
        num_samples: Samples whose gradient counted, over all steps.
        num_micro_batches: Forward-backward passes.
        train_s: Seconds inside `Trainer.train`.
        sent_bytes: What gradients or weights were sent, without headers, in the algorithms that are usual; None where
            it is not known.
        num_tokens: The model's own tokens: places of `input_ids` that `attention_mask` leaves in, or all where there is
            no mask. Those of all ranks together are the same on any number of ranks. None for a model without tokens.
        num_padding_tokens: Places of the micro-batches that hold none of these tokens.
        waiting_s: Seconds in which it waited for other ranks, with the transfer; 0.0 in one process. None where the
            ranks hold parts of the weights.
        peak_bytes: Most memory: what torch has allocated on the accelerator, or what the process held on the CPU.
        step_s: Median seconds of an optimizer step, from the end of the one before, without evaluations and
            checkpoints.
        loop_s: Seconds from the begin of the first step to the end of the last one.
        setup_s: Seconds from the call of `train()` to the begin of the first step.
        runtime_s: What the Trainer itself calls the seconds of the training, its `train_runtime`.
    """

    rank: int
    num_steps: int
    num_samples: int
    num_micro_batches: int
    train_s: float
    sent_bytes: int | None = None
    num_tokens: int | None = None
    num_padding_tokens: int | None = None
    waiting_s: float | None = None
    peak_bytes: int | None = None
    step_s: float | None = None
    loop_s: float | None = None
    setup_s: float | None = None
    runtime_s: float | None = None


@dataclass(frozen=True)
class RunReport:
    """All ranks' shares of a training, in the order of ranks.

    Args:
        planner: What the planner had measured at the end, as JSON values; empty where samples were dealt in order.
        max_steps: Steps of the whole training, with those before a checkpoint that it resumed from; None = not known.
        resumed_step: Steps before the checkpoint that it resumed from.
        resumed: Name of that checkpoint's folder, where it is known.
        first_step: What the comparison of the first step with that of one process has found, as JSON values; empty
            where there was none.
        inexact: Why this is not exactly the training of one process; "" = nothing was found.
    """

    ranks: tuple[RankReport, ...]
    planner: Mapping[str, Any] = field(default_factory=dict)
    max_steps: int | None = None
    resumed_step: int = 0
    resumed: str = ""
    first_step: Mapping[str, Any] = field(default_factory=dict)
    inexact: str = ""

    @property
    def num_samples(self) -> int:
        """Samples of all ranks together."""
        return sum(r.num_samples for r in self.ranks)

    @property
    def num_tokens(self) -> int | None:
        """Tokens of all ranks together; None where they are not known."""
        return _total(r.num_tokens for r in self.ranks)

    @property
    def rates(self) -> Rates:
        """Of all ranks together, from the begin of the first step to the end of the last one."""
        return rates_of([vars(r) for r in self.ranks])

    @property
    def tokens_per_s(self) -> float | None:
        """See `Rates`, and so of the next two."""
        return self.rates.tokens_per_s

    @property
    def waiting(self) -> float | None:
        return self.rates.waiting

    @property
    def padding(self) -> float | None:
        return self.rates.padding

    @property
    def had_nothing_to_do(self) -> bool:
        """True where the training resumed from its own end."""
        return self.ranks[0].num_steps == 0 and 0 < (self.max_steps or 0) <= self.resumed_step

    def summary(self, traffic: str = "sent {:.1f} MB per rank") -> str:
        """The training in one sentence. Its seconds are the Trainer's own `train_runtime`, of rank 0.

        Args:
            traffic: What it says of the `sent_bytes` of the rank that sent most, in MB.
        """
        first = self.ranks[0]
        if self.had_nothing_to_do:
            return (
                f"{self.resumed or f'checkpoint-{self.resumed_step}'} is the end of this training ({self.resumed_step} "
                f"of {self.max_steps} steps): nothing to do; another output_dir starts a new training"
            )
        shares = f" ({' + '.join(str(r.num_samples) for r in self.ranks)})" if len(self.ranks) > 1 else ""
        seconds = max(r.train_s for r in self.ranks) if first.runtime_s is None else first.runtime_s
        line = f"trained {_counted(first.num_steps, 'step')}"
        # Where the script's own batches are trained on, their samples are not counted.
        if is_counted := self.num_samples > 0 or first.num_steps == 0:
            line += f", {_counted(self.num_samples, 'sample')}{shares}"
        line += f" in {seconds:.1f} s"
        if is_counted and seconds > 0:
            line += f" ({_rounded(self.num_samples / seconds)} samples/s)"
        if first.setup_s is not None:
            line += f", set-up {first.setup_s:.1f} s"
        sent = [r.sent_bytes for r in self.ranks if r.sent_bytes is not None]
        line = f"{line}, {traffic.format(max(sent) / 1e6)}" if sent else line
        return f"{line}; not exactly the training of one process: {self.inexact}" if self.inexact else line


def _total(counts: Iterable[int | None]) -> int | None:
    """The sum; None where one is not known."""
    found = list(counts)
    return None if None in found else sum(count for count in found if count is not None)


def _share(pairs: Iterable[tuple[float | None, float | None]]) -> float | None:
    """The sum of the first numbers as part of the sum of the second ones; None where one is not known."""
    parts, wholes = zip(*pairs, strict=True)
    if None in parts or None in wholes or not sum(wholes):
        return None
    return float(sum(parts) / sum(wholes))


def _counted(number: int, name: str) -> str:
    return f"{number} {name}{'' if number == 1 else 's'}"


def _rounded(number: float) -> str:
    return f"{number:.0f}" if number >= 10 else f"{number:.2g}"
