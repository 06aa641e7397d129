"""Facts of whole trainings, which `training.py` runs: waits, loss scales, faults. See `fact.py`."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.gpu.card import of_ranks
from tests.helpers.run import PLAIN, Finished, run_python

SCRIPT, SCALED = (Path(__file__).with_name(name) for name in ("training.py", "scaled.py"))
MESSAGE_CHARACTERS = 1500


def host_waits() -> dict[str, Any]:
    """How often the host waits for the device in an optimizer step, by line: without ours, and in rank 0 of two."""
    return {"without": finished(0, "waits"), "ours": finished(2, "waits")}


def loss_scale() -> dict[str, Any]:
    """fp16: scales and gradient norms of one process and of two ranks; see `scaled.py`."""
    return {name: finished(num, "fp16", [SCALED, str(num)]) for name, num in (("one_process", 1), ("ours", 2))}


def beyond_vocabulary() -> dict[str, Any]:
    """What the user sees where a token is none of the model's: on a card, a device-side assert."""
    return failed("beyond_vocabulary")


def out_of_memory() -> dict[str, Any]:
    """What the user sees where a micro-batch of one rank finds no memory."""
    return failed("out_of_memory")


def finished(num_ranks: int, kind: str, command: Sequence[Any] = ()) -> dict[str, Any]:
    run, out = train(num_ranks, kind, command)
    if run.code:
        raise RuntimeError(f"{kind}, {num_ranks} rank(s): exit code {run.code}: {run.err[-900:]}")
    return dict(json.loads(out.read_text()))


def failed(kind: str) -> dict[str, Any]:
    """Exit code, and the message that ends what the user sees."""
    run, _ = train(2, kind)
    lines = [line for line in run.err.splitlines() if line.startswith(("unsloth_multigpu: rank ", "Hint: "))]
    return {"code": run.code, "message": "\n".join(lines)[-MESSAGE_CHARACTERS:]}


def train(num_ranks: int, kind: str, command: Sequence[Any] = ()) -> tuple[Finished, Path]:
    """Runs the command, else `training.py`; 0 ranks = without the line."""
    out = Path.cwd() / f"{kind}_{num_ranks}.json"
    started = [*(command or [SCRIPT, str(num_ranks), kind]), out]
    run = run_python(started, Path.cwd(), {**PLAIN, **of_ranks(max(1, num_ranks))})
    sys.stderr.write(run.err)
    return run, out
