"""Loops with Accelerators of their own: one scores rows, one trains as accelerate shares batches, one splits them."""

import json
import os
import sys
from pathlib import Path

import unsloth_multigpu as ump

ump.enable_multi_gpu()

import torch
from accelerate import Accelerator, DataLoaderConfiguration
from torch.utils.data import DataLoader


def train(**options: object) -> list[float]:
    """The gradient norm of each optimizer step."""
    torch.manual_seed(0)
    accelerator = Accelerator(**options)
    model, rows = torch.nn.Linear(3, 1), torch.randn(24, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    loader = DataLoader(rows, batch_size=4)
    model, optimizer, loader, schedule = accelerator.prepare(model, optimizer, loader, schedule)
    norms = []
    for batch in loader:
        accelerator.backward(model(batch).square().mean())
        norms.append(float(accelerator.clip_grad_norm_(model.parameters(), 100.0)))
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    return norms


def score() -> int:
    """Rows that are scored without training."""
    accelerator = Accelerator()
    model, loader = accelerator.prepare(torch.nn.Linear(3, 1), DataLoader(torch.randn(24, 3), batch_size=4))
    with torch.no_grad():
        return sum(len(accelerator.gather_for_metrics(model(batch))) for batch in loader)


found = {
    "scored": score(),
    "whole": train(),
    "split": train(dataloader_config=DataLoaderConfiguration(split_batches=True)),
}
if os.environ.get("RANK", "0") == "0":
    Path(sys.argv[1]).write_text(json.dumps(found))
