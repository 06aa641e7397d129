"""What a benchmark runs: the options of `unsloth-multigpu bench`, checked, as plain data that travels to the ranks."""

from __future__ import annotations

import argparse
import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, cast

from unsloth_multigpu.errors import ConfigError
from unsloth_multigpu.row import CommandOption, did_you_mean, flag

# What is compared: the name of the option that says of which, too.
ARMS, STRATEGIES, FEDERATED = KINDS = ("arms", "strategies", "federated")
# Hidden size, layers, vocabulary. The last one has about 0.9e9 parameters.
MODEL_SIZES: Mapping[str, tuple[int, int, int]] = {
    "tiny": (64, 2, 1000),
    "small": (256, 6, 2000),
    "medium": (768, 12, 16000),
    "1b": (2048, 16, 32000),
}
HEAD_SIZE = 64
# A GPU compiles and tunes kernels in its first steps, and the planner fits its costs in the first 16.
NUM_WARMUP_ON_DEVICE = 20
# Our planner compares the ranks' speeds after 4 steps, and again after 8.
_NUM_WARMUP_SLOW = 8
TRANSFORMERS, UNSLOTH = _LIBRARIES = ("transformers", "unsloth")
LEARNING_RATE = 1e-3
MAX_TEST_ROWS = 128
# Defaults of the other kinds, where they differ from those of arms.
_DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    ARMS: {},
    STRATEGIES: {"steps": 40, "lengths": "text:128"},
    FEDERATED: {"steps": 8, "warmup": 1, "train": "lora"},
}
_ONLY_FOR: Mapping[str, tuple[str, ...]] = {
    **dict.fromkeys(("clients", "rounds"), (FEDERATED,)),
    **dict.fromkeys(("library", "padding_free", "interleave"), (ARMS,)),
    **dict.fromkeys(
        ("ranks", "slow_rank", "accumulation", "save_steps", "optim", "gradient_checkpointing"), (ARMS, STRATEGIES)
    ),
    "epochs": (STRATEGIES,),
}


def _option(
    default: Any, text: str, shown: str = "N", *, least: int | None = None, words: Sequence[str] = (), group: str
) -> Any:
    """A field that is an option, whose help ends with its defaults.

    Args:
        least: The smallest number that can be used.
        words: What it is one of; empty = anything.
    """
    return field(default=default, metadata={"text": text, "shown": shown, "least": least, "words": words, "of": group})


_what, _model, _data, _run = (
    functools.partial(_option, group=group) for group in ("what is compared", "model", "samples", "measurement")
)


@dataclass(frozen=True)
class BenchOptions:
    """One benchmark. `from_arguments` checks what was given. What has no option:

    Args:
        arms: Names of what is compared, in the order in which they run.
        kind: One of `KINDS`.
        model_folder: Where Unsloth finds the model; the benchmark makes it before the arms run. None = not yet.
        is_card_shared: All ranks use the one visible card, over gloo.
    """

    arms: Sequence[str] = ()
    kind: str = ARMS
    model_folder: str | None = None
    is_card_shared: bool = False
    clients: int = _what(4, "clients", least=1)
    rounds: int = _what(3, "rounds", least=1)
    ranks: int = _what(2, "ranks of arms that have several", least=1)
    device: str = _what("auto", "where they train", "{auto,cpu,cuda}", words=("auto", "cpu", "cuda"))
    slow_rank: str = _what("", "rank R computes at SPEED, 0.5 say; simulated", "R:SPEED")
    model_size: str = _model(
        "small",
        "hidden x layers, vocabulary: " + ", ".join(f"{n} = {h} x {d}, {v}" for n, (h, d, v) in MODEL_SIZES.items()),
        "{tiny,small,medium,1b}",
        words=tuple(MODEL_SIZES),
    )
    hidden_size: int = _model(0, "in place of that of --model-size", least=HEAD_SIZE)
    num_layers: int = _model(0, "in place of that of --model-size", least=1)
    vocab_size: int = _model(0, "in place of that of --model-size", least=256)
    dtype: str = _model(
        "fp32", "bf16 = autocast; with lora the frozen weights are bf16, too", "{fp32,bf16}", words=("fp32", "bf16")
    )
    gradient_checkpointing: bool = _model(False, "activations are computed again in the backward pass")
    train: str = _model("full", "what is trained", "{full,lora}", words=("full", "lora"))
    library: str = _model(
        TRANSFORMERS,
        "unsloth = FastLanguageModel and its SFTTrainer in every arm, on the same rows",
        "{transformers,unsloth}",
        words=_LIBRARIES,
    )
    four_bit: bool = _model(False, "with --library unsloth: frozen weights in 4 bits")
    optim: str = _model("adamw_torch", "of TrainingArguments", "NAME")
    lengths: str = _data(
        "lognormal:150:1024",
        "lognormal:MEDIAN:MAX or fixed:N in tokens; text:MAX = Python's help texts, a byte is a token",
        "SPEC",
    )
    padding_free: bool = _data(
        False, "rows lie end to end in every arm, as with TRL's padding_free, and as Unsloth lays them on several ranks"
    )
    batch_size: int = _data(8, "samples of a micro-batch per device", least=1)
    accumulation: int = _data(1, "micro-batches of a step per rank", least=1)
    seed: int = _data(0, "of weights, lengths and tokens", least=0)
    epochs: int = _run(2, "epochs, each with a test at its end", least=1)
    steps: int = _run(3, "timed optimizer steps; with --strategies of an epoch, of a client in a round", least=1)
    # The second step is not typical: DDP rebuilds its buckets in it, and it includes the check of replicas.
    warmup: int = _run(
        2,
        f"first steps, which are not timed ({_NUM_WARMUP_SLOW} with --slow-rank, {NUM_WARMUP_ON_DEVICE} of arms on "
        "GPUs); with --federated first rounds",
        least=0,
    )
    repeats: int = _run(3, "rounds, each of which runs every arm once", least=1)
    save_steps: int = _run(0, "steps between two checkpoints, of all arms but unguarded; 0 = none", least=0)
    interleave: str = _run(
        "runs",
        "steps = all arms are in memory at once and take turns step by step, which ratios need on a machine that "
        "others disturb; runs = one after the other",
        "{runs,steps}",
        words=("runs", "steps"),
    )
    timeout_s: float = _run(900.0, "limit of one run, or turn", "SECONDS")

    def __post_init__(self) -> None:
        for name, size in zip(("hidden_size", "num_layers", "vocab_size"), MODEL_SIZES[self.model_size], strict=True):
            object.__setattr__(self, name, getattr(self, name) or size)

    @classmethod
    def from_arguments(cls, arguments: argparse.Namespace) -> BenchOptions:
        """Checks a command line; `device` is left as it was given.

        Raises:
            ConfigError: A value cannot be used.
        """
        given = {name: value for name, value in vars(arguments).items() if value is not None}
        asked = [kind for kind in KINDS if kind in given]
        if len(asked) > 1:
            raise ConfigError(f"--{asked[0]} and --{asked[1]} are two benchmarks.", hint="Give one of them.")
        kind = (asked or [ARMS])[0]
        table = {f.name: f.metadata for f in fields(cls) if f.metadata}
        given = {name: value for name, value in given.items() if name in table}
        for name, value in given.items():
            if kind not in (kinds := _ONLY_FOR.get(name, KINDS)):
                only = " or ".join(map(flag, kinds))
                raise ConfigError(f"{flag(name)} {value} is for {only}, not for {flag(kind)}.", hint="Leave it out.")
            _check_value(name, value, table[name]["words"], table[name]["least"])
        if "slow_rank" in given:
            given.setdefault("warmup", _NUM_WARMUP_SLOW)
        options = cls(kind=kind, **{**_DEFAULTS[kind], **given})
        options._check()
        return options

    @property
    def is_learning(self) -> bool:
        """The model learns a text, and is tested after each epoch."""
        return self.kind == STRATEGIES

    @property
    def num_samples_per_step(self) -> int:
        """Samples of an optimizer step over all ranks, or clients: the same number in every arm."""
        return self.batch_size * self.accumulation * (self.clients if self.kind == FEDERATED else self.ranks)

    @property
    def timeout_of_turns_s(self) -> float:
        """The limit of a run of all arms in turns, in seconds."""
        return self.timeout_s * (1 + len(self.arms) * (self.warmup + self.steps + 1))

    @property
    def num_rows(self) -> int:
        """Rows of the data set: one epoch of whole steps."""
        return self.num_samples_per_step * (self.steps + (self.warmup if self.kind == ARMS else 0))

    def speed_of(self, rank: int) -> float:
        """Speed at which a rank computes; 1 = its own."""
        slow_rank, _, speed = self.slow_rank.partition(":")
        return float(speed) if slow_rank and rank == int(slow_rank) else 1.0

    def _check(self) -> None:
        _check_lengths(self.lengths)
        if self.slow_rank:
            self._check_slow_rank()
        if self.hidden_size % HEAD_SIZE:
            raise ConfigError(
                f"--hidden-size {self.hidden_size}: attention heads are {HEAD_SIZE} wide.",
                hint=f"Give a multiple of {HEAD_SIZE}.",
            )
        if self.four_bit and (self.library, self.train) != (UNSLOTH, "lora"):
            raise ConfigError(
                f"--four-bit with --library {self.library} --train {self.train}: 4-bit weights are frozen, and Unsloth "
                "loads them.",
                hint="Give --library unsloth --train lora.",
            )
        if not 0 < self.timeout_s < math.inf:
            raise ConfigError(f"--timeout-s {self.timeout_s}: expected seconds above 0.", hint="Give --timeout-s 900.")
        if self.is_learning and not self.lengths.startswith("text:"):
            raise ConfigError(
                f"--lengths {self.lengths}: random tokens teach a model nothing.", hint="Give --lengths text:128."
            )
        if self.is_learning and self.steps <= self.warmup:
            raise ConfigError(
                f"--steps {self.steps}: expected more than --warmup {self.warmup}.",
                hint=f"Give --steps {self.warmup + 1}.",
            )

    def _check_slow_rank(self) -> None:
        rank, _, speed = self.slow_rank.partition(":")
        try:
            is_known = 0 <= int(rank) < self.ranks and 0 < float(speed) <= 1
        except ValueError:
            is_known = False
        if not is_known:
            raise ConfigError(
                f"--slow-rank {self.slow_rank!r}: expected R:SPEED with a rank below {self.ranks} and 0 < SPEED <= 1.",
                hint="Give --slow-rank 1:0.5 for a second rank of half the speed.",
            )


def options_table() -> dict[str, CommandOption]:
    """The options of the command line that are fields of `BenchOptions`."""
    table = {}
    for option in fields(BenchOptions):
        if option.metadata:
            only = [flag(kind) for kind in _ONLY_FOR.get(option.name, ())]
            others = [f"with {flag(kind)} {its[option.name]}" for kind, its in _DEFAULTS.items() if option.name in its]
            least, default = option.metadata["least"], cast("Any", option.default)
            # 0 below the least, "" and a switch stand for what is not given.
            is_shown = default >= least if isinstance(least, int) else bool(default)
            shown = f"{default:g}" if isinstance(default, float) else str(default)
            defaults = "; ".join([shown] * is_shown + others)
            text = f"{'with ' + ' or '.join(only) + ': ' if only else ''}{option.metadata['text']}"
            table[option.name] = CommandOption(
                type(option.default),
                f"{text} [{defaults}]" if defaults else text,
                option.metadata["shown"],
                tuple(option.metadata["words"]),
                option.metadata["of"],
            )
    return table


def _check_value(name: str, value: Any, words: Sequence[str], least: int | None) -> None:
    if words and value not in words:
        meant = did_you_mean(str(value), {word: word for word in words})
        raise ConfigError(
            f"{flag(name)} {value}: expected one of {', '.join(words)}.", hint=f"{meant}Give one of them."
        )
    if least is not None and value < least:
        raise ConfigError(f"{flag(name)} {value}: expected at least {least}.", hint=f"Give {flag(name)} {least}.")


def _check_lengths(text: str) -> None:
    kind, _, rest = text.partition(":")
    numbers = [int(part) for part in rest.split(":") if part.isdecimal()]
    # Two tokens hold the number of the row, and a causal loss needs one more to predict.
    is_known = (kind, len(numbers), rest.count(":")) in (("fixed", 1, 0), ("text", 1, 0), ("lognormal", 2, 1))
    if not is_known or min(numbers) < 3 or sorted(numbers) != numbers:
        raise ConfigError(
            f"--lengths {text!r}: expected lognormal:MEDIAN:MAX, fixed:N or text:MAX (tokens, at least 3).",
            hint="Give --lengths lognormal:150:1024, say.",
        )
