"""The options of a run: one frozen dataclass, and its loader.

The class says everything about an option but what the code does with it. Checks, variables, the command line with
`--help` and `docs/options.md` come from it. This module is the only reader of UNSLOTH_MULTIGPU_* options.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

from unsloth_multigpu.accelerator import KINDS
from unsloth_multigpu.errors import ConfigError
from unsloth_multigpu.option_file import find_pyproject, read_pyproject, read_yaml
from unsloth_multigpu.option_type import Option, Scope, options_of, take_values, unknown_option
from unsloth_multigpu.strategy import DDP, Strategy, read_strategy

ENV_PREFIX = "UNSLOTH_MULTIGPU_"
# Variables that the launcher hands to its ranks; they are no options. The run's private folder, what else is the same
# for all of its attempts, as JSON, and how often the ranks were started before; see context.RunContext.
ENV_RUN_DIR = ENV_PREFIX + "RUN_DIR"
ENV_RUN = ENV_PREFIX + "RUN"
ENV_ATTEMPT = ENV_PREFIX + "ATTEMPT"
# A tool that takes part in the run: its class and what it is made from, as JSON. See context.ToolRequest.
ENV_TOOL = ENV_PREFIX + "TOOL"
# Marks the processes of the server that generates; see launch.generation_server.
ENV_SERVER = ENV_PREFIX + "SERVER"
# What shard="auto" has become: "on" or "off".
ENV_SHARD_CHOICE = ENV_PREFIX + "SHARD_CHOICE"
# What a worker of a notebook needs to know: a JSON object, see notebook.start.
ENV_NOTEBOOK = ENV_PREFIX + "NOTEBOOK"
# Marks the processes of one check of `unsloth-multigpu doctor`, see tools.probe.
ENV_PROBE = ENV_PREFIX + "PROBE"
# A YAML file of options, which users may set too.
ENV_CONFIG = ENV_PREFIX + "CONFIG"
# Variables with our prefix that are no options.
INTERNAL_VARIABLES = frozenset(value for name, value in tuple(globals().items()) if name.startswith("ENV_"))

# Groups of `--help` and of docs/options.md, in their order.
EVERYDAY = "Everyday"
GRADIENTS = "How gradients are synchronized"
DEALING = "Which samples, where"
FAILING = "When something fails"
PLACE = "Processes and devices"
NODES = "Several nodes"
GROUPS = (EVERYDAY, GRADIENTS, DEALING, FAILING, PLACE, NODES)

# Names of former options and of arguments of the older plugin -> what to use.
FORMER = {
    "sync": "strategy=..., its name now",
    "grad_compression": "a communication hook of DDP: see docs/strategies.md",
    "ddp_backend": "TrainingArguments(ddp_backend=...)",
    "find_unused_parameters": "TrainingArguments(ddp_find_unused_parameters=...)",
    "enable_gradient_checkpointing": "TrainingArguments(gradient_checkpointing=...)",
    "enable_memory_optimization": "the variable PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True",
    "gradient_aggregation": "enable_ddp=False alone, whose shards weigh what they weigh on one device",
    "debug": 'logging.getLogger("unsloth_multigpu").setLevel("DEBUG")',
}

RANKS, TRAINER, SEVERAL_NODES = (Scope.RANKS,), (Scope.TRAINER,), (Scope.NODES,)
TRAINED, PLANNED = (Scope.RANKS, Scope.TRAINER), (Scope.RANKS, Scope.PLANNER, Scope.TRAINER)

_RUN_AND_VERIFY, _RUN_AND_CHAOS, _EVERY_COMMAND = ("run", "verify"), ("run", "chaos"), ("run", "verify", "chaos")
_DDP = DDP()
_ALL_GPUS = "all visible GPUs; where there is none, this process alone"
_FOR_ELASTIC_NODES = (
    "Set it to a number. For nodes that come and go start this script with torchrun --nnodes MIN:MAX --nproc-per-node "
    "NUM_GPUS --max-restarts 3 --rdzv-backend c10d --rdzv-endpoint HOST:29400 --rdzv-id ID train.py"
)


@dataclass(frozen=True)
class MultiGPUConfig:
    """Every option of a run. `resolve` makes one from arguments, variables, files and defaults.

    `--help` and docs/options.md have these texts.

    Args:
        num_gpus: Ranks on this machine. More than there are GPUs is an error. Without a GPU, that many CPU ranks over
            gloo, after a warning. Not given: all GPUs, or where an optimizer step has too few samples for that, as
            many as can share it.
        batch_size_per_gpu: Samples of one micro-batch on each rank, in place of per_device_train_batch_size. An
            optimizer step then sees N times as many, as with global_batch="scale".
        enable_ddp: One process per device. Off: the older plugin's serial path, which is slower than one GPU: this
            process alone, with a copy of the model per device, which compute one after the other.
        global_batch: "keep": an optimizer step sees the samples of the one-GPU run. "scale": every rank takes the
            script's batch and Hugging Face deals the samples, as under torchrun; a step sees N times as many.
        strategy: How gradients are synchronized: "ddp", "allreduce", "parameter_server", "local_sgd" or "diloco".
            Options of a strategy stand behind a colon, as in "diloco:every_steps=8,outer_momentum=0"; in Python also
            as ump.DiLoCo(every_steps=8).
        shard: "on": each rank holds a part of the weights, gradients and optimizer states (FSDP2, by Unsloth where it
            is imported, else by accelerate), for models that do not fit one GPU. "off": every rank holds the whole
            model, unless the script itself asks for FSDP2. "auto": that, where a forecast of the memory says that it
            is needed.
        balance: "auto": the samples of a step are dealt by length, so that all ranks finish together, where that leaves
            the gradient as it is. "tokens": that, or an error that says why not; also in one process, where it saves
            padding. "off": dealt in order.
        resume: "auto": a training that was stopped resumes from the last complete checkpoint in its output folder, if
            the same training wrote one. "off": as the script says.
        device: "auto", "cpu", "cuda" (ROCm too), "xpu" or "npu". "auto": accelerators if there are any, else the CPU.
        log_dir: Folder of rank_N.log, made if missing.
        generators: GPUs, the last ones, that no rank gets. TRL's server generates on them for a GRPOTrainer or
            RLOOTrainer with use_vllm=True and vllm_mode="server". It is started when that Trainer is made, with the
            Trainer's model, and ends with the run.
        sequence_parallel: Ranks that share each sample: every one has a part of its positions, and in attention a part
            of the heads. For rows that do not fit one GPU; the number of ranks and of heads is a multiple of it.
        shard_offload: With shard="on" or "auto": weights, gradients and optimizer states of a sharded model lie in host
            memory. A GPU holds the layers that compute, and the optimizer runs on the CPU. Slower; for models that do
            not fit sharded either.
        max_tokens_per_micro_batch: Most tokens of a micro-batch, rows x longest row. More lets short texts share a
            micro-batch; less saves memory.
        max_restarts: How often all ranks are started again after one failed.
        timeout_s: Limit, in seconds, of a collective and of a wait for another rank.
        hang_timeout_s: Seconds without progress after which a training rank is called hung and the run ends. Longer
            while it loads, saves, evaluates, compiles or makes its first step, and where micro-batches of this run take
            long (ten times the longest). 0 = never.
        grace_s: Seconds from SIGTERM, SIGUSR1 or Ctrl-C until the run ends: the time to finish a step and to save.
        on_nan: What a gradient that is not finite does. "raise": it ends the run. "skip": the step is left out on all
            ranks. "off": it is left to the script.
        check_first_step: Computes a step as one process does and as the ranks share it, before it is trained, and
            compares the gradients. "auto": the first step, in a minute at most; of code that is the script's own also
            steps 2, 4, 8 and so on and the first of each epoch. "every": each step. "off": none.
        loss_reduction: How the loss is reduced. "auto": known of the classes of transformers, TRL and Unsloth, else
            measured. "token_sum": a sum divided by num_items_in_batch, whose samples may be in any micro-batch.
            "row_mean", "token_mean": a mean over rows or labels. "whole": anything; micro-batches stay whole.
        inexact: What a training does that is not exactly that of one process, as the comparison of a step finds.
            "warn": it is said, with its size. "raise": it is refused.
        verify_every: Steps between two comparisons of all ranks' weights, and until then after steps 1, 2, 4, 8 and so
            on; 0 = never.
        nnodes: Nodes of the run, all of which take part from the first step to the last.
        rdzv_endpoint: Where the nodes meet: HOST:PORT, served by the node of that name.
        rdzv_id: The run's name among those that meet there.
        node_rank: Place of this node among the others, from 0. The first ranks run on node 0.

    Raises:
        ConfigError: An option has a value that cannot be used, alone or beside another.
    """

    num_gpus: Annotated[
        int | None, Option(EVERYDAY, least=1, otherwise=_ALL_GPUS, commands=_RUN_AND_CHAOS, is_of_node=True)
    ] = None
    batch_size_per_gpu: Annotated[
        int | None, Option(DEALING, RANKS, least=1, otherwise="the script's", commands=_RUN_AND_VERIFY)
    ] = None
    enable_ddp: Annotated[bool, Option(GRADIENTS, TRAINER)] = True
    global_batch: Annotated[str, Option(EVERYDAY, RANKS, words=("keep", "scale"), commands=_RUN_AND_VERIFY)] = "keep"
    strategy: Annotated[
        Strategy,
        Option(EVERYDAY, TRAINED, check=read_strategy, shown="NAME[:OPTION=VALUE,...]", commands=_RUN_AND_VERIFY),
    ] = _DDP
    shard: Annotated[str, Option(EVERYDAY, TRAINED, words=("off", "auto", "on"), commands=_EVERY_COMMAND)] = "off"
    balance: Annotated[
        str, Option(EVERYDAY, PLANNED, asking=("tokens",), words=("auto", "off", "tokens"), commands=_EVERY_COMMAND)
    ] = "auto"
    resume: Annotated[str, Option(EVERYDAY, TRAINED, words=("off", "auto"))] = "off"
    device: Annotated[str, Option(PLACE, words=("auto", "cpu", *KINDS), commands=_EVERY_COMMAND)] = "auto"
    log_dir: Annotated[str, Option(PLACE, shown="FOLDER", commands=_RUN_AND_VERIFY, is_of_node=True)] = "logs"
    generators: Annotated[int, Option(PLACE, TRAINED)] = 0
    sequence_parallel: Annotated[int, Option(PLACE, TRAINED, least=1)] = 1
    shard_offload: Annotated[bool, Option(PLACE, RANKS, commands=_EVERY_COMMAND)] = False
    max_tokens_per_micro_batch: Annotated[
        int | None,
        Option(DEALING, PLANNED, least=1, otherwise="what equal numbers of rows reach", commands=_RUN_AND_VERIFY),
    ] = None
    max_restarts: Annotated[int, Option(FAILING, RANKS, commands=_RUN_AND_CHAOS)] = 0
    timeout_s: Annotated[float, Option(FAILING, least=0.001, shown="SECONDS")] = 1800.0
    # Ranks report every 0.5 seconds.
    hang_timeout_s: Annotated[
        float, Option(FAILING, least=2, zero_is_never=True, shown="SECONDS", commands=_RUN_AND_CHAOS)
    ] = 120.0
    grace_s: Annotated[float, Option(FAILING, least=0.001, shown="SECONDS", commands=_RUN_AND_CHAOS)] = 30.0
    on_nan: Annotated[str, Option(FAILING, TRAINED, asking=("skip",), words=("raise", "skip", "off"))] = "raise"
    check_first_step: Annotated[str, Option(FAILING, TRAINER, asking=("every",), words=("auto", "off", "every"))] = (
        "auto"
    )
    loss_reduction: Annotated[
        str, Option(DEALING, TRAINER, words=("auto", "token_sum", "row_mean", "token_mean", "whole"))
    ] = "auto"
    inexact: Annotated[str, Option(FAILING, TRAINER, words=("warn", "raise"))] = "warn"
    verify_every: Annotated[int, Option(FAILING)] = 100
    nnodes: Annotated[str, Option(NODES, RANKS, pattern="[1-9][0-9]*", shown="NUMBER", hint=_FOR_ELASTIC_NODES)] = "1"
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
        """Arguments win over variables, variables over the YAML file, that over pyproject.toml, and that over defaults.

        Args:
            arguments: What the caller gave; a missing name or None means "not given".
            environment: Variables to read, and the files that they name; None = `os.environ`, and the pyproject.toml of
                the working folder or of one above it.

        Raises:
            ConfigError: A value cannot be used, or a variable with our prefix or a name in a file names no option.
        """
        return cls(**given_options(arguments, environment))

    def plain_values(self) -> dict[str, Any]:
        """Name -> value that JSON can hold: the strategy is its text."""
        return {name: str(value) if isinstance(value, Strategy) else value for name, value in vars(self).items()}

    def of_the_run(self) -> dict[str, Any]:
        """The plain values of options that must be equal on all ranks; the others each node may set for itself."""
        options = options_of(MultiGPUConfig)
        return {name: value for name, value in self.plain_values().items() if not options[name].is_of_node}

    def asked(self, scope: Scope) -> list[str]:
        """What was asked of `scope`, as name=value, in the order of the fields."""
        values = self.plain_values()
        return [
            f"{name}={values[name]!r}"
            for name, option in options_of(MultiGPUConfig).items()
            if scope in option.scopes and option.asks(getattr(self, name))
        ]

    def with_shard(self, shard: str) -> MultiGPUConfig:
        """The same run where `shard="auto"` has become `shard`. What is not sharded is not offloaded."""
        return replace(self, shard=shard, shard_offload=self.shard_offload and shard == "on")

    @property
    def keeps_global_batch(self) -> bool:
        """True if a step sees the samples of the one-process run; `batch_size_per_gpu` asks for another batch."""
        return self.global_batch == "keep" and self.batch_size_per_gpu is None

    @property
    def is_synchronous(self) -> bool:
        """True if all ranks make one optimizer step together, so that their weights are equal after each."""
        return self.strategy.is_synchronous


def given_options(arguments: Mapping[str, Any], environment: Mapping[str, str] | None = None) -> dict[str, Any]:
    """The options that somebody has given, and not the defaults; see `MultiGPUConfig.resolve`.

    Raises:
        ConfigError: A variable with our prefix or a name in a file names no option, or has a value that cannot be used.
    """
    options = options_of(MultiGPUConfig)
    values: dict[str, Any] = {}
    for place, shown, name, value in _sources(os.environ if environment is None else environment, environment is None):
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
    return {**values, **{name: value for name, value in arguments.items() if value is not None}}


def _sources(environment: Mapping[str, str], searches: bool) -> Iterator[tuple[str, str, str, Any]]:
    """Place, shown name, name and value of all that files and variables say, what counts more behind the others."""
    if searches and (pyproject := find_pyproject()):
        yield from ((place, name, name, value) for place, name, value in read_pyproject(pyproject))
    if file := environment.get(ENV_CONFIG, "").strip():
        yield from ((place, name, name, value) for place, name, value in read_yaml(Path(file)))
    for shown, text in environment.items():
        if shown.startswith(ENV_PREFIX) and shown not in INTERNAL_VARIABLES:
            yield "", shown, shown.removeprefix(ENV_PREFIX).lower(), text


def command_options(command: str, defaults: Mapping[str, Any] | None = None) -> dict[str, Option]:
    """The options of a run that a command has, by their names, in the order of the groups.

    Args:
        command: "run", "verify" or "chaos".
        defaults: Of that command, where they are others than a run's.
    """
    given = defaults or {}
    return {
        name: replace(option, default=given.get(name, option.default))
        for group in GROUPS
        for name, option in options_of(MultiGPUConfig).items()
        if command in option.commands and option.group == group
    }


def variable(name: str) -> str:
    """The variable of an option."""
    return ENV_PREFIX + name.upper()


def from_keywords(keywords: Mapping[str, Any]) -> dict[str, Any]:
    """Keywords of `enable_multi_gpu` as options.

    Raises:
        ConfigError: A keyword that is no option.
    """
    options = options_of(MultiGPUConfig)
    for keyword, value in keywords.items():
        if keyword not in options:
            error = unknown_option(f"enable_multi_gpu: {keyword}", value, keyword, {name: name for name in options})
            raise ConfigError(*error.args, hint=f"Use {FORMER[keyword]}." if keyword in FORMER else error.hint)
    return dict(keywords)


def num_nodes(nnodes: str) -> int:
    """The number of nodes of "2".

    Raises:
        ConfigError: It is no number.
    """
    return int(options_of(MultiGPUConfig)["nnodes"].take("nnodes", nnodes))


def _check_together(config: MultiGPUConfig) -> None:
    """Checks that the options fit together: that nothing is asked for which nothing would do."""
    for scope, reason in _closed_scopes(config):
        if given := config.asked(scope):
            raise ConfigError(f"{given[0]} {reason}.", hint="Leave one of them out.")
    if num_nodes(config.nnodes) > 1:
        _check_nodes(config)
    if config.generators and (num_nodes(config.nnodes) > 1 or config.shard != "off" or not config.is_synchronous):
        others = f"nnodes={config.nnodes!r}, shard={config.shard!r}, strategy='{config.strategy}'"
        raise ConfigError(
            f"generators={config.generators} is for one node whose ranks have equal and whole weights; {others}.",
            hint="Leave generators out, or the other options.",
        )
    if config.shard != "off" and config.strategy != DDP():
        raise ConfigError(
            f"shard={config.shard!r} leaves the exchange of gradients to FSDP2, and strategy='{config.strategy}'.",
            hint="Leave one of them out.",
        )
    if config.shard_offload and config.shard == "off":
        raise ConfigError(
            "shard_offload=True moves what a rank holds of a sharded model to the host's memory, and shard='off'.",
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
            f"on_nan='skip' needs the one gradient of the step on every rank; strategy='{config.strategy}' has none.",
            hint="Set on_nan='raise' or 'off'.",
        )


def _closed_scopes(config: MultiGPUConfig) -> Iterator[tuple[Scope, str]]:
    """Scopes in which nothing may be asked for, and why."""
    if not config.enable_ddp:
        yield Scope.RANKS, "is for several ranks, and enable_ddp=False is the legacy path in one process"
    if num_nodes(config.nnodes) == 1:
        yield Scope.NODES, "is for several nodes, and nnodes='1'"
    if config.balance == "off":
        yield Scope.PLANNER, "is for the planner, and balance='off'"
    if not config.keeps_global_batch:
        yield Scope.PLANNER, "is for the planner, and global_batch='scale' or batch_size_per_gpu leave it out"
    if not config.is_synchronous:
        yield Scope.PLANNER, f"is for the planner, and with strategy='{config.strategy}' ranks do not wait for others"


def _check_nodes(config: MultiGPUConfig) -> None:
    if config.node_rank is not None and config.node_rank >= int(config.nnodes):
        raise ConfigError(
            f"node_rank={config.node_rank}, but nnodes={config.nnodes!r}; expected 0 .. {int(config.nnodes) - 1}.",
            hint="Count the nodes from 0.",
        )
    for name in ("rdzv_endpoint", "rdzv_id"):
        if getattr(config, name) is None:
            raise ConfigError(
                f"{name}=None, but nnodes={config.nnodes!r}: nodes would not find each other.",
                hint='Set rdzv_endpoint="HOST:29400", the address of one of the nodes, and rdzv_id="any-name" on all.',
            )
