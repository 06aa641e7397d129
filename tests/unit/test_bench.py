"""`unsloth-multigpu bench` without training: options, samples, commands, the instrument, figures and the page."""

import json
import math
import os
import sys
import time
from dataclasses import replace

import pytest

from tests.helpers.run import orphans
from unsloth_multigpu import __main__ as main
from unsloth_multigpu import start
from unsloth_multigpu.errors import ConfigError, LaunchError, SetupError
from unsloth_multigpu.tools.bench import bench_command as bench
from unsloth_multigpu.tools.bench.arm import ARMS, Arm, BenchOptions, arm_environment
from unsloth_multigpu.tools.bench.bench_command import run_arm
from unsloth_multigpu.tools.bench.bench_result import Spread, result_row, summarize

COLD = BenchOptions(warmup=0)


def step(**given):
    return {"wall_s": 1.0, "cpu_s": 1.0, "compute_s": 1.0, "micro_batches": [[2, 10, 15]], "samples": [0, 1], **given}


def rank(number, *steps, norms=None, **more):
    norms = [1.0] * len(steps) if norms is None else norms
    record = {"rank": number, "steps": steps, "gradient_norms": norms, "peak_bytes": 100, "device": "cpu"}
    return {**record, "sent_bytes": None, "planner": {}, **more}


def test_samples_are_compared_with_how_often_they_occur():
    def run(*ranks):
        return [[rank(r, step(samples=first), step(samples=second)) for r, (first, second) in enumerate(ranks)]]

    runs = {
        "one_process": run(((5,), (1, 2, 3, 4))),
        "ours": run(((5,), (4,)), ((), (3, 1, 2))),
        "torchrun": run(((5,), (4,)), ((), (3, 1, 2, 2))),
        "rebalance": run(((5,), (1,)), ((), (2, 3))),
        "ours_off": run(((1, 2, 3, 4), (5,))),
    }
    results = {result.name: result for result in summarize(runs, COLD)}
    assert [name for name in runs if results[name].has_same_samples] == ["one_process", "ours"]
    assert results["ours"].norm_difference == 0.0
    assert results["torchrun"].norm_difference is None
    assert results["one_process"].times["one_process"] == Spread(1.0, 1.0, 1.0)
    (alone,) = summarize({"ours": runs["ours"]}, COLD)
    assert (alone.times, alone.norm_difference, alone.has_same_samples) == ({}, None, None)
    assert result_row(alone)["samples"] == "-"


def test_arms_hear_nothing_from_another_launcher(tmp_path):
    foreign = {"RANK": "3", "LOCAL_RANK": "3", "TORCHELASTIC_RUN_ID": "x", "UNSLOTH_MULTIGPU_RUN_DIR": "/r"}
    inherited = {**foreign, "UNSLOTH_MULTIGPU_VERIFY_EVERY": "0", "OMP_NUM_THREADS": "8", "HOME": "/h"}
    inherited |= {"CUDA_VISIBLE_DEVICES": "4,5", "UNSLOTH_MULTIGPU_CONFIG": "m.yaml"}

    def variables(name, **options):
        return arm_environment(ARMS[name], BenchOptions(**{"device": "cpu", **options}), tmp_path, inherited)

    on_cpu = variables("torchrun")
    kept = {"UNSLOTH_MULTIGPU_VERIFY_EVERY": "0", "OMP_NUM_THREADS": "1", "HOME": "/h", "CUDA_VISIBLE_DEVICES": ""}
    assert not foreign.keys() & on_cpu.keys()
    kept |= {"TMPDIR": str(tmp_path), "UNSLOTH_MULTIGPU_CONFIG": os.path.abspath("m.yaml")}
    assert on_cpu.items() >= kept.items()
    assert variables("one_process", device="cuda")["CUDA_VISIBLE_DEVICES"] == "4"
    assert variables("torchrun", device="cuda")["CUDA_VISIBLE_DEVICES"] == "4,5"
    assert variables("torchrun", device="cuda", is_gpu_shared=True)["ACCELERATE_BYPASS_DEVICE_MAP"] == "true"


class Planted(Arm):
    """An arm whose process runs other code. The settings file, its argument, tells which processes are meant."""

    def command(self, options):
        return [sys.executable, "-c", self.training["code"]]


SLEEPER = "import time; time.sleep(600)"
# A session of its own and no end with its parent, as a rank of torchrun.
STARTER = f"""
import subprocess, sys
subprocess.Popen([sys.executable, '-c', {SLEEPER!r}, sys.argv[1]], start_new_session=True)
{SLEEPER}
"""


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        ("print('its reason'); raise SystemExit(3)", r"ended with exit code 3\. .*\n  \| its reason"),
        (STARTER, "did not end within 1 s"),
        ("", "left results of 0 of 1 ranks"),
    ],
)
def test_arm_that_fails_is_named_and_ended_with_its_children(tmp_path, code, reason):
    arm, begin_s = Planted("one_process", "planted", has_one_process=True, training={"code": code}), time.monotonic()
    with pytest.raises(LaunchError, match=rf"The arm one_process \(planted\) {reason}"):
        run_arm(arm, BenchOptions(timeout_s=1.0 if code == STARTER else 60.0), tmp_path)
    assert time.monotonic() - begin_s < 20
    assert orphans(str(tmp_path)) == []


def test_run_is_measured_without_its_warm_up():
    slow = step(wall_s=100.0, cpu_s=50.0, compute_s=90.0, micro_batches=((8, 100, 10),))
    ranks = [
        rank(0, slow, step(wall_s=2.0, cpu_s=3.0, compute_s=4.0), step(cpu_s=1.0)),
        rank(1, slow, step(wall_s=3.0, cpu_s=1.0, compute_s=2.0, micro_batches=((1, 10, 5), (1, 20, 20))), step()),
    ]
    (result,) = summarize({"ours": [ranks]}, BenchOptions(warmup=1))
    assert result.tokens_per_s.median == (15 + 15 + 25 + 15) / 4.0
    assert result.padding_share.median == pytest.approx(1 - 70 / (20 + 20 + 30 + 20))
    assert result.waiting_share.median == pytest.approx((4 - 3) / (4 + 1))
    assert result.cpu_s.median == 3.0 + 1.0
    # Memory is needed in the warm-up, too.
    assert result.peak_bytes == 100


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--arms ours,theirs", "arms='ours,theirs': there is no 'theirs'"),
        ("--arms ours,ours", "arms='ours,ours': 'ours' is given twice"),
        ("--ranks 0", "ranks=0; expected a whole number of at least 1"),
        ("--warmup -1", "warmup=-1; expected a whole number of at least 0"),
        ("--model-size 100x2", "model_size='100x2'; expected tiny, small, medium, 1b, or HIDDENxLAYERS"),
        ("--model-size 65x2", "with a multiple of 64 as hidden size"),
        ("--train half", "train='half'; expected 'full' or 'lora'"),
        *(
            (f"--lengths {text}", f"lengths={text!r}; expected lognormal")
            for text in ("lognormal:300:200", "fixed:1", "normal:1:2")
        ),
        ("--timeout-s 0", "timeout_s=0.0; expected a number of at least 1"),
        ("--four-bit --library unsloth --train full", "four_bit with library='unsloth' and train='full'"),
    ],
)
def test_wrong_value_is_named_at_once(arguments, message, capsys, monkeypatch):
    monkeypatch.setattr(bench, "run_rounds", lambda *_: pytest.fail("it ran"))
    assert main.main(["bench", "--device", "cpu", *arguments.split()]) == ConfigError.exit_code
    error = capsys.readouterr().err
    assert message in error
    assert "Hint: " in error


@pytest.mark.parametrize(
    ("visible", "given", "expected"),
    [
        (("cpu", 0), "auto", ("cpu", False)),
        (("cuda", 1), "auto", ("cuda", True)),
        (("cuda", 3), "cuda", ("cuda", False)),
        (("cuda", 8), "cpu", ("cpu", False)),
        (("cpu", 0), "cuda", "--device cuda: bench measures CUDA devices and CPUs, and torch sees no GPU"),
        (("cuda", 2), "auto", "--ranks 3, but 2 GPUs"),
        (("xpu", 2), "auto", "torch sees 2 devices of kind xpu"),
    ],
)
def test_device_is_found_or_refused(visible, given, expected, monkeypatch):
    monkeypatch.setattr(start, "visible_accelerators", lambda: visible)
    asked = BenchOptions(device=given, ranks=3)
    if isinstance(expected, str):
        with pytest.raises(SetupError, match=expected):
            bench.on_device(asked)
        return
    options = bench.on_device(asked)
    assert (options.device, options.is_gpu_shared) == expected
    # A card compiles in its first steps, and costs are fitted in them.
    assert options.warmup == (20 if options.device == "cuda" else 2)
    assert bench.on_device(replace(asked, warmup=3)).warmup == 3


def test_each_round_begins_with_another_arm_and_whole_rounds_are_kept(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    ran = []

    def run(arm, options, folder):
        ran.append(folder.stem)
        if ran[-1] == "3_one_process":
            raise LaunchError("it failed", hint="")
        # An infinite norm: no JSON has it.
        return [rank(r, *[step()] * 5, norms=[math.inf] * 5) for r in range(arm.num_processes(options))]

    monkeypatch.setattr("unsloth_multigpu.tools.bench.bench_command.run_arm", run)
    options = ["bench", "--device", "cpu", "--arms", "one_process,ours,torchrun", "--repeats", "3"]
    assert main.main(options) == 1
    rounds = ["1_one_process", "1_ours", "1_torchrun", "2_ours", "2_torchrun", "2_one_process", "3_torchrun"]
    assert ran == [*rounds, "3_one_process"]
    captured = capsys.readouterr()
    assert captured.err.startswith("bench: 1 of 9: round 1/3, one_process\nbench: 2 of 9: round 1/3, ours\n")
    assert "error: it failed" in captured.err
    assert "repeats=2\n" in captured.out
    assert "stopped: an arm failed in round 3 of 3" in captured.out
    ran.clear()
    assert main.main([*options, "--json"]) == 1
    written = json.loads(capsys.readouterr().out, parse_constant=pytest.fail)
    assert "stopped: an arm failed in round 3 of 3" in written["conditions"]
    assert [len(rounds) for rounds in written["runs"].values()] == [2, 2, 2]
    assert written["runs"]["ours"][1][0]["gradient_norms"] == ["inf"] * 5
    assert list(tmp_path.iterdir()) == []
