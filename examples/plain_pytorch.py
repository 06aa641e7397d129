"""A plain PyTorch loop, no Trainer: a small network learns to spell Python's help texts.

python examples/plain_pytorch.py                             # every GPU; one process where there is none
python examples/plain_pytorch.py --num-gpus 2                # 2 ranks, on the CPU where there is no GPU
torchrun --nproc-per-node 2 examples/plain_pytorch.py

All three print the same losses.
"""

import argparse
from pathlib import Path
from pydoc_data.topics import topics

import unsloth_multigpu as ump

parser = argparse.ArgumentParser()
parser.add_argument("--num-gpus", type=int)
parser.add_argument("--epochs", type=int, default=3)
options = parser.parse_args()

ump.enable_multi_gpu(num_gpus=options.num_gpus)  # The line: starts this command once for each device.

import torch
from torch import nn

CONTEXT = 16
PATH = Path("outputs/plain_pytorch/model.pt")

text = "".join(topics[name] for name in sorted(topics))[:340_000]
alphabet = sorted(set(text))
number = {letter: i for i, letter in enumerate(alphabet)}
# (num_pieces, CONTEXT + 1): letters, and the one that follows them.
pieces = torch.tensor([number[letter] for letter in text]).unfold(0, CONTEXT + 1, CONTEXT + 1)
is_held_out = torch.arange(len(pieces)) % 10 == 0
train, held_out = pieces[~is_held_out], pieces[is_held_out]


def build() -> nn.Module:
    """Letters (batch, CONTEXT) -> scores of the next one (batch, letters of the alphabet)."""
    size = 24
    return nn.Sequential(
        nn.Embedding(len(alphabet), size),
        nn.Flatten(),
        nn.Linear(CONTEXT * size, 256),
        nn.GELU(),
        nn.Linear(256, len(alphabet)),
    )


@torch.no_grad()
def held_out_loss(model: nn.Module) -> float:
    """Without the wrapper, so that a rank can do it alone."""
    rows = held_out.to(next(model.parameters()).device)
    return float(nn.functional.cross_entropy(ump.unwrap_model(model)(rows[:, :-1]), rows[:, -1]))


torch.manual_seed(0)
model = ump.wrap_model_multi_gpu(build())  # On this rank's device, with the weights of rank 0.
device = next(model.parameters()).device
loader = ump.distributed_loader(train, batch_size=128)  # 128 samples of all ranks together.
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
status = ump.get_multi_gpu_status()

if status.rank == 0:
    print(f"{len(train)} samples, {len(loader)} steps per epoch, world_size={status.world_size} device={device}")
for epoch in range(options.epochs):
    for rows in loader:
        rows = rows.to(device)
        loss = nn.functional.cross_entropy(model(rows[:, :-1]), rows[:, -1])
        # 1.0, but for a step that does not divide by the number of ranks.
        (loss * loader.loss_weight).backward()
        optimizer.step()
        optimizer.zero_grad()
    if status.rank == 0:
        print(f"epoch {epoch + 1}: loss on held-out text {held_out_loss(model):.4f}")

if ump.is_main_process():
    PATH.parent.mkdir(parents=True, exist_ok=True)
    torch.save(ump.unwrap_model(model).state_dict(), PATH)
    again = build().to(device)
    again.load_state_dict(torch.load(PATH, map_location=device))
    print(f"read back from {PATH}: {held_out_loss(again):.4f}")
