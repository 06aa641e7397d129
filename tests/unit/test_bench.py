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
from unsloth_multigpu.tools.bench import worker
from unsloth_multigpu.tools.bench.arm import (
    ARMS,
    STRATEGIES,
    Arm,
    arm_command,
    arm_environment,
    num_accumulated,
    speed_of,
)
from unsloth_multigpu.tools.bench.data import make_rows, make_test_rows
from unsloth_multigpu.tools.bench.meter import Meter
from unsloth_multigpu.tools.bench.option import BenchOptions
from unsloth_multigpu.tools.bench.result import (
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
from unsloth_multigpu.tools.bench.table import Table, conditions, result_tables
from unsloth_multigpu.tools.plain_json import json_text

COLD = BenchOptions(warmup=0)


def parsed(*arguments: str) -> BenchOptions:
    return BenchOptions.from_arguments(main.make_parser(main.find_commands()).parse_args(["bench", *arguments]))


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
    measure = measure_run(ranks, BenchOptions(warmup=1))
    assert measure.tokens_per_s == (15 + 15 + 25 + 15) / 4.0
    assert measure.padding_share == pytest.approx(1 - 70 / (20 + 20 + 30 + 20))
    assert measure.waiting_share == pytest.approx((4 - 3) / (4 + 1))
    assert measure.cpu_s == 3.0 + 1.0
    (result,) = summarize({"ours": [ranks]}, BenchOptions(warmup=1))
    # Memory is needed in the warm-up, too.
    assert (result.peak_bytes, result.largest_tokens) == (100, 800)


def test_rank_that_is_late_in_one_step_makes_it_late_where_ranks_meet() -> None:
    ranks = [rank(0, step(wall_s=3.0), step(wall_s=1.0)), rank(1, step(wall_s=2.0), step(wall_s=2.0))]
    once = measure_run(ranks, COLD).tokens_per_s
    assert once * 4.0 == pytest.approx(
        measure_run(ranks, BenchOptions(warmup=0, interleave="steps")).tokens_per_s * 5.0
    )


def test_ratios_are_taken_within_each_round() -> None:
    # The ratio of the medians would be 20 / 20.
    assert ratios([10.0, 20.0, 60.0], [5.0, 20.0, 30.0]) == Spread(2.0, 1.0, 2.0)


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
    results = {result.name: result for result in summarize(runs, COLD)}
    assert [name for name in runs if results[name].has_same_samples] == ["one_process", "ours"]
    assert results["ours"].norm_difference == 0.0
    assert results["torchrun"].norm_difference is None
    assert results["one_process"].times["one_process"] == Spread(1.0, 1.0, 1.0)


def test_arm_without_others_has_nothing_to_compare() -> None:
    (result,) = summarize({"ours": [[rank(0, step())]]}, COLD)
    assert (result.times, result.norm_difference, result.has_same_samples) == ({}, None, None)
    assert shown(*result_tables([result])).splitlines()[1].split().count("-") == 2


def test_cost_of_the_guard_is_a_ratio_within_each_round() -> None:
    seconds = {"ours": (2.0, 20.0), "unguarded": (1.0, 20.0)}
    runs = {name: [[rank(0, step(wall_s=wall_s))] for wall_s in rounds] for name, rounds in seconds.items()}
    ours, unguarded = summarize(runs, COLD)
    assert ours.times == {"unguarded": Spread(0.75, 0.5, 1.0)}
    assert unguarded.times == {"unguarded": Spread(1.0, 1.0, 1.0)}
    table = shown(*result_tables([ours, unguarded])).splitlines()
    assert table[0].split()[:5] == ["arm", "tokens/s", "x", "unguarded", "samples"]
    assert "0.750 (0.500-1.000)" in table[1]


def test_all_arms_but_the_unguarded_one_save(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)

    def strategy(name: str, save_steps: int) -> tuple[str, int]:
        options = BenchOptions(save_steps=save_steps)
        values = worker._training_values(ARMS[name], options)
        return values["save_strategy"], values["save_steps"]

    assert [strategy(name, 7) for name in ("ours", "torchrun")] == [("steps", 7)] * 2
    assert strategy("unguarded", 7)[0] == strategy("ours", 0)[0] == "no"
    assert not any("checkpoints:" in line for line in conditions(BenchOptions(), 0, "cpu", "1"))
    saved = conditions(BenchOptions(arms=("unguarded",), save_steps=7), 0, "cpu", "1")
    assert any(line.startswith("checkpoints: every 7 steps") for line in saved)


def test_numbers_that_json_lacks_are_text() -> None:
    text = json_text({"a": [math.inf, (math.nan, 1.5)], "b": {"c": -math.inf}, "d": None})
    assert json.loads(text, parse_constant=pytest.fail) == {"a": ["inf", ["nan", 1.5]], "b": {"c": "-inf"}, "d": None}


def test_default_lengths_are_ragged_as_documented() -> None:
    options = BenchOptions(steps=400, warmup=0)
    rows = make_rows(options)
    lengths = [len(row) for row in rows]
    assert 140 < statistics.median(lengths) < 160
    assert max(lengths) == 1024
    batches = [lengths[i : i + 8] for i in range(0, len(lengths), 8)]
    padded = sum(8 * max(batch) for batch in batches)
    assert 0.57 < 1 - sum(lengths) / padded < 0.63
    assert [high * 2000 + low for high, low, *_ in rows] == list(range(len(rows)))
    assert rows == make_rows(options)
    assert rows != make_rows(BenchOptions(steps=400, warmup=0, seed=1))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--arms ours,theirs", "--arms: there is no 'theirs'"),
        ("--arms ours,ours", "--arms: 'ours' is given twice"),
        ("--strategies ddp,theirs", "--strategies: there is no 'theirs'"),
        ("--strategies ours", "--strategies: there is no 'ours'"),
        ("--arms ours --strategies ddp", "--arms and --strategies are two benchmarks"),
        ("--ranks 0", "--ranks 0: expected at least 1"),
        ("--warmup -1", "--warmup -1: expected at least 0"),
        ("--hidden-size 100", "--hidden-size 100: attention heads are 64 wide"),
        ("--vocab-size 15", "--vocab-size 15: expected at least 256"),
        ("--train half", "--train half: expected one of full, lora"),
        ("--steps x", "argument --steps: invalid int value: 'x'"),
        *((f"--lengths {text}", f"--lengths {text!r}") for text in ("lognormal:150", "lognormal:300:200", "fixed:2")),
        *((f"--lengths {text}", f"--lengths {text!r}") for text in ("normal:1:2", "file:a.txt", "text:2")),
        *((f"--slow-rank {text}", f"--slow-rank {text!r}") for text in ("2:0.5", "1:0", "1")),
        ("--timeout-s 0", "--timeout-s 0.0: expected seconds above 0"),
        ("--json /proc/bench.json", "--json: "),
        ("--epochs 3", "--epochs 3 is for --strategies, not for --arms"),
        ("--steps 2 --strategies ddp", "--steps 2: expected more than --warmup 2"),
        ("--lengths fixed:20 --strategies ddp", "--lengths fixed:20: random tokens teach a model nothing"),
        ("--interleave steps --strategies ddp", "--interleave steps is for --arms, not for --strategies"),
        ("--library unsloth --strategies ddp", "--library unsloth is for --arms, not for --strategies"),
        ("--padding-free --strategies all", "--padding-free True is for --arms, not for --strategies"),
        ("--ranks 4 --federated all", "--ranks 4 is for --arms or --strategies, not for --federated"),
        ("--clients 3", "--clients 3 is for --federated, not for --arms"),
        ("--four-bit --library unsloth --train full", "--four-bit with --library unsloth --train full"),
    ],
)
def test_wrong_value_is_named_at_once(arguments, message, capsys, monkeypatch) -> None:
    monkeypatch.setattr(bench, "_run_rounds", lambda *_: pytest.fail("it ran"))
    try:
        code = main.main(["bench", "--device", "cpu", *arguments.split()])
    except SystemExit as ended:  # argparse
        code = ended.code
    error = capsys.readouterr().err
    assert code == ConfigError.exit_code
    assert message in error
    assert "Hint: " in error


def test_defaults_follow_what_is_compared() -> None:
    # The check of replicas after the first step is counted in the second.
    assert (parsed().warmup, parsed().train, parsed().num_rows) == (2, "full", 80)
    slow = parsed("--slow-rank", "0:0.5")
    assert (slow.warmup, speed_of(ARMS["ours"], slow, 0), speed_of(ARMS["ours"], slow, 1)) == (8, 0.5, 1.0)
    # One process, with which the others are compared, is not slowed.
    assert {speed_of(arm, slow, 0) for arm in ARMS.values() if arm.has_one_process} == {1.0}
    assert parsed("--slow-rank", "1:0.5", "--warmup", "2").warmup == 2
    assert (parsed("--model-size", "1b", "--num-layers", "3").hidden_size, parsed().vocab_size) == (2048, 2000)
    learned = parsed("--strategies", "all")
    assert (learned.steps, learned.epochs, learned.lengths) == (40, 2, "text:128")
    clients = parsed("--federated", "all", "--clients", "3")
    assert (clients.train, clients.warmup, clients.num_samples_per_step, clients.num_rows) == ("lora", 1, 24, 192)


def test_arm_that_transformers_lacks_is_skipped_with_its_version(monkeypatch, tmp_path) -> None:
    arms, options = list(ARMS), BenchOptions()
    assert bench_arm.part_available(arms, options) == (arms, [])
    (tmp_path / "training_args.py").write_text("group_by_length")
    spec = importlib.util.spec_from_file_location(
        "transformers", tmp_path / "x.py", submodule_search_locations=[str(tmp_path)]
    )
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: spec)
    monkeypatch.setattr(bench_arm, "installed_version", lambda name: "4.57.1")
    left, lines = bench_arm.part_available(arms, options)
    assert [name for name in arms if name not in left] == ["rebalance"]
    assert lines == ["rebalance: skipped, transformers 4.57.1 has no batch_rebalance"]


@pytest.mark.parametrize("arm", [*ARMS.values(), *STRATEGIES.values()], ids=lambda arm: arm.name)
def test_every_arm_has_the_same_samples_in_a_step(arm) -> None:
    options = BenchOptions(ranks=3, batch_size=5, accumulation=2)
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
        return arm_environment(ARMS[name], BenchOptions(**{"device": "cpu", **options}), tmp_path, inherited)

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
        given = BenchOptions(library="unsloth", device="cpu", model_folder=str(tmp_path / "model"), **options)
        return arm_environment(ARMS["ours"], given, tmp_path, {})

    name = "UNSLOTH_DISABLE_AUTO_PADDING_FREE"
    assert variables()[name] == "1"
    assert name not in variables(padding_free=True)
    assert name not in arm_environment(ARMS["ours"], BenchOptions(device="cpu"), tmp_path, {})
    # What one arm compiled the next one finds.
    assert variables()["TORCHINDUCTOR_CACHE_DIR"] == str(tmp_path / "inductor")
    said = conditions(BenchOptions(library="unsloth", train="lora", four_bit=True, optim="adamw_8bit"), 0, "cpu", "1")
    assert any(line.endswith("SFTTrainer of Unsloth, 4-bit weights, adamw_8bit") for line in said)


def test_compilations_and_the_allocator_are_those_of_the_worst_rank() -> None:
    steps = [step()] * 4
    ranks = [
        dataclasses.replace(rank(0, *steps), num_compiled=(3, 5, 5, 6), is_expandable=True),
        dataclasses.replace(rank(1, *steps), num_compiled=(3, 5, 7, 9), is_expandable=False),
    ]
    (result,) = summarize({"ours": [ranks]}, BenchOptions(warmup=2))
    assert (result.num_compiled, result.is_expandable) == ((5, 4), False)
    (result,) = summarize({"ours": [ranks]}, COLD)
    assert result.num_compiled == (0, 9)
    (on_cpu,) = summarize({"ours": [[rank(0, *steps)]]}, BenchOptions(warmup=2))
    assert (on_cpu.num_compiled, on_cpu.is_expandable) == ((0, 0), None)


def test_ranks_that_share_a_card_are_started_by_torchrun() -> None:
    shared = BenchOptions(device="cuda", is_card_shared=True)
    assert "torch.distributed.run" in arm_command(ARMS["ours"], shared)
    assert "torch.distributed.run" not in arm_command(ARMS["ours"], BenchOptions())
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
    options = bench._on_device(BenchOptions(device=given, ranks=3), is_warm=False)
    assert (options.device, options.is_card_shared) == expected
    # A card compiles in its first steps, and costs are fitted in them.
    assert options.warmup == (20 if options.device == "cuda" else 2)
    assert bench._on_device(BenchOptions(device=given, ranks=3), is_warm=True).warmup == 2


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
        bench._on_device(BenchOptions(device=given, ranks=3), is_warm=False)


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
    batch = worker.end_to_end([{"input_ids": [1, 2, 5]}, {"input_ids": [0, 7, 3, 4]}])
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
    options = BenchOptions(gradient_checkpointing=True, padding_free=True)
    values = worker._training_values(ARMS["ours"], options)
    assert values["gradient_checkpointing"] is True
    assert values["gradient_checkpointing_kwargs"] == {"use_reentrant": False}
    said = "\n".join(conditions(options, 0, "cpu", "1"))
    assert "full training, gradient checkpointing\n" in said
    assert "in each step, rows end to end\n" in said


def test_reserved_memory_is_shown_where_there_is_any() -> None:
    on_card = dataclasses.replace(rank(0, step()), reserved_bytes=3 * 2**20)
    for records, cell in (([rank(0, step())], " 0 MiB "), ([on_card, rank(1, step())], " 0 MiB (3 reserved) ")):
        assert cell in shown(*result_tables(summarize({"ours": [records]}, COLD)))


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
    runs, failed = bench._run_rounds(BenchOptions(arms=("one_process", "ours", "torchrun"), repeats=4))
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
    options = BenchOptions(arms=("ours", "torchrun"), slow_rank="0:0.5")
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
        run_arm(failing([sys.executable, "-c", code]), BenchOptions(timeout_s=1.0), tmp_path)
    assert time.monotonic() - begin_s < 20
    assert orphans(str(tmp_path)) == []


def test_arm_that_leaves_no_result_has_failed(tmp_path) -> None:
    arm = failing([sys.executable, "-c", ""])
    for options, flag in ((BenchOptions(), "--arms"), (learning(), "--strategies")):
        with pytest.raises(LaunchError, match="left no result of rank_0") as caught:
            run_arm(arm, options, tmp_path)
        assert f"bench {flag} one_process" in caught.value.hint


def test_rest_of_a_benchmark_is_told_when_it_is_known(capsys, monkeypatch) -> None:
    clock = iter([0.0, 60.0, 60.0, 160.0])
    monkeypatch.setattr("unsloth_multigpu.tools.bench.run.time", SimpleNamespace(monotonic=lambda: next(clock)))
    with Pace(["ours"], 2) as pace:
        for label in ("round 1/2", "round 2/2"):
            with pace.told(label, "ours"):
                pass
    assert capsys.readouterr().err.splitlines() == [
        "bench: 2 runs, one after the other: ours in each of 2 round(s); the first tells how long they take",
        "bench: 1 of 2, round 1/2  ours                     60.0 s with start-up, about 1 min 00 s left",
        "bench: 2 of 2, round 2/2  ours                    100.0 s with start-up",
    ]


def test_command_line_loads_no_library_to_show_its_help() -> None:
    code = "import sys, unsloth_multigpu.cli.main as m\ntry: m.main(['bench', '--help'])\nexcept SystemExit: pass\n"
    code += "print(sorted({'torch', 'transformers', 'matplotlib', 'numpy'} & set(sys.modules)), file=sys.stderr)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stderr.strip() == "[]"


def learning(**options) -> BenchOptions:
    return BenchOptions(kind="strategies", **{"lengths": "text:40", **options})


def test_text_is_parted_into_what_is_learned_and_what_is_tested() -> None:
    options = learning(steps=100)
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
    assert make_test_rows(BenchOptions(lengths="text:40")) == []


def test_test_counts_tokens_that_are_to_be_predicted() -> None:
    logits = torch.zeros(2, 4, 5)
    logits[0, 1, 3] = math.log(4)  # Half of the probability.
    labels = torch.tensor([[-100, -100, 3, 0], [-100, 2, -100, -100]])
    scores = worker.score_rows(logits, labels)
    expected = [[math.log(2) + math.log(5), 2, 2], [math.log(5), 0, 1]]
    assert torch.allclose(scores, torch.tensor(expected, dtype=torch.float32))
    means = worker.mean_scores(SimpleNamespace(predictions=scores.numpy()))
    assert means == pytest.approx({"token_loss": (math.log(2) + 2 * math.log(5)) / 3, "accuracy": 2 / 3})


def test_numbers_of_rows_are_not_learned() -> None:
    rows = [{"input_ids": [7, 7, 1, 2]}, {"input_ids": [7, 8, 3]}]
    batch = worker.collate(rows, num_given=2)
    assert batch["input_ids"].tolist() == [[7, 7, 1, 2], [7, 8, 3, 0]]
    assert batch["attention_mask"].tolist() == [[1, 1, 1, 1], [1, 1, 1, 0]]
    assert batch["labels"].tolist() == [[-100, -100, 1, 2], [-100, -100, 3, -100]]


def test_epochs_are_told_apart() -> None:
    def tested(loss: float, accuracy: float) -> dict[str, float]:
        return {"eval_loss": 9.0, "eval_token_loss": loss, "eval_accuracy": accuracy}

    history = [{"loss": 5.0, "grad_norm": 1.0}, {"loss": 3.0}, tested(3.5, 0.1), {"loss": 2.0}, tested(2.5, 0.2)]
    assert worker.epoch_records([*history, {"train_loss": 3.3}]) == [
        {"train_loss": 4.0, "test_loss": 3.5, "accuracy": 0.1},
        {"train_loss": 2.0, "test_loss": 2.5, "accuracy": 0.2},
    ]


def test_strategies_know_how_their_ranks_meet() -> None:
    alone = ["local_sgd", "diloco"]
    assert [name for name, arm in STRATEGIES.items() if not arm.is_synchronous] == alone
    # A loss in the log is a meeting of all ranks.
    meetings = {
        name: worker.learning_arguments(arm, learning())["logging_strategy"] for name, arm in STRATEGIES.items()
    }
    assert [name for name, strategy in meetings.items() if strategy == "epoch"] == alone


def test_legacy_is_one_process_on_all_cards(tmp_path) -> None:
    legacy, options = STRATEGIES["legacy"], BenchOptions(device="cuda")
    assert (bench_arm.num_processes(legacy, options), bench_arm.num_devices(legacy, options)) == (1, 2)
    visible = {"CUDA_VISIBLE_DEVICES": "4,5"}
    assert arm_environment(legacy, options, tmp_path, visible)["CUDA_VISIBLE_DEVICES"] == "4,5"
    one_card = BenchOptions(device="cuda", is_card_shared=True)
    arms, lines = bench_arm.part_available(list(STRATEGIES), one_card)
    assert lines == ["legacy: skipped, one process cannot use one card as 2"]
    assert len(arms) == len(STRATEGIES) - 1


def learned_runs() -> dict[str, list[list[RankRecord]]]:
    """Two rounds of three strategies, two epochs of two steps."""

    def run(num_ranks: int, step_s: float, accuracies, norms, sent_bytes) -> list[RankRecord]:
        epochs = [{"train_loss": 4.0 - a, "test_loss": 5.0 - a, "accuracy": a} for a in accuracies]
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
    results = {r.name: r for r in summarize(runs, learning(steps=2, warmup=1))}
    # Norms are compared in the first epoch alone, where there are any; its last step differs by a factor of 9.
    assert results["ddp"].norm_difference == pytest.approx(1e-3)
    assert results["local_sgd"].norm_difference is None
    assert all(result.has_same_samples for result in results.values())
    assert results["ddp"].times["ddp"] == Spread(1.0, 1.0, 1.0)
    assert results["one_process"].times["ddp"].low == pytest.approx(2.2 / 4.0 / 2)
    learned = {name: result.learned for name, result in results.items()}
    # Both epochs, warm-up included, of the slower rank.
    assert learned["ddp"].epoch_s == Spread(pytest.approx(5.5), pytest.approx(4.4), pytest.approx(6.6))
    assert [it.num_updates for it in learned.values()] == [4, 4, 4]
    assert [it.sent_bytes_per_step for it in learned.values()] == [0.0, 20.0, None]
    accuracies = [epoch["accuracy"] for epoch in learned["local_sgd"].epochs]
    assert accuracies == [Spread(0.1, 0.1, 0.1), Spread(0.4, 0.3, 0.5)]
    assert learned["ddp"].epochs[1]["test_loss"].median == 4.8
    speed, epochs = result_tables(list(results.values()))
    assert [len(row) for row in (*speed.rows, *epochs.rows)] == [len(speed.columns)] * 3 + [len(epochs.columns)] * 3
    assert speed.rows[2][speed.columns.index("MB sent/step")] == "-"
    assert "40.0% (30.0%-50.0%)" in epochs.rows[2]
    assert shown(epochs).splitlines()[0].endswith("accuracy 2")
