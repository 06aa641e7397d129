"""`unsloth-multigpu bench` without training: options, samples, commands, the instrument, figures and the page."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import math
import statistics
import subprocess
import sys
import time
from html.parser import HTMLParser
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.helpers.run import orphans
from unsloth_multigpu import start
from unsloth_multigpu.cli import bench, bench_arm, bench_ddp, main
from unsloth_multigpu.cli.bench_arm import (
    ARMS,
    Arm,
    arm_command,
    arm_environment,
    choose_arms,
    num_accumulated,
    speed_of,
)
from unsloth_multigpu.cli.bench_data import make_rows
from unsloth_multigpu.cli.bench_meter import Meter
from unsloth_multigpu.cli.bench_option import BenchOptions
from unsloth_multigpu.cli.bench_plot import draw_plots
from unsloth_multigpu.cli.bench_report import render_page
from unsloth_multigpu.cli.bench_result import (
    RankRecord,
    Spread,
    StepRecord,
    measure_run,
    norm_difference,
    ratios,
    summarize,
    waiting_share,
)
from unsloth_multigpu.cli.bench_run import run_arm
from unsloth_multigpu.cli.bench_table import COLUMNS, conditions, render_table
from unsloth_multigpu.cli.plain_json import json_text
from unsloth_multigpu.errors import ConfigError, LaunchError, SetupError


def step(wall_s=1.0, cpu_s=1.0, compute_s=1.0, micro_batches=((2, 10, 15),), samples=(0, 1)) -> StepRecord:
    return StepRecord(wall_s, cpu_s, compute_s, tuple(micro_batches), tuple(samples))


def rank(number: int, *steps: StepRecord, norms=None, peak_bytes=100, num_threads=1) -> RankRecord:
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
    assert render_table([result]).splitlines()[1].split().count("-") == 4


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
    assert any(value in error for value in (arguments[1], "theirs", "'ours' is given twice", "/proc"))
    assert "Hint: " in error


def test_help_names_every_arm_and_option(capsys) -> None:
    with pytest.raises(SystemExit):
        main.main(["bench", "--help"])
    text = capsys.readouterr().out
    assert [name for name in ARMS if f"{name}: " not in " ".join(text.split())] == []
    options = "arms ranks device slow-rank model-size hidden-size num-layers vocab-size dtype train lengths batch-size"
    options += " accumulation seed steps warmup repeats timeout-s json report"
    assert [name for name in options.split() if f"  --{name} " not in text] == []


def test_slow_rank_gives_the_planner_time_to_notice() -> None:
    def options(*arguments: str) -> BenchOptions:
        return BenchOptions.from_arguments(main._parser().parse_args(["bench", *arguments]), [])

    # The check of replicas after the first step is counted in the second.
    assert options().num_warmup == 2
    slow = options("--slow-rank", "0:0.5")
    assert (slow.num_warmup, speed_of(ARMS["ours"], slow, 0), speed_of(ARMS["ours"], slow, 1)) == (8, 0.5, 1.0)
    # One process, with which the others are compared, is not slowed.
    assert {speed_of(arm, slow, 0) for arm in ARMS.values() if arm.has_one_process} == {1.0}
    assert options("--slow-rank", "1:0.5", "--warmup", "2").num_warmup == 2
    assert (options("--model-size", "1b", "--num-layers", "3").hidden_size, options().vocab_size) == (2048, 2000)


def test_arm_that_transformers_lacks_is_skipped_with_its_version(monkeypatch, tmp_path) -> None:
    arms = choose_arms(None)
    assert bench_arm.part_available(arms) == (arms, [])
    (tmp_path / "training_args.py").write_text("group_by_length")
    spec = importlib.util.spec_from_file_location(
        "transformers", tmp_path / "x.py", submodule_search_locations=[str(tmp_path)]
    )
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: spec)
    monkeypatch.setattr(bench_arm, "installed_version", lambda name: "4.57.1")
    left, lines = bench_arm.part_available(arms)
    assert [arm.name for arm in arms if arm not in left] == ["rebalance"]
    assert lines == ["rebalance: skipped, transformers 4.57.1 has no batch_rebalance"]


@pytest.mark.parametrize("arm", ARMS.values(), ids=ARMS)
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
    options = bench._on_device(BenchOptions(arms=(), device=given, num_ranks=3))
    assert (options.device, options.is_card_shared) == expected


@pytest.mark.parametrize(
    ("visible", "given", "reason"),
    [
        (("cpu", 0), "cuda", "--device cuda, but this machine has 0 CUDA"),
        (("cuda", 2), "auto", "--ranks 3, but 2 GPUs"),
    ],
)
def test_device_that_is_missing_is_refused(visible, given, reason, monkeypatch) -> None:
    monkeypatch.setattr(start, "visible_accelerators", lambda: visible)
    with pytest.raises(SetupError, match=reason):
        bench._on_device(BenchOptions(arms=(), device=given, num_ranks=3))


def test_report_without_matplotlib_is_refused_before_it_runs(monkeypatch, tmp_path, capsys) -> None:
    real = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "matplotlib" else real(name))
    monkeypatch.setattr(bench, "_run_rounds", lambda *_: pytest.fail("it ran"))
    assert main.main(["bench", "--device", "cpu", "--report", str(tmp_path / "r")]) == SetupError.exit_code
    assert "pip install 'unsloth-multigpu[report]'" in capsys.readouterr().err


class Tiny(nn.Module):
    """Takes what a Trainer hands a model."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(10, 4)
        self.head = nn.Linear(4, 10)

    def forward(self, input_ids, labels):
        time.sleep(0.02)
        return self.head(self.embed(input_ids)).sum()


def test_meter_counts_what_is_computed_and_nothing_else() -> None:
    model = Tiny()
    meter = Meter(model, vocab_size=10, is_cuda=False, speed=1.0)
    ids = torch.tensor([[1, 2, 5], [0, 7, 0], [0, 1, 1]])
    labels = torch.tensor([[1, 2, 5], [0, 7, -100], [-100, -100, -100]])
    meter.mark_step()
    with torch.no_grad():
        model(input_ids=ids, labels=labels)
    model(input_ids=ids, labels=labels)  # Without a backward pass.
    model.eval()(input_ids=ids, labels=labels).backward()
    model.train()
    for number in (1, 2):
        for _ in range(number):
            model(input_ids=ids, labels=labels).backward()
            time.sleep(0.03)  # Waiting for others.
        meter.mark_step()
    first, second = meter.steps()
    assert first["micro_batches"] == [[3, 3, 5]]
    assert first["samples"] == [12, 7]  # The third row is a filler.
    assert second["micro_batches"] == [[3, 3, 5]] * 2
    assert 0.02 <= first["compute_s"] < first["wall_s"] - 0.03 + 1e-4
    assert first["cpu_s"] < first["wall_s"]


def test_slow_rank_takes_as_long_as_at_its_speed() -> None:
    model = Tiny()
    meter = Meter(model, vocab_size=10, is_cuda=False, speed=0.25)
    ends = []
    # What is registered later, as our planner's instrument is, sees the slowness as well.
    model.embed.weight.register_post_accumulate_grad_hook(lambda _: ends.append(time.perf_counter()))
    meter.mark_step()
    begin = time.perf_counter()
    model(input_ids=torch.ones(2, 3, dtype=torch.int64), labels=torch.ones(2, 3, dtype=torch.int64)).backward()
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
        ran.append(folder.name)
        if folder.name == fails_in:
            raise LaunchError("it failed", hint="")
        # An infinite norm: no JSON has it.
        ranks = range(bench_arm.num_processes(arm, options))
        return [rank(r, *[step(wall_s=len(ran))] * 5, norms=[math.inf] * 5, num_threads=r + 1) for r in ranks]

    monkeypatch.setattr("unsloth_multigpu.cli.bench_run.run_arm", run)
    return ran


def test_each_round_begins_with_another_arm(monkeypatch) -> None:
    ran = planted_rounds(monkeypatch)
    arms = choose_arms("one_process,ours,torchrun")
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


def test_gradients_of_a_setting_that_failed_are_no_memory_of_the_next(monkeypatch) -> None:
    class Model(nn.Linear):
        def forward(self, input_ids, labels):
            return SimpleNamespace(loss=super().forward(input_ids).sum())

    model, seen = Model(2, 2), []
    model(torch.ones(1, 2), None).loss.backward()

    @contextlib.contextmanager
    def peak(_device):
        seen.append([parameter.grad for parameter in model.parameters()])
        yield [0.0]

    monkeypatch.setattr(bench_ddp, "_peak", peak)
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    try:
        bench_ddp._measure(model, [torch.ones(1, 2)], {}, num_steps=1)
    finally:
        dist.destroy_process_group()
    assert seen == [[None, None]]


def test_arm_that_hangs_is_ended_with_its_children(tmp_path) -> None:
    # The settings file, which stands in the command, tells which processes are meant.
    sleeper = "import time; time.sleep(600)"
    code = f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {sleeper!r}, sys.argv[1]]); {sleeper}"
    begin_s = time.monotonic()
    with pytest.raises(LaunchError, match="did not end within 1 s"):
        run_arm(failing([sys.executable, "-c", code]), BenchOptions(arms=(), timeout_s=1.0), tmp_path)
    assert time.monotonic() - begin_s < 20
    assert orphans(str(tmp_path)) == []


def test_arm_that_leaves_no_result_has_failed(tmp_path) -> None:
    with pytest.raises(LaunchError, match="left no result of rank_0"):
        run_arm(failing([sys.executable, "-c", ""]), BenchOptions(arms=()), tmp_path)


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
        if self.open and self.open[-1] in ("td", "th", "small"):
            self.cells.append(data)


def test_report_stands_alone() -> None:
    def run(speed: float, norm: float) -> list[RankRecord]:
        return [rank(0, step(wall_s=9.0), *[step(wall_s=1 / speed)] * 3, norms=[1.0, norm, 1.1, 1.2])]

    runs = {"one_process": [run(1, 1.0)] * 2, "ours": [run(2, 1.0 + 1e-7), run(4, 1.0)], "torchrun": [run(1, 1.0)] * 2}
    results = summarize(runs, 1)
    plots = draw_plots(results, runs, 1)
    assert set(plots) == {"speed.png", "shares.png", "steps.png", "norms.png"}
    assert all(png.startswith(b"\x89PNG") and len(png) > 5000 for png in plots.values())
    page = Page()
    text = render_page(["CPU: a <b>, 2 cores", "batch: 8"], results, plots)
    assert "<dt>CPU</dt><dd>a &lt;b&gt;, 2 cores</dd>" in text
    page.feed(text)
    assert page.open == []
    assert len(page.sources) == len(plots)
    assert all(source.startswith("data:image/png;base64,") for source in page.sources)
    assert set(COLUMNS) <= set(page.cells)
    assert {"3.00", "2.00-4.00"} <= set(page.cells)


def test_plots_do_without_a_run_to_compare_with() -> None:
    runs = {"ours": [[rank(0, step(), step())]]}
    assert len(draw_plots(summarize(runs, 1), runs, 1)) == 4


def test_command_line_loads_no_library_to_show_its_help() -> None:
    names = [path.stem for path in Path(bench.__file__).parent.glob("bench*.py")]
    assert {"bench", "bench_arm", "bench_option"} <= set(names)
    code = "import sys, unsloth_multigpu.cli.main as m\ntry: m.main(['bench', '--help'])\nexcept SystemExit: pass\n"
    code += "print(sorted({'torch', 'transformers', 'matplotlib', 'numpy'} & set(sys.modules)), file=sys.stderr)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stderr.strip() == "[]"
