"""`unsloth-multigpu bench` as a user runs it, with a tiny model."""

from __future__ import annotations

import json
import signal

import pytest

from tests.helpers.run import finish, light, orphans, run_python, start, wait_until

BENCH = ["-m", "unsloth_multigpu.cli.main", "bench", "--device", "cpu", "--model-size", "tiny"]
LIBRARIES = light("rich", "triton")
QUICK = ["--repeats", "1", "--steps", "2", "--lengths", "lognormal:20:80", "--batch-size", "4"]


@pytest.mark.thorough
@pytest.mark.slow
def test_bench_compares_the_arms(tmp_path):
    home = tmp_path / "tmp"
    home.mkdir()
    arms = "one_process,ours,torchrun,group,accelerate,ours_one"
    outputs = ["--save-steps", "2", "--json", "out/bench.json"]
    run = run_python([*BENCH, *QUICK, "--arms", arms, *outputs], tmp_path, {**LIBRARIES, "TMPDIR": str(home)})
    assert run.code == 0, run.err
    results = {r["name"]: r for r in json.loads((tmp_path / "out" / "bench.json").read_text())["results"]}
    assert list(results) == arms.split(",")
    assert {name for name, r in results.items() if not r["has_same_samples"]} == {"group"}
    for name in results.keys() - {"group"}:
        assert results[name]["norm_difference"] < 1e-5, name
    assert results["ours"]["padding_share"]["median"] < results["torchrun"]["padding_share"]["median"]
    assert results["ours_one"]["padding_share"]["median"] < results["one_process"]["padding_share"]["median"]
    for name in ("one_process", "ours_one"):
        assert results[name]["waiting_share"]["median"] == 0.0
    assert all(r["largest_tokens"] <= 4 * 80 and r["tokens_per_s"]["low"] > 0 for r in results.values())
    assert all(r["peak_bytes"] > 2**27 for r in results.values())
    for line in ("threads: 1 in every rank of every arm", "group: other samples in a step", "device: cpu"):
        assert line in run.out
    table = [line.split()[0] for line in run.out.splitlines() if line.split()[:1] and line.split()[0] in results]
    assert [name for name in table if name != "group:"] == list(results)
    assert run.err.count("round 1/1") == len(results)
    assert list(home.iterdir()) == []
    assert orphans(str(home)) == []


@pytest.mark.thorough
@pytest.mark.slow
def test_bench_of_lora_in_bf16_with_accumulation(tmp_path):
    options = ["--arms", "one_process,ours,torchrun", "--train", "lora", "--dtype", "bf16", "--accumulation", "2"]
    options += ["--gradient-checkpointing"]
    options += ["--steps", "1", "--warmup", "1", "--interleave", "steps", "--json", "b.json"]
    run = run_python([*BENCH, *QUICK, *options], tmp_path, LIBRARIES)
    assert run.code == 0, run.err
    outcome = json.loads((tmp_path / "b.json").read_text())
    for result in outcome["results"][1:]:
        assert result["has_same_samples"], result["name"]
        assert result["norm_difference"] < 2e-2, result["name"]
    planner = {name: rounds[0][0]["planner"] for name, rounds in outcome["runs"].items()}
    assert planner["ours"]["overhead_tokens"] == 32.0
    assert planner["ours"]["speeds"] == [1.0, 1.0]
    assert planner["one_process"] == planner["torchrun"] == {}
    num_micro_batches = {
        name: [len(step["micro_batches"]) for step in rounds[0][0]["steps"]] for name, rounds in outcome["runs"].items()
    }
    # A script for one GPU accumulates what two ranks do together.
    assert num_micro_batches["one_process"] == [4, 4]
    assert num_micro_batches["torchrun"] == [2, 2]
    assert "accumulation 2, 2 ranks; scripts for one GPU accumulate 4" in run.out
    assert "bf16, lora training" in run.out
    assert run.err.count("round 1/1  all arms") == 1
    assert "turns: all arms of a round are in memory at once" in run.out


@pytest.mark.thorough
@pytest.mark.slow
def test_bench_trains_with_unsloth(tmp_path):
    home = tmp_path / "tmp"
    home.mkdir()
    options = ["--library", "unsloth", "--train", "lora", "--gradient-checkpointing", "--arms", "one_process,ours"]
    options += ["--warmup", "1", "--num-layers", "1", "--json", "b.json"]
    run = run_python([*BENCH, *QUICK, *options], tmp_path, {"TMPDIR": str(home)})
    assert run.code == 0, run.err
    outcome = json.loads((tmp_path / "b.json").read_text())
    one, ours = (outcome["runs"][name][0] for name in ("one_process", "ours"))
    assert (len(one), len(ours)) == (1, 2)
    for rank in (*one, *ours):
        assert "SFTTrainer" in rank["trainer"]
    result = outcome["results"][1]
    assert result["has_same_samples"]
    assert result["norm_difference"] < 1e-5
    # Dealt by length, as with the plain Trainer.
    assert result["padding_share"]["median"] < outcome["results"][0]["padding_share"]["median"]
    assert "FastLanguageModel and SFTTrainer of Unsloth\n" in run.out
    assert list(home.iterdir()) == []
    assert orphans(str(home)) == []


@pytest.mark.slow
def test_slow_rank_is_waited_for(tmp_path):
    options = [
        "--arms",
        "torchrun",
        "--slow-rank",
        "1:0.1",
        "--warmup",
        "1",
        "--lengths",
        "fixed:40",
        "--json",
        "b.json",
    ]
    run = run_python([*BENCH, *QUICK, *options], tmp_path, LIBRARIES)
    assert run.code == 0, run.err
    (result,) = json.loads((tmp_path / "b.json").read_text())["results"]
    # The other rank waits nine tenths of the time, which is 45 % of what both have; less where the machine is busy.
    assert 0.2 < result["waiting_share"]["median"] <= 0.5
    assert "slow rank: 1 computes at 0.1 of its speed" in run.out


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "code", "interleave"), [(signal.SIGINT, 130, "runs"), (signal.SIGTERM, 143, "steps")]
)
def test_stopped_bench_leaves_nothing(tmp_path, number, code, interleave):
    options = ["--arms", "torchrun", "--interleave", interleave]
    process = start([*BENCH, *QUICK, *options], tmp_path, {**LIBRARIES, "TMPDIR": str(tmp_path)})
    # torchrun and its two ranks, in whose command the settings file stands.
    wait_until(lambda: len(orphans(f"{tmp_path}/unsloth_multigpu_bench_")) >= 3, 60, "ranks")
    process.send_signal(number)
    run = finish(process, 60)
    assert (run.code, run.out) == (code, "")
    assert run.err.startswith("bench: 1 runs: ")  # What it does and how long that takes, and nothing more.
    assert run.err.count("\n") == 1
    assert orphans(str(tmp_path)) == []
    assert list(tmp_path.iterdir()) == []


@pytest.mark.thorough
@pytest.mark.slow
def test_bench_compares_strategies(tmp_path):
    # Each arm costs a start. One process with replicas and two ranks must learn the same, each in its own way.
    options = ["--strategies", "legacy,allreduce", "--repeats", "1", "--steps", "3", "--batch-size", "4"]
    # Ragged rows, and more micro-batches than ranks.
    options += ["--lengths", "text:60", "--accumulation", "2", "--warmup", "1"]
    options += ["--num-layers", "1", "--vocab-size", "256", "--json", "b.json"]
    run = run_python([*BENCH, *options], tmp_path, LIBRARIES)
    assert run.code == 0, run.err
    outcome = json.loads((tmp_path / "b.json").read_text())
    legacy, allreduce = (outcome["runs"][name][0] for name in ("legacy", "allreduce"))
    assert (len(legacy), len(allreduce)) == (1, 2)
    for rank in allreduce:
        assert rank["gradient_norms"] == pytest.approx(legacy[0]["gradient_norms"], rel=1e-5)
    for number, step in enumerate(legacy[0]["steps"]):
        assert sorted(step["samples"]) == sorted(n for rank in allreduce for n in rank["steps"][number]["samples"])
    assert [result["name"] for result in outcome["results"]] == ["legacy", "allreduce"]
    results = [result["learned"] for result in outcome["results"]]
    for learned in results:
        assert learned["num_updates"] == 6
        assert learned["epoch_s"]["low"] > 0
        first, second = ({what: spread["median"] for what, spread in epoch.items()} for epoch in learned["epochs"])
        others = [{what: spread["median"] for what, spread in epoch.items()} for epoch in results[0]["epochs"]]
        assert [first, second] == [pytest.approx(other, rel=1e-3) for other in others]
        # The logarithm of 256 tokens is 5.5 before the first step.
        assert 5.56 > first["train_loss"] > second["train_loss"]
        assert first["test_loss"] > second["test_loss"] > 0
        assert 0 < second["accuracy"] < 1
    # All gradients to the CPU and back, and all weights, with each step; half of that where two ranks share it.
    moved, sent = (learned["sent_bytes_per_step"] for learned in results)
    assert 0 < 2 * sent < moved
    for words in ("strategy", "accuracy 2", "text:60", "2 epochs of 3, timed but for the first 1"):
        assert words in run.out


@pytest.mark.thorough
@pytest.mark.slow
def test_bench_trains_the_same_clients_in_processes_and_in_threads(tmp_path):
    home = tmp_path / "tmp"
    home.mkdir()
    # Three clients in two slots: who waits for whom changes nothing.
    options = ["--federated", "slots:2,threads:2", "--clients", "3", "--rounds", "2", "--warmup", "0", "--repeats", "1"]
    options += ["--steps", "2", "--batch-size", "4", "--lengths", "text:40", "--json", "b.json"]
    run = run_python([*BENCH, *options], tmp_path, {**light("triton"), "TMPDIR": str(home)})
    assert run.code == 0, run.err
    outcome = json.loads((tmp_path / "b.json").read_text())
    slots, threads = (outcome["runs"][name][0] for name in ("slots:2", "threads:2"))
    assert slots["losses"] == pytest.approx(threads["losses"], rel=1e-5)
    assert slots["losses"][1] < slots["losses"][0]
    assert outcome["results"]["threads:2"]["difference"] <= 1e-6
    assert (len(slots["pss_bytes"]), len(threads["pss_bytes"])) == (3, 1)
    assert min(*slots["pss_bytes"], *threads["pss_bytes"]) > 2**26
    assert all(seconds > 0 for arm in (slots, threads) for seconds in arm["rounds_s"])
    assert "slots:2" in run.out
    assert list(home.iterdir()) == []
    assert orphans(str(home)) == []
