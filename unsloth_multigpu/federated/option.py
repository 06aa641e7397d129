"""What the arguments of a federated server and of its `fit` may be."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from unsloth_multigpu.errors import ConfigError

PLACEMENTS = ("round_robin", "balanced")
LORA_AGGREGATIONS = ("mean", "project", "exact")
_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
_DEVICE = re.compile(r"(cpu|cuda|xpu)(:\d+)?")
# Keys that Flower and this package set in the clients' config.
_TAKEN = ("server-round", "proximal-mu", "frozen-layout")
_MAX_SECONDS = 1e9


@dataclass(frozen=True)
class FitOptions:
    """How long and how strictly a server trains; see `FederatedServer.fit`."""

    num_rounds: int = 3
    config: Mapping[str, Any] | None = None
    output_dir: str | None = None
    resume: str | None = None
    min_success: float = 0.0
    round_timeout_s: float = 3600.0

    def check(self) -> None:
        """Raises ConfigError with the name and the value of the first argument that cannot be used."""
        check_count("num_rounds", self.num_rounds)
        check_config(self.config)
        check_number("min_success", self.min_success, low=0.0, high=1.0, expected="a share between 0 and 1")
        check_number("round_timeout_s", self.round_timeout_s, low=1e-3, high=_MAX_SECONDS, expected="seconds above 0")
        for name, value in (("output_dir", self.output_dir), ("resume", self.resume)):
            if value is not None and (not isinstance(value, str) or not value):
                raise _wrong(name, value, "the name of a folder, or None")
        if self.resume == "auto" and self.output_dir is None:
            raise ConfigError(
                "resume='auto' looks for rounds in output_dir, which is not set.",
                hint="Set output_dir to the folder of the training that stopped.",
            )


def check_server(
    server_id: Any,
    device: Any,
    num_gpus: Any,
    clients_per_gpu: Any,
    max_workers: Any,
    seed: Any,
    log_dir: Any,
) -> None:
    """Checks what `create_multigpu_flower_server` got, but for its functions and its strategy.

    Raises:
        ConfigError: With the name and the value of the argument.
    """
    if not isinstance(server_id, str) or not _ID.fullmatch(server_id):
        raise _wrong("server_id", server_id, "1 to 100 letters, digits, '.', '_' or '-', a letter or digit first")
    if device is not None and (not isinstance(device, str) or not _DEVICE.fullmatch(device)):
        raise _wrong("device", device, "'cpu', 'cuda', 'cuda:1', 'xpu' and the like, or None")
    if num_gpus is not None:
        check_count("num_gpus", num_gpus)
    if clients_per_gpu != "auto":
        check_count("clients_per_gpu", clients_per_gpu, or_else="'auto'")
    if max_workers is not None:
        check_count("max_workers", max_workers)
    if not isinstance(seed, int) or isinstance(seed, bool) or not 0 <= seed < 2**31:
        raise _wrong("seed", seed, "a whole number from 0 to 2**31 - 1")
    if not isinstance(log_dir, str) or not log_dir:
        raise _wrong("log_dir", log_dir, "the name of a folder")


def check_choice(name: str, value: Any, choices: tuple[str, ...]) -> None:
    """Raises ConfigError unless `value` is one of `choices`."""
    if value not in choices:
        raise _wrong(name, value, "one of " + ", ".join(map(repr, choices)))


def check_count(name: str, value: Any, *, or_else: str = "") -> None:
    """Raises ConfigError unless `value` is a whole number of 1 or more."""
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise _wrong(name, value, "a whole number of 1 or more" + (f", or {or_else}" if or_else else ""))


def check_number(name: str, value: Any, *, low: float, high: float, expected: str) -> None:
    """Raises ConfigError unless `value` is a finite number from `low` to `high`."""
    if not isinstance(value, int | float) or isinstance(value, bool) or not math.isfinite(value):
        raise _wrong(name, value, expected)
    if not low <= value <= high:
        raise _wrong(name, value, expected)


def check_callable(name: str, value: Any, called_with: str) -> None:
    """Raises ConfigError unless `value` can be called."""
    if not callable(value):
        raise _wrong(name, value, f"a function that is called as {name}({called_with})")


def check_config(config: Any) -> None:
    """Checks that `config` holds what can travel to a client.

    Raises:
        ConfigError: It is no mapping of names to finite numbers, texts, bytes or lists of one of them, or takes a key
            of ours.
    """
    if config is None:
        return
    if not isinstance(config, Mapping):
        raise _wrong("config", config, "a mapping of names to numbers and texts")
    for name, value in config.items():
        if not isinstance(name, str) or not _can_travel(value):
            raise ConfigError(
                f"config[{name!r}]={value!r} cannot be sent to a client.",
                hint="Names are texts; values are int, float (finite), bool, str, bytes, or a list of one kind.",
            )
        if name in _TAKEN:
            raise ConfigError(f"config[{name!r}] is set in every round.", hint="Choose another name.")


def _can_travel(value: Any) -> bool:
    scalars = (int, float, bool, str, bytes)
    if isinstance(value, list):
        return all(_can_travel(v) and not isinstance(v, list) and type(v) is type(value[0]) for v in value)
    # NaN is unequal to itself, so that a resumed training would never have the same config.
    return isinstance(value, scalars) and not (isinstance(value, float) and not math.isfinite(value))


def _wrong(name: str, value: Any, expected: str) -> ConfigError:
    return ConfigError(f"{name}={value!r}; expected {expected}.", hint=f"Change {name}.")
