"""The model and the training of a client in a benchmark: the same functions for processes and for threads.

A module of its own, since the arm is a program: functions of `__main__` would travel to a slot by value.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

from unsloth_multigpu.tools.bench.data import make_rows
from unsloth_multigpu.tools.bench.federated_option import FederatedOptions
from unsloth_multigpu.tools.bench.worker import collate, make_model

if TYPE_CHECKING:
    from unsloth_multigpu.federated.client import FederatedClient

# SGD, because with Adam a rounding error in a small gradient can flip the sign of a step, and arms would differ.
_LEARNING_RATE = 0.05
_rows = functools.lru_cache(maxsize=1)(make_rows)


def build_model(options: FederatedOptions) -> Any:
    """A client's model."""
    return make_model(options.llama, max(map(len, _rows(options.llama))))


def train_client(options: FederatedOptions, model: Any, client: FederatedClient) -> tuple[int, dict[str, float]]:
    """One client's part of a round: some steps of SGD over its own rows. Draws no random numbers."""
    import torch

    llama = options.llama
    rows = [{"input_ids": row} for row in _rows(llama)[client.client_id :: client.num_clients]]
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], _LEARNING_RATE)
    losses = []
    for begin in range(0, len(rows), llama.batch_size):
        batch = collate(rows[begin : begin + llama.batch_size], num_given=0)
        with torch.autocast(client.device.type, torch.bfloat16, enabled=llama.dtype == "bf16"):
            loss = model(**{name: value.to(client.device) for name, value in batch.items()}).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return len(rows), {"loss": float(torch.stack(losses).mean())}
