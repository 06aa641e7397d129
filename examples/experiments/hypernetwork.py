"""Do two GPUs learn better than one? A HyperNetwork classifier in the four experiments that answer it, and controls.

    python examples/experiments/hypernetwork.py                       # both tasks, 2 CPU ranks, about 3 minutes
    python examples/experiments/hypernetwork.py --quick --out /tmp    # a few seconds; its accuracies mean nothing

A report found 42.76 % on two GPUs against 36.13 % on one, once each. Here each condition runs with several seeds, on
text (the next character of Python's own help) and on scikit-learn's digits; one thing changes at a time. Writes
hypernetwork.md, .json and .png. Needs the extra `experiments`.
"""

from __future__ import annotations

import argparse
import logging
import platform
import shlex
import sys
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist
from hypernetwork_page import draw, to_json, to_markdown
from hypernetwork_result import WEIGHT_PAIRS, Results
from hypernetwork_training import Arm, Run, Task, gather, load_task, train

import unsloth_multigpu as ump

OUTPUT = Path(__file__).resolve().parents[2] / "docs" / "experiments"
TASKS = ("text", "digits")
ARMS = (
    Arm("one 128", "one process, batch 128", batch_size=128),
    Arm("one 256", "one process, batch 256 (experiment 3)"),
    Arm("simulated", "one process, gradients of two half batches averaged (experiment 1)", num_parts=2),
    Arm("ddp", "DDP, 2 ranks x 128 (experiment 2)", num_parts=2, is_ddp=True),
    Arm("ddp same seed", "one seed on both ranks (experiment 2)", num_parts=2, is_ddp=True, same_streams=True),
    Arm("split 128", "in a distributed sampler's order (experiment 4)", 128, samples="split"),
    Arm("half 128", "the share of rank 0 alone", batch_size=128, samples="half"),
    Arm("one 256, no dropout", "as named", dropout=0.0),
    Arm("ddp, no dropout", "as named", num_parts=2, is_ddp=True, dropout=0.0),
    Arm("one 256, 2x epochs", "as named", epochs_factor=2),
)
SWEPT = ("one 128", "one 256", "ddp")


def main() -> None:
    options = parse_options()
    ump.enable_multi_gpu(num_gpus=2, device="cpu")  # The line: this command starts again as two ranks.

    logging.getLogger("unsloth_multigpu").setLevel(logging.WARNING)  # It names each of the many models that it wraps.
    torch.set_num_threads(1)  # The same figures whatever the number of cores.
    rank = ump.get_multi_gpu_status().rank
    tasks = TASKS if options.task == "both" else (options.task,)
    results = [
        measure(load_task(name, num_epochs=options.epochs, quick=options.quick), options.seeds, rank) for name in tasks
    ]
    if rank == 0:
        publish(results, options.out)
    dist.barrier()  # A rank that ends with an error ends the others, and rank 0 would not have written.
    dist.destroy_process_group()
    if not all(result.is_exact for result in results):
        sys.exit("DDP and its simulation in one process do not agree; see the conclusion above.")


def measure(task: Task, num_seeds: int, rank: int) -> Results:
    """Every condition with every seed. What needs one process is shared out to the ranks; then both do DDP together."""
    arms = [*ARMS, *sweep(task)]
    jobs = [(arm, seed) for arm in arms for seed in range(num_seeds)]
    # Long ones first, in turn: both ranks finish at about the same time.
    alone = sorted((job for job in jobs if not job[0].is_ddp), key=lambda job: job[0].batch_size / job[0].epochs_factor)
    together = [job for job in jobs if job[0].is_ddp]
    if rank == 0:
        print(f"{task.name}: {len(alone)} trainings in one process, {len(together)} by DDP", flush=True)
    runs: list[Run] = []
    for arm, seed in alone[rank::2] + together:
        run = train(task, arm, seed, rank)
        is_compared = any(arm.name in pair for pair in WEIGHT_PAIRS)
        runs.append(run if is_compared else replace(run, weights=torch.empty(0)))
    return Results(task, arms, gather(runs))


def sweep(task: Task) -> list[Arm]:
    """Batch 128, batch 256 and DDP with other learning rates."""
    swept = [arm for arm in ARMS if arm.name in SWEPT]
    return [
        replace(
            arm, name=f"{arm.name}, lr x {factor:g}", text=f"{arm.text.split(' (')[0]}, lr x {factor:g}", factor=factor
        )
        for factor in task.factors
        if factor != 1
        for arm in swept
    ]


def publish(results: list[Results], out: Path) -> None:
    out.mkdir(parents=True, exist_ok=True)
    facts = {
        "command": shlex.join(["python", "examples/experiments/hypernetwork.py", *sys.argv[1:]]),
        "python": platform.python_version(),  # The text is its own help.
        "torch": torch.__version__,
    }
    for name, text in (("md", to_markdown(results, facts)), ("json", to_json(results, facts))):
        (out / f"hypernetwork.{name}").write_text(text, encoding="utf-8")
    draw(results, out / "hypernetwork.png")
    for result in results:
        print(f"\n{result.task.name}\n" + "\n".join(f"- {line}" for line in result.conclusion))
    print(f"\n{out / 'hypernetwork.md'}", flush=True)


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--task", choices=(*TASKS, "both"), default="both", help="[both]")
    parser.add_argument("--seeds", type=int, help="trainings of each condition, 2 or more [6; --quick: 2]")
    parser.add_argument("--epochs", type=int, help="[text 2, digits 12; --quick: 2]")
    parser.add_argument("--out", type=Path, default=OUTPUT, help="folder [docs/experiments]")
    parser.add_argument("--quick", action="store_true", help="a small part of the data, to see that it works")
    options = parser.parse_args()
    options.seeds = (2 if options.quick else 6) if options.seeds is None else options.seeds
    if options.seeds < 2 or (options.epochs is not None and options.epochs < 1):
        parser.error("--seeds must be 2 or more, --epochs 1 or more")
    return options


if __name__ == "__main__":
    main()
