"""`unsloth-multigpu bench` without training: options, samples, commands, the instrument, figures and the page."""

from __future__ import annotations

import copy
import dataclasses
import importlib.util
import json
import math
import statistics
import subprocess
import sys
import time
from html.parser import HTMLParser
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from tests.helpers.run import orphans
from unsloth_multigpu import start
from unsloth_multigpu.cli import main
from unsloth_multigpu.errors import ConfigError, LaunchError, SetupError
from unsloth_multigpu.text_table import aligned
from unsloth_multigpu.tools.bench import arm as bench_arm
from unsloth_multigpu.tools.bench import command as bench
from unsloth_multigpu.tools.bench import plot
from unsloth_multigpu.tools.bench import run as bench_run
from unsloth_multigpu.tools.bench import worker as bench_worker
from unsloth_multigpu.tools.bench.arm import (
    ARMS,
    Arm,
    arm_command,
    arm_environment,
    choose_arms,
    num_accumulated,
    speed_of,
)
from unsloth_multigpu.tools.bench.data import make_rows, make_test_rows
from unsloth_multigpu.tools.bench.headline import headline
from unsloth_multigpu.tools.bench.meter import Meter
from unsloth_multigpu.tools.bench.option import BenchOptions
from unsloth_multigpu.tools.bench.page import render_page
from unsloth_multigpu.tools.bench.plot import draw_curves, draw_plots
from unsloth_multigpu.tools.bench.result import (
    EpochRecord,
    MeasuredStep,
    RankRecord,
    Spread,
    measure_run,
    norm_difference,
    ratios,
    summarize,
    waiting_share,
)
from unsloth_multigpu.tools.bench.run import Pace, run_arm
from unsloth_multigpu.tools.bench.strategy_arm import STRATEGIES
from unsloth_multigpu.tools.bench.strategy_result import (
    epoch_records,
    learning_arguments,
    mean_scores,
    score_rows,
    strategy_tables,
    summarize_strategies,
)
from unsloth_multigpu.tools.bench.table import COLUMNS, Table, conditions, result_table
from unsloth_multigpu.tools.plain_json import json_text


def shown(table: Table) -> str:
    return "\n".join(aligned([table.columns, *table.rows], num_left=1))


def step(wall_s=1.0, cpu_s=1.0, compute_s=1.0, micro_batches=((2, 10, 15),), samples=(0, 1)) -> MeasuredStep:
    return MeasuredStep(wall_s, cpu_s, compute_s, tuple(micro_batches), tuple(samples))


def rank(number: int, *steps: MeasuredStep, norms=None, peak_bytes=100, num_threads=1) -> RankRecord:
    return RankRecord(number, steps, tuple(norms or [1.0] * len(steps)), peak_bytes, "cpu", num_threads)


def test_waiting_is_counted_step_by_step() -> None:
    # In each step another rank waits one of two seconds, half the ranks' time; over the whole run they did the same.
    assert waiting_share([[2.0, 1.0], [1.0, 2.0]]) == 0.25
    assert waiting_share([[3.0], [1.0]]) == 0.0


def test_run_is_measured_without_its_warm_up() -> None:
    slow = step(wall_s=100.0, cpu_s=50.0, compute_s=90.0, micro_batches=((8, 100, 10),))
    ranks = [
        rank(0, slow, step(wall_s=2.0, cpu_s=3.0, compute_s=4.0), step(cpu_s=1.0), peak_bytes=7),
        rank(1, slow, step(wall_s=3.0, cpu_s=1.0, compute_s=2.0, micro_batches=((1, 10, 5), (1, 20, 20))), step()),
    ]
    measure = measure_run(ranks, num_warmup=1)
    assert measure.tokens_per_s == (15 + 15 + 25 + 15) / 4.0
    assert measure.padding_share == pytest.approx(1 - 70 / (20 + 20 + 30 + 20))
    assert measure.waiting_share == pytest.approx((4 - 3) / (4 + 1))
    assert measure.cpu_s == 3.0 + 1.0
    assert measure.peak_bytes == 100
    assert measure.largest_tokens == 800  # Memory is needed in the warm-up, too.
    assert measure.step_s == (3.0, 1.0)


def test_rank_that_is_late_in_one_step_makes_it_late_where_ranks_meet() -> None:
    ranks = [rank(0, step(wall_s=3.0), step(wall_s=1.0)), rank(1, step(wall_s=2.0), step(wall_s=2.0))]
    once = measure_run(ranks, num_warmup=0).tokens_per_s
    assert once * 4.0 == pytest.approx(measure_run(ranks, num_warmup=0, meets=True).tokens_per_s * 5.0)


def test_ratios_are_taken_within_each_round() -> None:
    # The ratio of the medians would be 20 / 20.
    assert ratios([10.0, 20.0, 60.0], [5.0, 20.0, 30.0]) == Spread(2.0, 1.0, 2.0)
    assert ratios([1.0], None) is None


def test_norm_difference_is_relative_and_the_largest() -> None:
    assert norm_difference([1.0, 2.2], [1.0, 2.0]) == pytest.approx(0.1)
    assert norm_difference([0.5], [0.0]) == 0.5
    assert norm_difference([math.nan, 1.0], [1.0, 1.0]) == math.inf


def test_samples_are_compared_with_how_often_they_occur() -> None:
    def run(*ranks: tuple[tuple[int, ...], tuple[int, ...]]) -> list[list[RankRecord]]:
        return [[rank(r, step(samples=first), step(samples=second)) for r, (first, second) in enumerate(ranks)]]

    runs = {
        "one_process": run(((5,), (1, 2, 3, 4))),
        "ours": run(((5,), (4,)), ((), (3, 1, 2))),
        "torchrun": run(((5,), (4,)), ((), (3, 1, 2, 2))),
        "accelerate": run(((5,), (1,)), ((), (2, 3))),
        "group": run(((1, 2, 3, 4), (5,))),
    }
    results = {result.name: result for result in summarize(runs, 0)}
    assert [name for name in runs if results[name].has_same_samples] == ["one_process", "ours"]
    assert results["ours"].norm_difference == 0.0
    assert results["torchrun"].norm_difference is None
    assert results["one_process"].times_reference == Spread(1.0, 1.0, 1.0)


def test_arm_without_others_has_nothing_to_compare() -> None:
    (result,) = summarize({"ours": [[rank(0, step())]]}, 0)
    assert (result.times_baseline, result.times_reference, result.norm_difference, result.has_same_samples) == (
        None,
    ) * 4
    assert shown(result_table([result])).splitlines()[1].split().count("-") == 4


def test_cost_of_the_guard_is_a_ratio_within_each_round() -> None:
    seconds = {"ours": (2.0, 20.0), "unguarded": (1.0, 20.0)}
    runs = {name: [[rank(0, step(wall_s=wall_s))] for wall_s in rounds] for name, rounds in seconds.items()}
    ours, unguarded = summarize(runs, 0)
    assert ours.times_unguarded == Spread(0.75, 0.5, 1.0)
    assert unguarded.times_unguarded == Spread(1.0, 1.0, 1.0)
    table = shown(result_table([ours, unguarded])).splitlines()
    assert table[0].split("  x one_process")[1].split()[:3] == ["x", "unguarded", "samples"]
    assert "0.750 (0.500-1.000)" in table[1]


def test_all_arms_but_the_unguarded_one_save(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)

    def strategy(name: str, save_steps: int | None) -> tuple[str, int]:
        options = BenchOptions(arms=(), save_steps=save_steps)
        values = bench_worker._training_values(ARMS[name], options)
        return values["save_strategy"], values["save_steps"]

    assert [strategy(name, 7) for name in ("ours", "torchrun")] == [("steps", 7)] * 2
    assert strategy("unguarded", 7)[0] == strategy("ours", None)[0] == "no"
    assert not any("checkpoints:" in line for line in conditions(BenchOptions(arms=()), 0, "cpu", "1"))
    saved = conditions(BenchOptions(arms=("unguarded",), save_steps=7), 0, "cpu", "1")
    assert any(line.startswith("checkpoints: every 7 steps") for line in saved)


def test_numbers_that_json_lacks_are_text() -> None:
    text = json_text({"a": [math.inf, (math.nan, 1.5)], "b": {"c": -math.inf}, "d": None})
    assert json.loads(text, parse_constant=pytest.fail) == {"a": ["inf", ["nan", 1.5]], "b": {"c": "-inf"}, "d": None}


def test_default_lengths_are_ragged_as_documented() -> None:
    options = BenchOptions(arms=(), num_steps=400, num_warmup=0)
    rows = make_rows(options)
    lengths = [len(row) for row in rows]
    assert 140 < statistics.median(lengths) < 160
    assert max(lengths) == 1024
    batches = [lengths[i : i + 8] for i in range(0, len(lengths), 8)]
    padded = sum(8 * max(batch) for batch in batches)
    assert 0.57 < 1 - sum(lengths) / padded < 0.63
    assert [high * 2000 + low for high, low, *_ in rows] == list(range(len(rows)))
    assert rows == make_rows(options)
    assert rows != make_rows(BenchOptions(arms=(), num_steps=400, num_warmup=0, seed=1))


def test_rows_come_from_files_and_repeat(tmp_path) -> None:
    def bodies(name: str, text: str) -> list[list[int]]:
        (tmp_path / name).write_text(text)
        rows = make_rows(BenchOptions(arms=(), num_steps=1, num_warmup=0, lengths=f"file:{tmp_path / name}"))
        assert len(rows) == 16
        return [row[2:] for row in rows]

    assert bodies("a.txt", "ab\n\nc\n")[:3] == [[97, 98], [99], [97, 98]]
    assert [len(body) for body in bodies("a.jsonl", '{"text": "abc"}\n12\n')[:4]] == [3, 10, 3, 10]
    for text in ('{"txt": "a"}', "2", "true", "{"):
        with pytest.raises(ConfigError, match=r"b\.jsonl:1"):
            bodies("b.jsonl", text)
    with pytest.raises(ConfigError, match="has no text"):
        bodies("c.txt", "\n")


@pytest.mark.parametrize(
    "arguments",
    [
        ["--arms", "ours,theirs"],
        ["--arms", "ours,ours"],
        ["--ranks", "0"],
        ["--steps", "0"],
        ["--warmup", "-1"],
        ["--hidden-size", "100"],
        ["--vocab-size", "15"],
        ["--lengths", "lognormal:150"],
        ["--lengths", "lognormal:300:200"],
        ["--lengths", "fixed:2"],
        ["--lengths", "normal:1:2"],
        ["--lengths", "file:missing.txt"],
        ["--slow-rank", "2:0.5"],
        ["--slow-rank", "1:0"],
        ["--slow-rank", "1"],
        ["--timeout-s", "0"],
        ["--json", "/proc/bench.json"],
        ["--report", "/proc/report"],
        ["--train", "half"],
        ["--steps", "x"],
        ["--strategies", "ddp,theirs"],
        ["--strategies", "ddp,ddp"],
        ["--strategies", "ours"],
        ["--epochs", "3"],
        ["--epochs", "0", "--strategies", "ddp"],
        ["--steps", "2", "--strategies", "ddp"],
        ["--lengths", "fixed:20", "--strategies", "ddp"],
        ["--lengths", "text:2"],
        ["--arms", "ours", "--strategies", "ddp"],
        ["--interleave", "steps", "--strategies", "ddp"],
        ["--interleave", "epochs"],
        ["--library", "unsloth", "--strategies", "ddp"],
        ["--library", "axolotl"],
        ["--four-bit", "--library", "transformers"],
        ["--four-bit", "--library", "unsloth", "--train", "full"],
    ],
)
def test_wrong_value_is_named_at_once(arguments, capsys, monkeypatch) -> None:
    monkeypatch.setattr(bench, "_run_rounds", lambda *_: pytest.fail("it ran"))
    try:
        code = main.main(["bench", "--device", "cpu", *arguments])
    except SystemExit as ended:  # argparse
        code = ended.code
    error = capsys.readouterr().err
    assert code == ConfigError.exit_code
    assert arguments[0] in error
    assert any(value in error for value in (arguments[1], "theirs", "is given twice", "/proc", "not allowed with"))
    assert "Hint: " in error


def test_help_names_every_arm_and_option(capsys) -> None:
    with pytest.raises(SystemExit):
        main.main(["bench", "--help"])
    text = capsys.readouterr().out
    assert [name for name in {**ARMS, **STRATEGIES} if f"{name}: " not in " ".join(text.split())] == []
    options = "arms strategies ranks device slow-rank model-size hidden-size num-layers vocab-size dtype train lengths"
    options += (
        " batch-size epochs accumulation seed steps warmup repeats timeout-s json report padding-free library optim"
    )
    assert "--four-bit " in text
    assert "--gradient-checkpointing\n" in text
    assert [name for name in options.split() if f"  --{name} " not in text] == []


def test_slow_rank_gives_the_planner_time_to_notice() -> None:
    def options(*arguments: str) -> BenchOptions:
        return BenchOptions.from_arguments(main.make_parser(main.find_commands()).parse_args(["bench", *arguments]), [])

    # The check of replicas after the first step is counted in the second.
    assert options().num_warmup == 2
    slow = options("--slow-rank", "0:0.5")
    assert (slow.num_warmup, speed_of(ARMS["ours"], slow, 0), speed_of(ARMS["ours"], slow, 1)) == (8, 0.5, 1.0)
    # One process, with which the others are compared, is not slowed.
    assert {speed_of(arm, slow, 0) for arm in ARMS.values() if arm.has_one_process} == {1.0}
    assert options("--slow-rank", "1:0.5", "--warmup", "2").num_warmup == 2
    assert (options("--model-size", "1b", "--num-layers", "3").hidden_size, options().vocab_size) == (2048, 2000)
    # Arms are not tested: no row is numbered for it.
    assert options("--vocab-size", "16", "--steps", "16", "--warmup", "0").num_rows == 16**2


def test_arm_that_transformers_lacks_is_skipped_with_its_version(monkeypatch, tmp_path) -> None:
    arms, options = list(ARMS.values()), BenchOptions(arms=())
    assert bench_arm.part_available(arms, options) == (arms, [])
    (tmp_path / "training_args.py").write_text("group_by_length")
    spec = importlib.util.spec_from_file_location(
        "transformers", tmp_path / "x.py", submodule_search_locations=[str(tmp_path)]
    )
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: spec)
    monkeypatch.setattr(bench_arm, "installed_version", lambda name: "4.57.1")
    left, lines = bench_arm.part_available(arms, options)
    assert [arm.name for arm in arms if arm not in left] == ["rebalance"]
    assert lines == ["rebalance: skipped, transformers 4.57.1 has no batch_rebalance"]


@pytest.mark.parametrize("arm", [*ARMS.values(), *STRATEGIES.values()], ids=lambda arm: arm.name)
def test_every_arm_has_the_same_samples_in_a_step(arm) -> None:
    options = BenchOptions(arms=(), num_ranks=3, batch_size=5, accumulation=2)
    num_loaders = 1 if arm.is_one_gpu_script else bench_arm.num_processes(arm, options)
    assert options.batch_size * num_accumulated(arm, options) * num_loaders == options.num_samples_per_step == 30


def test_arms_hear_nothing_from_another_launcher(tmp_path) -> None:
    inherited = {
        "RANK": "3",
        "LOCAL_RANK": "3",
        "TORCHELASTIC_RUN_ID": "x",
        "CUDA_VISIBLE_DEVICES": "4,5",
        "HOME": "/h",
    }
    inherited |= {"UNSLOTH_MULTIGPU_RUN_DIR": "/r", "UNSLOTH_MULTIGPU_VERIFY_EVERY": "0", "OMP_NUM_THREADS": "8"}

    def variables(name: str, **options) -> dict[str, str]:
        return arm_environment(ARMS[name], BenchOptions(arms=(), **options), tmp_path, inherited)

    on_cpu = variables("torchrun")
    assert not {"RANK", "LOCAL_RANK", "TORCHELASTIC_RUN_ID", "UNSLOTH_MULTIGPU_RUN_DIR"} & set(on_cpu)
    assert on_cpu["CUDA_VISIBLE_DEVICES"] == ""
    assert (on_cpu["OMP_NUM_THREADS"], on_cpu["HOME"], on_cpu["UNSLOTH_MULTIGPU_VERIFY_EVERY"]) == ("1", "/h", "0")
    assert on_cpu["TMPDIR"] == str(tmp_path)
    assert variables("one_process", device="cuda")["CUDA_VISIBLE_DEVICES"] == "4"
    assert variables("torchrun", device="cuda")["CUDA_VISIBLE_DEVICES"] == "4,5"
    assert variables("torchrun", device="cuda", is_card_shared=True)["ACCELERATE_BYPASS_DEVICE_MAP"] == "true"


def test_unsloth_lays_rows_as_it_is_asked_to(tmp_path) -> None:
    def variables(**options) -> dict[str, str]:
        given = BenchOptions(arms=(), library="unsloth", model_folder=str(tmp_path / "model"), **options)
        return arm_environment(ARMS["ours"], given, tmp_path, {})

    name = "UNSLOTH_DISABLE_AUTO_PADDING_FREE"
    assert variables()[name] == "1"
    assert name not in variables(is_padding_free=True)
    assert name not in arm_environment(ARMS["ours"], BenchOptions(arms=()), tmp_path, {})
    # What one arm compiled the next one finds.
    assert variables()["TORCHINDUCTOR_CACHE_DIR"] == str(tmp_path / "inductor")
    said = conditions(
        BenchOptions(arms=(), library="unsloth", train="lora", is_four_bit=True, optimizer="adamw_8bit"), 0, "cpu", "1"
    )
    assert any(line.endswith("SFTTrainer of Unsloth, 4-bit weights, adamw_8bit") for line in said)


def test_compilations_and_the_allocator_are_those_of_the_worst_rank() -> None:
    steps = [step()] * 4
    ranks = [
        dataclasses.replace(rank(0, *steps), num_compiled=(3, 5, 5, 6), is_expandable=True),
        dataclasses.replace(rank(1, *steps), num_compiled=(3, 5, 7, 9), is_expandable=False),
    ]
    (result,) = summarize({"ours": [ranks]}, 2)
    assert (result.num_compiled, result.is_expandable) == ((5, 4), False)
    (result,) = summarize({"ours": [ranks]}, 0)
    assert result.num_compiled == (0, 9)
    (on_cpu,) = summarize({"ours": [[rank(0, *steps)]]}, 2)
    assert (on_cpu.num_compiled, on_cpu.is_expandable) == ((0, 0), None)


def test_ranks_that_share_a_card_are_started_by_torchrun() -> None:
    shared = BenchOptions(arms=(), device="cuda", is_card_shared=True)
    assert "torch.distributed.run" in arm_command(ARMS["ours"], shared)
    assert "torch.distributed.run" not in arm_command(ARMS["ours"], BenchOptions(arms=()))
    assert "torch.distributed.run" not in arm_command(ARMS["ours_one"], shared)
    assert "torch.distributed.run" not in arm_command(ARMS["one_process"], shared)


@pytest.mark.parametrize(
    ("visible", "given", "expected"),
    [
        (("cpu", 0), "auto", ("cpu", False)),
        (("cuda", 1), "auto", ("cuda", True)),
        (("cuda", 3), "cuda", ("cuda", False)),
        (("cuda", 8), "cpu", ("cpu", False)),
    ],
)
def test_device_is_found(visible, given, expected, monkeypatch) -> None:
    monkeypatch.setattr(start, "visible_accelerators", lambda: visible)
    options = bench._on_device(BenchOptions(arms=(), device=given, num_ranks=3), is_warm=False)
    assert (options.device, options.is_card_shared) == expected
    # A card compiles in its first steps, and costs are fitted in them.
    assert options.num_warmup == (20 if options.device == "cuda" else 2)
    assert bench._on_device(BenchOptions(arms=(), device=given, num_ranks=3), is_warm=True).num_warmup == 2


@pytest.mark.parametrize(
    ("visible", "given", "reason"),
    [
        (("cpu", 0), "cuda", "--device cuda, but this machine has 0 CUDA"),
        (("cuda", 2), "auto", "--ranks 3, but 2 GPUs"),
        (("xpu", 2), "auto", "This machine has xpu, and bench measures CUDA devices and CPUs"),
    ],
)
def test_device_that_is_missing_is_refused(visible, given, reason, monkeypatch) -> None:
    monkeypatch.setattr(start, "visible_accelerators", lambda: visible)
    with pytest.raises(SetupError, match=reason):
        bench._on_device(BenchOptions(arms=(), device=given, num_ranks=3), is_warm=False)


def test_report_without_matplotlib_is_refused_before_it_runs(monkeypatch, tmp_path, capsys) -> None:
    real = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "matplotlib" else real(name))
    monkeypatch.setattr(bench, "_run_rounds", lambda *_: pytest.fail("it ran"))
    assert main.main(["bench", "--device", "cpu", "--report", str(tmp_path / "r")]) == SetupError.exit_code
    assert "pip install matplotlib" in capsys.readouterr().err


class Tiny(nn.Module):
    """Takes what a Trainer hands a model."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(10, 4)
        self.head = nn.Linear(4, 10)

    def forward(self, input_ids, attention_mask, labels):
        time.sleep(0.02)
        return self.head(self.embed(input_ids)).sum()


def test_meter_counts_what_is_computed_and_nothing_else() -> None:
    model = Tiny()
    meter = Meter(model, vocab_size=10, is_cuda=False, speed=1.0)
    ids = torch.tensor([[1, 2, 5], [0, 7, 0], [0, 1, 1]])
    inputs = {
        "input_ids": ids,
        "attention_mask": torch.tensor([[1, 1, 1], [1, 1, 0], [1, 1, 1]]),
        # The first tokens of a row may be given, and are computed all the same.
        "labels": torch.tensor([[-100, 2, 5], [0, 7, -100], [-100, -100, -100]]),
    }
    meter.mark_begin()
    time.sleep(0.05)  # What comes before the epoch.
    begin_s = time.perf_counter()
    meter.mark_begin()
    with torch.no_grad():
        model(**inputs)
    model(**inputs)  # Without a backward pass.
    model.eval()(**inputs).backward()
    model.train()
    for number in (1, 2):
        for _ in range(number):
            model(**inputs).backward()
            time.sleep(0.03)  # Waiting for others.
        meter.mark_step()
    assert sum(step["wall_s"] for step in meter.steps()) <= time.perf_counter() - begin_s
    before = meter.steps()[1]
    time.sleep(0.01)  # The ranks meet.
    meter.extend_step()
    first, second = meter.steps()
    assert before["wall_s"] + 0.01 <= second["wall_s"]
    assert before["micro_batches"] == second["micro_batches"]
    assert first["micro_batches"] == [[3, 3, 5]]
    assert first["samples"] == [12, 7]  # The third row is a filler.
    assert second["micro_batches"] == [[3, 3, 5]] * 2
    assert 0.02 <= first["compute_s"] < first["wall_s"] - 0.03 + 1e-4
    assert first["cpu_s"] < first["wall_s"]


def test_meter_counts_rows_that_lie_end_to_end() -> None:
    class EndToEnd(Tiny):
        def forward(self, input_ids, position_ids, labels):
            return super().forward(input_ids, None, labels)

    model = EndToEnd()
    meter = Meter(model, vocab_size=10, is_cuda=False, speed=1.0)
    meter.mark_begin()
    batch = bench_worker.end_to_end([{"input_ids": [1, 2, 5]}, {"input_ids": [0, 7, 3, 4]}])
    assert batch["labels"].tolist() == [[-100, 2, 5, -100, 7, 3, 4]]
    assert batch["position_ids"].tolist() == [[0, 1, 2, 0, 1, 2, 3]]
    model(**batch).backward()
    model(**{**batch, "labels": batch["labels"].fill_(-100)}).backward()
    meter.mark_step()
    (record,) = meter.steps()
    assert record["micro_batches"] == [[1, 7, 7], [1, 7, 0]]
    assert record["samples"] == [12, 7]  # The second is a filler.


def test_what_the_training_is_told_of_memory_and_rows(monkeypatch, tmp_path) -> None:
    monkeypatch.chdir(tmp_path)
    options = BenchOptions(arms=(), has_checkpointing=True, is_padding_free=True)
    values = bench_worker._training_values(ARMS["ours"], options)
    assert values["gradient_checkpointing"] is True
    assert values["gradient_checkpointing_kwargs"] == {"use_reentrant": False}
    said = "\n".join(conditions(options, 0, "cpu", "1"))
    assert "full training, gradient checkpointing\n" in said
    assert "in each step, rows end to end\n" in said
    parsed = main.make_parser(main.find_commands()).parse_args(["bench", "--strategies", "all", "--padding-free"])
    with pytest.raises(ConfigError, match="--padding-free is for --arms"):
        BenchOptions.from_arguments(parsed, [])


def test_reserved_memory_is_shown_where_there_is_any() -> None:
    on_card = dataclasses.replace(rank(0, step()), reserved_bytes=3 * 2**20)
    for records, cell in (([rank(0, step())], " 0 MiB "), ([on_card, rank(1, step())], " 0 MiB (3 reserved) ")):
        assert cell in shown(result_table(summarize({"ours": [records]}, 0)))


def test_copy_of_a_model_is_watched_by_the_same_meter() -> None:
    model = Tiny()
    meter = Meter(model, vocab_size=10, is_cuda=False, speed=1.0)
    replica = copy.deepcopy(model)
    meter.mark_begin()
    for part in (model, replica, replica):
        ones = torch.ones(2, 3, dtype=torch.int64)
        part(input_ids=ones, attention_mask=ones, labels=ones).backward()
    meter.mark_step()
    (record,) = meter.steps()
    assert record["micro_batches"] == [[2, 3, 6]] * 3
    assert record["samples"] == [11] * 6


def test_slow_rank_takes_as_long_as_at_its_speed() -> None:
    model = Tiny()
    meter = Meter(model, vocab_size=10, is_cuda=False, speed=0.25)
    ends = []
    # What is registered later, as our planner's instrument is, sees the slowness as well.
    model.embed.weight.register_post_accumulate_grad_hook(lambda _: ends.append(time.perf_counter()))
    meter.mark_begin()
    begin = time.perf_counter()
    ones = torch.ones(2, 3, dtype=torch.int64)
    model(input_ids=ones, attention_mask=ones, labels=ones).backward()
    meter.mark_step()
    (record,) = meter.steps()
    assert record["compute_s"] >= 4 * 0.02
    assert ends[0] - begin >= 4 * 0.02


def failing(command: list[str]) -> Arm:
    return Arm("one_process", "planted", lambda num_ranks: command, has_one_process=True)


def test_failing_arm_ends_the_bench_with_its_output(monkeypatch, tmp_path, capsys) -> None:
    monkeypatch.setitem(
        ARMS, "one_process", failing([sys.executable, "-c", "print('its reason'); raise SystemExit(3)"])
    )
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    code = main.main(["bench", "--device", "cpu", "--arms", "one_process"])
    captured = capsys.readouterr()
    assert code == 1
    assert "The arm one_process (planted) ended with exit code 3" in captured.err
    assert "| its reason" in captured.err
    assert captured.out == ""
    assert list(tmp_path.iterdir()) == []


def planted_rounds(monkeypatch, *, fails_in: str = "") -> list[str]:
    """Arms that only note that they ran, as "ROUND_ARM"; `fails_in` is the one that fails. What ran is returned."""
    ran = []

    def run(arm, options, folder):
        ran.append(f"{folder.parent.name}_{folder.stem}")
        if ran[-1] == fails_in:
            raise LaunchError("it failed", hint="")
        # An infinite norm: no JSON has it.
        ranks = range(bench_arm.num_processes(arm, options))
        return [rank(r, *[step(wall_s=len(ran))] * 5, norms=[math.inf] * 5, num_threads=r + 1) for r in ranks]

    monkeypatch.setattr("unsloth_multigpu.tools.bench.run.run_arm", run)
    return ran


def test_each_round_begins_with_another_arm(monkeypatch) -> None:
    ran = planted_rounds(monkeypatch)
    arms = choose_arms("--arms", "one_process,ours,torchrun", ARMS)
    runs, failed = bench._run_rounds(arms, BenchOptions(arms=(), num_repeats=4))
    assert [name.split("_", 1)[1][:3] for name in ran] == [
        *("one", "our", "tor"),
        *("our", "tor", "one"),
        *("tor", "one", "our"),
        *("one", "our", "tor"),
    ]
    assert failed is None
    assert list(runs) == ["one_process", "ours", "torchrun"]
    assert [ranks[0].steps[0].wall_s for ranks in runs["torchrun"]] == [3, 5, 7, 12]


def test_rounds_that_are_whole_are_kept_where_a_later_one_fails(monkeypatch, tmp_path, capsys) -> None:
    ran = planted_rounds(monkeypatch, fails_in="3_one_process")
    file = tmp_path / "bench.json"
    options = ["--device", "cpu", "--arms", "one_process,ours,torchrun", "--repeats", "3", "--json", str(file)]
    assert main.main(["bench", *options]) == 1
    assert ran[-2:] == ["3_torchrun", "3_one_process"]
    captured = capsys.readouterr()
    assert "error: it failed" in captured.err
    assert "2 round(s)" in captured.out
    assert "stopped: an arm failed in round 3 of 3" in captured.out
    assert "threads: 1 or 2 in every rank of every arm" in captured.out
    written = json.loads(file.read_text(), parse_constant=pytest.fail)
    assert [len(rounds) for rounds in written["runs"].values()] == [2, 2, 2]
    assert written["runs"]["ours"][1][0]["gradient_norms"] == ["inf"] * 5


def test_conditions_say_what_else_differs() -> None:
    options = BenchOptions(arms=("ours", "torchrun"), slow_rank=0, slow_speed=0.5)
    lines = conditions(options, 1000, "cpu", "1")
    assert any("ours: DDP does not search for unused parameters" in line for line in lines)
    assert any("arms of one process are not slowed" in line for line in lines)


def test_arm_that_hangs_is_ended_with_its_children(tmp_path) -> None:
    # The settings file, which stands in the command, tells which processes are meant.
    sleeper = "import time; time.sleep(600)"
    # A session of its own and no end with its parent, as a rank of torchrun.
    start = f"subprocess.Popen([sys.executable, '-c', {sleeper!r}, sys.argv[1]], start_new_session=True)"
    code = f"import subprocess, sys; {start}; {sleeper}"
    begin_s = time.monotonic()
    with pytest.raises(LaunchError, match="did not end within 1 s"):
        run_arm(failing([sys.executable, "-c", code]), BenchOptions(arms=(), timeout_s=1.0), tmp_path)
    assert time.monotonic() - begin_s < 20
    assert orphans(str(tmp_path)) == []


def test_arm_that_leaves_no_result_has_failed(tmp_path) -> None:
    arm = failing([sys.executable, "-c", ""])
    for options, flag in ((BenchOptions(arms=()), "--arms"), (learning(), "--strategies")):
        with pytest.raises(LaunchError, match="left no result of rank_0") as caught:
            run_arm(arm, options, tmp_path)
        assert f"bench {flag} one_process" in caught.value.hint


class Page(HTMLParser):
    """Notes what a page loads, and tags that are not closed in order."""

    def __init__(self) -> None:
        super().__init__()
        self.open, self.sources, self.cells = [], [], []

    def handle_starttag(self, tag, attributes):
        self.sources += [value for name, value in attributes if name in ("src", "href")]
        if tag not in ("meta", "img"):
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open and self.open[-1] in ("td", "th", "small", "span"):
            self.cells.append(data)


def test_report_stands_alone() -> None:
    def run(speed: float, norm: float) -> list[RankRecord]:
        return [rank(0, step(wall_s=9.0), *[step(wall_s=1 / speed)] * 3, norms=[1.0, norm, 1.1, 1.2])]

    runs = {"one_process": [run(1, 1.0)] * 2, "ours": [run(2, 1.0 + 1e-7), run(4, 1.0)], "torchrun": [run(1, 1.0)] * 2}
    results = summarize(runs, 1)
    plots = draw_plots(results, runs, 1, "fp32")
    assert set(plots) == {"speed.png", "shares.png", "steps.png", "norms.png"}
    assert all(png.startswith(b"\x89PNG") and len(png) > 5000 for png in plots.values())
    page = Page()
    text = render_page(["5 < 6", "Twice."], ["CPU: a <b>, 2 cores", "batch: 8"], [result_table(results)], plots)
    assert '<p class="headline">5 &lt; 6</p>\n<p class="headline result">Twice.</p>' in text
    assert "<dt>CPU</dt><dd>a &lt;b&gt;, 2 cores</dd>" in text
    page.feed(text)
    assert page.open == []
    assert len(page.sources) == len(plots)
    assert all(source.startswith("data:image/png;base64,") for source in page.sources)
    assert set(COLUMNS) <= set(page.cells)
    assert {"3.00", "2.00-4.00"} <= set(page.cells)


def test_first_sentences_say_what_came_out() -> None:
    def run(wall_s: float, norm: float = 1.0, samples=(0, 1)) -> list[list[RankRecord]]:
        return [[rank(0, step(wall_s=wall_s, samples=samples), norms=[norm])]]

    def said(dtype: str = "fp32", **runs) -> str:
        options = BenchOptions(arms=tuple(runs), device="cpu", dtype=dtype, num_steps=7, num_repeats=1)
        what, result = headline(summarize(runs, 0), [], options)
        assert what.endswith(f"trained in {len(runs)} ways, on 2 CPU ranks, 7 timed steps, 1 round(s).")
        return result

    one, two = run(2.0), run(0.8)
    assert said(one_process=one, ours=run(1.0, 1 + 1e-7), torchrun=two) == (
        "With the line: 2.00 times as fast as one process, and 0.80 times as fast as torchrun; each step has the "
        "samples of one process, and its gradient norm differs by 1e-07, which is rounding."
    )
    assert said(one_process=one, ours=run(1.0)).endswith("and its gradient norm to the last bit.")
    assert said(one_process=one, ours=run(1.0, 1.001)).endswith(
        "differs by 1e-03, which is MORE than rounding (bound 1e-04)."
    )
    assert said(one_process=one, ours=run(1.0, 1.001), dtype="bf16").endswith("differs by 1e-03, which is rounding.")
    assert said(one_process=one, ours=run(1.0, samples=(0, 2))).endswith(
        "its steps have OTHER samples than those of one_process."
    )
    assert said(ours=run(1.0)).startswith("With the line: 15 tokens in a second; without one_process there is nothing")
    assert said(torchrun=two) == "Most tokens in a second: torchrun, 19."


def test_rest_of_a_benchmark_is_told_when_it_is_known(capsys, monkeypatch) -> None:
    clock = iter([0.0, 60.0, 60.0, 80.0, 80.0, 180.0, 180.0, 220.0])
    monkeypatch.setattr(bench_run, "time", SimpleNamespace(monotonic=lambda: next(clock)))
    with Pace(["ours", "torchrun"], 2) as pace:
        assert pace.left_s() is None
        left = []
        for label, name in (("round 1/2", "ours"), ("round 1/2", "torchrun"), ("round 2/2", "torchrun")):
            with pace.told(label, name):
                pass
            left.append(pace.left_s())
        # Of an arm that has run, its own time; of another one the mean of what has.
        assert left == [60.0 + 2 * 60.0, 60.0 + 20.0, 60.0]
        with pace.told("round 2/2", "ours"):
            pass
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == (
        "bench: 4 runs, one after the other: ours, torchrun in each of 2 round(s); the first tells how long they take"
    )
    assert lines[1] == "bench: 1 of 4, round 1/2  ours                     60.0 s with start-up, about 3 min left"
    assert lines[4] == "bench: 4 of 4, round 2/2  ours                     40.0 s with start-up"


def test_plots_do_without_a_run_to_compare_with() -> None:
    runs = {"ours": [[rank(0, step(), step())]]}
    assert len(draw_plots(summarize(runs, 1), runs, 1, "bf16")) == 4


def test_command_line_loads_no_library_to_show_its_help() -> None:
    code = "import sys, unsloth_multigpu.cli.main as m\ntry: m.main(['bench', '--help'])\nexcept SystemExit: pass\n"
    code += "print(sorted({'torch', 'transformers', 'matplotlib', 'numpy'} & set(sys.modules)), file=sys.stderr)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stderr.strip() == "[]"


def learning(**options) -> BenchOptions:
    return BenchOptions(arms=(), **{"num_epochs": 2, "lengths": "text:40", **options})


def test_text_is_parted_into_what_is_learned_and_what_is_tested() -> None:
    options = learning(num_steps=100)
    rows, test_rows = make_rows(options), make_test_rows(options)
    assert (len(rows), len(test_rows)) == (1600, 128)
    bodies, test_bodies = ({tuple(row[2:]) for row in part} for part in (rows, test_rows))
    assert len(bodies) == 1600
    assert not bodies & test_bodies
    assert {8 <= len(body) <= 38 and max(body) < 256 for body in bodies | test_bodies} == {True}
    assert bytes(rows[0][2:]).decode().isprintable()
    assert [high * 2000 + low for high, low, *_ in [*rows, *test_rows]] == list(range(1728))
    assert (rows, test_rows) == (make_rows(options), make_test_rows(options))
    # Speed alone needs no test.
    assert make_test_rows(learning(num_epochs=None)) == []


def test_texts_of_a_file_are_parted_too(tmp_path) -> None:
    file = tmp_path / "a.txt"
    file.write_text("".join(f"text {n:02}\n" for n in range(20)))
    options = learning(num_steps=2, lengths=f"file:{file}")
    assert [bytes(row[2:]) for row in make_test_rows(options)] == [b"text 00", b"text 01"]
    assert {bytes(row[2:]) for row in make_rows(options)} == {b"text %02d" % n for n in range(2, 20)}
    file.write_text("alone")
    with pytest.raises(ConfigError, match="learned and tested"):
        make_rows(options)


def test_test_counts_tokens_that_are_to_be_predicted() -> None:
    logits = torch.zeros(2, 4, 5)
    logits[0, 1, 3] = math.log(4)  # Half of the probability.
    labels = torch.tensor([[-100, -100, 3, 0], [-100, 2, -100, -100]])
    scores = score_rows(logits, labels)
    expected = [[math.log(2) + math.log(5), 2, 2], [math.log(5), 0, 1]]
    assert torch.allclose(scores, torch.tensor(expected, dtype=torch.float32))
    means = mean_scores(SimpleNamespace(predictions=scores.numpy()))
    assert means == pytest.approx({"token_loss": (math.log(2) + 2 * math.log(5)) / 3, "accuracy": 2 / 3})


def test_numbers_of_rows_are_not_learned() -> None:
    rows = [{"input_ids": [7, 7, 1, 2]}, {"input_ids": [7, 8, 3]}]
    batch = bench_worker.collate(rows, num_given=2)
    assert batch["input_ids"].tolist() == [[7, 7, 1, 2], [7, 8, 3, 0]]
    assert batch["attention_mask"].tolist() == [[1, 1, 1, 1], [1, 1, 1, 0]]
    assert batch["labels"].tolist() == [[-100, -100, 1, 2], [-100, -100, 3, -100]]


def test_epochs_are_told_apart() -> None:
    def tested(loss: float, accuracy: float) -> dict[str, float]:
        return {"eval_loss": 9.0, "eval_token_loss": loss, "eval_accuracy": accuracy}

    history = [{"loss": 5.0, "grad_norm": 1.0}, {"loss": 3.0}, tested(3.5, 0.1), {"loss": 2.0}, tested(2.5, 0.2)]
    assert epoch_records([*history, {"train_loss": 3.3}]) == [
        {"train_loss": 4.0, "test_loss": 3.5, "accuracy": 0.1},
        {"train_loss": 2.0, "test_loss": 2.5, "accuracy": 0.2},
    ]


def test_strategies_know_how_their_ranks_meet() -> None:
    alone = ["local_sgd", "diloco"]
    assert [name for name, arm in STRATEGIES.items() if not arm.meets_every_step] == alone
    # A loss in the log is a meeting of all ranks.
    meetings = {name: learning_arguments(arm, 2, 8)["logging_strategy"] for name, arm in STRATEGIES.items()}
    assert [name for name, strategy in meetings.items() if strategy == "epoch"] == alone


def test_legacy_is_one_process_on_all_cards(tmp_path) -> None:
    legacy, options = STRATEGIES["legacy"], BenchOptions(arms=(), num_ranks=2, device="cuda")
    assert (bench_arm.num_processes(legacy, options), bench_arm.num_devices(legacy, options)) == (1, 2)
    visible = {"CUDA_VISIBLE_DEVICES": "4,5"}
    assert arm_environment(legacy, options, tmp_path, visible)["CUDA_VISIBLE_DEVICES"] == "4,5"
    one_card = BenchOptions(arms=(), device="cuda", is_card_shared=True)
    arms, lines = bench_arm.part_available(list(STRATEGIES.values()), one_card)
    assert lines == ["legacy: skipped, one process cannot use one card as 2"]
    assert len(arms) == len(STRATEGIES) - 1


def learned_runs() -> dict[str, list[list[RankRecord]]]:
    """Two rounds of three strategies, two epochs of two steps."""

    def run(num_ranks: int, step_s: float, accuracies, norms, sent_bytes) -> list[RankRecord]:
        epochs = tuple(EpochRecord(4.0 - a, 5.0 - a, a) for a in accuracies)
        samples = [(0, 1)] if num_ranks == 1 else [(0,), (1,)]
        steps = [[step(wall_s=step_s * (1 + r / 10), samples=mine)] * 4 for r, mine in enumerate(samples)]
        return [
            dataclasses.replace(rank(r, *steps[r], norms=norms), gradient_norms=norms, epochs=epochs, sent_bytes=sent)
            for r, sent in zip(range(num_ranks), sent_bytes, strict=True)
        ]

    norms, late = (1.0, 1.0, 1.0, 1.0), (1.0, 1.001, 1.0, 9.0)
    return {
        "one_process": [run(1, 4.0, (0.1, 0.2), norms, [0])] * 2,
        "ddp": [run(2, s, (0.1, 0.2), late, [80, 80]) for s in (2.0, 3.0)],
        "local_sgd": [run(2, 1.0, (0.1, a), (), [None, 40]) for a in (0.3, 0.5)],
    }


def test_strategies_are_summarized() -> None:
    runs = learned_runs()
    options = learning(num_steps=2, num_warmup=1)
    arms = {r.name: r for r in summarize(runs, 1, options.num_steps)}
    results = {r.name: r for r in summarize_strategies(runs, options)}
    # Norms are compared in the first epoch alone, where there are any; its last step differs by a factor of 9.
    assert arms["ddp"].norm_difference == pytest.approx(1e-3)
    assert arms["local_sgd"].norm_difference is None
    assert all(arm.has_same_samples for arm in arms.values())
    # Both epochs, warm-up included, of the slower rank.
    assert results["ddp"].epoch_s == Spread(pytest.approx(5.5), pytest.approx(4.4), pytest.approx(6.6))
    assert results["ddp"].times_ddp == Spread(1.0, 1.0, 1.0)
    assert results["one_process"].times_ddp.low == pytest.approx(2.2 / 4.0 / 2)
    assert [r.num_updates for r in results.values()] == [4, 4, 4]
    assert [r.sent_bytes_per_step for r in results.values()] == [0.0, 20.0, None]
    assert results["local_sgd"].accuracies == (Spread(0.1, 0.1, 0.1), Spread(0.4, 0.3, 0.5))
    assert results["ddp"].test_losses[1].median == 4.8
    speed, epochs = strategy_tables(list(results.values()), arms)
    assert [len(row) for row in (*speed.rows, *epochs.rows)] == [len(speed.columns)] * 3 + [len(epochs.columns)] * 3
    assert speed.rows[2][speed.columns.index("MB sent/step")] == "-"
    assert "40.0% (30.0%-50.0%)" in epochs.rows[2]
    assert shown(epochs).splitlines()[0].endswith("accuracy 2")


def test_learning_is_drawn(monkeypatch) -> None:
    original = plot.png_of
    runs = learned_runs()
    figures = []
    monkeypatch.setattr(plot, "png_of", lambda figure: (figures.append(figure), original(figure))[1])
    plots = draw_curves(summarize_strategies(runs, learning(num_steps=2)))
    # Strategies that learn the same are drawn at the same places.
    for axes in figures[0].axes:
        assert {tuple(line.get_xdata()) for line in axes.lines if len(line.get_xdata()) == 2} == {(1, 2)}
    assert list(plots) == ["accuracy_curves.png"]
    assert plots["accuracy_curves.png"].startswith(b"\x89PNG")
    # One strategy has no norms.
    assert len(draw_plots(summarize(runs, 1), runs, 1, "bf16")) == 4
