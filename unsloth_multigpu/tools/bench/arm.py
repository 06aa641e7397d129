"""The arms of a benchmark, as data: launcher, arguments of `enable_multi_gpu()` and of the training."""

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
    # With an address, because torch would resolve this machine's name, which not every network can.
    options = ["--standalone", "--local-addr", "127.0.0.1", "--nproc-per-node", str(num_ranks)]
    return [sys.executable, "-m", "torch.distributed.run", *options, "-m", WORKER]


@dataclass(frozen=True)
class Arm:
    """One way to train the same model on the same samples.

    Args:
        name: Name in `--arms`.
        text: Short description.
        line: Arguments of `enable_multi_gpu()`; None = the script does not call it.
        has_one_process: Only one process trains.
        launcher: Returns the command for a number of ranks, without the file of settings.
        training: Additional `TrainingArguments`.
        note: A remark for the comparison.
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
        # Our launcher refuses more ranks than GPUs; ranks of torchrun may share one.
        is_shared = options.is_card_shared and self.line is not None and not self.has_one_process
        return (_torchrun if is_shared else self.launcher)(options.ranks)


def _strategy(name: str, text: str, has_one_process: bool = False, note: str = "", **options: Any) -> Arm:
    # balance="off", so that each micro-batch has the same rows as without enable_multi_gpu().
    return Arm(name, text, {"balance": "off", **options}, has_one_process, note=note)


_MEETINGS = "ranks synchronize every 4 steps"
ARMS: Mapping[str, Arm] = {
    arm.name: arm
    for arm in (
        Arm(REFERENCE, "Trainer, one process", has_one_process=True),
        Arm(
            "ours",
            "one line: enable_multi_gpu()",
            {"balance": "auto"},
            note="DDP does not search for unused parameters, unlike in a Trainer without enable_multi_gpu(); the first "
            "step is not compared with one process",
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
        Arm("line_one", "one line, one process: its overhead", {}, True),
        # In one process enable_multi_gpu() changes nothing unless an option such as on_nan needs it.
        Arm(
            "guarded_one",
            "one line, one process, steered like a rank",
            {"on_nan": "skip", "balance": "off"},
            True,
        ),
        _strategy(
            "legacy",
            "one process, a replica per device, one after the other",
            has_one_process=True,
            note="sends gradients to the CPU and back, and weights to the replicas",
            enable_ddp=False,
        ),
        _strategy(DDP, "all-reduce during backward", strategy="ddp"),
        _strategy("allreduce", "all-reduce in buckets, after backward", strategy="allreduce"),
        _strategy("parameter_server", "rank 0 steps and sends its weights", strategy="parameter_server"),
        _strategy(
            "local_sgd", "ranks step alone, weights are averaged", note=_MEETINGS, strategy="local_sgd:every_steps=4"
        ),
        _strategy("diloco", "local_sgd with an outer Nesterov step", note=_MEETINGS, strategy="diloco:every_steps=4"),
    )
}

# Prefixes of variables that launchers set for their ranks: an arm must get them only from its own launcher.
_OF_LAUNCHERS = (
    *("RANK", "WORLD_SIZE", "MASTER_", "LOCAL_", "GROUP_", "ROLE_", "TORCHELASTIC_", "ACCELERATE_", "FSDP_"),
    *("SLURM_", "OMPI_", "PMI_", "PMIX_"),
)


def choose_names(text: str) -> list[str]:
    """Splits names of arms at commas.

    Raises:
        ConfigError: An unknown name, or one given twice.
    """
    names = [name.strip() for name in text.split(",")]
    for name in names:
        if name not in ARMS:
            raise ConfigError(f"arms={text!r}: there is no {name!r}.", hint=f"Choose from {', '.join(ARMS)}.")
        if names.count(name) > 1:
            raise ConfigError(f"arms={text!r}: {name!r} is given twice.", hint="Name each once; see --repeats.")
    return names


def arm_environment(arm: Arm, options: BenchOptions, folder: Path, inherited: Mapping[str, str]) -> dict[str, str]:
    """Returns the variables of an arm: those of this process without those of launchers, and one thread per rank.

    Args:
        folder: Folder for temporary files and caches, so that the user's are not used.
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
        # A Trainer in one process would use DataParallel over all visible GPUs.
        variables |= only("cuda", 0, inherited)
    if options.library == UNSLOTH:
        # Rows are tokens already, so no processes are needed to prepare them.
        variables |= {"UNSLOTH_DISABLE_STATISTICS": "1", "UNSLOTH_DATASET_NUM_PROC": "0"}
        if not options.padding_free:
            # Otherwise Unsloth concatenates rows if it expects that to be faster, and always on several ranks.
            variables["UNSLOTH_DISABLE_AUTO_PADDING_FREE"] = "1"
        if options.model_folder is not None:
            # Shared by all arms, so that code is compiled once.
            variables.setdefault("TORCHINDUCTOR_CACHE_DIR", str(Path(options.model_folder).parent / "inductor"))
    if options.is_card_shared:
        # accelerate would give DDP the local rank as device, but there is only GPU 0.
        variables["ACCELERATE_BYPASS_DEVICE_MAP"] = "true"
    return variables
