"""The one configuration: frozen, validated when it is made, and the only reader of UNSLOTH_MULTIGPU_* variables."""

from __future__ import annotations

import dataclasses
import os
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from unsloth_multigpu.errors import ConfigError
from unsloth_multigpu.option import check_options, companions, did_you_mean

ENV_PREFIX = "UNSLOTH_MULTIGPU_"
# Variables that the launcher hands to its ranks; they are no options.
ENV_RUN_DIR = ENV_PREFIX + "RUN_DIR"
ENV_SUPERVISOR_PID = ENV_PREFIX + "SUPERVISOR_PID"
ENV_LOG_DIR_OF_RUN = ENV_PREFIX + "RUN_LOG_DIR"
ENV_RUN_SEED = ENV_PREFIX + "RUN_SEED"
# Digests of the supervisor's random generators at the line: a JSON object, see launch.draw.
ENV_RUN_DRAWS = ENV_PREFIX + "RUN_DRAWS"
# How often the ranks were started before, by a failure or because a node came or went.
ENV_ATTEMPT = ENV_PREFIX + "ATTEMPT"
# Identifier of a run, the same for all its attempts.
ENV_RUN_ID = ENV_PREFIX + "RUN_ID"
# Process id of a rank that multiprocessing has started: what it starts itself inherits the other variables.
ENV_RANK_PID = ENV_PREFIX + "RANK_PID"
# A tool that takes part in the run: its class and what it is made from, as JSON. See context.ToolRequest.
ENV_TOOL = ENV_PREFIX + "TOOL"
# What a worker of a notebook needs to know: a JSON object, see notebook.start.
ENV_NOTEBOOK = ENV_PREFIX + "NOTEBOOK"
# Marks the processes of one check of `unsloth-multigpu doctor`, see cli.probe.
ENV_PROBE = ENV_PREFIX + "PROBE"
INTERNAL_VARIABLES = frozenset(
    {
        ENV_RUN_DIR,
        ENV_SUPERVISOR_PID,
        ENV_LOG_DIR_OF_RUN,
        ENV_RUN_SEED,
        ENV_RUN_DRAWS,
        ENV_ATTEMPT,
        ENV_RUN_ID,
        ENV_RANK_PID,
        ENV_TOOL,
        ENV_NOTEBOOK,
        ENV_PROBE,
    }
)

# They do not change the training.
_OF_A_NODE = ("num_gpus", "rdzv_endpoint", "log_dir", "debug")
_BOOLEANS = {"1": True, "true": True, "yes": True, "on": True, "0": False, "false": False, "no": False, "off": False}


@dataclass(frozen=True)
class MultiGPUConfig:
    """Every option of a run. `MultiGPUConfig.resolve` makes one from arguments, environment and defaults.

    Args:
        num_gpus: Ranks on this machine. None = all visible accelerators, or this process alone where there is none.
        batch_size_per_gpu: Samples of one micro-batch on each rank, in place of `per_device_train_batch_size`.
            The samples of an optimizer step then grow with the number of ranks. None = leave the script's value.
        enable_ddp: One process per device. False = the legacy serial path of the older plugin: one process, a copy of
            the model per device, which compute one after the other.
        global_batch: "keep" = the samples of an optimizer step are those of the one-process run;
            "scale" = every rank takes the script's batch, so that a step sees `world_size` times as many samples.
        sync: How gradients meet: "ddp"; "allreduce" after backward; "parameter_server", whose optimizer steps on rank
            0; "local_sgd" and "diloco", whose ranks step by themselves and meet every `sync_every_steps`.
        balance: "auto" = samples of a step are dealt so that all ranks finish together, where the gradient stays the
            same; "tokens" = that, or an error that says why not; "off" = they are dealt in order.
        device: "auto" = accelerators if there are any, else the CPU.
        seed_per_rank: Ranks draw different dropout masks and augmentations. Rank 0 keeps the script's seed.
        timeout_s: Limit of one collective operation and of one wait for another rank, in seconds.
        max_restarts: How often the ranks are started again after one of them failed.
        log_dir: Folder of `rank_N.log`, made if missing.
        max_tokens_per_micro_batch: Most tokens of one micro-batch, rows x longest row. None = what shares of equal
            numbers of rows could reach.
        micro_batch_overhead_tokens: What a micro-batch costs whatever is in it, as the time of so many tokens.
            None = measured in the first steps.
        micro_batch_floor_tokens: Micro-batches of fewer tokens take as long as one of so many. None = measured.
        rank_speeds: How fast each rank computes, relative to the others. None = measured while training.
        grad_compression: "bf16", "fp16" or "powersgd" = gradients are sent smaller, and are no longer exact.
        sync_bucket_mb: MiB of one message of "allreduce" and "parameter_server", 0 = a message for each tensor.
            None = 25.
        max_staleness_steps: How many steps a rank of "parameter_server" may be ahead of the slowest one. None = ranks
            step together.
        sync_every_steps: Optimizer steps of "local_sgd" and "diloco" between two meetings. None = 16.
        outer_learning_rate: Of the step that "diloco" makes when ranks meet. None = 0.7.
        outer_momentum: Nesterov momentum of that step. None = 0.9.
        gradient_aggregation: How `enable_ddp=False` puts the gradients of shards together. None = "weighted".
        verify_every: All ranks compare their weights after the first step and every so many steps. 0 = never.
        hang_timeout_s: A rank that makes no progress for so many seconds while it trains is called hung, and the run
            ends. Longer while it loads, saves, evaluates or compiles. 0 = never.
        resume: "auto" = a training goes on from the last whole checkpoint in its output folder, if the same training
            wrote one; "off" = as the script says.
        grace_s: Seconds from a signal to stop until the run ends: the time to finish a step and to save.
        on_nan: What a gradient norm that is no finite number does: "raise" ends the run, "skip" leaves the step out on
            all ranks, "off" leaves it to the script.
        inexact: What is done where a micro-batch's loss is not made up of the losses of its parts, and ranks share it:
            "warn" says so with its size and goes on, "raise" refuses.
        nnodes: Nodes of the run: a number, or "MIN:MAX" for nodes that come and go.
        rdzv_endpoint: HOST:PORT where nodes meet, served by the node of that name. Needed for several nodes.
        rdzv_id: Name of the run among those that meet there. Needed for several nodes.
        ddp_backend: Process group backend; None = the one that fits the device. (Older plugin.)
        find_unused_parameters: Given to DDP; None = decided from the model. (Older plugin.)
        gradient_checkpointing: Given to TrainingArguments; None = leave the script's value. (Older plugin.)
        memory_optimization: Lets CUDA's allocator use expandable segments. (Older plugin.)
        debug: This package logs at DEBUG level. (Older plugin.)
    """

    num_gpus: int | None = None
    batch_size_per_gpu: int | None = None
    enable_ddp: bool = True
    global_batch: str = "keep"
    sync: str = "ddp"
    balance: str = "auto"
    device: str = "auto"
    seed_per_rank: bool = True
    timeout_s: float = 1800.0
    max_restarts: int = 0
    log_dir: str = "logs"
    max_tokens_per_micro_batch: int | None = None
    micro_batch_overhead_tokens: float | None = None
    micro_batch_floor_tokens: float | None = None
    rank_speeds: tuple[float, ...] | None = None
    grad_compression: str | None = None
    sync_bucket_mb: float | None = None
    max_staleness_steps: int | None = None
    sync_every_steps: int | None = None
    outer_learning_rate: float | None = None
    outer_momentum: float | None = None
    gradient_aggregation: str | None = None
    verify_every: int = 100
    hang_timeout_s: float = 120.0
    resume: str = "off"
    grace_s: float = 30.0
    on_nan: str = "raise"
    inexact: str = "warn"
    nnodes: str = "1"
    rdzv_endpoint: str | None = None
    rdzv_id: str | None = None
    ddp_backend: str | None = None
    find_unused_parameters: bool | None = None
    gradient_checkpointing: bool | None = None
    memory_optimization: bool = False
    debug: bool = False

    def __post_init__(self) -> None:
        check_options(self)

    @classmethod
    def resolve(cls, arguments: Mapping[str, Any], environment: Mapping[str, str] | None = None) -> MultiGPUConfig:
        """Arguments win over the environment, the environment over the defaults.

        Args:
            arguments: What the caller gave; a missing name or None means "not given".
            environment: Variables to read; None = `os.environ`.

        Raises:
            ConfigError: A value cannot be used, or a variable with our prefix names no option.
        """
        given = {name: value for name, value in arguments.items() if value is not None}
        from_environment = _read_environment(os.environ if environment is None else environment)
        return cls(**{**from_environment, **given})

    def of_the_run(self) -> dict[str, Any]:
        """The options that must be equal on all ranks; the others each node may set for itself."""
        return {name: value for name, value in vars(self).items() if name not in _OF_A_NODE}

    @property
    def keeps_global_batch(self) -> bool:
        """True if a step sees the samples of the one-process run; `batch_size_per_gpu` asks for another batch."""
        return self.global_batch == "keep" and self.batch_size_per_gpu is None

    @property
    def meets_every_step(self) -> bool:
        """True if all ranks make one optimizer step together, so that their weights are equal after each."""
        return self.sync in ("ddp", "allreduce") or (
            self.sync == "parameter_server" and self.max_staleness_steps is None
        )


def translate_legacy(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Turns the older plugin's arguments into today's options, with a DeprecationWarning each.

    Raises:
        ConfigError: An argument that neither version knows, or a gradient aggregation that DDP does not do.
    """
    replacements = {
        "ddp_backend": ("ddp_backend", "TrainingArguments(ddp_backend=...)"),
        "enable_memory_optimization": (
            "memory_optimization",
            "the variable PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True",
        ),
        "enable_gradient_checkpointing": ("gradient_checkpointing", "TrainingArguments(gradient_checkpointing=...)"),
        "find_unused_parameters": ("find_unused_parameters", "TrainingArguments(ddp_find_unused_parameters=...)"),
        "debug": ("debug", 'logging.getLogger("unsloth_multigpu").setLevel("DEBUG")'),
    }
    translated: dict[str, Any] = {}
    for name, value in arguments.items():
        if name not in replacements:
            older = {new_name for new_name, _ in replacements.values()}
            known = [f.name for f in dataclasses.fields(MultiGPUConfig) if f.name not in older]
            raise ConfigError(
                f"enable_multi_gpu() got {name}={value!r}, which it does not know.",
                hint=f"{did_you_mean(name, [*known, *replacements])}Options: {', '.join(known)}.",
            )
        new_name, replacement = replacements[name]
        # The frames above are this function, enable_multi_gpu and the user's line.
        warnings.warn(f"{name} is deprecated. Use {replacement}.", DeprecationWarning, stacklevel=3)
        if new_name is not None:
            _check_alone(new_name, value, shown=name)
            translated[new_name] = value
    return translated


def _read_environment(environment: Mapping[str, str]) -> dict[str, Any]:
    fields = {f.name: f for f in dataclasses.fields(MultiGPUConfig)}
    values: dict[str, Any] = {}
    for variable, text in environment.items():
        if not variable.startswith(ENV_PREFIX) or variable in INTERNAL_VARIABLES:
            continue
        name = variable[len(ENV_PREFIX) :].lower()
        if name not in fields:
            known = ", ".join(sorted(ENV_PREFIX + n.upper() for n in fields))
            meant = did_you_mean(name.upper(), [n.upper() for n in fields], ENV_PREFIX)
            raise ConfigError(f"{variable}={text!r} names no option.", hint=f"{meant}Unset it. Variables: {known}.")
        if text.strip() and text.strip().lower() != "none":
            values[name] = _parse(variable, text.strip(), str(fields[name].type))
            _check_alone(name, values[name], shown=variable)
    return values


def _check_alone(name: str, value: Any, *, shown: str) -> None:
    """Checks one option that was given by another name, so that an error names it as it was given."""
    try:
        MultiGPUConfig.resolve({**companions(name), name: value}, {})
    except ConfigError as error:
        raise ConfigError(error.args[0].replace(name, shown), hint=error.hint.replace(name, shown)) from None


def _parse(variable: str, text: str, annotation: str) -> Any:
    kind = annotation.split("|")[0].strip()
    if kind == "bool":
        if text.lower() not in _BOOLEANS:
            raise ConfigError(
                f"{variable}={text!r}; expected a truth value.", hint=f"Set {variable}=1 or {variable}=0."
            )
        return _BOOLEANS[text.lower()]
    if kind.startswith("tuple"):
        try:
            return tuple(float(part) for part in text.split(","))
        except ValueError:
            raise ConfigError(
                f"{variable}={text!r}; expected numbers with commas between them.", hint=f"Set {variable}=1,0.5, say."
            ) from None
    if kind in ("int", "float"):
        try:
            return int(text) if kind == "int" else float(text)
        except ValueError:
            word = "a whole number" if kind == "int" else "a number"
            raise ConfigError(f"{variable}={text!r}; expected {word}.", hint=f"Set {variable}=2, say.") from None
    return text
