"""Facts of this machine as JSON: `python -m tests.gpu.fact GROUP FILE`.

Each fact stands alone: one that fails is recorded with its error, the others go on, and the exit code is 1.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from tests.gpu.card import of_ranks
from tests.helpers.run import PLAIN, Finished, run_python

SCRIPT, SUPERVISED = (Path(__file__).with_name(f"{name}.py") for name in ("training", "supervised"))
MESSAGE_CHARACTERS = 1500
DEVICE = os.environ.get("GPU_KIT_DEVICE", "cuda")
IS_TINY = os.environ.get("GPU_KIT_TINY") == "1"
Fact = Callable[[], Any]


def collect(path: Path, facts: Iterable[Fact]) -> int:
    """Writes what each function returns after every one of them; returns the exit code."""
    found: dict[str, Any] = {}
    code = 0
    for fact in facts:
        begin_s = time.perf_counter()
        try:
            found[fact.__name__] = fact()
        except Exception as error:
            traceback.print_exc()
            found[fact.__name__] = {"error": f"{type(error).__name__}: {error}"[:600]}
            code = 1
        print(f"{fact.__name__}: {found[fact.__name__]} ({time.perf_counter() - begin_s:.1f} s)", flush=True)
        path.write_text(json.dumps(found, indent=1))
    return code


def rank() -> dict[str, Any]:
    """What a rank that our launcher started and watches finds on the card; see `supervised.py`."""
    out = Path.cwd() / "supervised.json"
    run = subprocess.run([sys.executable, SUPERVISED, out], capture_output=True, text=True, check=False)
    if run.returncode:
        raise RuntimeError(f"exit code {run.returncode}: {run.stderr[-900:]}")
    return dict(json.loads(out.read_text()))


def stopwatch() -> dict[str, float]:
    """A lap of the stopwatch beside the wall clock: forward and backward of eight layers, in ms."""
    import torch
    from torch import nn

    from unsloth_multigpu.deal.measure import Stopwatch

    width, rows = (64, 8) if IS_TINY else (4096, 2048)
    model = nn.Sequential(*(nn.Linear(width, width) for _ in range(8))).to(DEVICE)
    watch, inputs = Stopwatch(torch.device(DEVICE)), torch.randn(rows, width, device=DEVICE)
    lap_s = wall_s = 0.0
    for _ in range(5):
        synchronize()
        begin_s = time.perf_counter()
        with watch.timing(model):
            model(inputs).sum().backward()
        synchronize()
        wall_s = time.perf_counter() - begin_s
        assert watch.lap is not None
        lap_s = watch.lap.seconds()
    if not 0.3 * wall_s < lap_s <= 1.05 * wall_s:
        raise RuntimeError(f"lap {lap_s} s, wall clock {wall_s} s")
    return {"lap_ms": round(1e3 * lap_s, 3), "wall_ms": round(1e3 * wall_s, 3)}


def synchronize() -> None:
    if DEVICE == "cuda":
        import torch

        torch.cuda.synchronize()


def recompiled() -> dict[str, Any]:
    """Graphs compiled at each number of rows: as Unsloth marks them, and as a plan hands them to the model."""
    import torch
    from torch._dynamo.utils import counters

    from unsloth_multigpu.step.passes import free_rows

    found: dict[str, Any] = {}
    for arm in ("rows that stay", "rows that are free"):
        torch._dynamo.reset()
        layers = [torch.nn.Embedding(64, 128), torch.nn.Linear(128, 128), torch.nn.GELU(), torch.nn.Linear(128, 64)]
        model = torch.compile(torch.nn.Sequential(*layers).to(DEVICE), backend="aot_eager" if IS_TINY else "inductor")
        found[arm] = {}
        for rows in (4, 8, 2, 3, 6, 5, 1, 7):
            ids = torch.randint(64, (rows, 32), device=DEVICE)
            torch._dynamo.mark_static(ids, 0)
            if arm == "rows that are free":
                free_rows([{"input_ids": ids}])
            before = counters["stats"]["unique_graphs"]
            model(ids).sum().backward()
            found[arm][str(rows)] = counters["stats"]["unique_graphs"] - before
    return found


def host_waits() -> dict[str, Any]:
    """How often the host waits for the device in an optimizer step, by line: without ours, and in rank 0 of two."""
    return {"without": finished(0, "waits"), "ours": finished(2, "waits")}


def loss_scale() -> dict[str, Any]:
    """fp16: scales and gradient norms of one process and of two ranks."""
    return {"one_process": finished(1, "fp16"), "ours": finished(2, "fp16")}


def beyond_vocabulary() -> dict[str, Any]:
    """What the user sees where a token is none of the model's: on a card, a device-side assert."""
    return failed("beyond_vocabulary")


def out_of_memory() -> dict[str, Any]:
    """What the user sees where a micro-batch of one rank finds no memory."""
    return failed("out_of_memory")


def finished(num_ranks: int, kind: str) -> dict[str, Any]:
    run, out = train(num_ranks, kind)
    if run.code:
        raise RuntimeError(f"{kind}, {num_ranks} rank(s): exit code {run.code}: {run.err[-900:]}")
    return dict(json.loads(out.read_text()))


def failed(kind: str) -> dict[str, Any]:
    """Exit code, and the message that ends what the user sees."""
    run, _ = train(2, kind)
    lines = [line for line in run.err.splitlines() if line.startswith(("unsloth_multigpu: rank ", "Hint: "))]
    return {"code": run.code, "message": "\n".join(lines)[-MESSAGE_CHARACTERS:]}


def train(num_ranks: int, kind: str) -> tuple[Finished, Path]:
    """Runs `training.py`; 0 ranks = without the line."""
    out = Path.cwd() / f"{kind}_{num_ranks}.json"
    run = run_python([SCRIPT, str(num_ranks), kind, out], Path.cwd(), {**PLAIN, **of_ranks(max(1, num_ranks))})
    sys.stderr.write(run.err)
    return run, out


GROUPS: dict[str, tuple[Fact, ...]] = {
    "device": (rank, stopwatch),
    "recompiled": (recompiled,),
    "waits": (host_waits,),
    "fp16": (loss_scale,),
    "beyond_vocabulary": (beyond_vocabulary,),
    "out_of_memory": (out_of_memory,),
}

if __name__ == "__main__":
    sys.exit(collect(Path(sys.argv[2]), GROUPS[sys.argv[1]]))
