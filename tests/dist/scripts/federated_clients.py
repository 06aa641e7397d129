"""Clients with data of unequal sizes and a small model with buffers and dropout; started by hand it is a server.

Usage: federated_clients.py OUTPUT_DIR. With the variable KILLS client 0 kills the server in round 3.
"""

import os
import random
import signal
import sys

import torch
from torch import nn

import unsloth_multigpu as ump

NUM_CLIENTS = 5
CONFIG = {"lr": 0.1, "steps": 3}


class Centred(nn.Module):
    """Assigns its running mean again, where BatchNorm writes into it."""

    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(6))

    def forward(self, x):
        if self.training:
            self.mean = 0.5 * self.mean + 0.5 * x.mean(0)
        return x - self.mean


def build():
    layers = nn.Linear(6, 16), nn.BatchNorm1d(16), nn.Dropout(0.2), nn.ReLU(), nn.Linear(16, 3)
    return nn.Sequential(Centred(), *layers)


def build_lora():
    """A tiny Llama of random weights, the same in every process, with an adapter on its projections."""
    from peft import LoraConfig, get_peft_model
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 2, "num_hidden_layers": 2}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=64, max_position_embeddings=32, **sizes))
    return get_peft_model(model, LoraConfig(r=4, lora_alpha=8, target_modules=["v_proj", "down_proj"]))


def descended(model, client, num_rows, batch_size, loss_of):
    """What a client says of its training; `loss_of` takes the places of rows."""
    optimizer = torch.optim.SGD((p for p in model.parameters() if p.requires_grad), lr=client.config["lr"])
    for _ in range(client.config["steps"]):
        optimizer.zero_grad()
        loss = loss_of(torch.randperm(num_rows)[:batch_size])
        loss.backward()
        optimizer.step()
    return num_rows, {"loss": loss.item()}


def train_lora(model, client):
    ids = tokens(client.client_id)
    return descended(model, client, len(ids), 4, lambda rows: model(input_ids=ids[rows], labels=ids[rows]).loss)


def tokens(client_id):
    generator = torch.Generator().manual_seed(client_id)
    return torch.randint(16 * (client_id % 4), 16 * (client_id % 4) + 16, (4 + 2 * client_id, 12), generator=generator)


def samples(client_id):
    generator = torch.Generator().manual_seed(client_id)
    x = torch.randn(8 + 3 * client_id, 6, generator=generator)
    return x, (x[:, :3] + client_id % 2).argmax(1)


def train(model, client):
    if "KILLS" in os.environ and (client.client_id, client.server_round) == (0, 3):
        os.kill(os.getppid(), signal.SIGKILL)
    # How long a client takes has nothing to do with its number or its result.
    for _ in range(random.SystemRandom().randrange(20)):
        torch.ones(100, 100) @ torch.ones(100, 100)
    x, y = (values.to(client.device) for values in samples(client.client_id))
    return descended(model, client, len(x), 8, lambda rows: nn.functional.cross_entropy(model(x[rows]), y[rows]))


def evaluate(model, client):
    x, y = samples(client.client_id)
    with torch.no_grad():
        logits = model(x)
    metrics = {"right": (logits.argmax(1) == y).float().mean().item()}
    return nn.functional.cross_entropy(logits, y).item(), len(x), metrics


def make_server(strategy="fedavg", **options):
    options = {"train_fn": train, "evaluate_fn": evaluate, "num_gpus": 2, **options}
    return ump.create_multigpu_flower_server("clients", build, strategy=strategy, **options)


if __name__ == "__main__":
    from flwr.serverapp.strategy import FedAvg

    with make_server(FedAvg(), num_gpus=1) as server:
        server.fit(NUM_CLIENTS, 4, config=CONFIG, output_dir=sys.argv[1])
