"""A federated server, and its loop of rounds, in which Flower's strategy selects clients and aggregates replies."""

from __future__ import annotations

import functools
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict

# Strategies raise it if replies do not fit together. Flower exports it only here.
from flwr.app.exception import AppExitException
from flwr.serverapp.strategy import Result, Strategy
from torch import nn

from unsloth_multigpu import plugin
from unsloth_multigpu.errors import ConfigError, FederatedError, SetupError
from unsloth_multigpu.federated import flower_strategy, rounds
from unsloth_multigpu.federated.adapters import adapter_settings, save_adapter
from unsloth_multigpu.federated.aggregation import aggregate_lora, to_tensor, weighted_mean
from unsloth_multigpu.federated.client import ClientModel, client_seed, make_client_app, to_metrics
from unsloth_multigpu.federated.grid import ProcessGrid, choose_devices, task_identity
from unsloth_multigpu.federated.server import FitOptions, ServerOptions
from unsloth_multigpu.group.random_state import seeded_draws
from unsloth_multigpu.logs import Console, get_logger
from unsloth_multigpu.wire.identity import read_identity

_log = get_logger(__name__)
# For building the first models: loading a base model may take longer than a round of small clients.
_MIN_BUILD_TIMEOUT_S = 300.0


class FederatedServer(AbstractContextManager["FederatedServer"]):
    """A server with its clients' processes, which live from the first `fit` to `close`.

    A context manager. Without `close` they end when this process ends. Created by `create_multigpu_flower_server`.

    Attributes:
        new_strategy: () -> a new strategy if it was given by name, else the user's instance with its state.
        description: Settings of the strategy at the beginning, by name; a training may change them.
        client_app: Flower's ClientApp of the clients. SuperNodes can run it, too, under a ServerApp of the user.
    """

    def __init__(
        self,
        options: ServerOptions,
        strategy: str | Strategy = "fedavg",
        strategy_kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        self.options = options
        self.new_strategy = functools.partial(flower_strategy.checked_strategy, strategy, strategy_kwargs)
        first = self.new_strategy()
        if options.lora_aggregation != "mean" and not flower_strategy.is_weighted_mean(first):
            fact = f"{type(first).__name__} does not compute the example-weighted mean, as FedAvg does"
            raise _no_projection(fact)
        functions = (options.model_builder, options.train_fn, options.evaluate_fn)
        self.client_app = make_client_app(*functions, server_id=options.server_id, seed=options.seed)
        self.description = flower_strategy.describe(first)
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
    ) -> rounds.FederatedResult:
        """Trains from the initial weights, or resumes from a saved round.

        Up to rounding, the result does not depend on the number of processes, or on the devices and the order in which
        clients run: every client has a seed for each round. Noise of differential privacy is not seeded.

        Args:
            num_clients: Number of clients; their ids are 0 to num_clients - 1.
            num_rounds: Total number of rounds, including those before a resume.
            config: Values that every client gets in `client.config`: int, float, bool, str, bytes or lists of them.
            server_evaluate: (model, server_round) -> metrics, called in this process with the model in eval mode:
                before the first round, which is server_round 0, and after each round.
            output_dir: Folder for rounds.jsonl and a file per round, of which the last two are kept.
            resume: "auto" = from the newest complete round in `output_dir`, or from the beginning.
            min_success: Fraction of a round's clients that must succeed; one client must in any case.
            round_timeout_s: Seconds for a round's training, and again for its evaluation. Later replies are left out.

        Raises:
            ConfigError: An argument is invalid, or does not fit the model or the strategy.
            SetupError: Devices are missing, or a function cannot be sent to another process.
            LaunchError: log_dir cannot be written.
            ResumeError: The saved round belongs to another training.
            FederatedError: Too many clients failed, or their results cannot be aggregated.
            OSError: A round cannot be saved.
        """
        folder: Any = output_dir  # The option converts a path to text.
        options = FitOptions(
            num_clients, num_rounds, config, folder, resume, min_success, round_timeout_s, server_evaluate
        )
        refuse_ranks()
        initial = None if self._training is None else self._training.initial
        self._training = None
        with closing(Console(is_notebook="ipykernel" in sys.modules)), task_identity():
            self._grid = self._grid or self._make_grid()
            self._grid.num_clients = num_clients
            training = Training(self, self._grid, options, initial)
            result = training.run()
        self._training = training
        return result

    def _make_grid(self) -> ProcessGrid:
        given = self.options
        devices = choose_devices(given.num_gpus, given.device, auto_gpu=given.auto_gpu)
        # First a slot on each device, then a second one on each: max_workers leaves out the last ones.
        slot_devices = (devices * given.clients_per_gpu)[: given.max_workers]
        return ProcessGrid(self.client_app, 0, slot_devices, given.placement, given.seed, given.log_dir)

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Returns the global trainable tensors and persistent buffers by name, on the CPU, half precision as float32.

        Raises SetupError if no `fit` has ended.
        """
        return tensors_of(self._last().arrays)

    def save(self, folder: str | os.PathLike[str]) -> None:
        """Saves the result of `fit`: a PEFT adapter, or model.safetensors with what `state_dict` returns.

        Raises SetupError if no `fit` has ended; OSError or SafetensorError if files cannot be written.
        """
        from safetensors.torch import save_file

        training, folder = self._last(), Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        initial, arrays, tensors = training.initial, training.arrays, tensors_of(training.arrays)
        if not initial.adapter_config:
            save_file(tensors, folder / "model.safetensors")
            return
        # Without unchanged buffers: they are in the base model, and other tools refuse unknown names.
        unchanged = [name for name in initial.buffers if arrays[name] == initial.arrays.get(name)]
        state = {name: value for name, value in tensors.items() if name not in unchanged}
        save_adapter(folder, state | tensors_of(initial.frozen), initial.adapter_config)

    def close(self) -> None:
        """Ends the clients' processes. The result is kept; another `fit` starts them again."""
        if self._grid is not None:
            self._grid.close()
            self._grid = None

    def __exit__(self, *error: object) -> None:
        self.close()

    def _last(self) -> Training:
        if self._training is None:
            raise SetupError("No training of this server has ended yet.", hint="Call fit() first.")
        return self._training


def refuse_ranks() -> None:
    """Raises SetupError in a rank or under `enable_multi_gpu`: the slots of several servers would share the devices."""
    identity = read_identity(os.environ)
    if identity is not None and identity.world_size > 1:
        raise SetupError(
            f"This process is rank {identity.rank} of {identity.world_size}, started by {identity.launcher}.",
            hint="Start the script with plain python, without enable_multi_gpu(): the server starts the processes.",
        )
    if plugin.is_multi_gpu_enabled():
        raise SetupError(
            "enable_multi_gpu() is in effect, which trains one model on all GPUs.",
            hint="Leave it out, or call disable_multi_gpu() first.",
        )


@dataclass(frozen=True)
class InitialState:
    """The state of a newly built model, from which a training starts.

    Args:
        arrays: The exchanged tensors.
        frozen: Frozen factors of the adapter, see `frozen_factors`.
        adapter_config: The result of `describe_adapter`; "" without an adapter.
        buffers: Names of the buffers in `arrays`.
        not_projectable: Reasons why lora_aggregation="project" cannot work with this model.
    """

    arrays: ArrayRecord
    frozen: ArrayRecord
    adapter_config: str = ""
    buffers: Sequence[str] = ()
    not_projectable: Sequence[str] = ()


class Training:
    """Flower's loop of rounds, made reproducible: the same clients in every run, and replies in the clients' order.

    Random generators are seeded while clients are selected, and not while replies are aggregated: noise of differential
    privacy from a known seed would hide nothing. Without the `initial` state, `run` asks clients for it.

    Attributes:
        arrays: The global arrays after the last round so far.
    """

    def __init__(
        self, server: FederatedServer, grid: ProcessGrid, options: FitOptions, initial: InitialState | None = None
    ) -> None:
        self.arrays = ArrayRecord()
        self._server, self._grid, self._options, self._known_initial = server, grid, options, initial
        self._strategy = server.new_strategy()
        flower_strategy.check_strategy(self._strategy, options.num_clients)
        self._model = ClientModel(server.options.model_builder, server.options.seed)
        self._reports: list[rounds.RoundReport] = []
        self._first_metrics: Mapping[str, Any] | None = None
        self._failures: list[str] = []
        facts = {name: getattr(server.options, name) for name in ("server_id", "seed", "lora_aggregation")}
        facts |= {"num_clients": options.num_clients, **server.description}
        facts |= {f"config[{name!r}]": value for name, value in (options.config or {}).items()}
        self._facts = {name: repr(value) for name, value in facts.items()}

    def run(self) -> rounds.FederatedResult:
        """Trains all rounds, or those after a saved round. Raises what `FederatedServer.fit` raises, and OSError."""
        begin_s, options = time.monotonic(), self._options
        folder = None if options.output_dir is None else Path(options.output_dir)
        with rounds.open_folder(folder, options.resume) if folder else nullcontext() as newest:
            saved = rounds.read_round(newest, self._facts, options.num_rounds) if newest else None
            self.initial = self._known_initial or query_initial_state(self._grid, options.round_timeout_s)
            if self._server.options.lora_aggregation == "project" and self.initial.not_projectable:
                raise _no_projection(self.initial.not_projectable[0])
            self.arrays = self.initial.arrays
            if newest and saved:
                rounds.refuse_difference(newest, saved.adapter, adapter_settings(self.initial.adapter_config))
                self.arrays, self._first_metrics = saved.arrays, saved.first_metrics
                self._reports = list(saved.reports)
                saved.restore(self._strategy)
                _log.info("resumes after round=%d of %s", len(saved.reports), newest)
            self._grid.records = []  # The query of the initial state belongs to no round.
            startup_s = time.monotonic() - begin_s
            with flower_strategy.quiet_flower():
                if self._first_metrics is None:
                    self._first_metrics = self._server_metrics(0)
                for number in range(len(self._reports) + 1, options.num_rounds + 1):
                    self._reports.append(self._round(number))
                    if folder is not None:
                        self._save(folder)
                    _log.info("%s", " ".join(f"{name}={text}" for name, text in self._reports[-1].row().items()))
        return self._result(startup_s)

    def _result(self, startup_s: float) -> rounds.FederatedResult:
        reports = tuple(self._reports)
        train, evaluate, server = (
            {report.server_round: MetricRecord(dict(m)) for report in reports if (m := getattr(report, name))}
            for name in ("train_metrics", "evaluate_metrics", "server_metrics")
        )
        if self._first_metrics:
            server = {0: MetricRecord(dict(self._first_metrics)), **server}
        server_id, num_slots = self._server.options.server_id, len(self._grid.devices_of_slots)
        return rounds.FederatedResult(
            Result(self.arrays, train, evaluate, server),
            rounds.FederatedReport(server_id, self._options.num_clients, num_slots, startup_s, reports),
        )

    def _round(self, number: int) -> rounds.RoundReport:
        begin_s, self._failures = time.monotonic(), []
        found = self._train(number)
        if self._server.options.evaluate_fn is not None and (replies := self._ask("evaluate", number)):
            with self._naming_step(number, "aggregate_evaluate"):
                found["evaluate_metrics"] = dict(self._strategy.aggregate_evaluate(number, replies) or {})
        found["server_metrics"] = self._server_metrics(number)
        records, self._grid.records = self._grid.records, []
        found["devices"] = rounds.device_reports(self._grid.devices_of_slots, records)
        repeated = [record for record in records if record.attempts > 1 and not record.error]
        self._failures += [f"client {r.client_id}: {r.kind} needed {r.attempts} attempts" for r in repeated]
        return rounds.RoundReport(number, time.monotonic() - begin_s, failures=tuple(self._failures), **found)

    def _train(self, number: int) -> dict[str, Any]:
        """Lets clients train, and aggregates their replies. Returns fields of the `RoundReport` by name."""
        replies = self._ask("train", number)
        contents = [reply.content for reply in replies if reply.has_content()]
        # Kept in new records, because some strategies empty those of the replies.
        kept = [ArrayRecord(dict(next(iter(c.array_records.values()), ArrayRecord()))) for c in contents]
        key = flower_strategy.weight_key(self._strategy)
        weights = [flower_strategy.metric_of(content, key) for content in contents]
        # Not the sum of the weights: a strategy may weight by another metric.
        num_examples = sum(int(flower_strategy.metric_of(content, "num-examples")) for content in contents)
        with self._naming_step(number, "aggregate_train"):
            arrays, metrics = self._strategy.aggregate_train(number, replies)
        found: dict[str, Any] = {"num_examples": 0, "train_metrics": dict(metrics or {})}
        if arrays is None:
            if contents:
                name = type(self._strategy).__name__
                self._failures.append(f"{name} used no reply, so the weights are unchanged")
            return found
        if flower_strategy.is_weighted_mean(self._strategy):
            mode = self._server.options.lora_aggregation
            arrays, found["lora_remainder"] = aggregate_lora(kept, weights, arrays, mode=mode)
        elif isinstance(self._strategy, flower_strategy.WITH_SERVER_OPTIMIZER) and self.initial.buffers:
            # The optimizer could make a running variance negative.
            arrays = ArrayRecord({**arrays, **weighted_mean(kept, weights, self.initial.buffers)})
        self.arrays = flower_strategy.cast_like(arrays, self.arrays)
        return found | {"num_examples": num_examples}

    def _ask(self, kind: flower_strategy.Kind, number: int) -> list[Message]:
        """Sends the global arrays to the clients that the strategy selects. Returns the checked replies."""
        step = f"configure_{kind}"
        config = ConfigRecord(dict(self._options.config or {}))
        with self._naming_step(number, step), seeded_draws(client_seed(self._server.options.seed, number, kind)):
            messages = list(getattr(self._strategy, step)(number, self.arrays, config, self._grid))
        messages.sort(key=lambda message: message.metadata.dst_node_id)
        checked, failures = flower_strategy.check_replies(
            self._grid.send_and_receive(messages, timeout=self._options.round_timeout_s),
            kind,
            number,
            min_success=self._options.min_success,
            weight_key=flower_strategy.weight_key(self._strategy),
        )
        self._failures += failures
        return checked

    def _server_metrics(self, number: int) -> dict[str, Any]:
        """Returns the metrics of the user's `server_evaluate`; none without it."""
        if self._options.server_evaluate is None:
            return {}
        try:
            device = torch.device(self._server.options.device or "cpu")
            model = self._model.prepare(self.arrays, device).eval()
            return dict(to_metrics(self._options.server_evaluate(model, number), "server_evaluate"))
        finally:
            if changed := self._model.release():
                text = "server_evaluate changed %s (and %d more tensors); the model is built again for the next round"
                _log.warning(text, changed[0], len(changed) - 1)

    def _save(self, folder: Path) -> None:
        packed, left_out = rounds.pack_strategy(self._strategy)
        first, adapter = self._first_metrics or {}, adapter_settings(self.initial.adapter_config)
        rounds.write_round(folder, rounds.SavedRound(self.arrays, self._reports, first, packed, self._facts, adapter))
        if left_out and len(self._reports) == 1:
            _log.warning("not saved, so a resumed training begins with the initial value: %s", ", ".join(left_out))

    @contextmanager
    def _naming_step(self, number: int, step: str) -> Iterator[None]:
        """Adds round and step to an error that the strategy raises."""
        try:
            yield
        except AppExitException as error:
            raise FederatedError(
                f"round {number}: {type(self._strategy).__name__}.{step}: {error}",
                hint="All clients must return the same metrics, including those that the strategy needs.",
            ) from error


def query_initial_state(grid: ProcessGrid, timeout_s: float) -> InitialState:
    """Lets one client for each slot build the model; returns the first state. Raises FederatedError if all fail."""
    asked = grid.get_node_ids()[: len(grid.devices_of_slots)]
    messages = [Message(RecordDict({"config": ConfigRecord()}), node_id, "query.initial") for node_id in asked]
    replies = grid.send_and_receive(messages, timeout=max(timeout_s, _MIN_BUILD_TIMEOUT_S))
    for reply in replies:
        if reply.has_content():
            records, facts = reply.content.array_records, reply.content.config_records["config"]
            known: dict[str, Any] = dict(facts)
            return InitialState(records["arrays"], records["frozen"], **known)
    raise FederatedError(
        f"no client could build its model: {replies[0].error.reason}",
        hint="The log above shows the whole error. Check that model_builder() works in a script of its own.",
    )


def tensors_of(arrays: ArrayRecord) -> dict[str, torch.Tensor]:
    """Copies arrays to contiguous tensors, which safetensors needs."""
    contiguous = torch.contiguous_format
    return {name: to_tensor(array).clone(memory_format=contiguous) for name, array in arrays.items()}


def _no_projection(reason: str) -> ConfigError:
    return ConfigError(f"lora_aggregation='project' cannot work here: {reason}.", hint="Use lora_aggregation='mean'.")
