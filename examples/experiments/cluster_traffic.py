"""What goes over the wire between machines in a step, on paper: DDP, sharded and DiLoCo, for 16 and 1,024 GPUs.

    python examples/experiments/cluster_traffic.py        # the tables of docs/cluster.md

Nothing is measured here. The formula is a lower bound: bytes over bandwidth, no latency, no overlap with computing, all
of the link's bandwidth.
"""

from __future__ import annotations

from dataclasses import dataclass

GPUS_PER_NODE = 8
GPUS = (16, 1024)
LINKS_GBIT = (10, 100, 400)
LORA_RANK = 16
DILOCO_EVERY_STEPS = (16,)
# A dense 16-bit matrix product on an H100, and the share of it that a training usually reaches.
PEAK_FLOPS = 989e12
UTILISATION = 0.4


@dataclass(frozen=True)
class Model:
    """A dense transformer.

    Args:
        num_weights: All of them.
        num_lora_weights: Of adapters of rank 16 on all linear layers.
    """

    name: str
    num_weights: int
    num_lora_weights: int


def lora_weights(hidden: int, kv: int, intermediate: int, num_layers: int, rank: int = LORA_RANK) -> int:
    """Weights of adapters on q, k, v, o, gate, up and down: rank x (inputs + outputs) of each."""
    attention = 2 * (hidden + hidden) + 2 * (hidden + kv)
    return rank * num_layers * (attention + 3 * (hidden + intermediate))


# Llama 3.1.
MODELS = (
    Model("8B", 8_030_261_248, lora_weights(4096, 1024, 14336, 32)),
    Model("70B", 70_553_706_496, lora_weights(8192, 1024, 28672, 80)),
)


def ring_bytes(size_bytes: float, num_gpus: int) -> float:
    """What one pass around a ring of all GPUs sends over each machine's link: (N - 1) / N of the data.

    An all-gather and a reduce-scatter are one pass, an all-reduce is two. One machine has no link to cross.
    """
    return 0.0 if num_gpus <= GPUS_PER_NODE else (num_gpus - 1) / num_gpus * size_bytes


def step_bytes(model: Model, method: str, num_gpus: int, *, lora: bool, accumulation: int = 1) -> float:
    """Bytes over each machine's link, in each direction, in an optimizer step; the mean where ranks meet seldom.

    Args:
        method: "DDP", "sharded", or "DiLoCo / K" with K steps between two meetings.
        accumulation: Micro-batches of a step.
    """
    # LoRA's adapters are trained in fp32, all weights in bf16. Frozen weights are bf16.
    trained = model.num_lora_weights if lora else model.num_weights
    gradient_bytes = trained * (4 if lora else 2)
    if method == "DDP":
        return 2 * ring_bytes(gradient_bytes, num_gpus)
    if method == "sharded":
        # Each micro-batch gathers the weights for its forward and for its backward; gradients are reduced once.
        gathered = 2 * accumulation * (model.num_weights * 2 + (trained * 4 if lora else 0))
        return ring_bytes(gathered + gradient_bytes, num_gpus)
    # Weights are averaged in fp32.
    return 2 * ring_bytes(trained * 4, num_gpus) / int(method.partition("/")[2])


def methods() -> tuple[str, ...]:
    """The rows of a table."""
    return ("DDP", "sharded", *(f"DiLoCo / {every}" for every in DILOCO_EVERY_STEPS))


def step_seconds(num_bytes: float, link_gbit: float) -> float:
    """Seconds that `num_bytes` take on a link of `link_gbit` Gbit/s."""
    return num_bytes * 8 / (link_gbit * 1e9)


def compute_seconds(model: Model, num_tokens: int, *, lora: bool) -> float:
    """Seconds of computing for `num_tokens` on one GPU: 6 operations a weight and token, 4 where weights are frozen."""
    return (4 if lora else 6) * model.num_weights * num_tokens / (PEAK_FLOPS * UTILISATION)


def traffic_table() -> str:
    """GB over each machine's link in a step by the number of GPUs, and seconds on the largest by the link."""
    heads = [*(f"GB, {n:,} GPUs" for n in GPUS), *(f"seconds, {link} Gbit/s" for link in LINKS_GBIT)]
    lines = [f"| In a step | {' | '.join(heads)} |", "|---|" + "---|" * len(heads)]
    for model, lora, method in _rows():
        sizes = [step_bytes(model, method, n, lora=lora) for n in GPUS]
        cells = [_number(size / 1e9) for size in sizes]
        cells += [_number(step_seconds(sizes[-1], link)) for link in LINKS_GBIT]
        lines.append(f"| {_name(model, lora)}, {method} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def compute_table(num_tokens: int = 8192) -> str:
    """Seconds of computing in a step, to compare with."""
    lines = [f"| Seconds of computing, {num_tokens:,} tokens on each GPU | LoRA | full |", "|---|---|---|"]
    for model in MODELS:
        cells = [_number(compute_seconds(model, num_tokens, lora=lora)) for lora in (True, False)]
        lines.append(f"| {model.name} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def page() -> str:
    """What docs/cluster.md has between its marks."""
    return "\n\n".join((traffic_table(), compute_table()))


def _rows() -> list[tuple[Model, bool, str]]:
    return [(model, lora, method) for model in MODELS for lora in (True, False) for method in methods()]


def _name(model: Model, lora: bool) -> str:
    return f"{model.name} {'LoRA' if lora else 'full'}"


def _number(value: float) -> str:
    """Three digits, never as 1e-05."""
    if value == 0:
        return "0"
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}" if value >= 0.001 else f"{value:.5f}"


if __name__ == "__main__":
    print(page())
