"""What planning a step gains by the cost model, and what it takes (docs/benchmarks.md).

    python examples/experiments/planning.py

Nothing is trained. Lengths are log-normal, as those of `unsloth-multigpu bench`.
"""

from __future__ import annotations

import random
import statistics
import time

from transformers.trainer_pt_utils import BatchRebalanceSampler

from unsloth_multigpu.deal.plan import CostModel, plan_step, step_time

# The overhead and the attention that `bench` measured on two CPU cores.
MEASURED = CostModel(overhead_tokens=40.0, attention=0.0004)


def draw(rng: random.Random, num: int) -> list[int]:
    """Tokens of `num` texts: median about 150, at most 1024."""
    return [min(1024, max(8, round(rng.lognormvariate(5.0, 0.9)))) for _ in range(num)]


def gain(accumulation: int, num_steps: int = 100) -> float:
    """Time of `batch_rebalance` over that of a plan, 2 ranks, 8 samples per device."""
    rng, num, ours, theirs = random.Random(1), 16 * accumulation, 0.0, 0.0
    for _ in range(num_steps):
        lengths = draw(rng, num)
        sampler = [BatchRebalanceSampler(lengths, num, 2, accumulation, shuffle=False, rank=rank) for rank in (0, 1)]
        plan = plan_step(lengths, (1.0, 1.0), MEASURED, 8 * max(lengths))
        ours += step_time(plan, lengths, (1.0, 1.0), MEASURED)
        theirs += step_time([list(batches) for batches in sampler], lengths, (1.0, 1.0), MEASURED)
    return theirs / ours


def plan_ms(samples: int, ranks: int = 8, num_steps: int = 20) -> float:
    """Milliseconds of one core for a plan, median of the steps."""
    rng, times = random.Random(1), []
    for _ in range(num_steps):
        lengths = draw(rng, samples)
        start = time.process_time()
        plan_step(lengths, (1.0,) * ranks, CostModel(32.0, 0.0, 1 / 4000), 8 * max(lengths))
        times.append(time.process_time() - start)
    return 1000 * statistics.median(times)


if __name__ == "__main__":
    for accumulation in (1, 4):
        print(f"accumulation {accumulation}: a plan is {gain(accumulation):.2f} times as fast as batch_rebalance")
    for samples in (64, 256, 1024, 4096):
        print(f"{samples} samples, 8 ranks: planned in {plan_ms(samples):.1f} ms")
