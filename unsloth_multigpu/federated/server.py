"""What users call: a Flower server that trains many clients on all GPUs, in a process for each."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping
from contextlib import closing
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal

from unsloth_multigpu.errors import SetupError, VersionError
from unsloth_multigpu.federated.federated_option import FitOptions, ServerOptions, called_as
from unsloth_multigpu.federated.round_report import FederatedResult
from unsloth_multigpu.logs import Console
from unsloth_multigpu.option_type import Option
from unsloth_multigpu.versions import SUPPORTED_FOR_FEDERATED, check_version
from unsloth_multigpu.wire.identity import read_identity

if TYPE_CHECKING:
    import torch
    from flwr.serverapp.strategy import Strategy
    from torch import nn

    from unsloth_multigpu.federated.grid import ProcessGrid
    from unsloth_multigpu.federated.training import ServerPlan, Training


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
    """A Flower server over any model, and processes on all GPUs that run the clients.

    Starts nothing and opens no GPU: that is done by `fit`. Without a GPU clients run in processes on the CPU.

    Args:
        server_id: Name of the server; clients see it, logs and reports show it.
        model_builder: () -> model with trainable parameters: plain PyTorch, PEFT or Unsloth. Called once in each
            process, with `seed` set. Only what is trainable travels, and persistent buffers.
        device: Where `server_evaluate` runs ["cpu"]; with auto_gpu=False also the one device of the clients.
        strategy: Name of a class of `flwr.serverapp.strategy` ("fedavg", "fedprox", "fedadam", "krum", ...), or an
            object of one. A name gives a fresh strategy to every `fit`; an object keeps its state.
        auto_gpu: Use all visible GPUs.
        train_fn: (model, client) -> (num_examples, metrics), a client's training; see `FederatedClient`.
        evaluate_fn: (model, client) -> (loss, num_examples, metrics); None = clients do not evaluate.
        num_gpus: How many of the visible GPUs [all]; without a GPU how many processes on the CPU [1].
        clients_per_gpu: Clients at a time on one device.
        max_workers: Upper limit of all processes together.
        placement: "round_robin" = client_id % number of devices; "balanced" = the longest client first, by measured
            seconds, to whichever device is free.
        strategy_kwargs: Arguments of the strategy's class, for a name.
        lora_aggregation: "mean" = A and B as the strategy does; "project" = the adapter of the same rank that is
            nearest to mean(B A).
        seed: Of models, clients and their choice.
        log_dir: Where the processes write what clients print, in slot_K.log.

    Raises:
        ConfigError: An argument cannot be used.
        SetupError: Flower is not installed, or this process is a rank or has `enable_multi_gpu` in effect.
        VersionError: Flower is outside the supported range.
    """
    options = ServerOptions(
        server_id,
        model_builder,
        train_fn,
        evaluate_fn,
        device,
        auto_gpu,
        num_gpus,
        clients_per_gpu,
        max_workers,
        placement,
        lora_aggregation,
        seed,
        log_dir,
    )
    _check_libraries()
    _refuse_ranks()
    from unsloth_multigpu.federated.training import ServerPlan

    return FederatedServer(ServerPlan(options, strategy, strategy_kwargs))


class FederatedServer:
    """A server with its clients' processes, which live from the first `fit` to `close`.

    A context manager. Without `close` the processes end with this one.

    Attributes:
        client_app: Flower's ClientApp, which SuperNodes run as well, under a ServerApp of the user's.
    """

    def __init__(self, plan: ServerPlan) -> None:
        self.client_app = plan.client_app
        self._plan = plan
        self._grid: ProcessGrid | None = None
        self._training: Training | None = None

    def fit(
        self,
        num_clients: int,
        num_rounds: int = 3,
        *,
        config: Mapping[str, Any] | None = None,
        server_evaluate: Callable[[nn.Module, int], Mapping[str, Any]] | None = None,
        output_dir: str | os.PathLike[str] | None = None,
        resume: Literal["auto"] | None = None,
        min_success: float = 0.0,
        round_timeout_s: float = 3600.0,
    ) -> FederatedResult:
        """Trains from the first weights, or on from a saved round.

        The result depends on the seed and the clients alone: not on the number of processes, not on where and in which
        order clients run.

        Args:
            num_clients: Clients 0 to num_clients - 1.
            num_rounds: Rounds in all, with those before a resume.
            config: Numbers and texts that every client gets as `client.config`.
            server_evaluate: (model, server_round) -> metrics, in this process, before the first and after each round.
            output_dir: Saves each round there, keeps the last two, and writes rounds.jsonl.
            resume: "auto" = from the newest whole round of `output_dir`, or from the beginning.
            min_success: Least share of a round's clients that must succeed; one of them must in any case.
            round_timeout_s: Limit of a round's training, and of its evaluation; who is not ready is left out.

        Raises:
            ConfigError: An argument cannot be used, or does not fit the model or the strategy.
            SetupError: The devices are not there, or a function cannot be sent to another process.
            ResumeError: The saved round is broken or belongs to another training.
            FederatedError: Too many clients failed, or what they sent cannot be put together.
        """
        Option(least=1, type=int, hint="Change num_clients.").take("num_clients", num_clients)
        if server_evaluate is not None:
            called_as("server_evaluate(model, server_round)")("server_evaluate", server_evaluate)
        folder: Any = output_dir  # A path becomes a text.
        options = FitOptions(num_rounds, config, folder, resume, min_success, round_timeout_s)
        _refuse_ranks()
        from unsloth_multigpu.federated.grid import task_identity
        from unsloth_multigpu.federated.training import Training

        start = None if self._training is None else self._training.start
        self._training = None
        with closing(Console(is_notebook="ipykernel" in sys.modules)), task_identity():
            if self._grid is None:
                self._grid = self._make_grid(num_clients)
            self._grid.num_clients = num_clients
            training = Training(
                self._plan, self._grid, num_clients, options, server_evaluate=server_evaluate, start=start
            )
            result = training.run()
        self._training = training
        return result

    def _make_grid(self, num_clients: int) -> ProcessGrid:
        from unsloth_multigpu.federated.client_device import choose_devices
        from unsloth_multigpu.federated.grid import ProcessGrid

        given = self._plan.options
        devices = choose_devices(given.num_gpus, given.device, auto_gpu=given.auto_gpu)
        # One on each device, then a second on each: max_workers cuts off the last ones.
        places = (devices * given.clients_per_gpu)[: given.max_workers]
        return ProcessGrid(
            self.client_app, num_clients, places, placement=given.placement, seed=given.seed, log_dir=given.log_dir
        )

    def state_dict(self) -> dict[str, torch.Tensor]:
        """The global trainable tensors and persistent buffers after `fit`, on the CPU; raises SetupError before it."""
        from unsloth_multigpu.federated.training import tensors_of

        return tensors_of(self._last().arrays)

    def save(self, folder: str | os.PathLike[str]) -> None:
        """Writes the result of `fit`: a PEFT adapter, or model.safetensors of what is trained in a plain model.

        Raises:
            SetupError: Nothing was trained yet.
            OSError: The disk is full or fails.
        """
        from unsloth_multigpu.federated.training import save_model

        save_model(self._last(), Path(folder))

    def close(self) -> None:
        """Ends the clients' processes. What was trained stays; another `fit` starts them again."""
        if self._grid is not None:
            self._grid.close()
            self._grid = None

    def __enter__(self) -> FederatedServer:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def _last(self) -> Training:
        if self._training is None:
            raise SetupError("No training of this server has ended yet.", hint="Call fit() first.")
        return self._training


def _check_libraries() -> None:
    hint = 'pip install "flwr>=1.41,<2" cloudpickle'
    for name, supported in SUPPORTED_FOR_FEDERATED.items():
        row = check_version(name + supported)
        if row.installed is None:
            python = "" if sys.version_info >= (3, 11) else " Flower needs Python 3.11 or newer."
            raise SetupError(f"Federated training needs {name}, which is not installed.{python}", hint=hint)
        if not row.ok or row.is_newer:  # Its engine is steered by more than functions that can be verified.
            raise VersionError(f"{name} {row.installed} is installed; expected {row.supported}.", hint=hint)


def _refuse_ranks() -> None:
    """A server is one process: as a rank it would exist several times, and its slots would fight for the devices."""
    from unsloth_multigpu.plugin import is_multi_gpu_enabled

    identity = read_identity(os.environ)
    if identity is not None and identity.world_size > 1:
        raise SetupError(
            f"This process is rank {identity.rank} of {identity.world_size}, started by {identity.launcher}.",
            hint="Start the script with plain python, without enable_multi_gpu(): the server starts the processes.",
        )
    if is_multi_gpu_enabled():
        raise SetupError(
            "enable_multi_gpu() is in effect, which trains one model on all GPUs.",
            hint="Leave it out, or call disable_multi_gpu() first.",
        )
