"""The one configuration of a run: frozen, checked when it is made, and the only reader of UNSLOTH_MULTIGPU_* variables.

What the options are is in `table`; here is what comes from it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from unsloth_multigpu.errors import ConfigError
from unsloth_multigpu.option_file import find_pyproject, read_pyproject, read_yaml
from unsloth_multigpu.row import CommandOption, Nodes, Scope, brief, did_you_mean, rows, take_values
from unsloth_multigpu.strategy import DDP, STRATEGIES, Strategy
from unsloth_multigpu.table import FORMER, SECTIONS, OptionTable

ENV_PREFIX = "UNSLOTH_MULTIGPU_"
# Variables that the launcher hands to its ranks; they are no options.
ENV_RUN_DIR = ENV_PREFIX + "RUN_DIR"
ENV_SUPERVISOR_PID = ENV_PREFIX + "SUPERVISOR_PID"
ENV_LOG_DIR_OF_RUN = ENV_PREFIX + "RUN_LOG_DIR"
ENV_RUN_SEED = ENV_PREFIX + "RUN_SEED"
# Digests of the supervisor's random generators at the line: a JSON object, see launch.seeding.
ENV_RUN_DRAWS = ENV_PREFIX + "RUN_DRAWS"
# How often the ranks were started before, by a failure or because a node came or went.
ENV_ATTEMPT = ENV_PREFIX + "ATTEMPT"
# Identifier of a run, the same for all its attempts.
ENV_RUN_ID = ENV_PREFIX + "RUN_ID"
# Process id of a rank that multiprocessing has started: what it starts itself inherits the other variables.
ENV_RANK_PID = ENV_PREFIX + "RANK_PID"
# A tool that takes part in the run: its class and what it is made from, as JSON. See context.ToolRequest.
ENV_TOOL = ENV_PREFIX + "TOOL"
# What shard="auto" has become: a JSON list, see context.ShardChoice.
ENV_SHARD_CHOICE = ENV_PREFIX + "SHARD_CHOICE"
# What a worker of a notebook needs to know: a JSON object, see notebook.start.
ENV_NOTEBOOK = ENV_PREFIX + "NOTEBOOK"
# Marks the processes of one check of `unsloth-multigpu doctor`, see tools.probe.
ENV_PROBE = ENV_PREFIX + "PROBE"
# A YAML file of options, which users may set too.
ENV_CONFIG = ENV_PREFIX + "CONFIG"
# The pyproject.toml that counts, "" for none: what a command tells processes that it starts in another folder.
ENV_PYPROJECT = ENV_PREFIX + "PYPROJECT"
_FILES = (ENV_CONFIG, ENV_PYPROJECT)
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
        ENV_SHARD_CHOICE,
        ENV_NOTEBOOK,
        ENV_PROBE,
    }
)


@dataclass(frozen=True)
class MultiGPUConfig(OptionTable):
    """Every option of a run; `docs/options.md` describes them. `MultiGPUConfig.resolve` makes one from arguments,
    environment and defaults.

    Raises:
        ConfigError: An option has a value that cannot be used, alone or beside another.
    """

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
        options = rows(self)
        return {name: value for name, value in self.plain_values().items() if not options[name].is_of_node}

    def asked(self, scope: Scope) -> list[str]:
        """What was asked of `scope`, as name=value, in the order of the table."""
        values = self.plain_values()
        return [
            f"{name}={values[name]!r}"
            for name, row in rows(self).items()
            if scope in row.scopes and row.asks(getattr(self, name))
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
        ConfigError: A variable with our prefix or a name in a file names no option, or has a text that means no value.
    """
    given = {name: value for name, value in arguments.items() if value is not None}
    variables = os.environ if environment is None else environment
    return {**_read_files(variables, searches=environment is None), **_read_environment(variables), **given}


def command_options(command: str, defaults: Mapping[str, Any] | None = None) -> dict[str, CommandOption]:
    """The options of a run that a command has, by their names, in the order of the sections.

    Args:
        command: "run", "verify" or "chaos".
        defaults: Of that command, where they are others than a run's.
    """
    others = defaults or {}
    return {
        name: CommandOption(
            row.kind.value_type,
            row.line(str(others[name]) if name in others else None),
            row.kind.shown(),
            row.kind.words(),
            row.section,
        )
        for section in SECTIONS
        for name, row in rows(MultiGPUConfig).items()
        if command in row.commands and row.section == section
    }


def variable(name: str) -> str:
    """The variable of an option."""
    return ENV_PREFIX + name.upper()


def from_keywords(keywords: Mapping[str, Any]) -> dict[str, Any]:
    """Keywords of `enable_multi_gpu` as options.

    Raises:
        ConfigError: A keyword that is no option.
    """
    options = rows(MultiGPUConfig)
    for keyword, value in keywords.items():
        if keyword in options:
            continue
        if keyword in FORMER:
            hint = f"Use {FORMER[keyword]}."
        else:
            carried = _carried(lambda cls, name: f"strategy=ump.{cls.__name__}({name}=...)")
            meant = did_you_mean(keyword, {**{name: name for name in options}, **carried})
            rest = "`unsloth-multigpu doctor --options` lists all." if meant else f"Options: {', '.join(options)}."
            hint = f"{meant}{rest}"
        raise ConfigError(f"enable_multi_gpu() got {keyword}={brief(value)}, which it does not know.", hint=hint)
    return dict(keywords)


def num_nodes(nnodes: str) -> int:
    """The number of nodes of "2".

    Raises:
        ConfigError: It is no number.
    """
    return int(Nodes().take("nnodes", nnodes))


def file_variables(environment: Mapping[str, str]) -> dict[str, str]:
    """What names the files of options that count here, to processes in another folder as well."""
    file = environment.get(ENV_CONFIG, "").strip()
    named = {ENV_CONFIG: os.path.abspath(file)} if file else {}
    return {ENV_PYPROJECT: _pyproject(environment), **named}


def _pyproject(environment: Mapping[str, str]) -> str:
    return environment[ENV_PYPROJECT] if ENV_PYPROJECT in environment else str(find_pyproject() or "")


def _read_files(environment: Mapping[str, str], *, searches: bool) -> dict[str, Any]:
    options = rows(MultiGPUConfig)
    pyproject = _pyproject(environment) if searches else environment.get(ENV_PYPROJECT, "")
    values = read_pyproject(Path(pyproject), options) if pyproject else {}
    if file := environment.get(ENV_CONFIG, "").strip():
        values |= read_yaml(Path(file), options)
    return values


def _read_environment(environment: Mapping[str, str]) -> dict[str, Any]:
    options = rows(MultiGPUConfig)
    values: dict[str, Any] = {}
    for shown, text in environment.items():
        if not shown.startswith(ENV_PREFIX) or shown in INTERNAL_VARIABLES or shown in _FILES:
            continue
        name = shown[len(ENV_PREFIX) :].lower()
        if name not in options:
            known = ", ".join(sorted(map(variable, options)))
            carried = _carried(lambda cls, name: f"{variable('strategy')}={cls.name}:{name}=...")
            meant = did_you_mean(name, {**{n: variable(n) for n in options}, "config": ENV_CONFIG, **carried})
            hint = f"{meant}Else unset it." if meant else f"Unset it. Variables: {known}."
            raise ConfigError(f"{shown}={brief(text)} names no option.", hint=hint)
        if text.strip() and text.strip().lower() != "none":
            kind = options[name].kind
            values[name] = kind.take(shown, kind.parse(shown, text.strip()))
    return values


def _carried(form: Callable[[type[Strategy], str], str]) -> dict[str, str]:
    """Options that a strategy carries -> how they are given: by the first strategy that has them."""
    return {name: form(cls, name) for cls in reversed(STRATEGIES.values()) for name in rows(cls)}


def _check_together(config: MultiGPUConfig) -> None:
    """Checks that the options fit together: that nobody is asked for what nobody would do."""
    _check_nodes(config)
    _check_planner(config)
    _check_sync(config)
    _check_shard(config)
    if not config.enable_ddp and (given := config.asked(Scope.RANKS)):
        raise ConfigError(
            f"{given[0]} is for several ranks; enable_ddp=False is the legacy path, one process that cuts the script's "
            "batches.",
            hint="Leave one of them out.",
        )


def _check_nodes(config: MultiGPUConfig) -> None:
    count = num_nodes(config.nnodes)
    if count == 1:
        if given := config.asked(Scope.NODES):
            raise ConfigError(f"{given[0]} is for several nodes.", hint="Leave it out, or set nnodes.")
        return
    if config.node_rank is not None and config.node_rank >= count:
        raise ConfigError(
            f"node_rank={config.node_rank}, but nnodes={config.nnodes!r}; expected 0 .. {count - 1}.",
            hint="Count the nodes from 0.",
        )
    for name in ("rdzv_endpoint", "rdzv_id"):
        if getattr(config, name) is None:
            raise ConfigError(
                f"{name}=None, but nnodes={config.nnodes!r}: nodes would not find each other.",
                hint='Set rdzv_endpoint="HOST:29400", the address of one of the nodes, and rdzv_id="any-name" on all.',
            )


def _check_planner(config: MultiGPUConfig) -> None:
    given = config.asked(Scope.PLANNER)
    if given and config.balance == "off":
        raise ConfigError(
            f"{given[0]} is for the planner, and balance='off'.", hint="Set balance='auto', or leave one of them out."
        )
    if given and not config.keeps_global_batch:
        raise ConfigError(
            f"{given[0]} deals the samples of a step, and global_batch='scale' leaves that to Hugging Face.",
            hint="Set global_batch='keep' and leave batch_size_per_gpu out.",
        )
    if given and not config.is_synchronous:
        raise ConfigError(
            f"{given[0]} lets ranks end a step together; with strategy='{config.strategy}' they do not "
            "wait for each other.",
            hint="Leave one of them out.",
        )


def _check_sync(config: MultiGPUConfig) -> None:
    if not isinstance(config.strategy, DDP) and (given := config.asked(Scope.DDP)):
        raise ConfigError(
            f"{given[0]} has no meaning for strategy='{config.strategy}'.", hint="Leave it out, or set strategy='ddp'."
        )
    if config.on_nan == "skip" and not config.strategy.has_one_gradient:
        raise ConfigError(
            f"on_nan='skip' needs one gradient that all ranks see; with strategy='{config.strategy}' each steps on "
            "its own.",
            hint="Set on_nan='raise' or 'off'.",
        )
    if config.on_nan == "skip" and config.grad_compression == "powersgd":
        raise ConfigError(
            "on_nan='skip' cannot work with grad_compression='powersgd', which keeps a step's error for the next.",
            hint="Set grad_compression='bf16', or on_nan='raise'.",
        )


def _check_shard(config: MultiGPUConfig) -> None:
    if config.shard == "off":
        if config.shard_offload:
            raise ConfigError(
                "shard_offload=True moves what a rank holds of a sharded model to the host's memory, and shard='off'.",
                hint="Set shard='on' or shard='auto', or leave shard_offload out.",
            )
        return
    if config.grad_compression is not None:
        raise ConfigError(
            f"grad_compression={config.grad_compression!r} is for DDP, and with shard={config.shard!r} FSDP2 exchanges "
            "the gradients.",
            hint="Leave one of them out.",
        )
