"""The arms of a benchmark, as data: who starts the training script, with which line and which arguments."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from unsloth_multigpu.accelerator import HIDDEN, only
from unsloth_multigpu.errors import ConfigError
from unsloth_multigpu.options import INTERNAL_VARIABLES, MultiGPUConfig
from unsloth_multigpu.tools.bench.bench_option import UNSLOTH, BenchOptions

WORKER = "unsloth_multigpu.tools.bench.bench_worker"
# Other arms are compared with these, in columns of the table.
REFERENCE, TORCHRUN, DDP = BASELINES = ("one_process", "torchrun", "ddp")


def _python(num_ranks: int) -> list[str]:
    return [sys.executable, "-m", WORKER]


def _torchrun(num_ranks: int) -> list[str]:
    # The address is given because torch would look up this machine's name, which not every network knows.
    options = ["--standalone", "--local-addr", "127.0.0.1", "--nproc-per-node", str(num_ranks)]
    return [sys.executable, "-m", "torch.distributed.run", *options, "-m", WORKER]


@dataclass(frozen=True)
class Arm:
    """One way to train the same model on the same samples.

    Args:
        name: What `--arms` calls it.
        text: What it is, in a few words.
        line: Arguments of `enable_multi_gpu()`; None = the script has no such line.
        has_one_process: Only one process trains.
        launcher: Number of ranks -> the command, without the file of settings that follows it.
        training: What it adds to `TrainingArguments`.
        note: What a reader must know to compare it.
    """

    name: str
    text: str
    line: Mapping[str, Any] | None = None
    has_one_process: bool = False
    launcher: Callable[[int], list[str]] = _python
    training: Mapping[str, Any] = field(default_factory=dict)
    note: str = ""

    @property
    def uses_all_devices(self) -> bool:
        """False if one device computes; the legacy path is one process on the devices of all ranks."""
        return not self.has_one_process or not self._config.enable_ddp

    @property
    def is_synchronous(self) -> bool:
        """True if all ranks make each optimizer step together; each step then has one gradient."""
        return self._config.is_synchronous

    @property
    def _config(self) -> MultiGPUConfig:
        return MultiGPUConfig.resolve(self.line or {}, {})

    def num_processes(self, options: BenchOptions) -> int:
        """How many processes train."""
        return 1 if self.has_one_process else options.ranks

    def num_devices(self, options: BenchOptions) -> int:
        """On how many devices they train."""
        return options.ranks if self.uses_all_devices else 1

    def num_accumulated(self, options: BenchOptions) -> int:
        """`gradient_accumulation_steps` of the script: every arm's step then has the same samples."""
        is_one_gpu_script = self.has_one_process or self.line is not None
        return options.accumulation * (options.ranks if is_one_gpu_script else 1)

    def command(self, options: BenchOptions) -> list[str]:
        """The command that trains; the file of settings follows it."""
        # Our launcher refuses more ranks than cards; ranks that another one started may share.
        is_shared = options.is_card_shared and self.line is not None and not self.has_one_process
        return (_torchrun if is_shared else self.launcher)(options.ranks)


def _strategy(name: str, text: str, has_one_process: bool = False, note: str = "", **options: Any) -> Arm:
    # With samples dealt in order, each micro-batch has the same rows as without the line.
    return Arm(name, text, {"balance": "off", **options}, has_one_process, note=note)


_MEETINGS = "ranks meet every 4 steps"
ARMS: Mapping[str, Arm] = {
    arm.name: arm
    for arm in (
        Arm(REFERENCE, "Trainer, one process", has_one_process=True),
        Arm(
            "ours",
            "one line: enable_multi_gpu()",
            {"balance": "auto"},
            note="DDP does not search for unused parameters, as it does by default in a Trainer without the line; the "
            "first step is not compared with one process",
        ),
        Arm("ours_off", 'one line, balance="off"', {"balance": "off"}),
        Arm(TORCHRUN, "torchrun + Trainer", launcher=_torchrun),
        Arm(
            "rebalance",
            "torchrun + batch_rebalance",
            launcher=_torchrun,
            training={"train_sampling_strategy": "batch_rebalance"},
        ),
        Arm("ours_one", 'one line, one process, balance="tokens"', {"balance": "tokens"}, True),
        Arm("line_one", "one line, one process: what it costs there", {}, True),
        # With one process the line changes nothing unless a guard is asked for.
        Arm(
            "guarded_one",
            "one line, one process, guarded and fed as a rank is",
            {"on_nan": "skip", "balance": "off"},
            True,
        ),
        _strategy(
            "legacy",
            "one process, a replica per device, one after the other",
            has_one_process=True,
            note="what it sends are gradients to the CPU and back, and weights to the replicas",
            enable_ddp=False,
        ),
        _strategy(DDP, "all-reduce during backward", strategy="ddp"),
        _strategy("allreduce", "all-reduce in buckets, after backward", strategy="allreduce"),
        _strategy("parameter_server", "rank 0 steps, the others get its weights", strategy="parameter_server"),
        _strategy(
            "local_sgd", "ranks step alone, weights are averaged", note=_MEETINGS, strategy="local_sgd:every_steps=4"
        ),
        _strategy("diloco", "that with an outer Nesterov step", note=_MEETINGS, strategy="diloco:every_steps=4"),
    )
}

# Variables that a launcher sets for its ranks: an arm must get them from its own launcher only.
_OF_LAUNCHERS = (
    *("RANK", "WORLD_SIZE", "MASTER_", "LOCAL_", "GROUP_", "ROLE_", "TORCHELASTIC_", "ACCELERATE_", "FSDP_"),
    *("SLURM_", "OMPI_", "PMI_", "PMIX_"),
)


def choose_names(text: str) -> list[str]:
    """The names in `text`, with commas between them.

    Raises:
        ConfigError: A name that is none, or one given twice.
    """
    names = [name.strip() for name in text.split(",")]
    for name in names:
        if name not in ARMS:
            raise ConfigError(f"arms={text!r}: there is no {name!r}.", hint=f"Choose from {', '.join(ARMS)}.")
        if names.count(name) > 1:
            raise ConfigError(f"arms={text!r}: {name!r} is given twice.", hint="Name each once; see --repeats.")
    return names


def arm_environment(arm: Arm, options: BenchOptions, folder: Path, inherited: Mapping[str, str]) -> dict[str, str]:
    """Variables of an arm: this process's, without what a launcher told it, and the same threads for every rank.

    Args:
        folder: Takes temporary files and caches, so that nothing of the user's is read or left.
    """
    variables = {
        name: value
        for name, value in inherited.items()
        if name not in INTERNAL_VARIABLES and not name.startswith(_OF_LAUNCHERS)
    }
    variables |= {name: str(folder) for name in ("TMPDIR", "HF_HOME", "HF_DATASETS_CACHE")}
    variables |= {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "TOKENIZERS_PARALLELISM": "false"}
    variables |= {"HF_HUB_OFFLINE": "1", "HF_HUB_DISABLE_PROGRESS_BARS": "1"}
    if options.device == "cpu":
        variables |= HIDDEN
    elif arm.num_devices(options) == 1:
        # A Trainer alone would spread its batches over all visible cards.
        variables |= only("cuda", 0, inherited)
    if options.library == UNSLOTH:
        # Rows are tokens already: no processes to prepare them.
        variables |= {"UNSLOTH_DISABLE_STATISTICS": "1", "UNSLOTH_DATASET_NUM_PROC": "0"}
        if not options.padding_free:
            # Otherwise Unsloth packs rows end to end where it expects that to be faster, and always on several ranks.
            variables["UNSLOTH_DISABLE_AUTO_PADDING_FREE"] = "1"
        if options.model_folder is not None:
            # What is compiled for one arm need not be compiled again for the next.
            variables.setdefault("TORCHINDUCTOR_CACHE_DIR", str(Path(options.model_folder).parent / "inductor"))
    if options.is_card_shared:
        # accelerate would give DDP the local rank as device; there is only card 0.
        variables["ACCELERATE_BYPASS_DEVICE_MAP"] = "true"
    return variables
