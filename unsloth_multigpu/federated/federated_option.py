"""What the arguments of a federated server and of its `fit` may be: one table."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from unsloth_multigpu.errors import ConfigError

_SERVER_ID, _DEVICE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}"), re.compile(r"(cpu|cuda|xpu)(:\d+)?")
# Keys that Flower and this package set in the clients' config.
_TAKEN = {"server-round", "proximal-mu", "model-layout"}


@dataclass(frozen=True)
class FitOptions:
    """How long and how strictly a server trains; see `FederatedServer.fit`. Raises ConfigError."""

    num_rounds: int = 3
    config: Mapping[str, Any] | None = None
    output_dir: str | None = None
    resume: str | None = None
    min_success: float = 0.0
    round_timeout_s: float = 3600.0

    def __post_init__(self) -> None:
        check_options(**vars(self))
        if self.resume and self.output_dir is None:
            raise ConfigError(
                "resume='auto' looks for rounds in output_dir, which is not set.",
                hint="Set output_dir to the folder of the training that stopped.",
            )


def check_options(**options: Any) -> None:
    """Raises ConfigError with the name and the value of the first option that cannot be used."""
    for name, value in options.items():
        is_right, expected = _OPTIONS[name]
        check(is_right(value), name, value, expected)


def check(is_right: bool, name: str, value: Any, expected: str) -> None:
    """Raises ConfigError unless `is_right`."""
    if not is_right:
        raise ConfigError(f"{name}={value!r}; expected {expected}.", hint=f"Change {name}.")


def _is_whole(value: Any, least: int = 1) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def _is_number(value: Any, least: float, most: float) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and least <= value <= most


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and value != ""


def _is_config(value: Any) -> bool:
    from flwr.app import ConfigRecord

    if not isinstance(value, Mapping) or _TAKEN & value.keys():
        return False
    try:
        ConfigRecord(dict(value))
    except (TypeError, ValueError):
        return False
    return True


_COUNT, _FUNCTION = "a whole number of 1 or more", "a function that is called as "
_OPTIONS: Mapping[str, tuple[Callable[[Any], bool], str]] = {
    "server_id": (
        lambda v: isinstance(v, str) and _SERVER_ID.fullmatch(v) is not None,
        "1 to 100 letters, digits, '.', '_' or '-', a letter or digit first",
    ),
    "device": (
        lambda v: v is None or (isinstance(v, str) and _DEVICE.fullmatch(v) is not None),
        "'cpu', 'cuda', 'cuda:1', 'xpu' and the like, or None",
    ),
    "num_gpus": (lambda v: v is None or _is_whole(v), _COUNT),
    "clients_per_gpu": (_is_whole, _COUNT),
    "max_workers": (lambda v: v is None or _is_whole(v), _COUNT),
    "placement": (lambda v: v in ("round_robin", "balanced"), "'round_robin' or 'balanced'"),
    "lora_aggregation": (lambda v: v in ("mean", "project"), "'mean' or 'project'"),
    "seed": (lambda v: _is_whole(v, 0) and v < 2**31, "a whole number from 0 to 2**31 - 1"),
    "log_dir": (_is_text, "the name of a folder"),
    # A model can be called, too.
    "model_builder": (
        lambda v: callable(v) and not hasattr(v, "parameters"),
        f"{_FUNCTION}model_builder() and makes a model: each process builds its own",
    ),
    "train_fn": (callable, f"{_FUNCTION}train_fn(model, client)"),
    "evaluate_fn": (lambda v: v is None or callable(v), f"{_FUNCTION}evaluate_fn(model, client)"),
    "num_clients": (_is_whole, _COUNT),
    "num_rounds": (_is_whole, _COUNT),
    "config": (
        lambda v: v is None or _is_config(v),
        "a mapping of texts to int, float, bool, str, bytes or lists of one of them, without "
        f"{', '.join(sorted(_TAKEN))}, which are set in every round",
    ),
    "server_evaluate": (lambda v: v is None or callable(v), f"{_FUNCTION}server_evaluate(model, server_round)"),
    "output_dir": (lambda v: v is None or _is_text(v), "the name of a folder, or None"),
    "resume": (lambda v: v in (None, "auto"), "'auto' or None"),
    "min_success": (lambda v: _is_number(v, 0, 1), "a share from 0 to 1"),
    "round_timeout_s": (lambda v: _is_number(v, 1e-3, 1e9), "seconds above 0"),
}
