"""What one card shows of a rank and of a training, in figures that `make gpu` records. Needs a GPU."""

from __future__ import annotations

import json
import os
import sys
import time
from math import isfinite
from pathlib import Path

import pytest
import torch
from torch._dynamo.utils import counters

from tests.gpu.card import IS_FAKE, IS_REHEARSAL, NEEDS_CARD, NEEDS_DRIVER, of_ranks
from tests.helpers.run import PLAIN, run_python, run_well
from unsloth_multigpu.deal.measure import Stopwatch
from unsloth_multigpu.step.passes import mark_rows_dynamic

SCRIPT, SUPERVISED = (Path(__file__).with_name(f"{name}.py") for name in ("training", "supervised"))
DEVICE = "cpu" if IS_REHEARSAL else "cuda"
MESSAGE_CHARACTERS = 1500
# Waits of the host for the device in an optimizer step that begin in a line of ours: the gradient norm is read once,
# and ranks tell each other something now and then.
MAX_OWN_WAITS = 2.0
pytestmark = [NEEDS_CARD, pytest.mark.slow]


@pytest.fixture
def facts():
    """By name; added to those of other tests of the same step, also if the test fails."""
    found = {}
    yield found
    if path := os.environ.get("GPU_KIT_FACTS"):
        file = Path(path)
        before = json.loads(file.read_text()) if file.exists() else {}
        file.write_text(json.dumps({**before, **found}, indent=1))


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """By kind: what `training.py` has found without the line, and in rank 0 of two."""
    folder = tmp_path_factory.mktemp("trained")

    def train(name, num_ranks, *kinds):
        out = folder / name
        out.mkdir()
        run_well([SCRIPT, str(num_ranks), out, *kinds], out, {**PLAIN, **of_ranks(max(1, num_ranks))})
        return {kind: json.loads((out / f"{kind}.json").read_text()) for kind in kinds}

    usual, compared = ("waits", "fp16"), ("not_compared", "compared") if IS_FAKE else ()
    one, two = train("one", 0, *compared[:1], *usual), train("two", 2, *compared, *usual)
    return {kind: {"without": one.get(kind), "ours": two[kind]} for kind in two}


@NEEDS_DRIVER
def test_device_of_a_supervised_rank_has_a_group_and_its_allocator(tmp_path, facts):
    out = tmp_path / "supervised.json"
    run_well([SUPERVISED, out], tmp_path, of_ranks(1))
    rank = facts["rank"] = json.loads(out.read_text())
    backend = "gloo" if IS_REHEARSAL else "nccl"
    assert (rank["launcher"], rank["backend"], rank["sum"]) == ("unsloth_multigpu", backend, 8.0)
    assert IS_REHEARSAL or rank["is_expandable"]


@NEEDS_DRIVER
def test_device_takes_as_long_by_the_stopwatch_as_by_the_clock(facts):
    """Forward and backward of eight layers."""

    def now_s():
        if DEVICE == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()

    width, rows = (64, 8) if IS_REHEARSAL else (4096, 2048)
    model = torch.nn.Sequential(*(torch.nn.Linear(width, width) for _ in range(8))).to(DEVICE)
    watch, inputs = Stopwatch(torch.device(DEVICE)), torch.randn(rows, width, device=DEVICE)
    for _ in range(5):
        begin_s = now_s()
        with watch.timing(model):
            model(inputs).sum().backward()
        wall_s = now_s() - begin_s
        lap_s = watch.lap.seconds()
    facts["stopwatch"] = {"lap_ms": round(1e3 * lap_s, 3), "wall_ms": round(1e3 * wall_s, 3)}
    assert 0.3 * wall_s < lap_s <= 1.05 * wall_s


@NEEDS_DRIVER
def test_rows_of_any_number_are_not_recompiled(facts):
    """Graphs compiled at each number of rows: as Unsloth marks them, and as a plan hands them to the model."""
    facts["recompiled"] = found = {}
    for arm in ("rows that stay", "rows that are free"):
        torch._dynamo.reset()
        layers = [torch.nn.Embedding(64, 128), torch.nn.Linear(128, 128), torch.nn.GELU(), torch.nn.Linear(128, 64)]
        backend = "aot_eager" if IS_REHEARSAL else "inductor"
        model = torch.compile(torch.nn.Sequential(*layers).to(DEVICE), backend=backend)
        found[arm] = {}
        for rows in (4, 8, 2, 3, 6, 5, 1, 7):
            ids = torch.randint(64, (rows, 32), device=DEVICE)
            torch._dynamo.mark_static(ids, 0)
            if arm == "rows that are free":
                mark_rows_dynamic([{"input_ids": ids}])
            before = counters["stats"]["unique_graphs"]
            model(ids).sum().backward()
            found[arm][str(rows)] = counters["stats"]["unique_graphs"] - before
    first, *later = found["rows that are free"].values()
    assert sum(later) <= first  # torch always compiles one row by itself.


def test_host_waits_no_more_often_with_the_line(trained, facts):
    """By line."""
    found = facts["host_waits"] = trained["waits"]
    if IS_REHEARSAL:
        return
    assert all(found[arm]["is_counted"] for arm in found)
    without, ours = (found[arm]["per_step"] for arm in ("without", "ours"))
    assert sum(count for line, count in ours.items() if "unsloth_multigpu/" in line) <= MAX_OWN_WAITS, ours
    assert sum(ours.values()) <= sum(without.values())


@pytest.mark.skipif(not IS_FAKE, reason="counts what devices in host memory are asked for")
def test_comparison_of_the_first_step_needs_the_memory_of_one_process_and_the_host_waits_no_more_later(trained):
    one, without, compared = (*trained["not_compared"].values(), trained["compared"]["ours"])
    assert compared["is_exact"]
    # A second copy of the gradients would be much more. What a sketch computes with has a fixed size.
    assert one["gradient_bytes"] > 24 * 2**20
    assert compared["compared_bytes"] <= one["step_bytes"] + 0.02 * one["gradient_bytes"] + 2**20
    assert compared["left_bytes"] <= 2 * 2**20
    assert compared["waits"] == without["waits"]
    assert len(compared["waits"]) == 3


def test_fp16_skips_the_steps_of_one_process(trained, facts):
    """The same scales, which fall behind each step that is skipped, and the norms of the others."""
    found = facts["loss_scale"] = trained["fp16"]
    one, ours = found["without"], found["ours"]
    assert IS_REHEARSAL or one["scales"][0] < 2.0**24  # The first step was skipped.
    assert ours["scales"] == one["scales"]
    norms, expected = (list(map(float, arm["norms"])) for arm in (ours, one))
    assert any(map(isfinite, norms))
    assert list(map(isfinite, norms)) == list(map(isfinite, expected))
    finite = [(a, b) for a, b in zip(norms, expected, strict=True) if isfinite(b)]
    assert [a for a, _ in finite] == pytest.approx([b for _, b in finite], rel=1e-5 if IS_FAKE else 1e-2)


@pytest.mark.parametrize(
    ("kind", "reasons"),
    [
        # On a card, a device-side assert.
        ("beyond_vocabulary", ("device-side assert", "index out of range")),
        ("out_of_memory", ("ran out of memory",)),
    ],
)
def test_failure_is_named_with_rank_and_step(tmp_path, facts, kind, reasons):
    run = run_python([SCRIPT, "2", tmp_path, kind], tmp_path, {**PLAIN, **of_ranks(2)})
    sys.stderr.write(run.err)
    lines = [line for line in run.err.splitlines() if line.startswith(("unsloth_multigpu: rank ", "Hint: "))]
    message = "\n".join(lines)[-MESSAGE_CHARACTERS:]
    facts[kind] = {"code": run.code, "message": message}
    assert run.code
    assert all(word in message for word in ("rank 1 ", "after step 2")), message
    assert any(reason in message for reason in reasons), message
