"""One rank that trains a small model by every strategy and writes down what it found: `RANK WORLD_SIZE`."""

import copy
import json
import sys
from contextlib import nullcontext
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from unsloth_multigpu.errors import SetupError
from unsloth_multigpu.group.replicas import tensor_hashes
from unsloth_multigpu.strategies.sync import AllReduceSync, DiLoCoSync, LocalSGDSync, ParameterServerSync
from unsloth_multigpu.strategy import DiLoCo, LocalSGD

RANK, WORLD_SIZE = int(sys.argv[1]), int(sys.argv[2])
NUM_STEPS, NUM_MICRO_BATCHES = 20, 2


class Model(nn.Module):
    """All that a strategy may meet: frozen, unused and partly used parameters, running statistics, a constant."""

    def __init__(self) -> None:
        super().__init__()
        # Without a bias before the norm, whose gradient would be nothing but rounding, which Adam makes large.
        self.first, self.norm, self.last = nn.Linear(6, 8, bias=False), nn.BatchNorm1d(8), nn.Linear(8, 3)
        self.frozen = nn.Parameter(torch.randn(8), requires_grad=False)
        self.on_last_rank = nn.Parameter(torch.randn(8))
        self.never = nn.Parameter(torch.randn(5))
        self.empty = nn.Parameter(torch.randn(0))
        self.register_buffer("constant", torch.rand(64))
        self.register_buffer("mask", torch.rand(3) > 0.5)

    def forward(self, x: torch.Tensor, rank: int) -> torch.Tensor:
        hidden = torch.tanh(self.norm(self.first(x))) * self.frozen
        return self.last(hidden * self.on_last_rank if rank == WORLD_SIZE - 1 else hidden)


def new_model(seed: int) -> Model:
    torch.manual_seed(seed)
    return Model()


def backward(model: nn.Module, step: int, micro_batch: int, rank: int, scale: float = 1.0) -> None:
    draw = torch.Generator().manual_seed(1 + rank + 10 * micro_batch + 100 * step)
    inputs, targets = torch.randn(5, 6, generator=draw), torch.randn(5, 3, generator=draw)
    loss = (model(inputs, rank) - targets).square().mean() / NUM_MICRO_BATCHES
    (loss * scale).backward()


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


def hashes(tensors) -> list[int]:
    return tensor_hashes([t for t in tensors if t.is_floating_point() and t.numel()])


def facts_of(model: Model, **more) -> dict:
    weights = {name: p.detach().flatten().tolist() for name, p in model.named_parameters()}
    buffers = {name: b.flatten().tolist() for name, b in model.named_buffers()}
    return {"weights": weights, "buffers": buffers, "hashes": hashes(model.parameters()), **more}


def train(make_sync, make_optimizer=adamw, num_steps=NUM_STEPS, seed=RANK, clip=0.5, at_step=None) -> dict:
    """The loop of any strategy; `make_sync=None` is torch's DDP."""
    model = new_model(seed)
    optimizer = make_optimizer(model)
    sync = None if make_sync is None else make_sync(model, optimizer)
    wrapped = DistributedDataParallel(model, find_unused_parameters=True) if sync is None else model
    if sync is not None:
        sync.begin()
    norms, equal, seen = [], [], []
    for step in range(num_steps):
        for i in range(NUM_MICRO_BATCHES):
            with wrapped.no_sync() if sync is None and i < NUM_MICRO_BATCHES - 1 else nullcontext():
                backward(wrapped, step, i, RANK)
        if sync is not None:
            sync.after_backward()
        if clip is not None:
            norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), clip)))
        optimizer.step()
        if sync is not None:
            sync.after_step()
            equal.append(sync.are_replicas_equal)
            seen.append(hashes(sync.parameters))
        optimizer.zero_grad()
        if at_step is not None:
            at_step(step, model, optimizer, sync)
    if sync is not None:
        sync.synchronize()
    sent_bytes = None if sync is None else sync.sent_bytes
    return facts_of(model, norms=norms, equal=equal, seen=seen, sent_bytes=sent_bytes, num_states=len(optimizer.state))


def server_of_resumed_run(model: Model, optimizer: torch.optim.Optimizer) -> ParameterServerSync:
    """Every rank has loaded the optimizer of a checkpoint."""
    zeros = torch.zeros(5)
    optimizer.state[model.never].update(step=torch.ones(()), exp_avg=zeros, exp_avg_sq=zeros.clone())
    return ParameterServerSync(model, optimizer)


def in_buckets(sync, num_bytes):
    sync.bucket_bytes = num_bytes
    return sync


def synchronous() -> dict:
    return {
        "ddp": train(None),
        "each": train(lambda m, o: in_buckets(AllReduceSync(m, o), 0)),
        "buckets": train(lambda m, o: in_buckets(AllReduceSync(m, o), 200)),
        "one_bucket": train(AllReduceSync),
        "server": train(server_of_resumed_run),
        "server_each": train(lambda m, o: in_buckets(ParameterServerSync(m, o), 0)),
    }


def local_sgd(every_steps: int):
    return lambda m, o: LocalSGDSync(m, o, LocalSGD(every_steps))


def diloco(*options):
    return lambda m, o: DiLoCoSync(m, o, DiLoCo(*options))


def local() -> dict:
    def meet_at_10(step, model, optimizer, sync) -> None:
        if step == 9:
            sync.synchronize()

    return {
        "ddp_sgd": train(None, sgd, clip=None),
        "local_1": train(local_sgd(1), sgd, clip=None),
        "local_4": train(local_sgd(4), num_steps=14, at_step=meet_at_10),
        "diloco_1": train(diloco(1, 1.0, 0.0), sgd, clip=None),
        "diloco_4": train(diloco(4), num_steps=12),
        "by_hand": diloco_by_hand(num_windows=3, every_steps=4, learning_rate=0.7, momentum=0.9),
    }


def diloco_by_hand(num_windows: int, every_steps: int, learning_rate: float, momentum: float) -> dict:
    """The algorithm as the paper has it, with all replicas in this process."""
    shared = new_model(seed=0)
    replicas = [copy.deepcopy(shared) for _ in range(WORLD_SIZE)]
    # The state of each inner optimizer resumes from window to window.
    optimizers = [adamw(replica) for replica in replicas]
    velocity = [torch.zeros_like(p) for p in shared.parameters()]
    for window in range(num_windows):
        for rank, (replica, optimizer) in enumerate(zip(replicas, optimizers, strict=True)):
            replica.load_state_dict(shared.state_dict())
            for step in range(window * every_steps, (window + 1) * every_steps):
                for i in range(NUM_MICRO_BATCHES):
                    backward(replica, step, i, rank)
                nn.utils.clip_grad_norm_(replica.parameters(), 0.5)
                optimizer.step()
                optimizer.zero_grad()
        with torch.no_grad():
            for weight, speed, *moved in zip(
                shared.parameters(), velocity, *(r.parameters() for r in replicas), strict=True
            ):
                if weight.requires_grad:
                    gradient = weight - torch.stack(moved).mean(0)
                    speed.mul_(momentum).add_(gradient)
                    weight.sub_(learning_rate * (gradient + momentum * speed))
    return facts_of(shared)


def half_precision() -> dict:
    """Weights of 16 bits: their mean by LocalSGD, and outer steps of DiLoCo that are too small to show in each."""
    values = [torch.randn(64, generator=torch.Generator().manual_seed(r)).bfloat16() for r in range(WORLD_SIZE)]
    model = nn.Linear(64, 1, bias=False, dtype=torch.bfloat16)
    sync = local_sgd(1)(model, sgd(model))
    model.weight.data.copy_(values[RANK][None])
    sync.after_step()
    mean = torch.stack(values).float().mean(0).bfloat16()
    slow = nn.Linear(1, 1, bias=False, dtype=torch.bfloat16)
    nn.init.ones_(slow.weight)
    outer = diloco(1, 0.25, 0.0)(slow, sgd(slow))
    outer.begin()
    seen = []
    for _ in range(4):
        # The spacing of bfloat16 numbers from 1 on is 2^-7.
        slow.weight.data += 2**-7
        outer.after_step()
        seen.append(slow.weight.item())
    (kept,) = outer.state_dict()["start"]
    return {"is_mean": bool((model.weight[0] == mean).all()), "seen": seen, "kept": kept.item()}


def scaled(make_optimizer) -> dict:
    """A GradScaler, and an overflow of one rank's gradients in the third step."""
    model = new_model(RANK)
    optimizer = make_optimizer(model)
    sync = ParameterServerSync(model, optimizer, is_loss_scaled=True)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=2)
    sync.begin()
    scales, seen = [], []
    for step in range(5):
        backward(model, step, 0, RANK, scaler.get_scale() if step else scaler.scale(torch.ones(())).item())
        if step == 2 and RANK == WORLD_SIZE - 1:
            model.last.weight.grad[0, 0] = torch.inf
        sync.after_backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        scaler.step(optimizer)
        scaler.update()
        sync.after_step()
        optimizer.zero_grad()
        scales.append(scaler.get_scale())
        seen.append(hashes(model.parameters()))
    return {"scales": scales, "seen": seen, "num_states": len(optimizer.state)}


def sparse() -> str:
    model = nn.Sequential(nn.Embedding(4, 2, sparse=True), nn.Linear(2, 1))
    sync = AllReduceSync(model, sgd(model))
    model(torch.tensor([RANK])).sum().backward()
    try:
        sync.after_backward()
    except SetupError as error:
        return str(error)
    return "no error"


if __name__ == "__main__":
    dist.init_process_group(
        "gloo",
        init_method=f"file://{Path('store').absolute()}",
        rank=RANK,
        world_size=WORLD_SIZE,
        timeout=timedelta(seconds=60),
    )
    facts = {**synchronous(), **local(), "half": half_precision(), "scaled": scaled(adamw), "sparse": sparse()}
    Path(f"facts_{RANK}.json").write_text(json.dumps(facts))
    dist.destroy_process_group()  # Its threads must not run while the process ends.
