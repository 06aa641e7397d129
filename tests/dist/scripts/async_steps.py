"""One of three ranks that train by the asynchronous parameter server. RANK is set; writes facts_RANK.json."""

import json
import os
import sys
import threading
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from unsloth_multigpu.errors import DistributedError
from unsloth_multigpu.strategies.asynchronous import AsyncParameterServerSync
from unsloth_multigpu.strategies.server import StepClock

RANK, WORLD_SIZE, NUM_STEPS = int(os.environ["RANK"]), 3, 10
DEVICE = sys.argv[1] if len(sys.argv) > 1 else "cpu"
SLOW_RANK, SLOW_S = 2, 0.01


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 1))
        self.shift = nn.Parameter(torch.zeros(3, dtype=torch.float64))
        self.idle = nn.Parameter(torch.ones(2))  # Never has a gradient, so that it must not decay either.

    def forward(self, x):
        return self.body(x).squeeze(-1) + self.shift.sum().to(x.dtype)


def prepare(bound, *, make=torch.optim.AdamW, lr=0.02, weight_decay=0.1, timeout_s=20.0):
    torch.manual_seed(RANK)  # Only rank 0's weights may count.
    net = Net().to(DEVICE)
    optimizer = make(net.parameters(), lr=lr, weight_decay=weight_decay)
    sync = AsyncParameterServerSync(net, optimizer, bound, timeout_s)
    sync.begin()
    return net, optimizer, sync


def train(net, optimizer, sync, num_steps=NUM_STEPS, on_step=lambda step: None):
    """Hugging Face's order of calls. Returns losses, and when each step began and was handed over, in seconds."""
    generator = torch.Generator().manual_seed(RANK + 10)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.5, num_steps)
    losses, begun, handed = [], [], []
    for step in range(num_steps):
        begun.append(time.monotonic())
        x = torch.randn(32, 8, generator=generator).to(DEVICE)
        loss = (net(x) - x[:, 0] - 1).square().mean()
        time.sleep(SLOW_S * (RANK == SLOW_RANK))
        loss.backward()
        sync.after_backward()
        nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        on_step(step)
        handed.append(time.monotonic())
        optimizer.step()
        scheduler.step()
        net.zero_grad()
        sync.after_step()
        losses.append(loss.item())
    return {"losses": losses, "begun": begun, "handed": handed}


def tensors(net):
    return {name: value.tolist() for name, value in net.state_dict().items()}


def asynchronous(bound, **options):
    net, optimizer, sync = prepare(bound, **options)
    start, is_equal = tensors(net), [sync.are_replicas_equal]
    facts = train(net, optimizer, sync)
    is_equal.append(sync.are_replicas_equal)
    sync.meet()
    is_equal.append(sync.are_replicas_equal)
    met = tensors(net)
    sync.end()
    own = list(net.parameters())
    facts |= {
        "start": start,
        "met": met,
        "end": tensors(net),
        "is_equal": is_equal,
        "max_lead_steps": sync.max_lead_steps,
        "max_missed_updates": sync.max_missed_updates,
        "num_steps": sync.num_steps,
        "sent_bytes": sync.sent_bytes,
        "is_own": all(a is b for a, b in zip(optimizer.param_groups[0]["params"], own, strict=True)),
        "state": {n: int(optimizer.state[p]["step"]) for n, p in net.named_parameters() if p in optimizer.state},
        "num_states": len(optimizer.state_dict()["state"]),
        "num_hooks": len(optimizer._optimizer_step_pre_hooks) + len(optimizer._optimizer_step_post_hooks),
        "num_threads": threading.active_count(),
    }
    net(torch.randn(8, 8, device=DEVICE)).mean().backward()
    optimizer.step()
    return facts | {"is_trainable": tensors(net)["body.0.weight"] != facts["end"]["body.0.weight"]}


def ungated():
    original, StepClock.may_begin = StepClock.may_begin, lambda self, rank: True
    facts = asynchronous(1)
    StepClock.may_begin = original
    return facts


def summed():
    """Gradients that do not depend on weights, so each update can be counted: weights = start - lr x their sum."""
    net, optimizer, sync = prepare(2, make=torch.optim.SGD, lr=0.5, weight_decay=0.0)
    for step in range(NUM_STEPS):
        (net.shift.sum() * 4.0 ** (RANK + 1) * (step + 1)).backward()
        if RANK == 0:
            net.idle.sum().backward()
        optimizer.step()
        net.zero_grad()
        sync.after_step()
    sync.end()
    return {"shift": net.shift.tolist(), "idle": net.idle.tolist()}


def resting():
    """Between `meet` and rank 0's next step nothing changes, although the others go on."""
    net, optimizer, sync = prepare(3)
    train(net, optimizer, sync, 2)
    sync.meet()
    counts = []
    if RANK == 0:
        for _ in range(2):
            counts.append([int(s["step"]) for s in optimizer.state_dict()["state"].values()])
            time.sleep(0.1)
    train(net, optimizer, sync, 2)
    sync.end()
    return {"counts": counts}


def failing(bound, on_step, timeout_s):
    """The error of a run that cannot go on, and what is left of it afterwards."""
    net, optimizer, sync = prepare(bound, timeout_s=timeout_s)
    begin = time.monotonic()
    facts = {"error": None}
    try:
        train(net, optimizer, sync, on_step=on_step)
    except DistributedError as error:
        facts = {"error": type(error).__name__, "text": str(error), "is_chained": error.__cause__ is not None}
    facts["seconds"] = time.monotonic() - begin
    if bound == 0:
        dist.barrier()  # The stuck rank is alive for as long as the others wait for it.
    sync.abort()
    sync.abort()
    hooks = len(optimizer._optimizer_step_pre_hooks) + len(optimizer._optimizer_step_post_hooks)
    own = optimizer.param_groups[0]["params"][0] is next(net.parameters())
    return facts | {"is_clean": own and not hooks and threading.active_count() == 1}


def get_stuck(step):
    if RANK == SLOW_RANK and step == 2:
        raise DistributedError("planted", hint="")


def die(step):
    if RANK == SLOW_RANK and step == 2:
        os._exit(9)


torch.set_num_threads(1)
dist.init_process_group("gloo", init_method=f"file://{Path('store').absolute()}", rank=RANK, world_size=WORLD_SIZE)
result = {f"bound_{bound}": asynchronous(bound) for bound in (0, 1, 3)}
result["ungated"] = ungated()
result["still"] = asynchronous(1, lr=0.0)
result["summed"] = summed()
result["resting"] = resting()
result["stuck"] = failing(0, get_stuck, timeout_s=1.0)
if RANK == SLOW_RANK:
    Path(f"facts_{RANK}.json").write_text(json.dumps(result))
result["dead"] = failing(5, die, timeout_s=60.0)
Path(f"facts_{RANK}.json").write_text(json.dumps(result))
