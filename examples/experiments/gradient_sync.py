"""Why did manual all-reduce "hardly learn" and the parameter server "learn best"? Mistakes put back one at a time.

    python examples/experiments/gradient_sync.py            # 4 to 5 minutes on 2 cores; downloads nothing
    python examples/experiments/gradient_sync.py --quick    # a few steps of each

Four CPU ranks train the same model on the same samples in several ways, one after the other: DDP, the product's own
strategies, and these with a mistake. The page, its pictures and its figures go to docs/experiments. Every sentence of
the verdict is chosen by the figures. Ends with an error where a strategy is not DDP, or where the replica
proof misses a mistake that lets the ranks' weights drift apart.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import sys
import time
from pathlib import Path
from typing import Any

import unsloth_multigpu as ump

NUM_RANKS = 4
OUTPUT = Path(__file__).resolve().parents[2] / "docs" / "experiments"
TASK_NAMES = ("digits", "momentum", "cnn", "text")
QUICK_EPOCHS, QUICK_TASKS = 1, ("digits",)


def main() -> None:
    options = parse_options()
    begin = time.perf_counter()

    ump.enable_multi_gpu(num_gpus=NUM_RANKS, device="cpu")  # The line: starts this command once for each rank.

    import torch
    from gradient_training import run_task

    from unsloth_multigpu.group.manager import DDPManager
    from unsloth_multigpu.wire.identity import read_identity

    torch.set_num_threads(1)
    identity, config = read_identity(os.environ), ump.get_active_config()
    assert identity is not None
    assert config is not None
    manager = DDPManager(identity, config)
    manager.open_group()
    results: dict[str, Any] = {
        "command": shlex.join(["python", "examples/experiments/gradient_sync.py", *sys.argv[1:]]),
        "torch": torch.__version__,
        "num_ranks": NUM_RANKS,
        "tasks": {name: run_task(name, options, manager) for name in options.task},
    }
    broken = []
    if identity.rank == 0:
        results["total_s"] = round(time.perf_counter() - begin, 1)
        broken = write(results, options.out)
    # All end together. The manager keeps the handles of these last exchanges: a thread of gloo that lets go of one in a
    # process that is just ending aborts it.
    manager.gather_json("end")
    torch.distributed.destroy_process_group()
    if broken:
        sys.exit("\n".join(broken))


def write(results: dict[str, Any], folder: Path) -> list[str]:
    """Writes figures, pictures and page; returns where the product did not keep its word."""
    from gradient_page import draw, page
    from gradient_result import broken_promises

    folder.mkdir(parents=True, exist_ok=True)
    (folder / "gradient_sync.json").write_text(json.dumps(results, indent=1) + "\n")
    for name, task in results["tasks"].items():
        draw(task, folder / f"gradient_sync_{name}.png")
    (folder / "gradient_sync.md").write_text(page(results))
    print(f"\nWritten: {folder / 'gradient_sync.md'} and its .json and .png files, {results['total_s']:.0f} s")
    return broken_promises(results)


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--task", nargs="+", choices=TASK_NAMES, help="what to learn [all of them]")
    parser.add_argument("--seeds", type=int, default=3, help="runs of each variant; 1 but for digits [3]")
    parser.add_argument("--epochs", type=int, help="passes over the samples [12 for digits, fewer for the others]")
    parser.add_argument("--quick", action="store_true", help="digits only, one epoch, one seed")
    parser.add_argument("--out", type=Path, default=OUTPUT, help="folder of page, figures and pictures")
    options = parser.parse_args()
    if options.quick:
        options.seeds, options.epochs = 1, options.epochs or QUICK_EPOCHS
    options.task = options.task or (QUICK_TASKS if options.quick else TASK_NAMES)
    if options.seeds < 1 or (options.epochs or 1) < 1:
        parser.error(f"--seeds {options.seeds} --epochs {options.epochs}: expected 1 or more")
    return options


if __name__ == "__main__":
    main()
