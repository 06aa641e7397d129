"""One arm of a benchmark of federated clients: the process that is measured, and what a client trains."""

from __future__ import annotations

import functools
import json
import queue
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from unsloth_multigpu.tools.bench.data import make_rows
from unsloth_multigpu.tools.bench.option import BenchOptions
from unsloth_multigpu.tools.bench.worker import collate, make_model

if TYPE_CHECKING:
    import torch

    from unsloth_multigpu.federated.client import FederatedClient

# SGD, because with Adam a rounding error in a small gradient can flip the sign of a step, and arms would differ.
_LEARNING_RATE = 0.05
_rows = functools.lru_cache(maxsize=1)(make_rows)
WEIGHTS = "weights.safetensors"
RECORD = "record.json"


@dataclass(frozen=True)
class ArmRecord:
    """What an arm measured of itself.

    Args:
        rounds_s: Seconds of each round, those of warm-up first.
        startup_s: Seconds until the first round began: processes or models.
        device: What clients computed on.
        losses: Mean training loss of all clients' samples in each round.
    """

    rounds_s: tuple[float, ...]
    startup_s: float
    device: str
    losses: tuple[float, ...]


def main() -> None:
    """Trains as the file of settings says, and leaves a record and the trained weights next to it."""
    from safetensors.torch import save_file

    file = Path(sys.argv[1])
    settings = json.loads(file.read_text(encoding="utf-8"))
    kind, _, num_at_once = settings["arm"].partition(":")
    options = BenchOptions(**{**settings["options"], "arms": tuple(settings["options"]["arms"])})
    record, weights = (_train_in_slots if kind == "slots" else _train_in_threads)(int(num_at_once), options)
    save_file(weights, file.with_name(WEIGHTS))
    file.with_name(RECORD).write_text(json.dumps(asdict(record)), encoding="utf-8")


def _train_in_slots(num_at_once: int, options: BenchOptions) -> tuple[ArmRecord, dict[str, torch.Tensor]]:
    from unsloth_multigpu.federated.server import create_multigpu_flower_server

    num_devices = min(num_at_once, _num_devices(options) or num_at_once)
    server = create_multigpu_flower_server(
        "bench",
        functools.partial(build_model, options),
        train_fn=functools.partial(train_client, options),
        num_gpus=num_devices,
        clients_per_gpu=-(-num_at_once // num_devices),
        max_workers=num_at_once,
        seed=options.seed,
    )
    with server:
        report = server.fit(options.clients, options.warmup + options.rounds).report
        rounds_s, losses = zip(*((r.seconds, r.train_metrics["loss"]) for r in report.rounds), strict=True)
        return ArmRecord(rounds_s, report.startup_s, _device_name(options), losses), server.state_dict()


def _train_in_threads(num_at_once: int, options: BenchOptions) -> tuple[ArmRecord, dict[str, torch.Tensor]]:
    import torch

    begin_s = time.perf_counter()
    clients = _Clients(options, num_at_once)
    marks_s, losses, weights = [time.perf_counter()], [], clients.first_weights
    with ThreadPoolExecutor(num_at_once) as pool:
        for server_round in range(1, options.warmup + options.rounds + 1):
            train = functools.partial(clients.train, weights, server_round)
            results = list(pool.map(train, range(options.clients)))
            total = sum(num_examples for num_examples, _, _ in results)
            shares = [num_examples / total for num_examples, _, _ in results]
            losses.append(sum(share * loss for share, (_, loss, _) in zip(shares, results, strict=True)))
            trained = [values for _, _, values in results]
            weights = {
                name: sum((s * t[name] for s, t in zip(shares, trained, strict=True)), torch.zeros_like(value))
                for name, value in weights.items()
            }
            marks_s.append(time.perf_counter())
    rounds_s = tuple(end - begin for begin, end in pairwise(marks_s))
    return ArmRecord(rounds_s, marks_s[0] - begin_s, _device_name(options), tuple(losses)), weights


class _Clients:
    """Threads share one process, so that there is a model for each client that trains at the same time."""

    def __init__(self, options: BenchOptions, num_at_once: int) -> None:
        import torch

        self._options = options
        num_devices = _num_devices(options)
        devices = [torch.device("cuda", n % num_devices) if num_devices else "cpu" for n in range(num_at_once)]
        models = [build_model(options).to(device).train() for device in devices]
        self.first_weights = {
            name: value.detach().cpu().clone() for name, value in models[0].named_parameters() if value.requires_grad
        }
        self._free_models: queue.SimpleQueue[torch.nn.Module] = queue.SimpleQueue()
        for model in models:
            self._free_models.put(model)

    def train(
        self, weights: dict[str, torch.Tensor], server_round: int, client_id: int
    ) -> tuple[int, float, dict[str, torch.Tensor]]:
        """One client's part of a round: its examples, its loss and what it trained."""
        import torch

        from unsloth_multigpu.federated.client import FederatedClient

        model = self._free_models.get_nowait()  # As many as threads.
        trained = {name: value for name, value in model.named_parameters() if name in weights}
        with torch.no_grad():
            for name, value in trained.items():
                value.copy_(weights[name])
        device = next(model.parameters()).device
        client = FederatedClient(client_id, self._options.clients, server_round, device)
        num_examples, metrics = train_client(self._options, model, client)
        values = {name: v.detach().cpu().clone() for name, v in trained.items()}
        self._free_models.put(model)
        return num_examples, metrics["loss"], values


def build_model(options: BenchOptions) -> Any:
    """A client's model."""
    return make_model(options, max(map(len, _rows(options))))


def train_client(options: BenchOptions, model: Any, client: FederatedClient) -> tuple[int, dict[str, float]]:
    """One client's part of a round: some steps of SGD over its own rows. Draws no random numbers."""
    import torch

    rows = [{"input_ids": row} for row in _rows(options)[client.client_id :: client.num_clients]]
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], _LEARNING_RATE)
    losses = []
    for begin in range(0, len(rows), options.batch_size):
        batch = collate(rows[begin : begin + options.batch_size], num_given=0)
        with torch.autocast(client.device.type, torch.bfloat16, enabled=options.dtype == "bf16"):
            loss = model(**{name: value.to(client.device) for name, value in batch.items()}).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return len(rows), {"loss": float(torch.stack(losses).mean())}


def _num_devices(options: BenchOptions) -> int:
    """Cards that may be used; 0 on the CPU."""
    import torch

    return torch.cuda.device_count() if options.device == "cuda" else 0


def _device_name(options: BenchOptions) -> str:
    import torch

    return torch.cuda.get_device_name() if options.device == "cuda" else "cpu"
