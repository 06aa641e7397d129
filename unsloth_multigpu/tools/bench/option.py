"""What a benchmark runs: the options of `unsloth-multigpu bench`, checked, as plain data that travels to the ranks."""

from __future__ import annotations

import argparse
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from unsloth_multigpu.errors import ConfigError

# Hidden size, layers, vocabulary. The last one has about 0.9e9 parameters.
MODEL_SIZES: Mapping[str, tuple[int, int, int]] = {
    "tiny": (64, 2, 1000),
    "small": (256, 6, 2000),
    "medium": (768, 12, 16000),
    "1b": (2048, 16, 32000),
}
DEFAULT_LENGTHS = "lognormal:150:1024"
HEAD_SIZE = 64
# The second step is not typical: DDP rebuilds its buckets in it, and it includes the check of replicas after the first.
NUM_WARMUP = 2
# A GPU compiles and tunes kernels in its first steps, and the planner fits its costs in the first 16.
NUM_WARMUP_ON_DEVICE = 20
# Our planner compares the ranks' speeds after 4 steps, and again after 8.
NUM_WARMUP_SLOW = 8
# For the comparison of strategies, which train on a text.
TEXT_LENGTHS = "text:128"
TEXT_KINDS = ("text:", "file:")
TRANSFORMERS, UNSLOTH = LIBRARIES = ("transformers", "unsloth")
NUM_EPOCHS = 2
LEARNING_RATE = 1e-3
DEFAULT_OPTIMIZER = "adamw_torch"
NUM_STEPS = 3
NUM_STEPS_OF_EPOCH = 40
MAX_TEST_ROWS = 128


@dataclass(frozen=True)
class BenchOptions:
    """One benchmark. `from_arguments` checks what was given.

    Args:
        arms: Names of `ARMS`, in the order in which they run.
        num_ranks: Ranks of the arms that have several.
        hidden_size, num_layers, vocab_size: Of a Llama with random weights.
        dtype: "fp32", or "bf16": autocast; under LoRA the frozen weights are bf16, too.
        train: "full" or "lora".
        library: Whose trainer and model all arms have: transformers' Trainer, or Unsloth's FastLanguageModel and TRL's
            SFTTrainer as Unsloth changes it.
        model_folder: Where Unsloth finds the model; the benchmark makes it before the arms run. None = not yet.
        is_four_bit: Unsloth loads the frozen weights in 4 bits.
        optimizer: Its name in `TrainingArguments`.
        lengths: "lognormal:MEDIAN:MAX", "fixed:N", "text:MAX" or "file:PATH"; see `data`.
        is_padding_free: Rows lie end to end, in every arm; else they are padded to the longest of their micro-batch.
        has_checkpointing: Activations are computed again in the backward pass.
        batch_size: Samples of a micro-batch per device.
        accumulation: Micro-batches of a step per rank.
        num_epochs: The model learns for this many epochs of `num_steps` steps, the first `num_warmup` of which are not
            timed, and is tested after each. None = one epoch of speed alone.
        num_steps, num_warmup: Optimizer steps that are measured, and those before them.
        num_repeats: Rounds; each runs every arm once.
        interleave: "runs": the arms of a round run one after the other; "steps": all at once, and they take turns.
        slow_rank: This rank computes at `slow_speed` of its speed. None = no such rank.
        save_steps: Optimizer steps between two checkpoints of the arms that may save. None = no checkpoints.
        device: "cpu" or "cuda".
        is_card_shared: All ranks use the one visible card, over gloo.
        timeout_s: Limit of one arm's run, in seconds; where arms take turns, of one step.
        seed: Of weights, lengths and tokens.
    """

    arms: tuple[str, ...]
    num_ranks: int = 2
    hidden_size: int = 256
    num_layers: int = 6
    vocab_size: int = 2000
    dtype: str = "fp32"
    train: str = "full"
    library: str = TRANSFORMERS
    model_folder: str | None = None
    is_four_bit: bool = False
    optimizer: str = DEFAULT_OPTIMIZER
    lengths: str = DEFAULT_LENGTHS
    is_padding_free: bool = False
    has_checkpointing: bool = False
    batch_size: int = 8
    accumulation: int = 1
    num_epochs: int | None = None
    num_steps: int = NUM_STEPS
    num_warmup: int = NUM_WARMUP
    num_repeats: int = 3
    interleave: str = "runs"
    slow_rank: int | None = None
    slow_speed: float = 1.0
    save_steps: int | None = None
    device: str = "cpu"
    is_card_shared: bool = False
    timeout_s: float = 900.0
    seed: int = 0

    @classmethod
    def from_arguments(cls, arguments: argparse.Namespace, arms: Sequence[str]) -> BenchOptions:
        """Checks a command line; `device` is left as it was given.

        Raises:
            ConfigError: A value cannot be used.
        """
        hidden_size, num_layers, vocab_size = MODEL_SIZES[arguments.model_size]
        slow_rank, slow_speed = _parse_slow_rank(arguments.slow_rank, arguments.ranks)
        is_learning = arguments.strategies is not None
        if arguments.epochs is not None and not is_learning:
            raise ConfigError(
                f"--epochs {arguments.epochs} is for --strategies; arms run one epoch.",
                hint="Give --steps, or --strategies all.",
            )
        if arguments.interleave == "steps" and is_learning:
            raise ConfigError(
                "--interleave steps is for --arms; strategies do more than steps.",
                hint="Leave --interleave out, or give --arms.",
            )
        if arguments.padding_free and is_learning:
            raise ConfigError(
                "--padding-free is for --arms; strategies test a model on padded rows.",
                hint="Leave --padding-free out, or give --arms.",
            )
        if arguments.library == UNSLOTH and is_learning:
            raise ConfigError(
                "--library unsloth is for --arms; strategies are compared with transformers' Trainer.",
                hint="Leave --library out, or give --arms.",
            )
        options = cls(
            arms=tuple(arms),
            num_ranks=arguments.ranks,
            hidden_size=_given(arguments.hidden_size, hidden_size),
            num_layers=_given(arguments.num_layers, num_layers),
            vocab_size=_given(arguments.vocab_size, vocab_size),
            dtype=arguments.dtype,
            train=arguments.train or "full",
            library=arguments.library,
            is_four_bit=arguments.four_bit,
            optimizer=arguments.optim,
            lengths=_checked_lengths(arguments.lengths or (TEXT_LENGTHS if is_learning else DEFAULT_LENGTHS)),
            is_padding_free=arguments.padding_free,
            has_checkpointing=arguments.gradient_checkpointing,
            batch_size=arguments.batch_size,
            accumulation=arguments.accumulation,
            num_epochs=_given(arguments.epochs, NUM_EPOCHS) if is_learning else None,
            num_steps=_given(arguments.steps, NUM_STEPS_OF_EPOCH if is_learning else NUM_STEPS),
            num_warmup=_given(arguments.warmup, NUM_WARMUP if slow_rank is None else NUM_WARMUP_SLOW),
            num_repeats=arguments.repeats,
            interleave=arguments.interleave,
            slow_rank=slow_rank,
            slow_speed=slow_speed,
            save_steps=arguments.save_steps,
            device=arguments.device,
            timeout_s=arguments.timeout_s,
            seed=arguments.seed,
        )
        options._check()
        return options

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> BenchOptions:
        """Of what `dataclasses.asdict` gave, after it travelled as JSON."""
        return cls(**{**values, "arms": tuple(values["arms"])})

    @property
    def num_samples_per_step(self) -> int:
        """Samples of an optimizer step over all ranks: the same number in every arm."""
        return self.batch_size * self.accumulation * self.num_ranks

    @property
    def timeout_of_turns_s(self) -> float:
        """The limit of a run of all arms in turns, in seconds."""
        return self.timeout_s * (1 + len(self.arms) * (self.num_warmup + self.num_steps + 1))

    @property
    def num_rows(self) -> int:
        """Rows of the data set: one epoch of whole steps."""
        num_untimed = self.num_warmup if self.num_epochs is None else 0
        return self.num_samples_per_step * (num_untimed + self.num_steps)

    def _check(self) -> None:
        for flag, value, minimum in (
            ("--ranks", self.num_ranks, 1),
            ("--hidden-size", self.hidden_size, HEAD_SIZE),
            ("--num-layers", self.num_layers, 1),
            ("--vocab-size", self.vocab_size, 256 if self.lengths.startswith(TEXT_KINDS) else 16),
            ("--batch-size", self.batch_size, 1),
            ("--accumulation", self.accumulation, 1),
            ("--epochs", _given(self.num_epochs, 1), 1),
            ("--warmup", self.num_warmup, 0),
            ("--steps", self.num_steps, 1 if self.num_epochs is None else self.num_warmup + 1),
            ("--repeats", self.num_repeats, 1),
            ("--save-steps", _given(self.save_steps, 1), 1),
            ("--seed", self.seed, 0),
        ):
            if value < minimum:
                raise ConfigError(f"{flag} {value}: expected at least {minimum}.", hint=f"Give {flag} {minimum}.")
        if self.hidden_size % HEAD_SIZE:
            raise ConfigError(
                f"--hidden-size {self.hidden_size}: attention heads are {HEAD_SIZE} wide.",
                hint=f"Give a multiple of {HEAD_SIZE}.",
            )
        if self.is_four_bit and (self.library, self.train) != (UNSLOTH, "lora"):
            raise ConfigError(
                f"--four-bit with --library {self.library} --train {self.train}: 4-bit weights are frozen, and Unsloth "
                "loads them.",
                hint="Give --library unsloth --train lora.",
            )
        if not 0 < self.timeout_s < math.inf:
            raise ConfigError(f"--timeout-s {self.timeout_s}: expected seconds above 0.", hint="Give --timeout-s 900.")
        if self.num_epochs is not None and not self.lengths.startswith(TEXT_KINDS):
            raise ConfigError(
                f"--lengths {self.lengths}: random tokens teach a model nothing.",
                hint=f"Give --lengths {TEXT_LENGTHS} or file:PATH with --strategies.",
            )
        if self.num_rows + (MAX_TEST_ROWS if self.num_epochs is not None else 0) > self.vocab_size**2:
            raise ConfigError(
                f"{self.num_rows} rows are more than two tokens of --vocab-size {self.vocab_size} can number.",
                hint="Give a larger vocabulary, or fewer steps.",
            )


def _given(value: int | None, otherwise: int) -> int:
    return otherwise if value is None else value


def _checked_lengths(text: str) -> str:
    kind, _, rest = text.partition(":")
    if kind == "file":
        path = Path(rest).expanduser().resolve()  # The ranks work in another folder.
        if path.is_file():
            return f"file:{path}"
        raise ConfigError(f"--lengths {text!r}: there is no such file.", hint="Give file:PATH of a text file.")
    numbers = [int(part) for part in rest.split(":") if part.isdecimal()]
    # Two tokens hold the number of the row, and a causal loss needs one more to predict.
    is_known = (kind, len(numbers), rest.count(":")) in (("fixed", 1, 0), ("text", 1, 0), ("lognormal", 2, 1))
    if not is_known or min(numbers) < 3 or sorted(numbers) != numbers:
        raise ConfigError(
            f"--lengths {text!r}: expected lognormal:MEDIAN:MAX, fixed:N, text:MAX (tokens, at least 3) or file:PATH.",
            hint=f"Give --lengths {DEFAULT_LENGTHS}, say.",
        )
    return text


def _parse_slow_rank(text: str | None, num_ranks: int) -> tuple[int | None, float]:
    if text is None:
        return None, 1.0
    rank, _, speed = text.partition(":")
    try:
        slow_rank, share = int(rank), float(speed)
    except ValueError:
        slow_rank, share = -1, 0.0
    if not (0 <= slow_rank < num_ranks and 0 < share <= 1):
        raise ConfigError(
            f"--slow-rank {text!r}: expected R:SPEED with a rank below {num_ranks} and 0 < SPEED <= 1.",
            hint="Give --slow-rank 1:0.5 for a second rank of half the speed.",
        )
    return slow_rank, share
