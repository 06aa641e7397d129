"""What do the settings of DistributedDataParallel cost and save? Each one measured in turns, in a plain torch loop.

    python examples/experiments/ddp_settings.py           # 2 CPU ranks, prints a table for each case
    python examples/experiments/ddp_settings.py --help

Full training and LoRA of a small Llama with random weights; nothing but the settings differs. In the case "uneven" a
step has a long and a short micro-batch, and odd ranks have them in the other order. Each round measures every setting
once; the table shows medians over the rounds with the smallest and the largest. Memory is what a step needs above the
model.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import gc
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from accelerate.utils import DDPCommunicationHookType, DistributedDataParallelKwargs
from torch.nn.parallel import DistributedDataParallel

BASE: dict[str, Any] = {"find_unused_parameters": False}
# Name -> arguments of DistributedDataParallel; "fused" is one of the optimizer, "hook" compresses the gradients.
SETTINGS: dict[str, dict[str, Any]] = {
    "DDP's defaults": {},
    "find_unused_parameters": {"find_unused_parameters": True},
    "bucket view (ours)": {"gradient_as_bucket_view": True},
    "no buffers broadcast": {"broadcast_buffers": False},
    "static_graph": {"static_graph": True},
    "bucket_cap_mb=5": {"bucket_cap_mb": 5},
    "bucket_cap_mb=100": {"bucket_cap_mb": 100},
    "optimizer not fused": {"fused": False},
    "bucket view, fp16": {"gradient_as_bucket_view": True, "hook": "fp16"},
    "bucket view, powersgd": {"gradient_as_bucket_view": True, "hook": "powersgd"},
}
_HOOKS = {"fp16": "fp16", "powersgd": "power_sgd"}
# Steps before PowerSGD begins. The default, 10, is more than the steps of a round.
_POWER_SGD_START = 2
CASES = ("full", "uneven", "lora")


def main() -> int:
    """Starts the ranks and waits; rank 0 prints the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--num-ranks", type=int, default=2)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--cases", nargs="+", choices=CASES, default=CASES)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, default=4, help="timed steps of a round [4]")
    parser.add_argument("--hidden-size", type=int, default=384)
    parser.add_argument("--num-layers", type=int, default=6)
    parser.add_argument("--num-tokens", type=int, default=128, help="tokens of a micro-batch [128]")
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--meeting-file", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank is not None:
        _run_rank(options)
        return 0
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        command = [sys.executable, __file__, *sys.argv[1:], "--meeting-file", f"{folder}/meeting"]
        ranks = []
        for rank in range(options.num_ranks):
            ranks.append(subprocess.Popen([*command, "--rank", str(rank)]))
            stack.callback(ranks[-1].wait)
            stack.callback(ranks[-1].kill)
        # Where one rank fails, the others would wait for it: leaving the stack kills them.
        while not any(codes := [rank.poll() for rank in ranks]) and None in codes:
            time.sleep(0.1)
        return 1 if any(codes) else 0


def _run_rank(options: argparse.Namespace) -> None:
    device = torch.device("cpu")
    if options.device == "cuda":
        device = torch.device("cuda", options.rank % torch.cuda.device_count())
        torch.cuda.set_device(device)
    has_own_card = device.type == "cuda" and torch.cuda.device_count() >= options.num_ranks
    torch.set_num_threads(1)
    dist.init_process_group(
        "nccl" if has_own_card else "gloo",
        init_method=f"file://{options.meeting_file}",
        rank=options.rank,
        world_size=options.num_ranks,
    )
    if options.rank == 0:
        where = torch.cuda.get_device_name() if device.type == "cuda" else "CPU, 1 thread a rank"
        print(f"{options.num_ranks} ranks, {dist.get_backend()}, {where}, torch {torch.__version__}")
    for case in options.cases:
        model = _model(options, case).to(device)
        micro_batches = _micro_batches(options, case, device)
        found: dict[str, list[tuple[float, float, float]]] = {name: [] for name in SETTINGS}
        for turn in range(options.rounds):
            names = list(SETTINGS)
            # Another setting is first in each round: the first is slower, since the caches are cold.
            for name in names[turn % len(names) :] + names[: turn % len(names)]:
                with contextlib.suppress(_NotPossible):
                    found[name].append(measure(model, micro_batches, SETTINGS[name], options.steps))
        if options.rank == 0:
            num = sum(p.numel() for p in model.parameters() if p.requires_grad)
            print(_table(f"{case}: {num / 1e6:.1f}M trainable parameters", found), flush=True)
    dist.destroy_process_group()


class _NotPossible(Exception):
    """No rank can use the setting here."""


def _model(options: argparse.Namespace, case: str) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    size = options.hidden_size
    model: Any = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=2000,
            hidden_size=size,
            intermediate_size=3 * size,
            num_hidden_layers=options.num_layers,
            num_attention_heads=size // 64,
            num_key_value_heads=size // 64,
        )
    )
    if case == "lora":
        from peft import LoraConfig, get_peft_model

        modules = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
        model = get_peft_model(model, LoraConfig(r=16, target_modules=modules))
    return model


def _micro_batches(options: argparse.Namespace, case: str, device: Any) -> list[Any]:
    """Token ids, each 1 x tokens, of the micro-batches of one step."""

    lengths = [options.num_tokens]
    if case == "uneven":
        lengths = [options.num_tokens * 3 // 2, options.num_tokens // 2][:: 1 if options.rank % 2 == 0 else -1]
    return [torch.randint(2000, (1, n), device=device) for n in lengths]


def measure(
    model: Any, micro_batches: list[Any], setting: dict[str, Any], num_steps: int
) -> tuple[float, float, float]:
    """Seconds of a step, peak bytes above the model, and the last gradient norm."""
    arguments = {**BASE, **setting}
    fused, hook = arguments.pop("fused", True), arguments.pop("hook", None)
    seconds, norm = [], torch.zeros(())
    model.zero_grad()  # A setting that failed has left gradients, which would count as memory of the model.
    with peak_memory(next(model.parameters()).device) as peak:
        ddp = DistributedDataParallel(model, **arguments)
        if hook is not None:
            _compress(ddp, hook)
        # A rate of zero: every setting starts from the same weights.
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.0, fused=fused)
        for step in range(2 + num_steps):
            dist.barrier()
            begin = time.perf_counter()
            for i, ids in enumerate(micro_batches):
                with contextlib.nullcontext() if i == len(micro_batches) - 1 else ddp.no_sync():
                    _backward(ddp(input_ids=ids, labels=ids).loss)
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            norm.item()  # On an accelerator: the step is over.
            if step >= 2:
                seconds.append(time.perf_counter() - begin)
    return median(seconds), peak[0], norm.item()


def _backward(loss: Any) -> None:
    try:
        loss.backward()
    except RuntimeError as error:
        # static_graph with no_sync() in the first step; every rank gets this error.
        if "expect_autograd_hooks_" not in str(error):
            raise
        raise _NotPossible from error


def _compress(ddp: Any, hook: str) -> None:
    if hook == "powersgd" and dist.get_backend() == "gloo":
        raise _NotPossible  # Each bucket sends twice, and gloo knows messages by their order only.
    settings = DistributedDataParallelKwargs(comm_hook=DDPCommunicationHookType(_HOOKS[hook]))
    if hook == "powersgd":
        settings.comm_state_option = {"matrix_approximation_rank": 4, "start_powerSGD_iter": _POWER_SGD_START}
    settings.register_comm_hook(ddp)


@contextlib.contextmanager
def peak_memory(device: Any) -> Iterator[list[float]]:
    """Yields an empty list; at the end it has one number: peak bytes above those in use at the start."""
    gc.collect()
    result: list[float] = []
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        yield result
        result.append(torch.cuda.max_memory_allocated() - before)
        return
    ctypes.CDLL(None).malloc_trim(0)  # Freed memory that malloc keeps would count as in use.
    Path("/proc/self/clear_refs").write_text("5")
    before = _status_bytes("VmRSS")
    yield result
    result.append(_status_bytes("VmHWM") - before)


def _status_bytes(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith(name)).split()[1]) * 1024


def _table(title: str, found: dict[str, list[tuple[float, float, float]]]) -> str:
    base = found["DDP's defaults"]
    lines = [f"\n{title}, {len(base)} rounds", "", "| setting | step ms (min-max) | to defaults | peak MiB | norm |"]
    lines.append("|---|---|---|---|---|")
    for name, rows in found.items():
        if not rows:
            lines.append(f"| {name} | not possible here | | | |")
            continue
        milliseconds = [1e3 * row[0] for row in rows]
        ratio = median(row[0] / other[0] for row, other in zip(rows, base, strict=True))
        spread = f"{median(milliseconds):.0f} ({min(milliseconds):.0f}-{max(milliseconds):.0f})"
        memory = median(row[1] for row in rows) / 2**20
        lines.append(f"| {name} | {spread} | {ratio:.3f} | {memory:.0f} | {rows[0][2]:.6g} |")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
