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
_SCALARS = (int, float, bool, str, bytes)
_TAKEN = ("server-round", "proximal-mu", "frozen-layout")


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
        check_share("min_success", self.min_success)
        is_limit = _is_number(self.round_timeout_s) and 1e-3 <= self.round_timeout_s <= 1e9
        check(is_limit, "round_timeout_s", self.round_timeout_s, "seconds above 0")
        output_dir, resume = self.output_dir, self.resume
        check(output_dir is None or _is_text(output_dir), "output_dir", output_dir, "the name of a folder, or None")
        check(resume in (None, "auto"), "resume", resume, "'auto' or None")
        if resume and output_dir is None:
            raise ConfigError(
                "resume='auto' looks for rounds in output_dir, which is not set.",
                hint="Set output_dir to the folder of the training that stopped.",
            )


def check_server(
    server_id: Any, device: Any, num_gpus: Any, clients_per_gpu: Any, max_workers: Any, seed: Any, log_dir: Any
) -> None:
    """Checks what `create_multigpu_flower_server` got, but for its functions and its strategy.

    Raises:
        ConfigError: With the name and the value of the argument.
    """
    is_id = isinstance(server_id, str) and _ID.fullmatch(server_id) is not None
    check(is_id, "server_id", server_id, "1 to 100 letters, digits, '.', '_' or '-', a letter or digit first")
    is_device = device is None or (isinstance(device, str) and _DEVICE.fullmatch(device) is not None)
    check(is_device, "device", device, "'cpu', 'cuda', 'cuda:1', 'xpu' and the like, or None")
    for name, value in (("num_gpus", num_gpus), ("max_workers", max_workers)):
        if value is not None:
            check_count(name, value)
    check_count("clients_per_gpu", clients_per_gpu)
    check(_is_whole(seed) and 0 <= seed < 2**31, "seed", seed, "a whole number from 0 to 2**31 - 1")
    check(_is_text(log_dir), "log_dir", log_dir, "the name of a folder")


def check(is_right: bool, name: str, value: Any, expected: str) -> None:
    """Raises ConfigError unless `is_right`."""
    if not is_right:
        raise ConfigError(f"{name}={value!r}; expected {expected}.", hint=f"Change {name}.")


def check_choice(name: str, value: Any, choices: tuple[str, ...]) -> None:
    """Raises ConfigError unless `value` is one of `choices`."""
    check(value in choices, name, value, "one of " + ", ".join(map(repr, choices)))


def check_count(name: str, value: Any) -> None:
    """Raises ConfigError unless `value` is a whole number of 1 or more."""
    check(_is_whole(value) and value >= 1, name, value, "a whole number of 1 or more")


def check_share(name: str, value: Any) -> None:
    """Raises ConfigError unless `value` is a number from 0 to 1."""
    check(_is_number(value) and 0 <= value <= 1, name, value, "a share from 0 to 1")


def check_callable(name: str, value: Any, called_with: str) -> None:
    """Raises ConfigError unless `value` can be called."""
    check(callable(value), name, value, f"a function that is called as {name}({called_with})")


def check_config(config: Any) -> None:
    """Checks that `config` holds what can travel to a client.

    Raises:
        ConfigError: It is no mapping of names to numbers, texts, bytes or lists of one of them, or takes a key of ours.
    """
    check(config is None or isinstance(config, Mapping), "config", config, "a mapping of names to numbers and texts")
    for name, value in (config or {}).items():
        values = value if isinstance(value, list) else [value]
        is_one_kind = len({type(item) for item in values}) <= 1
        if not isinstance(name, str) or not is_one_kind or not all(isinstance(item, _SCALARS) for item in values):
            raise ConfigError(
                f"config[{name!r}]={value!r} cannot be sent to a client.",
                hint="Names are texts; values are int, float, bool, str, bytes, or a list of one kind.",
            )
        if name in _TAKEN:
            raise ConfigError(f"config[{name!r}] is set in every round.", hint="Choose another name.")


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and value != ""
