"""A plain loop in ranks of torchrun; each writes what it saw. Usage: plain.py OUT"""

import json
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

import unsloth_multigpu as ump

if __name__ == "__main__":
    ump.enable_multi_gpu()

NUM_SAMPLES, BATCH_SIZE, NUM_EPOCHS = 23, 6, 5  # The last step of an epoch has 5 samples.


def train(seed):
    """Returns the model, the weights that it began with, and the samples of each step of each epoch."""
    rows = torch.randn(NUM_SAMPLES, 9, generator=torch.Generator().manual_seed(7))
    data = [(rows[i, :8], rows[i, 8:], i) for i in range(NUM_SAMPLES)]
    torch.manual_seed(seed)
    model = ump.wrap_model_multi_gpu(nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1)))
    device = next(model.parameters()).device
    start = [p.tolist() for p in model.parameters()]
    loader = ump.distributed_loader(data, BATCH_SIZE)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    epochs = []
    for _ in range(NUM_EPOCHS):
        epochs.append([])
        for x, y, index in loader:
            loss = nn.functional.mse_loss(model(x.to(device)), y.to(device))
            optimizer.zero_grad()
            (loss * loader.loss_weight).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            epochs[-1].append(index.tolist())
    return model, start, epochs


def main():
    out, rank = Path(sys.argv[1]), int(os.environ["RANK"])
    model, start, epochs = train(seed=rank)
    facts = {"start": start, "epochs": epochs, "kind": type(model).__name__, "world_size": dist.get_world_size()}
    facts["launcher"] = ump.get_multi_gpu_status().launcher
    facts["end"] = [p.tolist() for p in ump.unwrap_model(model).parameters()]
    (out / f"plain_{rank}.json").write_text(json.dumps(facts))


if __name__ == "__main__":
    main()
