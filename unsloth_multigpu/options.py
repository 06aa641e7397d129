"""The options of a run: one frozen dataclass, and its loader.

Checks, variables, the command line, `--help` and `docs/options.md` are derived from the class. This module is the only
reader of UNSLOTH_MULTIGPU_* options, and `option_file` reads the user's files for it.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

from unsloth_multigpu.accelerator import KINDS
from unsloth_multigpu.errors import ConfigError
from unsloth_multigpu.option_type import Option, Scope, options_of, take_values, unknown_option
from unsloth_multigpu.strategy import DDP, Strategy, read_strategy

ENV_PREFIX = "UNSLOTH_MULTIGPU_"
# Variables from the launcher for its ranks, see context.RunContext: the run's private folder, and other facts as JSON.
ENV_RUN_DIR = ENV_PREFIX + "RUN_DIR"
ENV_RUN = ENV_PREFIX + "RUN"
# The tool that started the run: its class and the class's arguments, as JSON. See wire.context.
ENV_TOOL = ENV_PREFIX + "TOOL"
# Marks the processes of the generation server; see launch.generation_server.
ENV_SERVER = ENV_PREFIX + "SERVER"
# Facts for a notebook's worker, as a JSON object; see notebook.kernel_start.
ENV_NOTEBOOK = ENV_PREFIX + "NOTEBOOK"
# Marks the processes of one check of `unsloth-multigpu doctor`; see tools.probe.
ENV_PROBE = ENV_PREFIX + "PROBE"
# A YAML file of options. Users may set this one.
ENV_CONFIG = ENV_PREFIX + "CONFIG"
# Variables with our prefix that are not options.
INTERNAL_VARIABLES = frozenset(value for name, value in tuple(globals().items()) if name.startswith("ENV_"))

# Groups of `--help` and of docs/options.md, in their order.
EVERYDAY = "Everyday"
GRADIENTS = "How gradients are synchronized"
DEALING = "Which samples, where"
FAILING = "When something fails"
PLACE = "Processes and devices"
NODES = "Several nodes"
GROUPS = (EVERYDAY, GRADIENTS, DEALING, FAILING, PLACE, NODES)

# Arguments of the older plugin -> what to use.
FORMER = {
    "ddp_backend": "TrainingArguments(ddp_backend=...)",
    "find_unused_parameters": "TrainingArguments(ddp_find_unused_parameters=...)",
    "enable_gradient_checkpointing": "TrainingArguments(gradient_checkpointing=...)",
    "enable_memory_optimization": "the variable PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True",
    "gradient_aggregation": "enable_ddp=False alone, which averages gradients as one device does",
    "debug": 'logging.getLogger("unsloth_multigpu").setLevel("DEBUG")',
}

RANKS, TRAINER, SEVERAL_NODES = (Scope.RANKS,), (Scope.TRAINER,), (Scope.NODES,)
TRAINED, PLANNED = (Scope.RANKS, Scope.TRAINER), (Scope.RANKS, Scope.PLANNER, Scope.TRAINER)

_RUN_AND_VERIFY, _RUN_AND_CHAOS, _EVERY_COMMAND = ("run", "verify"), ("run", "chaos"), ("run", "verify", "chaos")
_DDP = DDP()
_ALL_GPUS = "all visible GPUs; without one, this process alone"
_ELASTIC = "For nodes that come and go see docs/cluster.md."


@dataclass(frozen=True)
class MultiGPUConfig:
    """Every option of a run. `resolve` makes one from arguments, variables, files and defaults.

    `--help` and docs/options.md have these texts.

    Args:
        num_gpus: Ranks on this machine. A number above that of GPUs is an error. Without a GPU, that many CPU ranks
            over gloo, after a warning. Not given: all GPUs, or fewer if an optimizer step has too few samples for all.
        batch_size_per_gpu: Samples of one micro-batch on each rank, in place of per_device_train_batch_size. An
            optimizer step then sees N times as many, as with global_batch="scale".
        enable_ddp: One process per device. Off: the older plugin's serial path in one process, with copies of the
            weights on further devices, which compute one after the other. Slower than one GPU.
        global_batch: "keep": an optimizer step sees the samples of the one-GPU run. "scale": every rank takes the
            script's batch and Hugging Face divides the samples, as under torchrun; a step sees N times as many.
        strategy: How gradients are synchronized: "ddp", "allreduce", "parameter_server", "local_sgd" or "diloco".
            Options of a strategy follow a colon, as in "diloco:every_steps=8,outer_momentum=0"; in Python also
            ump.DiLoCo(every_steps=8).
        shard: "on": each rank holds a shard of the weights, gradients and optimizer states (FSDP2, by Unsloth if it
            is imported, else by accelerate), for models that do not fit one GPU. "off": every rank holds the whole
            model, unless the script itself asks for FSDP2. "auto": "on" if a forecast says that the memory of one GPU
            is not enough, else "off".
        balance: "auto": the samples of a step are divided by length, so that all ranks finish together, if this does
            not change the gradient. "tokens": the same, or an error that gives the reason; also in one process, where
            it saves padding. "off": divided in order.
        resume: "auto": a stopped training resumes from the last complete checkpoint that it wrote to its output folder.
            "off": as the script says.
        device: "auto", "cpu", "cuda" (ROCm too), "xpu" or "npu". "auto": accelerators if there are any, else the CPU.
        log_dir: Folder of rank_N.log, created if missing.
        generators: Number of GPUs, the last ones, for TRL's generation server; ranks use the others. For a GRPOTrainer
            or RLOOTrainer with use_vllm=True and vllm_mode="server". The server is started when that Trainer is made,
            with the Trainer's model, and ends with the run.
        sequence_parallel: Number of ranks that share each sample: each has a part of its positions, and in attention a
            part of the heads. For rows that do not fit one GPU. Must divide the number of ranks and of heads.
        shard_offload: With shard="on" or "auto": weights, gradients and optimizer states of a sharded model stay in
            host memory. A GPU holds the layers that compute, and the optimizer runs on the CPU. Slower; for models
            that do not fit the GPUs even if sharded.
        max_tokens_per_micro_batch: Limit of the tokens of a micro-batch: rows x longest row. A higher limit lets more
            short texts share a micro-batch; a lower one saves memory.
        max_restarts: How often all ranks are started again after a failure.
        timeout_s: Limit, in seconds, of a collective and of a wait for another rank.
        hang_timeout_s: Seconds without progress after which a training rank counts as hung and the run ends. Longer
            while a rank loads, saves, evaluates, compiles or makes its first step, and in runs with long micro-batches
            (ten times the longest). 0 = never.
        grace_s: Seconds from SIGTERM, SIGUSR1 or Ctrl-C until the run ends: the time to finish a step and to save.
        on_nan: What to do if the gradient of a step is infinite or NaN. "raise": end the run. "skip": all ranks skip
            the step. "off": leave it to the script.
        check_first_step: Before a step is trained, compute its gradient as one process does and as the ranks share it,
            and compare. "auto": the first step, for one minute at most; for code of the script also steps 2, 4, 8 and
            so on and the first of each epoch. "every": each step. "off": none.
        loss_reduction: How the loss is reduced. "auto": known for the classes of transformers, TRL and Unsloth, else
            measured. "token_sum": a sum divided by num_items_in_batch, whose samples may be in any micro-batch.
            "row_mean", "token_mean": a mean over rows or labels. "whole": anything; micro-batches are not divided.
        inexact: What to do if the comparison of a step finds a difference from one process. "warn": log its size.
            "raise": end the run.
        verify_every: Steps between two comparisons of all ranks' weights; before the first, steps 1, 2, 4, 8 and so on.
            0 = never.
        nnodes: Number of nodes. All of them take part from the first step to the last.
        rdzv_endpoint: HOST:PORT at which the nodes find each other, served by the node of that name.
        rdzv_id: Name of the run, among those that use the same endpoint.
        node_rank: Number of this node, from 0. Node 0 has the first ranks.

    Raises:
        ConfigError: An option has an invalid value, or does not fit another option.
    """

    num_gpus: Annotated[
        int | None, Option(EVERYDAY, least=1, otherwise=_ALL_GPUS, commands=_RUN_AND_CHAOS, is_of_node=True)
    ] = None
    batch_size_per_gpu: Annotated[
        int | None, Option(DEALING, RANKS, least=1, otherwise="the script's", commands=_RUN_AND_VERIFY)
    ] = None
    enable_ddp: Annotated[bool, Option(GRADIENTS, TRAINER)] = True
    global_batch: Annotated[str, Option(EVERYDAY, RANKS, choices=("keep", "scale"), commands=_RUN_AND_VERIFY)] = "keep"
    strategy: Annotated[
        Strategy,
        Option(EVERYDAY, TRAINED, check=read_strategy, shown="NAME[:OPTION=VALUE,...]", commands=_RUN_AND_VERIFY),
    ] = _DDP
    shard: Annotated[str, Option(EVERYDAY, TRAINED, choices=("off", "auto", "on"), commands=_EVERY_COMMAND)] = "off"
    balance: Annotated[
        str, Option(EVERYDAY, PLANNED, asking=("tokens",), choices=("auto", "off", "tokens"), commands=_EVERY_COMMAND)
    ] = "auto"
    resume: Annotated[str, Option(EVERYDAY, TRAINED, choices=("off", "auto"))] = "off"
    device: Annotated[str, Option(PLACE, choices=("auto", "cpu", *KINDS), commands=_EVERY_COMMAND)] = "auto"
    log_dir: Annotated[str, Option(PLACE, shown="FOLDER", commands=_RUN_AND_VERIFY, is_of_node=True)] = "logs"
    generators: Annotated[int, Option(PLACE, TRAINED)] = 0
    sequence_parallel: Annotated[int, Option(PLACE, TRAINED, least=1)] = 1
    shard_offload: Annotated[bool, Option(PLACE, RANKS, commands=_EVERY_COMMAND)] = False
    max_tokens_per_micro_batch: Annotated[
        int | None,
        Option(DEALING, PLANNED, least=1, otherwise='the largest with balance="off"', commands=_RUN_AND_VERIFY),
    ] = None
    max_restarts: Annotated[int, Option(FAILING, RANKS, commands=_RUN_AND_CHAOS)] = 0
    timeout_s: Annotated[float, Option(FAILING, least=0.001, shown="SECONDS")] = 1800.0
    # At least 2, because ranks report every 0.5 seconds.
    hang_timeout_s: Annotated[
        float, Option(FAILING, least=2, zero_is_never=True, shown="SECONDS", commands=_RUN_AND_CHAOS)
    ] = 120.0
    grace_s: Annotated[float, Option(FAILING, least=0.001, shown="SECONDS", commands=_RUN_AND_CHAOS)] = 30.0
    on_nan: Annotated[str, Option(FAILING, TRAINED, asking=("skip",), choices=("raise", "skip", "off"))] = "raise"
    check_first_step: Annotated[str, Option(FAILING, TRAINER, asking=("every",), choices=("auto", "off", "every"))] = (
        "auto"
    )
    loss_reduction: Annotated[
        str, Option(DEALING, TRAINER, choices=("auto", "token_sum", "row_mean", "token_mean", "whole"))
    ] = "auto"
    inexact: Annotated[str, Option(FAILING, TRAINER, choices=("warn", "raise"))] = "warn"
    verify_every: Annotated[int, Option(FAILING)] = 100
    nnodes: Annotated[int, Option(NODES, RANKS, least=1, hint=_ELASTIC)] = 1
    rdzv_endpoint: Annotated[
        str | None, Option(NODES, SEVERAL_NODES, pattern=r".+:\d+", shown="HOST:PORT", is_of_node=True)
    ] = None
    rdzv_id: Annotated[str | None, Option(NODES, SEVERAL_NODES)] = None
    node_rank: Annotated[int | None, Option(NODES, SEVERAL_NODES, otherwise="by address", is_of_node=True)] = None

    def __post_init__(self) -> None:
        take_values(self)
        _check_together(self)

    @classmethod
    def resolve(cls, arguments: Mapping[str, Any], environment: Mapping[str, str] | None = None) -> MultiGPUConfig:
        """Merges the sources: arguments before variables, the YAML file, pyproject.toml and defaults.

        Args:
            arguments: Options by name; None means "not given".
            environment: Variables to read. None = `os.environ`, and the nearest pyproject.toml from here up.

        Raises:
            ConfigError: An invalid value, or an argument, a variable with our prefix or a name in a file that is not an
                option.
        """
        known = {name: name for name in options_of(MultiGPUConfig)}
        for name, value in arguments.items():
            if name not in known:
                error = unknown_option(f"enable_multi_gpu: {name}", value, name, known)
                raise ConfigError(*error.args, hint=f"Use {FORMER[name]}." if name in FORMER else error.hint)
        given = {name: value for name, value in arguments.items() if value is not None}
        return cls(**{**_from_sources(environment), **given})

    def plain_values(self) -> dict[str, Any]:
        """Returns the options as JSON values: the strategy as its text."""
        return {name: str(value) if isinstance(value, Strategy) else value for name, value in vars(self).items()}

    def of_the_run(self) -> dict[str, Any]:
        """Returns the plain values of the options that must be equal on all nodes."""
        options = options_of(MultiGPUConfig)
        return {name: value for name, value in self.plain_values().items() if not options[name].is_of_node}

    def asked(self, scope: Scope) -> list[str]:
        """Returns the options, as name=value, whose values need `scope`."""
        values = self.plain_values()
        return [
            f"{name}={values[name]!r}"
            for name, option in options_of(MultiGPUConfig).items()
            if scope in option.scopes and option.asks(getattr(self, name))
        ]

    def with_shard(self, shard: str) -> MultiGPUConfig:
        """Returns these options with `shard` in place of "auto". Without shards nothing is offloaded."""
        return replace(self, shard=shard, shard_offload=self.shard_offload and shard == "on")

    @property
    def keeps_global_batch(self) -> bool:
        """True if a step sees the samples of the one-process run."""
        return self.global_batch == "keep" and self.batch_size_per_gpu is None

    @property
    def is_synchronous(self) -> bool:
        """True if all ranks make each optimizer step together, so that their weights are equal after it."""
        return self.strategy.is_synchronous


def _from_sources(environment: Mapping[str, str] | None) -> dict[str, Any]:
    """Returns the options that files and variables give, in their types."""
    options, values = options_of(MultiGPUConfig), dict[str, Any]()
    for place, shown, name, value in _sources(environment):
        if name not in options:
            known = {n: n if place else variable(n) for n in options}
            raise unknown_option(f"{place}{shown}", value, name, known)
        if isinstance(value, str):
            if value.strip().lower() in ("", "none", "null", "~"):
                continue
            value = options[name].parse(value.strip())
        try:
            values[name] = options[name].take(shown, value)
        except ConfigError as error:
            raise ConfigError(f"{place}{error.args[0]}", hint=error.hint) from None
    return values


def _sources(environment: Mapping[str, str] | None) -> Iterator[tuple[str, str, str, Any]]:
    """Yields (place, shown name, option name, value) of files and variables. Later ones override earlier ones."""
    pyproject = _find_pyproject() if environment is None else None
    environment = os.environ if environment is None else environment
    file = environment.get(ENV_CONFIG, "").strip()
    if pyproject or file:
        from unsloth_multigpu.option_file import read_pyproject, read_yaml

        yield from read_pyproject(pyproject) if pyproject else ()
        yield from read_yaml(Path(file)) if file else ()
    for shown, text in environment.items():
        if shown.startswith(ENV_PREFIX) and shown not in INTERNAL_VARIABLES:
            yield "", shown, shown.removeprefix(ENV_PREFIX).lower(), text


def _find_pyproject() -> Path | None:
    """Returns the pyproject.toml of the working folder or the nearest folder above it; None without one."""
    try:
        folder = Path.cwd()
    except FileNotFoundError:  # The working folder was removed.
        return None
    files = (place / "pyproject.toml" for place in (folder, *folder.parents))
    # Unlike `Path.is_file`, it does not raise if a folder above is not readable.
    return next((file for file in files if os.path.isfile(file)), None)


def command_options(command: str, defaults: Mapping[str, Any] | None = None) -> dict[str, Option]:
    """Returns the options of "run", "verify" or "chaos" by name, in the order of the groups.

    `defaults` are the command's own, where they differ from those of a run.
    """
    given = defaults or {}
    return {
        name: replace(option, default=given.get(name, option.default))
        for group in GROUPS
        for name, option in options_of(MultiGPUConfig).items()
        if command in option.commands and option.group == group
    }


def variable(name: str) -> str:
    """Returns the name of an option's variable."""
    return ENV_PREFIX + name.upper()


def _check_together(config: MultiGPUConfig) -> None:
    for scope, reason in _closed_scopes(config):
        if given := config.asked(scope):
            raise ConfigError(f"{given[0]} {reason}.", hint="Leave one of them out.")
    if config.nnodes > 1:
        _check_nodes(config)
    if config.generators and (config.nnodes > 1 or config.shard != "off" or not config.is_synchronous):
        others = f"nnodes={config.nnodes}, shard={config.shard!r}, strategy='{config.strategy}'"
        raise ConfigError(
            f"generators={config.generators} needs one node and ranks with equal, unsharded weights; {others}.",
            hint="Leave generators out, or the other options.",
        )
    if config.shard != "off" and config.strategy != DDP():
        raise ConfigError(
            f"shard={config.shard!r} synchronizes gradients by FSDP2, but strategy='{config.strategy}'.",
            hint="Leave one of them out.",
        )
    if config.shard_offload and config.shard == "off":
        raise ConfigError(
            "shard_offload=True moves the shards of a model to host memory, but shard='off'.",
            hint="Set shard='on' or shard='auto', or leave shard_offload out.",
        )
    is_plain = config.shard == "off" and config.strategy == DDP() and config.keeps_global_batch
    if config.sequence_parallel > 1 and not is_plain:
        raise ConfigError(
            f"sequence_parallel={config.sequence_parallel} needs strategy='ddp', shard='off' and the script's batch.",
            hint="Leave sequence_parallel out, or strategy, shard, global_batch and batch_size_per_gpu.",
        )
    if config.on_nan == "skip" and not config.strategy.has_one_gradient:
        raise ConfigError(
            f"on_nan='skip' needs the same gradient on every rank; strategy='{config.strategy}' does not provide it.",
            hint="Set on_nan='raise' or 'off'.",
        )


def _closed_scopes(config: MultiGPUConfig) -> Iterator[tuple[Scope, str]]:
    """Yields the scopes that do not apply, with the reason."""
    if not config.enable_ddp:
        yield Scope.RANKS, "is for several ranks, but enable_ddp=False runs in one process"
    if config.nnodes == 1:
        yield Scope.NODES, "is for several nodes, but nnodes=1"
    if config.balance == "off":
        yield Scope.PLANNER, "is for the planner, but balance='off'"
    if not config.keeps_global_batch:
        yield Scope.PLANNER, "is for the planner, which global_batch='scale' and batch_size_per_gpu turn off"
    if not config.is_synchronous:
        yield Scope.PLANNER, f"is for the planner, but strategy='{config.strategy}' does not synchronize each step"


def _check_nodes(config: MultiGPUConfig) -> None:
    if config.node_rank is not None and config.node_rank >= config.nnodes:
        raise ConfigError(
            f"node_rank={config.node_rank}, but nnodes={config.nnodes}; expected 0 .. {config.nnodes - 1}.",
            hint="Count the nodes from 0.",
        )
    for name in ("rdzv_endpoint", "rdzv_id"):
        if getattr(config, name) is None:
            raise ConfigError(
                f"{name}=None, but nnodes={config.nnodes}: the nodes could not find each other.",
                hint='Set rdzv_endpoint="HOST:29400", the address of one of the nodes, and rdzv_id="any-name" on all.',
            )
