"""What a benchmark runs: the options of `unsloth-multigpu bench`, checked, as plain data that travels to the ranks."""

from __future__ import annotations

import argparse
import functools
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from unsloth_multigpu.errors import ConfigError
from unsloth_multigpu.option_type import CommandOption, did_you_mean, flag

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
TRANSFORMERS, UNSLOTH = _LIBRARIES = ("transformers", "unsloth")


def _option(default: Any, text: str, shown: str = "N", *, words: Sequence[str] = (), group: str) -> Any:
    """A field that is an option, whose help ends with its defaults.

    Args:
        words: What it is one of; empty = anything.
    """
    shown = f"{{{','.join(words)}}}" if words else shown
    return field(default=default, metadata={"option": CommandOption(type(default), text, shown, tuple(words), group)})


_what, _model, _data, _run = (
    functools.partial(_option, group=group) for group in ("what is compared", "model", "samples", "measurement")
)


@dataclass(frozen=True)
class BenchOptions:
    """One benchmark. `from_arguments` checks what was given. What has no option:

    Args:
        arms: Names of what is compared, in the order in which they run.
        model_folder: Where Unsloth finds the model; the benchmark makes it before the arms run. None = not yet.
        is_card_shared: All ranks use the one visible card, over gloo.
    """

    arms: Sequence[str] = ()
    model_folder: str | None = None
    is_card_shared: bool = False
    ranks: int = _what(2, "ranks of arms that have several")
    device: str = _what("auto", "where they train", words=("auto", "cpu", "cuda"))
    model_size: str = _model(
        "small",
        "hidden x layers, vocabulary: " + ", ".join(f"{n} = {h} x {d}, {v}" for n, (h, d, v) in MODEL_SIZES.items()),
        "{tiny,small,medium,1b,HxL[xV]}",
    )
    dtype: str = _model("fp32", "bf16 = autocast; with lora the frozen weights are bf16, too", words=("fp32", "bf16"))
    gradient_checkpointing: bool = _model(False, "activations are computed again in the backward pass")
    train: str = _model("full", "what is trained", words=("full", "lora"))
    library: str = _model(
        TRANSFORMERS, "unsloth = FastLanguageModel and its SFTTrainer in every arm, on the same rows", words=_LIBRARIES
    )
    four_bit: bool = _model(False, "with --library unsloth: frozen weights in 4 bits")
    optim: str = _model("adamw_torch", "of TrainingArguments", "NAME")
    lengths: str = _data(
        "lognormal:150:1024",
        "lognormal:MEDIAN:MAX or fixed:N in tokens",
        "SPEC",
    )
    padding_free: bool = _data(
        False, "rows lie end to end in every arm, as with TRL's padding_free, and as Unsloth lays them on several ranks"
    )
    batch_size: int = _data(8, "samples of a micro-batch per device")
    accumulation: int = _data(1, "micro-batches of a step per rank")
    seed: int = _data(0, "of weights, lengths and tokens")
    steps: int = _run(3, "timed optimizer steps")
    # The second step is not typical: DDP rebuilds its buckets in it, and it includes the check of replicas.
    warmup: int = _run(2, f"first steps, which are not timed ({NUM_WARMUP_ON_DEVICE} on GPUs)")
    repeats: int = _run(3, "rounds, each of which runs every arm once")
    timeout_s: float = _run(900.0, "limit of one run", "SECONDS")

    @classmethod
    def from_arguments(cls, arguments: argparse.Namespace) -> BenchOptions:
        """Checks a command line; `device` is left as it was given.

        Raises:
            ConfigError: A value cannot be used.
        """
        given = {name: value for name, value in vars(arguments).items() if value is not None}
        values = {name: given[name] for name in options_table() if name in given}
        options = cls(**values)
        options._check(values)
        return options

    @property
    def model_shape(self) -> tuple[int, int, int]:
        """Hidden size, layers and vocabulary."""
        if self.model_size in MODEL_SIZES:
            return MODEL_SIZES[self.model_size]
        hidden, layers, *vocabulary = map(int, self.model_size.split("x"))
        return hidden, layers, vocabulary[0] if vocabulary else 2000

    @property
    def vocab_size(self) -> int:
        """Base of the numbers that the first tokens of a row are."""
        return self.model_shape[2]

    @property
    def num_samples_per_step(self) -> int:
        """Samples of an optimizer step over all ranks: the same number in every arm."""
        return self.batch_size * self.accumulation * self.ranks

    @property
    def num_rows(self) -> int:
        """Rows of the data set: one epoch of whole steps."""
        return self.num_samples_per_step * (self.steps + self.warmup)

    def _check(self, given: Mapping[str, Any]) -> None:
        table = options_table()
        for name, value in given.items():
            words, least = table[name].words, 0 if name in ("seed", "warmup") else 1
            if words and value not in words:
                raise _wrong(name, value, f"one of {', '.join(words)}", words)
            if type(value) is int and value < least:
                raise _wrong(name, value, f"at least {least}")
        if self.model_size not in MODEL_SIZES and not re.fullmatch(r"[1-9]\d*x[1-9]\d*(x\d+)?", self.model_size):
            expected = f"{', '.join(MODEL_SIZES)}, or HIDDENxLAYERS as in 192x4"
            raise _wrong("model_size", self.model_size, expected, tuple(MODEL_SIZES))
        hidden, _, vocabulary = self.model_shape
        if hidden % HEAD_SIZE or vocabulary < 256:
            expected = f"a multiple of {HEAD_SIZE} as hidden size, and a vocabulary of at least 256"
            raise _wrong("model_size", self.model_size, expected)
        _check_lengths(self.lengths)
        if self.four_bit and (self.library, self.train) != (UNSLOTH, "lora"):
            raise _wrong("four_bit", f"with --library {self.library} --train {self.train}", "unsloth and lora")
        if not 0 < self.timeout_s < math.inf:
            raise _wrong("timeout_s", self.timeout_s, "seconds above 0")


def options_table() -> dict[str, CommandOption]:
    """The options of the command line that are fields of `BenchOptions`."""
    table = {}
    for row in (row for row in fields(BenchOptions) if row.metadata):
        option: CommandOption = row.metadata["option"]
        default = f"{row.default:g}" if option.kind is float else str(row.default)
        text = option.text if row.default is False else f"{option.text} [{default}]"
        table[row.name] = option._replace(text=text)
    return table


def _wrong(name: str, value: Any, expected: str, words: Sequence[str] = ()) -> ConfigError:
    meant = did_you_mean(str(value), {word: word for word in words})
    return ConfigError(f"{flag(name)} {value}: expected {expected}.", hint=f"{meant}See --help for what it takes.")


def _check_lengths(text: str) -> None:
    kind, _, rest = text.partition(":")
    numbers = [int(part) for part in rest.split(":") if part.isdecimal()]
    # Two tokens hold the number of the row, and a causal loss needs one more to predict.
    is_known = (kind, len(numbers), rest.count(":")) in (("fixed", 1, 0), ("lognormal", 2, 1))
    if not is_known or min(numbers) < 3 or sorted(numbers) != numbers:
        raise _wrong("lengths", repr(text), "lognormal:MEDIAN:MAX or fixed:N (tokens, at least 3)")
