"""The options and the arms of a benchmark, as plain data that is passed to the ranks.

An arm is one way to train: a launcher, arguments of `enable_multi_gpu()` and of the training.
"""

from __future__ import annotations

import math
import os
import random
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any

from unsloth_multigpu.accelerator import HIDDEN, variables_for
from unsloth_multigpu.cli.command import Arguments
from unsloth_multigpu.errors import ConfigError
from unsloth_multigpu.option_type import Option, did_you_mean
from unsloth_multigpu.options import ENV_CONFIG, INTERNAL_VARIABLES, MultiGPUConfig

# Hidden size, layers, vocabulary. The last one has about 0.9e9 parameters.
MODEL_SIZES: Mapping[str, tuple[int, int, int]] = {
    "tiny": (64, 2, 1000),
    "small": (256, 6, 2000),
    "medium": (768, 12, 16000),
    "1b": (2048, 16, 32000),
}
HEAD_SIZE = 64
# The maximum is this many standard deviations above the median. With lognormal:75:512, 60 % of random batches of 8 is
# padding, as in instruction data.
_MAX_AT = 2.1
# A causal loss needs a second token to predict.
_FEWEST_TOKENS = 2
# A GPU compiles and tunes kernels in its first steps, and the planner fits its costs in the first 16.
NUM_WARMUP_ON_DEVICE = 20
TRANSFORMERS, UNSLOTH = _LIBRARIES = ("transformers", "unsloth")
_WHAT, _MODEL, _SAMPLES, _RUN = "what is compared", "model", "samples", "measurement"


def _check_arms(name: str, value: str) -> str:
    names = [arm.strip() for arm in value.split(",")]
    for arm in names:
        if arm not in ARMS:
            raise ConfigError(f"{name}={value!r}: there is no {arm!r}.", hint=f"Choose from {', '.join(ARMS)}.")
        if names.count(arm) > 1:
            raise ConfigError(f"{name}={value!r}: {arm!r} is given twice.", hint="Name each once; see --repeats.")
    return ",".join(names)


def _check_model_size(name: str, value: str) -> str:
    hidden = _shape_of(value)[0]
    if hidden % HEAD_SIZE or not hidden:
        raise ConfigError(
            f"{name}={value!r}; expected {', '.join(MODEL_SIZES)}, or HIDDENxLAYERS as in 192x4, with a multiple of "
            f"{HEAD_SIZE} as hidden size.",
            hint=did_you_mean(value, {size: size for size in MODEL_SIZES}) or "Leave it out for small.",
        )
    return value


def _shape_of(size: str) -> tuple[int, int, int]:
    """Returns hidden size, layers and vocabulary; zeros for an invalid text."""
    match = re.fullmatch(r"([1-9]\d*)x([1-9]\d*)(?:x([1-9]\d*))?", size)
    return MODEL_SIZES.get(size) or ((int(match[1]), int(match[2]), int(match[3] or 2000)) if match else (0, 0, 0))


def _check_lengths(name: str, value: str) -> str:
    kind, _, rest = value.partition(":")
    numbers = [int(part) for part in rest.split(":") if part.isdecimal()]
    is_known = (kind, len(numbers), rest.count(":")) in (("fixed", 1, 0), ("lognormal", 2, 1))
    if not is_known or min(numbers) < _FEWEST_TOKENS or sorted(numbers) != numbers:
        expected = "lognormal:MEDIAN:MAX or fixed:N (tokens, at least 2)"
        raise ConfigError(f"{name}={value!r}; expected {expected}.", hint="Leave it out for lognormal:75:512.")
    return value


@dataclass(frozen=True)
class BenchOptions(Arguments):
    """Trains a random Llama in several ways, one after the other, and compares speed, waiting, memory, gradients and
    bytes sent. Exit code 0 = measured, 1 = an arm failed.

    Args:
        arms: Names of the arms, in the order in which they run.
        ranks: Ranks of the arms with several ranks.
        device: Device of the training.
        model_size: Hidden x layers, vocabulary: tiny = 64 x 2, 1000, small = 256 x 6, 2000, medium = 768 x 12, 16000,
            1b = 2048 x 16, 32000.
        dtype: bf16 = autocast; with lora the frozen weights are bf16, too.
        gradient_checkpointing: Recompute activations in the backward pass.
        train: Train all weights, or LoRA adapters.
        library: unsloth = FastLanguageModel and its SFTTrainer in every arm, on the same rows.
        four_bit: With --library unsloth: frozen weights in 4 bits.
        optim: `TrainingArguments.optim`.
        lengths: lognormal:MEDIAN:MAX or fixed:N in tokens.
        padding_free: Concatenate rows without padding in every arm, as TRL's padding_free does, and Unsloth on several
            ranks.
        batch_size: Samples of a micro-batch per device.
        accumulation: Micro-batches of a step per rank.
        seed: Seed of weights, lengths and tokens.
        steps: Timed optimizer steps.
        warmup: First steps, which are not timed.
        repeats: Rounds, each of which runs every arm once.
        timeout_s: Limit of one run.
        json: Print one JSON object with all figures.
        model_folder: Folder of the model that Unsloth loads, which the benchmark creates. None = not yet.
        is_gpu_shared: All ranks use the one visible GPU, over gloo.
    """

    arms: Annotated[str, Option(_WHAT, check=_check_arms, shown="A,B")] = "one_process,ours,torchrun"
    ranks: Annotated[int, Option(_WHAT, least=1)] = 2
    device: Annotated[str, Option(_WHAT, choices=("auto", "cpu", "cuda"))] = "auto"
    model_size: Annotated[str, Option(_MODEL, check=_check_model_size, shown="{tiny,small,medium,1b,HxL[xV]}")] = (
        "small"
    )
    dtype: Annotated[str, Option(_MODEL, choices=("fp32", "bf16"))] = "fp32"
    gradient_checkpointing: Annotated[bool, Option(_MODEL)] = False
    train: Annotated[str, Option(_MODEL, choices=("full", "lora"))] = "full"
    library: Annotated[str, Option(_MODEL, choices=_LIBRARIES)] = TRANSFORMERS
    four_bit: Annotated[bool, Option(_MODEL)] = False
    optim: Annotated[str, Option(_MODEL, shown="NAME")] = "adamw_torch"
    lengths: Annotated[str, Option(_SAMPLES, check=_check_lengths, shown="SPEC")] = "lognormal:75:512"
    padding_free: Annotated[bool, Option(_SAMPLES)] = False
    batch_size: Annotated[int, Option(_SAMPLES, least=1)] = 8
    accumulation: Annotated[int, Option(_SAMPLES, least=1)] = 1
    seed: Annotated[int, Option(_SAMPLES)] = 0
    # With the defaults a bench takes about five minutes of CPU time.
    steps: Annotated[int, Option(_RUN, least=1)] = 2
    warmup: Annotated[int | None, Option(_RUN, otherwise="2; 20 on GPUs")] = None
    repeats: Annotated[int, Option(_RUN, least=1)] = 3
    timeout_s: Annotated[float, Option(_RUN, least=1, shown="SECONDS")] = 900.0
    json: Annotated[bool, Option(_RUN)] = False
    model_folder: Annotated[str | None, Option(commands=())] = None
    is_gpu_shared: Annotated[bool, Option(commands=())] = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.four_bit and (self.library, self.train) != (UNSLOTH, "lora"):
            raise ConfigError(
                f"four_bit with library={self.library!r} and train={self.train!r}; expected 'unsloth' and 'lora'.",
                hint="Set --library unsloth --train lora.",
            )

    @classmethod
    def table(cls) -> dict[str, Option]:
        """Returns the options, with the list of arms as help of `arms`."""
        table = super().table()
        arms = "; ".join(f"{arm.name}: {arm.text}" for arm in ARMS.values())
        return {**table, "arms": replace(table["arms"], help=arms)}

    @property
    def num_warmup(self) -> int:
        """Number of steps that are not timed."""
        # The second step is not typical: DDP rebuilds its buckets in it, and it includes the check of replicas.
        return 2 if self.warmup is None else self.warmup

    @property
    def model_shape(self) -> tuple[int, int, int]:
        """Hidden size, layers and vocabulary."""
        return _shape_of(self.model_size)

    @property
    def num_samples_per_step(self) -> int:
        """Samples of an optimizer step over all ranks, equal in every arm."""
        return self.batch_size * self.accumulation * self.ranks

    @property
    def num_rows(self) -> int:
        """Rows of the data set: one epoch of whole steps."""
        return self.num_samples_per_step * (self.steps + self.num_warmup)

    @property
    def max_length(self) -> int:
        """Tokens of the longest row."""
        return max(map(len, self.rows()))

    def rows(self) -> list[list[int]]:
        """Returns rows of token ids, equal on every rank of every arm."""
        draw = random.Random(self.seed)
        kind, *numbers = self.lengths.split(":")
        longest = int(numbers[-1])
        lengths = [longest] * self.num_rows
        if kind == "lognormal":
            middle = math.log(int(numbers[0]))
            spread = (math.log(longest) - middle) / _MAX_AT
            drawn = (round(draw.lognormvariate(middle, spread)) for _ in lengths)
            lengths = [min(longest, max(_FEWEST_TOKENS, length)) for length in drawn]
        return [draw.choices(range(self.model_shape[2]), k=length) for length in lengths]


WORKER = "unsloth_multigpu.tools.bench.bench_worker"
# Other arms are compared with these, in columns of the table.
REFERENCE, TORCHRUN, DDP = BASELINES = ("one_process", "torchrun", "ddp")


@dataclass(frozen=True)
class Arm:
    """One way to train the same model on the same samples.

    Args:
        name: Name in `--arms`.
        text: Short description.
        line: Arguments of `enable_multi_gpu()`; None = the script does not call it.
        has_one_process: Only one process trains.
        training: Additional `TrainingArguments`.
        note: A remark for the comparison.
    """

    name: str
    text: str
    line: Mapping[str, Any] | None = None
    has_one_process: bool = False
    training: Mapping[str, Any] = field(default_factory=dict)
    note: str = ""

    @property
    def uses_all_devices(self) -> bool:
        """False if only one device computes. The legacy path uses the devices of all ranks in one process."""
        return not self.has_one_process or not self._config.enable_ddp

    @property
    def is_synchronous(self) -> bool:
        """True if all ranks make each optimizer step together; each step then has one gradient."""
        return self._config.is_synchronous

    @property
    def _config(self) -> MultiGPUConfig:
        return MultiGPUConfig.resolve(self.line or {}, {})

    def num_processes(self, options: BenchOptions) -> int:
        """Returns the number of processes."""
        return 1 if self.has_one_process else options.ranks

    def num_devices(self, options: BenchOptions) -> int:
        """Returns the number of devices."""
        return options.ranks if self.uses_all_devices else 1

    def num_accumulated(self, options: BenchOptions) -> int:
        """Returns `gradient_accumulation_steps` of the script, with which each arm's step has the same samples."""
        is_one_gpu_script = self.has_one_process or self.line is not None
        return options.accumulation * (options.ranks if is_one_gpu_script else 1)

    def command(self, options: BenchOptions) -> list[str]:
        """Returns the command, without the file of settings."""
        command = [sys.executable, "-m", WORKER]
        # Our launcher refuses more ranks than GPUs; ranks of torchrun may share one.
        if self.has_one_process or (self.line is not None and not options.is_gpu_shared):
            return command
        # With an address, because torch would resolve this machine's name, which fails in some networks.
        address = ["--standalone", "--local-addr", "127.0.0.1", "--nproc-per-node", str(options.ranks)]
        return [*command[:2], "torch.distributed.run", *address, *command[1:]]


def _strategy(name: str, text: str, options: str = "", note: str = "") -> Arm:
    # balance="off", so that each micro-batch has the same rows as without enable_multi_gpu().
    return Arm(name, text, {"balance": "off", "strategy": name + options}, note=note)


_EVERY = (":every_steps=4", "ranks synchronize every 4 steps")
_STEERED = {"on_nan": "skip", "balance": "off"}
_REBALANCED = {"train_sampling_strategy": "batch_rebalance"}
_OURS_NOTE = (
    "DDP does not search for unused parameters, unlike in a Trainer without enable_multi_gpu(); the first step is not "
    "compared with one process"
)
_LEGACY_NOTE = "sends weights to further devices, and gradients back"
_LEGACY = {"balance": "off", "enable_ddp": False}
ARMS: Mapping[str, Arm] = {
    arm.name: arm
    for arm in (
        Arm(REFERENCE, "Trainer, one process", has_one_process=True),
        Arm("ours", "one line: enable_multi_gpu()", {"balance": "auto"}, note=_OURS_NOTE),
        Arm("ours_off", 'one line, balance="off"', {"balance": "off"}),
        Arm(TORCHRUN, "torchrun + Trainer"),
        Arm("rebalance", "torchrun + batch_rebalance", training=_REBALANCED),
        Arm("ours_one", 'one line, one process, balance="tokens"', {"balance": "tokens"}, True),
        Arm("line_one", "one line, one process: its overhead", {}, True),
        # In one process enable_multi_gpu() changes nothing unless an option such as on_nan needs it.
        Arm("guarded_one", "one line, one process, steered like a rank", _STEERED, True),
        Arm("legacy", "one process, a replica per device, one after the other", _LEGACY, True, note=_LEGACY_NOTE),
        _strategy(DDP, "all-reduce during backward"),
        _strategy("allreduce", "all-reduce in buckets, after backward"),
        _strategy("parameter_server", "rank 0 steps and sends its weights"),
        _strategy("local_sgd", "ranks step alone, weights are averaged", *_EVERY),
        _strategy("diloco", "local_sgd with an outer Nesterov step", *_EVERY),
    )
}

# Prefixes of variables that launchers set for their ranks: an arm must get them only from its own launcher.
_OF_LAUNCHERS = (
    *("RANK", "WORLD_SIZE", "MASTER_", "LOCAL_", "GROUP_", "ROLE_", "TORCHELASTIC_", "ACCELERATE_", "FSDP_"),
    *("SLURM_", "OMPI_", "PMI_", "PMIX_"),
)


def arm_environment(arm: Arm, options: BenchOptions, folder: Path, inherited: Mapping[str, str]) -> dict[str, str]:
    """Returns the variables of an arm: those of this process without those of launchers, and one thread per rank.

    `folder` is for temporary files and caches, so that the user's are not used.
    """
    variables = {
        name: value
        for name, value in inherited.items()
        if name not in INTERNAL_VARIABLES and not name.startswith(_OF_LAUNCHERS)
    }
    if file := inherited.get(ENV_CONFIG):
        variables[ENV_CONFIG] = os.path.abspath(file)  # Arms have other working folders.
    variables |= {name: str(folder) for name in ("TMPDIR", "HF_HOME", "HF_DATASETS_CACHE")}
    variables |= {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "TOKENIZERS_PARALLELISM": "false"}
    variables |= {"HF_HUB_OFFLINE": "1", "HF_HUB_DISABLE_PROGRESS_BARS": "1"}
    if options.device == "cpu":
        variables |= HIDDEN
    elif arm.num_devices(options) == 1:
        # A Trainer in one process would use DataParallel over all visible GPUs.
        variables |= variables_for("cuda", [0], inherited)
    if options.library == UNSLOTH:
        # Rows are tokens already, so no processes are needed to prepare them.
        variables |= {"UNSLOTH_DISABLE_STATISTICS": "1", "UNSLOTH_DATASET_NUM_PROC": "0"}
        if not options.padding_free:
            # Otherwise Unsloth concatenates rows if it expects that to be faster, and always on several ranks.
            variables["UNSLOTH_DISABLE_AUTO_PADDING_FREE"] = "1"
        if options.model_folder is not None:
            # Shared by all arms, so that code is compiled once.
            variables.setdefault("TORCHINDUCTOR_CACHE_DIR", str(Path(options.model_folder).parent / "inductor"))
    if options.is_gpu_shared:
        # accelerate would give DDP the local rank as device, but there is only GPU 0.
        variables["ACCELERATE_BYPASS_DEVICE_MAP"] = "true"
    return variables
