"""Facts of this machine as JSON: `python -m tests.gpu.fact GROUP FILE`.

Each fact stands alone: one that fails is recorded with its error, the others go on, and the exit code is 1.
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import random
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from tests.gpu.trained import beyond_vocabulary, host_waits, loss_scale, out_of_memory, processes

DEVICE = os.environ.get("GPU_KIT_DEVICE", "cuda")
IS_TINY = os.environ.get("GPU_KIT_TINY") == "1"
LIBRARIES = (
    *("torch", "triton", "transformers", "trl", "accelerate", "peft", "datasets", "wrapt", "unsloth", "unsloth_zoo"),
    *("bitsandbytes", "torchao", "cut_cross_entropy", "xformers", "flash_attn"),
)
# First imports of a process; Unsloth last, because it changes the others.
IMPORTED = ("unsloth_multigpu", "torch", "transformers", "datasets", "bitsandbytes", "unsloth")
IMPORT_LIMIT_S = 100

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


def versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for name in LIBRARIES:
        with contextlib.suppress(PackageNotFoundError):
            found[name] = version(name)
    return found


def imports() -> dict[str, float]:
    """Seconds that each library takes in a new process."""
    code = "import sys, time; t = time.perf_counter(); __import__(sys.argv[1]); print(time.perf_counter() - t)"
    found = {}
    for name in IMPORTED:
        run = subprocess.run(
            [sys.executable, "-c", code, name], capture_output=True, text=True, timeout=IMPORT_LIMIT_S, check=False
        )
        if run.returncode:
            raise RuntimeError(f"import {name}: {run.stderr[-500:]}")
        found[name] = round(float(run.stdout.split()[-1]), 2)
    return found


def torch_build() -> dict[str, Any]:
    import torch
    import torch.distributed as dist

    has_nccl = dist.is_available() and dist.is_nccl_available()
    return {
        "cuda": torch.version.cuda,
        "num_cards": torch.cuda.device_count(),
        "nccl": torch.cuda.nccl.version() if has_nccl else None,
    }


def rank() -> dict[str, Any]:
    """What a rank that our launcher started and watches finds on the card; see `supervised.py`."""
    folder = Path.cwd()
    script, out = Path(__file__).with_name("supervised.py"), folder / "supervised.json"
    run = subprocess.run([sys.executable, str(script), str(out)], capture_output=True, text=True, check=False)
    if run.returncode:
        raise RuntimeError(f"exit code {run.returncode}: {run.stderr[-900:]}")
    return dict(json.loads(out.read_text()))


def gloo() -> list[str]:
    """Collectives of gloo that work on tensors of the device: ranks that share a card need them."""
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        tensor = torch.ones(8, device=DEVICE)
        dist.all_reduce(tensor)
        dist.broadcast(tensor, 0)
        dist.all_gather([torch.empty_like(tensor)], tensor)
        dist.barrier()
    finally:
        dist.destroy_process_group()
    return ["all_reduce", "broadcast", "all_gather", "barrier"]


def stopwatch() -> dict[str, float]:
    """A lap of the stopwatch beside the wall clock: forward and backward of eight layers, in ms."""
    import torch
    from torch import nn

    from unsloth_multigpu.step.measure import Stopwatch

    width, rows = (64, 8) if IS_TINY else (4096, 2048)
    model = nn.Sequential(*(nn.Linear(width, width) for _ in range(8))).to(DEVICE)
    watch, inputs = Stopwatch(lambda: model, torch.device(DEVICE)), torch.randn(rows, width, device=DEVICE)
    lap_s = wall_s = 0.0
    with watch.on_model():
        for _ in range(5):
            synchronize()
            begin_s = time.perf_counter()
            watch.start()
            model(inputs).sum().backward()
            lap = watch.lap()
            synchronize()
            wall_s = time.perf_counter() - begin_s
            assert lap is not None
            lap_s = lap.seconds()
    if not 0.3 * wall_s < lap_s <= 1.05 * wall_s:
        raise RuntimeError(f"lap {lap_s} s, wall clock {wall_s} s")
    return {"lap_ms": round(1e3 * lap_s, 3), "wall_ms": round(1e3 * wall_s, 3)}


def synchronize() -> None:
    if DEVICE == "cuda":
        import torch

        torch.cuda.synchronize()


def micro_batch() -> dict[str, Any]:
    """Milliseconds of micro-batches by their shape, and what the planner would find in them."""
    return _costs(has_checkpointing=False)


def micro_batch_with_checkpointing() -> dict[str, Any]:
    return _costs(has_checkpointing=True)


def _costs(*, has_checkpointing: bool) -> dict[str, Any]:
    import torch

    from unsloth_multigpu.step.cost import ANY_COST, CostModel, fit_cost
    from unsloth_multigpu.step.measure import attention_of
    from unsloth_multigpu.tools.bench.option import BenchOptions
    from unsloth_multigpu.tools.bench.worker import make_model

    size, dtype = ("tiny", "fp32") if IS_TINY else ("1b", "bf16")
    options = BenchOptions(model_size=size, dtype=dtype, train="lora")
    model = make_model(options, 1024).to(DEVICE).train()
    if has_checkpointing:
        model.enable_input_require_grads()
        model.gradient_checkpointing_enable({"use_reentrant": False})
    shapes = [(1, 16), (2, 16), (4, 64)]
    if not IS_TINY:
        shapes = [(r, n) for r in (1, 2, 4, 8, 16) for n in (16, 64, 256, 1024) if r * n <= 8192]
    draw = random.Random(0)
    times: dict[tuple[int, int], list[float]] = {shape: [] for shape in shapes}
    for number in range(4):
        draw.shuffle(shapes)
        for shape in shapes:
            ids = torch.randint(16, options.vocab_size, shape, device=DEVICE)
            synchronize()
            begin_s = time.perf_counter()
            with torch.autocast(DEVICE, dtype=torch.bfloat16, enabled=not IS_TINY):
                loss = model(input_ids=ids, labels=ids).loss
            loss.backward()
            synchronize()
            if number:  # The first one of a shape is no usual one.
                times[shape].append(time.perf_counter() - begin_s)
    q = attention_of(model)
    samples = [(r * (n + q * n * n), s) for (r, n), seconds in times.items() for s in seconds]
    found = fit_cost(CostModel(128.0, 512.0, attention=q, possible=ANY_COST), samples)
    by_size = sorted(times, key=lambda shape: shape[0] * shape[1])
    return {
        **{name: getattr(found, name) for name in ("overhead_tokens", "floor_tokens", "attention")},
        "ms of rows x tokens:": {f"{r} x {n}": [round(1e3 * s, 3) for s in times[r, n]] for r, n in by_size},
    }


def recompiled() -> dict[str, Any]:
    """Graphs compiled at each number of rows: as Unsloth marks them, and as a plan hands them to the model."""
    import torch
    from torch._dynamo.utils import counters

    from unsloth_multigpu.step.inputs import free_rows

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


GROUPS: dict[str, tuple[Fact, ...]] = {
    "libraries": (versions, imports, torch_build),
    "device": (rank, gloo, stopwatch),
    "costs": (micro_batch, micro_batch_with_checkpointing),
    "recompiled": (recompiled,),
    "waits": (host_waits,),
    "fp16": (loss_scale,),
    "beyond_vocabulary": (beyond_vocabulary,),
    "out_of_memory": (out_of_memory,),
    "processes": (processes,),
}

if __name__ == "__main__":
    sys.exit(collect(Path(sys.argv[2]), GROUPS[sys.argv[1]]))
