"""Checks the arguments of a federated server and of its `fit`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any

from unsloth_multigpu.errors import ConfigError
from unsloth_multigpu.option_type import Option, take_values

# Keys that Flower and this package set in the clients' config.
_RESERVED = {"server-round", "proximal-mu"}


def check(is_right: bool, name: str, value: Any, expected: str) -> None:
    """Raises ConfigError unless `is_right`."""
    if not is_right:
        raise ConfigError(f"{name}={value!r}; expected {expected}.", hint=f"Change {name}.")


def called_as(example: str) -> Callable[[str, Any], Any]:
    """Returns a check for an argument that must be a function, which is called as in `example`."""

    def take(name: str, value: Any) -> Any:
        # A model is callable, too, but not allowed.
        is_function = callable(value) and not hasattr(value, "parameters")
        check(is_function, name, value, f"a function that is called as {example}")
        return value

    return take


def _take_config(name: str, value: Any) -> Any:
    from flwr.app import ConfigRecord

    is_right = isinstance(value, Mapping) and not _RESERVED & value.keys()
    try:
        ConfigRecord(dict(value) if is_right else {})
    except (TypeError, ValueError):
        is_right = False
    expected = "a mapping of texts to int, float, bool, str, bytes or lists of one of them, without "
    check(is_right, name, value, f"{expected}{', '.join(sorted(_RESERVED))}, which are set in every round")
    return value


def _take_share(name: str, value: Any) -> Any:
    check(isinstance(value, int | float) and 0 <= value <= 1, name, value, "a share from 0 to 1")
    return value


@dataclass(frozen=True)
class ServerOptions:
    """Arguments of `create_multigpu_flower_server`. Raises ConfigError if one is invalid."""

    server_id: Annotated[
        str,
        Option(
            pattern=r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}",
            shown="1 to 100 letters, digits, '.', '_' or '-', a letter or digit first",
            hint="Change server_id.",
        ),
    ]
    model_builder: Annotated[
        Any, Option(check=called_as("model_builder() and makes a model: each process builds its own"))
    ]
    train_fn: Annotated[Any, Option(check=called_as("train_fn(model, client)"))]
    evaluate_fn: Annotated[Any, Option(check=called_as("evaluate_fn(model, client)"))] = None
    device: Annotated[
        str | None, Option(pattern=r"(cpu|cuda|xpu)(:\d+)?", shown="'cpu', 'cuda', 'cuda:1', 'xpu' and the like")
    ] = None
    auto_gpu: Annotated[bool, Option()] = True
    num_gpus: Annotated[int | None, Option(least=1, otherwise="all")] = None
    clients_per_gpu: Annotated[int, Option(least=1)] = 1
    max_workers: Annotated[int | None, Option(least=1)] = None
    placement: Annotated[str, Option(words=("round_robin", "balanced"))] = "round_robin"
    lora_aggregation: Annotated[str, Option(words=("mean", "project"))] = "mean"
    seed: Annotated[int, Option(below=2**31)] = 0
    log_dir: Annotated[str, Option(shown="the name of a folder")] = "logs"

    def __post_init__(self) -> None:
        take_values(self)


@dataclass(frozen=True)
class FitOptions:
    """Arguments of `FederatedServer.fit`. Raises ConfigError if one is invalid."""

    num_clients: Annotated[int, Option(least=1, hint="Change num_clients.")]
    num_rounds: Annotated[int, Option(least=1)] = 3
    config: Annotated[Mapping[str, Any] | None, Option(check=_take_config)] = None
    output_dir: Annotated[str | None, Option(shown="the name of a folder")] = None
    resume: Annotated[str | None, Option(words=("auto",))] = None
    min_success: Annotated[float, Option(check=_take_share)] = 0.0
    round_timeout_s: Annotated[float, Option(least=1e-3)] = 3600.0
    server_evaluate: Annotated[Any, Option(check=called_as("server_evaluate(model, server_round)"))] = None

    def __post_init__(self) -> None:
        take_values(self)
        if self.resume and self.output_dir is None:
            raise ConfigError(
                "resume='auto' looks for rounds in output_dir, which is not set.",
                hint="Set output_dir to the folder of the stopped training.",
            )
