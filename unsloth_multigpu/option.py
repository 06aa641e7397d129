"""What the options of a run may be, alone and together."""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from unsloth_multigpu.errors import ConfigError

if TYPE_CHECKING:
    from unsloth_multigpu.config import MultiGPUConfig

_CHOICES: dict[str, tuple[str, ...]] = {
    "global_batch": ("keep", "scale"),
    "sync": ("ddp", "allreduce", "parameter_server", "local_sgd", "diloco"),
    "balance": ("auto", "off", "tokens"),
    "device": ("auto", "cpu", "cuda", "xpu"),
    "grad_compression": ("bf16", "fp16", "powersgd"),
    "resume": ("off", "auto"),
    "on_nan": ("raise", "skip", "off"),
    "inexact": ("warn", "raise"),
    "ddp_backend": ("nccl", "gloo", "xccl"),
    "gradient_aggregation": ("mean", "sum", "weighted"),
}
# Options that only some values of `sync` know.
_OPTIONS_OF_SYNC: dict[str, tuple[str, ...]] = {
    "grad_compression": ("ddp",),
    "find_unused_parameters": ("ddp",),
    "sync_bucket_mb": ("allreduce", "parameter_server"),
    "max_staleness_steps": ("parameter_server",),
    "sync_every_steps": ("local_sgd", "diloco"),
    "outer_learning_rate": ("diloco",),
    "outer_momentum": ("diloco",),
}
_PLANNER_OPTIONS = (
    "max_tokens_per_micro_batch",
    "micro_batch_overhead_tokens",
    "micro_batch_floor_tokens",
    "rank_speeds",
)
# What `enable_ddp=False` does not do, with the defaults.
_NOT_SERIAL: dict[str, Any] = {
    "sync": "ddp",
    "global_batch": "keep",
    "batch_size_per_gpu": None,
    "grad_compression": None,
    "find_unused_parameters": None,
    "max_restarts": 0,
    "resume": "off",
    "nnodes": "1",
}
_WHICH_GPUS = "Leave it out for all GPUs, or give their number; CUDA_VISIBLE_DEVICES chooses which."
_MAY_BE_NONE = ("grad_compression", "ddp_backend", "gradient_aggregation")
_MIN_HANG_TIMEOUT_S = 2.0
# 31 years; torch counts in nanoseconds of 64 bits.
_MAX_SECONDS = 1e9


def check_options(config: MultiGPUConfig) -> None:
    """Checks each option, and that they fit together.

    Raises:
        ConfigError: With the name and the value of the option.
    """
    for name, choices in _CHOICES.items():
        if getattr(config, name) is not None or name not in _MAY_BE_NONE:
            _check_choice(name, getattr(config, name), choices)
    _check_count("num_gpus", config.num_gpus, minimum=1, none_means="all visible accelerators")
    _check_count("batch_size_per_gpu", config.batch_size_per_gpu, minimum=1, none_means="the script's value")
    _check_count("max_restarts", config.max_restarts, minimum=0)
    _check_count("verify_every", config.verify_every, minimum=0)
    _check_planner_options(config)
    for name in ("enable_ddp", "seed_per_rank", "memory_optimization", "debug"):
        _check_boolean(name, getattr(config, name))
    for name in ("find_unused_parameters", "gradient_checkpointing"):
        if getattr(config, name) is not None:
            _check_boolean(name, getattr(config, name))
    _check_seconds("timeout_s", config.timeout_s, example=1800.0)
    _check_seconds("grace_s", config.grace_s, example=30.0)
    _check_number("hang_timeout_s", config.hang_timeout_s, expected="seconds of at least 0")
    if 0 < config.hang_timeout_s < _MIN_HANG_TIMEOUT_S:
        raise ConfigError(
            f"hang_timeout_s={config.hang_timeout_s!r}; ranks beat every 0.5 seconds, so expected at least "
            f"{_MIN_HANG_TIMEOUT_S:g}, or 0 for never.",
            hint="Set hang_timeout_s=120.0.",
        )
    _check_nodes(config)
    if not isinstance(config.log_dir, str) or not config.log_dir:
        raise ConfigError(f"log_dir={config.log_dir!r}; expected a folder name.", hint='Set log_dir="logs".')
    _check_sync_options(config)
    _check_serial_options(config)
    if config.ddp_backend == "nccl" and config.device == "cpu":
        raise ConfigError(
            'ddp_backend="nccl" cannot run with device="cpu".', hint='Use ddp_backend="gloo" or leave it out.'
        )


def num_nodes(nnodes: str) -> tuple[int, int]:
    """Fewest and most nodes of "2" or "1:4".

    Raises:
        ConfigError: It is neither.
    """
    parts = nnodes.split(":") if isinstance(nnodes, str) else []
    numbers = [int(p) for p in parts if p.isascii() and p.isdigit()]
    if len(numbers) != len(parts) or len(parts) not in (1, 2) or not 1 <= numbers[0] <= numbers[-1]:
        raise ConfigError(
            f'nnodes={nnodes!r}; expected a number, or "MIN:MAX".', hint='Set nnodes="2" or nnodes="1:4".'
        )
    return numbers[0], numbers[-1]


def _check_nodes(config: MultiGPUConfig) -> None:
    several = num_nodes(config.nnodes) != (1, 1)
    for name in ("rdzv_endpoint", "rdzv_id"):
        value = getattr(config, name)
        if several and not (isinstance(value, str) and value):
            raise ConfigError(
                f"{name}={value!r}, but nnodes={config.nnodes!r}: nodes would not find each other.",
                hint='Set rdzv_endpoint="HOST:29400", the address of one of the nodes, and rdzv_id="any-name" on all.',
            )
        if not several and value is not None:
            raise ConfigError(f"{name}={value!r} is for several nodes.", hint="Leave it out, or set nnodes.")
    if several and not config.rdzv_endpoint.rpartition(":")[2].isdigit():  # type: ignore[union-attr]
        raise ConfigError(
            f"rdzv_endpoint={config.rdzv_endpoint!r}; expected HOST:PORT.", hint='Set rdzv_endpoint="10.0.0.1:29400".'
        )


def companions(name: str) -> dict[str, Any]:
    """Values of other options beside which `name` has a meaning: it can be checked before those are known."""
    if name == "gradient_aggregation":
        return {"enable_ddp": False}
    if name in ("nnodes", "rdzv_endpoint", "rdzv_id"):
        return {"nnodes": "1:2", "rdzv_endpoint": "host:1", "rdzv_id": "run"}
    return {"sync": _OPTIONS_OF_SYNC[name][0]} if name in _OPTIONS_OF_SYNC else {}


def _check_planner_options(config: MultiGPUConfig) -> None:
    most = "what equal numbers of rows could reach"
    _check_count("max_tokens_per_micro_batch", config.max_tokens_per_micro_batch, minimum=1, none_means=most)
    for name in ("micro_batch_overhead_tokens", "micro_batch_floor_tokens"):
        if getattr(config, name) is not None:
            _check_number(name, getattr(config, name), expected="tokens of at least 0")
    speeds = config.rank_speeds
    if speeds is not None and not (
        isinstance(speeds, tuple) and speeds and all(_is_number(s) and 0 < s < math.inf for s in speeds)
    ):
        raise ConfigError(
            f"rank_speeds={speeds!r}; expected a tuple with a number above 0 for each rank.",
            hint="Set rank_speeds=(1.0, 0.5), say, or leave it out.",
        )

    given = _asked_of_planner(config)
    if given and config.balance == "off":
        raise ConfigError(
            f"{given[0]} is for the planner, and balance='off'.", hint="Set balance='auto', or leave one of them out."
        )
    if config.balance == "tokens":
        given.append("balance='tokens'")
    if given and not config.keeps_global_batch:
        raise ConfigError(
            f"{given[0]} deals the samples of a step, and global_batch='scale' leaves that to Hugging Face.",
            hint="Set global_batch='keep' and leave batch_size_per_gpu out.",
        )
    if given and not config.meets_every_step:
        raise ConfigError(
            f"{given[0]} lets ranks end a step together; with sync={config.sync!r} they do not wait for each other.",
            hint="Leave one of them out.",
        )


def _asked_of_planner(config: MultiGPUConfig) -> list[str]:
    return [f"{n}={getattr(config, n)!r}" for n in _PLANNER_OPTIONS if getattr(config, n) is not None]


def _check_sync_options(config: MultiGPUConfig) -> None:
    for name, strategies in _OPTIONS_OF_SYNC.items():
        value = getattr(config, name)
        if value is not None and config.sync not in strategies:
            raise ConfigError(
                f"{name}={value!r} has no meaning for sync={config.sync!r}.",
                hint=f"Leave it out, or set sync={strategies[0]!r}.",
            )
    if config.sync_bucket_mb is not None and config.max_staleness_steps is not None:
        raise ConfigError(
            f"sync_bucket_mb={config.sync_bucket_mb!r} has no meaning with max_staleness_steps, whose ranks send one "
            "message.",
            hint="Leave one of them out.",
        )
    for name in ("sync_bucket_mb", "outer_learning_rate", "outer_momentum"):
        if getattr(config, name) is not None:
            _check_number(name, getattr(config, name), expected="a number of at least 0")
    if config.outer_momentum is not None and config.outer_momentum >= 1:
        raise ConfigError(
            f"outer_momentum={config.outer_momentum!r} grows without a limit; expected a number below 1.",
            hint="Leave outer_momentum out.",
        )
    if config.on_nan == "skip" and config.sync not in ("ddp", "allreduce"):
        raise ConfigError(
            f"on_nan='skip' needs one gradient that all ranks see; with sync={config.sync!r} each steps on its own.",
            hint="Set on_nan='raise' or 'off'.",
        )
    if config.on_nan == "skip" and config.grad_compression == "powersgd":
        raise ConfigError(
            "on_nan='skip' cannot work with grad_compression='powersgd', which keeps a step's error for the next.",
            hint="Set grad_compression='bf16', or on_nan='raise'.",
        )
    _check_count("max_staleness_steps", config.max_staleness_steps, minimum=0, none_means="ranks that step together")
    _check_count("sync_every_steps", config.sync_every_steps, minimum=1, none_means="16")


def _check_serial_options(config: MultiGPUConfig) -> None:
    aggregation = config.gradient_aggregation
    if config.enable_ddp:
        # "mean" is what DDP does, and what scripts for the older plugin ask for.
        if aggregation not in (None, "mean"):
            raise ConfigError(
                f"gradient_aggregation={aggregation!r} is for enable_ddp=False; DDP averages the gradients of ranks.",
                hint="Leave gradient_aggregation out.",
            )
        return
    given = _asked_of_planner(config)
    given += [f"{n}={getattr(config, n)!r}" for n, default in _NOT_SERIAL.items() if getattr(config, n) != default]
    if config.balance == "tokens":
        given.append("balance='tokens'")
    if config.on_nan == "skip":
        given.append("on_nan='skip'")
    if given:
        raise ConfigError(
            f"{given[0]} is for several ranks; enable_ddp=False is the legacy path, one process that cuts the script's "
            "batches.",
            hint="Leave one of them out.",
        )


def _check_count(name: str, value: object, *, minimum: int, none_means: str | None = None) -> None:
    """A whole number of at least `minimum`; None where that means something."""
    if value is None and none_means is not None:
        return
    # bool is an int in Python; num_gpus=True is a mistake and not one GPU.
    if not isinstance(value, int) or isinstance(value, bool) or value < minimum:
        otherwise = f", or None for {none_means}" if none_means else ""
        raise ConfigError(
            f"{name}={value!r}; expected a whole number of at least {minimum}{otherwise}.",
            hint=_WHICH_GPUS if name == "num_gpus" else f"Set {name}={max(minimum, 1)}.",
        )


def did_you_mean(name: str, known: Iterable[str], prefix: str = "") -> str:
    """The beginning of a hint about an unknown name; "" where none that is known, without the prefix, is like it."""
    found = difflib.get_close_matches(name, list(known), n=1)
    return f"Did you mean {prefix}{found[0]}? " if found else ""


def _check_boolean(name: str, value: object) -> None:
    """True or False."""
    if not isinstance(value, bool):
        raise ConfigError(f"{name}={value!r}; expected True or False.", hint=f"Set {name}=True or {name}=False.")


def _check_seconds(name: str, value: object, *, example: float) -> None:
    """A time above 0."""
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not 0 < value <= _MAX_SECONDS:
        raise ConfigError(
            f"{name}={value!r}; expected seconds above 0, at most {_MAX_SECONDS:g}.", hint=f"Set {name}={example}."
        )


def _is_number(value: object) -> bool:
    """True for an int or a float. bool is an int in Python, and no number here."""
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _check_number(name: str, value: object, *, expected: str) -> None:
    """A finite number of at least 0."""
    if not _is_number(value) or not 0 <= value < math.inf:  # type: ignore[operator]
        raise ConfigError(f"{name}={value!r}; expected {expected}.", hint=f"Leave {name} out.")


def _check_choice(name: str, value: object, choices: tuple[str, ...]) -> None:
    """One of some words."""
    if value not in choices:
        expected = " or ".join(repr(c) for c in choices)
        hint = "Set resume='auto' to go on, resume='off' not to." if name == "resume" else f"Set {name}={choices[0]!r}."
        raise ConfigError(f"{name}={value!r}; expected {expected}.", hint=hint)
