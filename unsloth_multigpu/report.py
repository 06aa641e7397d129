"""The report of a training: figures of each rank as plain data."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

Number = TypeVar("Number", int, float)
# Name of all optimizer steps but the first. A summary names other phases that take more than this fraction of the time.
STEPS, _NOTICEABLE = "steps", 0.05


@dataclass(frozen=True)
class Figures:
    """Figures of one rank in a training, up to its last finished step. None = not known.

    Args:
        max_steps: Steps of the whole training, including those before a resumed checkpoint.
        num_steps: Optimizer steps.
        num_samples: Samples that contributed to a gradient, over all steps.
        num_tokens: Tokens without padding: those that `attention_mask` selects in `input_ids`, all without a mask. The
            sum over all ranks does not depend on their number. None for a model without tokens.
        num_padding_tokens: Padding tokens of the micro-batches.
        waiting_s: Seconds of waiting for other ranks, including the transfer; 0.0 in one process. None if sharded.
        peak_bytes: Peak memory: that allocated by torch on an accelerator, that of the process on the CPU.
        held_bytes: Memory after the last step, of the same kind.
        step_s: Median seconds of an optimizer step, without evaluations and checkpoints.
        loop_s: Seconds from the start of the first step to the end of the last one.
        setup_s: Seconds from the call of `train()` to the start of the first step.
    """

    max_steps: int | None = None
    num_steps: int | None = None
    num_samples: int | None = None
    num_tokens: int | None = None
    num_padding_tokens: int | None = None
    waiting_s: float | None = None
    peak_bytes: int | None = None
    held_bytes: int | None = None
    step_s: float | None = None
    loop_s: float | None = None
    setup_s: float | None = None

    def since(self, before: Figures) -> Figures:
        """Returns the increments since `before` of the figures that are sums; the others are not known."""
        names = ("num_steps", "num_samples", "num_tokens", "num_padding_tokens", "waiting_s", "loop_s")
        pairs = {name: (getattr(before, name), getattr(self, name)) for name in names}
        return Figures(**{name: None if new is None else new - (old or 0) for name, (old, new) in pairs.items()})


def rates_of(ranks: Sequence[Figures]) -> dict[str, float | None]:
    """Returns the throughput of several ranks together: sums of their counts, divided by the first rank's `loop_s`.

    None = not known.

    Returns:
        "steps_per_s", "samples_per_s" and "tokens_per_s", without padding; "waiting": the fraction of the time in which
        ranks waited for others, as the mean of all ranks; "padding": the fraction of the tokens that is padding.
    """
    seconds, num_steps = (ranks[0].loop_s, ranks[0].num_steps) if ranks else (None, None)
    num_tokens, num_padding = _total(rank.num_tokens for rank in ranks), _total(r.num_padding_tokens for r in ranks)
    return {
        "steps_per_s": _ratio(num_steps, seconds),
        "samples_per_s": _ratio(_total(rank.num_samples for rank in ranks), seconds),
        "tokens_per_s": _ratio(num_tokens, seconds),
        "waiting": _ratio(_total(rank.waiting_s for rank in ranks), _total(rank.loop_s for rank in ranks)),
        "padding": _ratio(num_padding, _total((num_tokens, num_padding))),
    }


@dataclass(frozen=True, kw_only=True)
class RankReport(Figures):
    """Figures of one rank in a whole training: those of `Figures`, and these. None = not known.

    Args:
        num_micro_batches: Forward-backward passes.
        train_s: Seconds inside `Trainer.train`.
        sent_bytes: Bytes of gradients or weights that this rank sent, without headers, computed for the usual
            algorithms of collectives.
        runtime_s: The Trainer's own `train_runtime`.
        phases_s: Seconds since the start of the first step, by what the main thread did: "steps", "saves".
    """

    rank: int
    num_steps: int
    num_samples: int
    num_micro_batches: int
    train_s: float
    sent_bytes: int | None = None
    runtime_s: float | None = None
    phases_s: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class RunReport:
    """Figures of a training.

    Args:
        ranks: One report per rank, in order.
        planner: Measurements of the planner, as JSON values; empty if samples were divided in order.
        max_steps: Steps of the whole training, including those before a resumed checkpoint; None = not known.
        resumed_step: Step of the checkpoint that the training resumed from; 0 = none.
        resumed: Name of that checkpoint's folder, if known.
        first_step: Result of the comparison of the first step with one process, as JSON values; empty without one.
        inexact: Why this is not exactly the training of one process; "" = no difference was found.
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
        """Samples of all ranks."""
        return sum(r.num_samples for r in self.ranks)

    @property
    def num_tokens(self) -> int | None:
        """Tokens of all ranks; None if not known."""
        return _total(r.num_tokens for r in self.ranks)

    @property
    def rates(self) -> dict[str, float | None]:
        """Rates of all ranks together, from the start of the first step to the end of the last one."""
        return rates_of(self.ranks)

    @property
    def had_nothing_to_do(self) -> bool:
        """True if the training resumed from its last step."""
        return self.ranks[0].num_steps == 0 and 0 < (self.max_steps or 0) <= self.resumed_step

    def summary(self, traffic: str = "sent {:.1f} MB per rank") -> str:
        """Returns one sentence about the training. Its seconds are rank 0's `train_runtime`.

        `traffic` is the format of the largest `sent_bytes` of a rank, in MB.
        """
        first = self.ranks[0]
        if self.had_nothing_to_do:
            return (
                f"{self.resumed or f'checkpoint-{self.resumed_step}'} is the end of this training ({self.resumed_step} "
                f"of {self.max_steps} steps): nothing to do; another output_dir starts a new training"
            )
        of_ranks = f" ({' + '.join(str(r.num_samples) for r in self.ranks)})" if len(self.ranks) > 1 else ""
        seconds = max(r.train_s for r in self.ranks) if first.runtime_s is None else first.runtime_s
        line = f"trained {_counted(first.num_steps, 'step')}"
        # Samples are not counted if the script makes its own batches.
        if is_counted := self.num_samples > 0 or first.num_steps == 0:
            line += f", {_counted(self.num_samples, 'sample')}{of_ranks}"
        line += f" in {seconds:.1f} s"
        if is_counted and seconds > 0:
            speed = self.num_samples / seconds
            line += f" ({speed:.0f} samples/s)" if speed >= 10 else f" ({speed:.2g} samples/s)"
        total_s = sum(first.phases_s.values())
        longest_first = sorted(first.phases_s.items(), key=lambda phase: -phase[1])
        others = [(s / total_s, name) for name, s in longest_first if name != STEPS and s > _NOTICEABLE * total_s]
        if others:
            line += f", of which {' and '.join(f'{share:.0%} {name}' for share, name in others)}"
        if first.setup_s is not None:
            line += f", set-up {first.setup_s:.1f} s"
        sent = [r.sent_bytes for r in self.ranks if r.sent_bytes is not None]
        line = f"{line}, {traffic.format(max(sent) / 1e6)}" if sent else line
        return f"{line}; not exactly the training of one process: {self.inexact}" if self.inexact else line


def _total(counts: Iterable[Number | None]) -> Number | None:
    found = list(counts)
    return None if None in found else sum(count for count in found if count is not None)


def _ratio(part: float | None, whole: float | None) -> float | None:
    return None if part is None or not whole else part / whole


def _counted(number: int, name: str) -> str:
    return f"{number} {name}{'' if number == 1 else 's'}"
