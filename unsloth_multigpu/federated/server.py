"""`create_multigpu_flower_server`, and its options: a Flower server whose clients run in processes on all GPUs."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Literal

from unsloth_multigpu.accelerator import KINDS
from unsloth_multigpu.errors import ConfigError, SetupError, VersionError
from unsloth_multigpu.option_type import Option, take_values
from unsloth_multigpu.versions import SUPPORTED_FOR_FEDERATED, check_version

if TYPE_CHECKING:
    from flwr.serverapp.strategy import Strategy
    from torch import nn

    from unsloth_multigpu.federated.training import FederatedServer

# Keys of the clients' config that Flower's strategies set in every round.
_RESERVED = {"server-round", "proximal-mu"}


def create_multigpu_flower_server(
    server_id: str,
    model_builder: Callable[[], nn.Module],
    device: str | None = None,
    strategy: str | Strategy = "fedavg",
    auto_gpu: bool = True,
    *,
    train_fn: Callable[..., Any],
    evaluate_fn: Callable[..., Any] | None = None,
    num_gpus: int | None = None,
    clients_per_gpu: int = 1,
    max_workers: int | None = None,
    placement: Literal["round_robin", "balanced"] = "round_robin",
    strategy_kwargs: Mapping[str, Any] | None = None,
    lora_aggregation: Literal["mean", "project"] = "mean",
    seed: int = 0,
    log_dir: str = "logs",
) -> FederatedServer:
    """Creates a Flower server for any model. Its clients run in processes on all GPUs, or on the CPU if there is none.

    Starts no process and opens no GPU; `FederatedServer.fit` does.

    Args:
        server_id: Name of the server, shown to clients and in reports.
        model_builder: () -> model with trainable parameters: plain PyTorch, PEFT or Unsloth. Called in each process,
            seeded with `seed`. Only trainable parameters and persistent buffers are exchanged.
        device: Device of `server_evaluate` ["cpu"]; with auto_gpu=False also the only device of the clients [the first
            GPU, else the CPU].
        strategy: Name of a class of `flwr.serverapp.strategy` ("fedavg", "fedprox", "fedadam", "krum", ...), or an
            instance. A name gives every `fit` a new strategy; an instance keeps its state from one `fit` to the next.
        auto_gpu: Use all visible GPUs.
        train_fn: (model, client) -> (num_examples, metrics): trains a client; see `FederatedClient`. Metrics are
            numbers, or lists of numbers, by name.
        evaluate_fn: (model, client) -> (loss, num_examples, metrics); None = clients do not evaluate.
        num_gpus: Number of visible GPUs to use [all]; without a GPU, number of processes on the CPU [1].
        clients_per_gpu: Number of clients that run on one device at the same time.
        max_workers: Upper limit of the number of processes.
        placement: "round_robin" = on device number client_id % number of devices; "balanced" = the client that took
            longest in its last run first, in any free process.
        strategy_kwargs: Arguments of the class that `strategy` names.
        lora_aggregation: "mean" = A and B as the strategy does; "project" = the adapter of the same rank that is
            nearest to mean(B A).
        seed: Seed of models, of clients, and of the selection of clients.
        log_dir: Folder for the clients' output: slot_K.log of process K.

    Raises:
        ConfigError: An argument is invalid.
        SetupError: Flower is not installed, or this process is a rank or has `enable_multi_gpu` in effect.
        VersionError: Flower is outside the supported range.
    """
    slots = (device, auto_gpu, num_gpus, clients_per_gpu, max_workers, placement)
    options = ServerOptions(server_id, model_builder, train_fn, evaluate_fn, *slots, lora_aggregation, seed, log_dir)
    _check_libraries()
    from unsloth_multigpu.federated.training import FederatedServer, refuse_ranks

    refuse_ranks()
    return FederatedServer(options, strategy, strategy_kwargs)


def _check_libraries() -> None:
    hint = 'pip install "flwr>=1.41,<2" cloudpickle'
    for name, supported in SUPPORTED_FOR_FEDERATED.items():
        row = check_version(name + supported)
        if row.installed is None:
            python = "" if sys.version_info >= (3, 11) else " Flower needs Python 3.11 or newer."
            raise SetupError(f"Federated training needs {name}, which is not installed.{python}", hint=hint)
        if not row.ok or row.is_newer:  # Newer versions, too: this package uses internals of Flower.
            raise VersionError(f"{name} {row.installed} is installed; expected {row.supported}.", hint=hint)


def check(is_right: bool, name: str, value: Any, expected: str) -> None:
    """Raises ConfigError, with the `expected` values, unless `is_right`."""
    if not is_right:
        raise ConfigError(f"{name}={value!r}; expected {expected}.", hint=f"Change {name}.")


def called_as(example: str) -> Callable[[str, Any], Any]:
    """Returns an `Option.check` for an argument that must be a function. `example` shows a call of it."""

    def take(name: str, value: Any) -> Any:
        # A model is callable, too, but it is not a function.
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
    expected = "a mapping of str to int, float, bool, str, bytes or lists of one of them, without "
    check(is_right, name, value, f"{expected}{', '.join(sorted(_RESERVED))}, which are set in every round")
    return value


def _take_fraction(name: str, value: Any) -> Any:
    check(isinstance(value, int | float) and 0 <= value <= 1, name, value, "a fraction from 0 to 1")
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
        str | None, Option(pattern=rf"(cpu|{'|'.join(KINDS)})(:\d+)?", shown="'cpu', 'cuda', 'cuda:1' and the like")
    ] = None
    auto_gpu: Annotated[bool, Option()] = True
    num_gpus: Annotated[int | None, Option(least=1, otherwise="all")] = None
    clients_per_gpu: Annotated[int, Option(least=1)] = 1
    max_workers: Annotated[int | None, Option(least=1)] = None
    placement: Annotated[str, Option(choices=("round_robin", "balanced"))] = "round_robin"
    lora_aggregation: Annotated[str, Option(choices=("mean", "project"))] = "mean"
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
    resume: Annotated[str | None, Option(choices=("auto",))] = None
    min_success: Annotated[float, Option(check=_take_fraction)] = 0.0
    round_timeout_s: Annotated[float, Option(least=1e-3)] = 3600.0
    server_evaluate: Annotated[Any, Option(check=called_as("server_evaluate(model, server_round)"))] = None

    def __post_init__(self) -> None:
        take_values(self)
        if self.resume and self.output_dir is None:
            raise ConfigError(
                "resume='auto' looks for rounds in output_dir, which is not set.",
                hint="Set output_dir to the folder of the stopped training.",
            )
