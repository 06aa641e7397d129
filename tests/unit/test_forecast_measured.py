"""From what a run has recorded to a forecast, and the comparison with several ranks."""

from __future__ import annotations

import dataclasses
import io
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from unsloth_multigpu.cli.screen import Screen
from unsloth_multigpu.errors import SetupError
from unsloth_multigpu.options import MultiGPUConfig
from unsloth_multigpu.step.cost import CostModel
from unsloth_multigpu.step.forecast import forecast_time
from unsloth_multigpu.step.link import PCIE, Network
from unsloth_multigpu.tools.forecast.measured import Check, check, read_measured
from unsloth_multigpu.tools.forecast.recorder import Clock, _refuse_what_is_not_known, _rows_of
from unsloth_multigpu.tools.forecast.text import facts, show, table_rows
from unsloth_multigpu.tools.forecast.tool import MeasureRequest

TRUE = CostModel(overhead_tokens=50.0)
TOKEN_S, UPDATE_S = 1e-3, 0.2
STEPS = {n: (100, 20 + 10 * n, 300, 7 * n) for n in range(3, 11)}


def record(**values: Any) -> dict[str, Any]:
    """Of a rank that computes as `TRUE` says; every second step was computed row by row."""
    micro, numbers, steps = [], [], []
    for n, rows in STEPS.items():
        parts = [rows[:2], rows[2:]] if n % 2 else [(row,) for row in rows]
        seconds = [TOKEN_S * TRUE.of(part) for part in parts]
        micro += [[list(part), s] for part, s in zip(parts, seconds, strict=True)]
        numbers += [n] * len(parts)
        steps.append({"step": n, "seconds": sum(seconds) + UPDATE_S, "computed_s": sum(seconds)})
    base = {
        "steps": steps,
        "micro_batches": micro,
        "micro_steps": numbers,
        "trained": {str(n): rows for n, rows in STEPS.items()},
        "drawn": list(STEPS.values()),
        "sizes": [2, 2],
        "cost": {**dataclasses.asdict(CostModel()), "possible": ()},
        "is_cpu": False,
        "is_length_known": True,
        "is_planned": True,
        "epochs": None,
        "regroup": True,
        "whole": False,
        "max_tokens": None,
        "num_steps": 1000,
        "exchange": "gradients",
        "every_steps": 1,
        "gradient_bytes": 0,
        "weight_bytes": 0,
        "num_units": 1,
        "hides": 0.0,
        "asked": {"strategy": "ddp", "shard": "off", "grad_compression": None, "keeps_batch": True},
    }
    return {**base, **values}


def test_costs_that_do_not_fit_are_told_with_the_way_out() -> None:
    taken = record(is_cpu=True)
    slow = [{**step, "computed_s": 1.5 * step["computed_s"]} for step in taken["steps"]]
    measured = read_measured({**taken, "steps": slow})
    assert measured.misfit == pytest.approx(1 / 3)
    assert "only within 33%" in measured.notes[-1]
    assert "OMP_NUM_THREADS=1 and --clock cpu" in measured.notes[-1]
    assert "raise --steps" in read_measured({**record(), "steps": slow}).notes[-1]


def test_forecast_of_one_rank_is_what_was_measured() -> None:
    measured = read_measured(record())
    assert measured.work.update_s == pytest.approx(UPDATE_S)
    assert measured.misfit < 1e-6
    assert measured.notes == ()
    in_order = [TOKEN_S * (TRUE.of(rows[:2]) + TRUE.of(rows[2:])) + UPDATE_S for rows in STEPS.values()]
    assert forecast_time(measured.work, 1, Network(PCIE)).step_s == pytest.approx(sum(in_order) / len(in_order))


def test_what_was_assumed_is_said() -> None:
    given = record(is_cpu=True, is_length_known=False)
    given["asked"] = {**given["asked"], "grad_compression": "powersgd", "shard": "auto"}
    notes = " ".join(read_measured(given).notes)
    for words in ("measured on a CPU", "are those of the steps that were run", "powersgd", "shard='auto'"):
        assert words in notes


def test_costs_that_do_not_fit_are_said() -> None:
    given = record()
    for k, step in enumerate(given["steps"]):  # The machine was busy in every second step.
        step["computed_s"] *= 2.0 if k % 2 else 0.5
    (note,) = read_measured(given).notes
    assert note.startswith("the fitted costs repeat the measured steps only within ")


def test_too_few_steps_are_refused() -> None:
    with pytest.raises(SetupError, match=r"2 step\(s\) could be timed"):
        read_measured(record(steps=record()["steps"][:2]))


def test_check_compares_the_same_steps() -> None:
    measured, network = read_measured(record()), Network(PCIE)
    ranks = []
    for slower in (1.0, 0.6):
        steps = []
        for n, rows in STEPS.items():
            one = forecast_time(dataclasses.replace(measured.work, steps=(rows,)), 2, network)
            steps.append({"step": n, "seconds": one.step_s * 1.25 * slower})
        ranks.append({"steps": steps})
    found = check(measured, ranks, network)
    assert (found.num_ranks, found.ratio) == (2, pytest.approx(0.8))
    with pytest.raises(SetupError, match="No step was timed in both runs"):
        check(measured, [{"steps": [{"step": 99, "seconds": 1.0}]}] * 2, network)


def test_rows_of_the_table_name_what_is_refused() -> None:
    work = read_measured(record()).work
    rows = table_rows(work, [2, 8], [forecast_time(work, n, Network(PCIE)) for n in (1, 2)])
    assert [row[0] for row in rows] == ["1", "2", "8"]
    assert rows[2][1:3] == ("refused", "4 samples")


def test_forecast_begins_with_the_two_times_that_ranks_have_measured() -> None:
    named = {"model": "M", "trainer": "T", "device": "D", "num_parameters": 2, "num_trained": 2}
    measured, network = read_measured(record(**named)), Network(PCIE)
    rows = [forecast_time(measured.work, 1, network)]
    found = Check(2, 1.0, 1.0, 1.0, {"one_process_s": 2.41, "dealt_s": 1.27})
    first, *others = facts(measured, rows, network, found)
    said = "2.41 s as one process, 1.27 s on 2 ranks (1.90 times as fast)"
    assert first == f"measured, forward and backward passes of the first step: {said}"
    # Where the step was not compared, as where no ranks were run, it begins with the rank that was measured.
    not_compared = dataclasses.replace(found, first_step={"one_process_s": None, "dealt_s": None})
    for without in (not_compared, dataclasses.replace(found, first_step={})):
        assert facts(measured, rows, network, without) == others
    assert others[0].startswith("M, 2 parameters")


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("stream", [io.StringIO(), Terminal()], ids=["pipe", "terminal"])
def test_forecast_is_coloured_on_a_terminal_only(stream: io.StringIO, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.delenv("NO_COLOR", raising=False)
    named = {"model": "M", "trainer": "T", "device": "D", "num_parameters": 2, "num_trained": 2}
    measured, network = read_measured(record(**named)), Network(PCIE)
    rows = [forecast_time(measured.work, n, network) for n in (1, 2)]
    show(Screen(stream), measured, [2], rows, network, ["Useful up to 2 GPUs.", "More."], None)
    text = stream.getvalue()
    assert ("\x1b[1m" in text) == stream.isatty()
    assert ("\nUseful up to 2 GPUs.\nMore.\n" in text) != stream.isatty()
    assert "GPUs" in text
    assert "speed-up: over the script" in text


@pytest.mark.parametrize(
    ("trainer", "config", "match"),
    [
        ({"args": SimpleNamespace(steps_per_generation=2)}, {}, "makes its samples while it trains"),
        ({"is_deepspeed_enabled": True}, {}, "FSDP or DeepSpeed"),
        ({"is_fsdp_enabled": True}, {}, "FSDP or DeepSpeed"),
    ],
)
def test_what_nothing_is_known_of_is_refused(trainer: Any, config: Any, match: str) -> None:
    base = {"args": SimpleNamespace(), "is_deepspeed_enabled": False, "is_fsdp_enabled": False}
    request = MeasureRequest("", 16, 1, "wall")
    with pytest.raises(SetupError, match=match) as error:
        _refuse_what_is_not_known(SimpleNamespace(**{**base, **trainer}), request, MultiGPUConfig(**config))
    assert error.value.hint


def test_clock_of_the_cpu_is_for_one_thread_of_it() -> None:
    with pytest.raises(SetupError, match="counts what one thread computes"):
        Clock("cpu", torch.device("cuda"))


def test_rows_are_told_by_mask_places_or_shape() -> None:
    ids = torch.ones(2, 5, dtype=torch.int64)
    mask = torch.tensor([[1, 1, 1, 0, 0], [1, 1, 1, 1, 1]])
    assert _rows_of({"input_ids": ids, "attention_mask": mask})() == [3, 5]
    assert _rows_of({"input_ids": ids})() == [5, 5]
    places = torch.tensor([[0, 1, 2, 0, 1, 0]])
    assert _rows_of({"input_ids": ids.reshape(1, 10)[:, :6], "position_ids": places})() == [3, 2, 1]
    assert _rows_of({"pixel_values": torch.zeros(4, 3, 2, 2)})() == [1, 1, 1, 1]
