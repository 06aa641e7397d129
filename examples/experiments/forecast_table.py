"""What an 8B model would do on 8 to 1,024 GPUs, on paper: DDP, sharded and DiLoCo, over several links.

    python examples/experiments/forecast_table.py        # the tables of docs/forecast.md

Nothing is measured here: seconds of a token come from the operations of a forward and a backward pass and an assumed
share of an H100's peak, as in cluster_traffic.py. Plans and links are those of `unsloth-multigpu forecast`.
"""

from __future__ import annotations

import dataclasses
import random

from cluster_traffic import MODELS, PEAK_FLOPS, UTILISATION

from unsloth_multigpu.step.cost import CostModel
from unsloth_multigpu.step.forecast import BACKWARD, BACKWARD_FROZEN, Mode, Workload, forecast_time
from unsloth_multigpu.step.link import NVLINK, Network, ethernet

GPUS = (8, 16, 64, 256, 1024)
LINKS_GBIT = (10, 100, 400)
SAMPLES, ROWS, NUM_STEPS = 1024, 4, 8
# Of log-normal lengths, in tokens.
MEDIAN, SIGMA, LONGEST = 512, 0.7, 4096
DILOCO_EVERY_STEPS = 64
# Of an optimizer step and all that a rank does beside computing.
UPDATE_S = {"LoRA": 0.02, "full": 0.1}
NUM_LAYERS = 32


def workload(kind: str) -> Workload:
    """Llama 3.1 8B with 1,024 ragged samples in a step."""
    draw = random.Random(0)
    model = MODELS[0]
    lengths = [min(LONGEST, max(16, round(MEDIAN * draw.lognormvariate(0, SIGMA)))) for _ in range(SAMPLES * NUM_STEPS)]
    cost = CostModel(overhead_tokens=128.0, floor_tokens=512.0)
    operations = (4 if kind == "LoRA" else 6) * model.num_weights
    return Workload(
        cost=cost,
        timing=cost,
        token_s=operations / (PEAK_FLOPS * UTILISATION),
        update_s=UPDATE_S[kind],
        steps=tuple(tuple(lengths[k * SAMPLES : (k + 1) * SAMPLES]) for k in range(NUM_STEPS)),
        sizes=(ROWS,) * (SAMPLES // ROWS),
        num_steps=1000,
        gradient_bytes=4 * model.num_lora_weights if kind == "LoRA" else 2 * model.num_weights,
        weight_bytes=2 * model.num_weights,
        num_units=NUM_LAYERS + 1,
        hides=BACKWARD_FROZEN if kind == "LoRA" else BACKWARD,
    )


def main() -> None:
    """Prints the table in Markdown."""
    modes: list[tuple[str, Mode, int]] = [("DDP", "ddp", 1), ("sharded", "sharded", 1), ("DiLoCo / 64", "ddp", 64)]
    for kind in ("LoRA", "full"):
        work = workload(kind)
        print(f"| 8B {kind}: seconds of a step (efficiency) | " + " | ".join(f"{n:,} GPUs" for n in GPUS) + " |")
        print("|---|" + "---|" * len(GPUS))
        for name, mode, every in modes:
            apart = dataclasses.replace(work, exchange="now and then", every_steps=every) if every > 1 else work
            for gbit in LINKS_GBIT:
                network = Network(NVLINK, ethernet(gbit))
                rows = [forecast_time(apart, n, network, mode) for n in GPUS]
                cells = " | ".join(f"{row.step_s:.3g} ({row.efficiency:.0%})" for row in rows)
                print(f"| {name}, {gbit} Gbit/s | {cells} |")
        print()


if __name__ == "__main__":
    main()
