"""How far is mean(B) mean(A) from mean(B A), and does it matter? Three ways to average LoRA clients, on the CPU.

    python examples/experiments/federated_aggregation.py            # about a minute and a half
    python examples/experiments/federated_aggregation.py --quick    # seconds; its losses mean little

Six clients fine-tune a tiny Llama that has read half of Python's own help; each has topics of its own from the other
half. After each round: what the plain mean of A and B misses of the mean of the clients' products, what the nearest
product of the same rank misses, and the loss on held-out text of all clients' topics. Prints a table in Markdown.
Needs flwr, transformers and peft.
"""

from __future__ import annotations

import argparse
import copy
import random
import statistics
import sys
import tempfile
from pathlib import Path
from pydoc_data.topics import topics as python_help

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
from flwr.app import ArrayRecord
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer, logging

from examples.tiny_model import build_tiny
from unsloth_multigpu.federated.aggregation import aggregate_lora, weighted_mean
from unsloth_multigpu.federated.client import ClientModel, client_seed, seeded

CPU = torch.device("cpu")
NUM_CLIENTS, LENGTH, BATCH = 6, 32, 8
VARIANTS = ("mean", "project", "frozen A")


def main() -> None:
    options = parse_options()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    torch.set_num_threads(1)  # The same figures whatever the number of cores.
    with tempfile.TemporaryDirectory() as folder:
        base, clients, held_out = prepare(folder, options.base_steps)
    seeds = range(options.seeds)
    print(f"{NUM_CLIENTS} clients x {options.steps} steps a round, rank {options.rank}, {len(seeds)} seeds", flush=True)
    rows = {variant: [run(variant, base, clients, held_out, options, seed) for seed in seeds] for variant in VARIANTS}
    print_table(rows, options.rounds)


def prepare(folder: str, num_steps: int) -> tuple[nn.Module, list[torch.Tensor], torch.Tensor]:
    """The base model, each client's rows (rows, LENGTH) of its own topics, and held-out rows of all these topics."""
    path = build_tiny(Path(folder) / "tiny", vocab_size=600)
    tokenizer = AutoTokenizer.from_pretrained(path)
    names = sorted(python_help)
    random.Random(0).shuffle(names)

    def rows_of(chosen: list[str]) -> torch.Tensor:
        tokens = tokenizer("\n".join(python_help[name] for name in chosen))["input_ids"]
        return torch.tensor(tokens[: len(tokens) // LENGTH * LENGTH]).view(-1, LENGTH)

    half = len(names) // 2
    base = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    with seeded(0, CPU):
        fit(base, rows_of(names[:half]), num_steps, 3e-3)
    parts = [rows_of(names[half + client :: NUM_CLIENTS]) for client in range(NUM_CLIENTS)]
    cut = min(len(part) for part in parts) // 4
    return base, [part[cut:] for part in parts], torch.cat([part[:cut][:24] for part in parts])


def run(variant: str, base: nn.Module, clients: list[torch.Tensor], held_out: torch.Tensor, options, seed: int):
    """Returns per round (what the plain mean misses, what the variant misses, loss); round 0 is the base."""
    model = ClientModel(lambda: with_adapter(base, options.rank, is_a_frozen=variant == "frozen A"), seed)
    model.build(CPU)
    arrays = model.read()
    weights = [len(rows) for rows in clients]
    results = [(None, None, loss_of(model.prepare(arrays, CPU), held_out))]
    for server_round in range(1, options.rounds + 1):
        replies = [
            turn(model, arrays, rows, options, client_seed(seed, server_round, client))
            for client, rows in enumerate(clients)
        ]
        averaged = weighted_mean(replies, weights, list(arrays))
        arrays, plain = aggregate_lora(replies, weights, averaged, mode="mean")
        missed = plain
        if variant == "project":
            arrays, missed = aggregate_lora(replies, weights, averaged, mode=variant)
        loss = loss_of(model.prepare(arrays, CPU), held_out)
        results.append((plain, missed, loss))
    return results


def turn(model: ClientModel, arrays: ArrayRecord, rows: torch.Tensor, options, seed: int) -> ArrayRecord:
    trained = model.prepare(arrays, CPU)
    with seeded(seed, CPU):
        fit(trained, rows, options.steps, options.learning_rate)
    result = model.read()
    model.release()
    return result


def with_adapter(base: nn.Module, rank: int, *, is_a_frozen: bool) -> nn.Module:
    targets = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    config = LoraConfig(r=rank, lora_alpha=2 * rank, target_modules=targets, task_type="CAUSAL_LM")
    model = get_peft_model(copy.deepcopy(base), config)
    for name, parameter in model.named_parameters():
        if is_a_frozen and ".lora_A." in name:
            parameter.requires_grad_(False)
    return model


def fit(model: nn.Module, rows: torch.Tensor, num_steps: int, learning_rate: float) -> None:
    model.train()
    optimizer = torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), learning_rate, weight_decay=0.0)
    for _ in range(num_steps):
        batch = rows[torch.randint(len(rows), (BATCH,))]
        model(input_ids=batch, labels=batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()


@torch.no_grad()
def loss_of(model: nn.Module, rows: torch.Tensor) -> float:
    """Mean loss of the next token, in nats."""
    model.eval()
    return float(model(input_ids=rows, labels=rows).loss)


def print_table(rows: dict[str, list], num_rounds: int) -> None:
    print(
        "\n| averaging | round | misses of mean(B A) | plain mean would miss | held-out loss |\n|---|---|---|---|---|"
    )
    for variant, runs in rows.items():
        for server_round in range(num_rounds + 1):
            plain, missed, losses = zip(*(one[server_round] for one in runs), strict=True)
            facts = (percent(missed), percent(plain), " ".join(f"{value:.4f}" for value in spread(losses)))
            print(f"| {variant} | {server_round} | {' | '.join(facts)} |")
    print("\nMedian, then lowest and highest of the seeds.")


def spread(values) -> tuple[float, float, float]:
    return statistics.median(values), min(values), max(values)


def percent(values) -> str:
    return "-" if None in values else f"{100 * statistics.median(values):.1f} %"


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=20, help="of each client in a round")
    parser.add_argument("--rank", type=int, default=8)
    parser.add_argument("--learning-rate", type=float, default=2e-3)
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--base-steps", type=int, default=300, help="the base model's own training")
    parser.add_argument("--quick", action="store_true", help="one seed, few steps")
    options = parser.parse_args()
    if options.quick:
        options.rounds, options.steps, options.seeds, options.base_steps = 2, 3, 1, 5
    return options


if __name__ == "__main__":
    main()
