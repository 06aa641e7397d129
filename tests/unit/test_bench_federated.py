"""`bench --federated`: what it accepts, what it compares and what it shows, with arms that only say they ran."""

from __future__ import annotations

import importlib.util
import json

import pytest
import torch

from unsloth_multigpu.cli import main
from unsloth_multigpu.errors import ConfigError, DivergenceError, LaunchError, SetupError
from unsloth_multigpu.tools.bench import federated as bench_federated
from unsloth_multigpu.tools.bench import federated_arm
from unsloth_multigpu.tools.bench.federated import ArmRun
from unsloth_multigpu.tools.bench.option import BenchOptions

BENCH = ["bench", "--device", "cpu", "--federated", "all"]
MIB = 2**20


@pytest.fixture
def planted(monkeypatch):
    """Arms take 4 seconds for a round with one client at a time; `planted[name]` spoils one."""
    spoiled = {}

    def run(name, options, folder):
        if isinstance(error := spoiled.get(name), LaunchError):
            raise error
        slots = [300 * MIB] * int(name[-1]) if name.startswith("slots") else []
        seconds = {"slots:2": 2.0, "slots:1": 4.0, "threads:2": 8.0}[name] + 0.1 * (folder.parent.name[0] == "2")
        weights = {"a": torch.tensor([1.0]), "b": torch.tensor([1.0, 2.0 + spoiled.get(name, 0.0)])}
        return ArmRun((seconds,) * options.rounds, 5.0, "cpu", (200 * MIB, *slots), (2.0, 1.0), weights)

    monkeypatch.setattr(bench_federated, "_run_arm", run)
    return spoiled


def test_arms_are_compared_with_one_slot(planted, tmp_path, capsys) -> None:
    assert main.main([*BENCH, "--clients", "8", "--repeats", "2", "--json", str(tmp_path / "b.json")]) == 0
    lines = capsys.readouterr().out.splitlines()
    rows = {line.split()[0]: " ".join(line.split()[1:]) for line in lines[lines.index("") + 2 :][:3]}
    assert rows == {
        "slots:2": "2.05 (2.00-2.10) 3.90 (3.81-4.00) 1.98 (1.95-2.00) 5.0 3 200 MiB 300 MiB 800 MiB 1.0000 0.0e+00",
        "slots:1": "4.05 (4.00-4.10) 1.98 (1.95-2.00) 1.00 5.0 2 200 MiB 300 MiB 500 MiB 1.0000 0.0e+00",
        "threads:2": "8.05 (8.00-8.10) 0.99 (0.99-1.00) 0.50 (0.50-0.51) 5.0 1 200 MiB - 200 MiB 1.0000 0.0e+00",
    }
    assert lines[lines.index("") + 1].split()[:2] == ["arm", "s/round"]
    results = json.loads((tmp_path / "b.json").read_text())["results"]
    assert results["slots:2"]["total_bytes"] == 800 * MIB
    assert results["threads:2"]["slot_bytes"] is None


def test_arm_that_trains_other_weights_is_an_error(planted, capsys) -> None:
    planted["threads:2"] = 1e-4
    assert main.main(BENCH) == DivergenceError.exit_code
    assert "threads:2 and slots:2 trained other weights: they differ by 1.0e-04" in capsys.readouterr().err
    planted["threads:2"] = float("nan")
    assert main.main(BENCH) == DivergenceError.exit_code


def test_threads_have_a_model_for_each_client_that_trains_at_once(monkeypatch) -> None:
    options = BenchOptions(kind="federated", clients=5, warmup=0, rounds=2, device="cpu")
    built = []
    monkeypatch.setattr(federated_arm, "build_model", lambda _: built.append(torch.nn.Linear(2, 1)) or built[-1])
    monkeypatch.setattr(federated_arm, "train_client", lambda *_: (1, {"loss": 1.0}))
    record, weights = federated_arm._train_in_threads(2, options)
    assert (len(built), len(record.rounds_s), len(weights)) == (2, 2, 2)


def test_arm_that_fails_ends_the_bench(planted, capsys) -> None:
    planted["slots:1"] = LaunchError("it failed", hint="Look.")
    assert main.main(BENCH) == 1
    captured = capsys.readouterr()
    assert "error: it failed" in captured.err
    assert captured.out == ""


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--federated", "slots:0"], "--federated: there is no 'slots:0'"),
        (["--federated", "slots"], "--federated: there is no 'slots'"),
        (["--federated", "slots:1,slots:1"], "--federated: 'slots:1' is given twice"),
        (["--federated", "all", "--clients", "0"], "--clients 0: expected at least 1"),
        (["--federated", "all", "--slow-rank", "1:0.5"], "--slow-rank 1:0.5 is for --arms or --strategies"),
    ],
)
def test_what_cannot_be_measured_is_said_at_once(planted, capsys, arguments, message) -> None:
    assert main.main(["bench", *arguments]) == ConfigError.exit_code
    assert message in capsys.readouterr().err


def test_what_is_missing_is_said_at_once(planted, monkeypatch, capsys) -> None:
    monkeypatch.setattr("unsloth_multigpu.start.visible_accelerators", lambda: ("cpu", 0))
    assert main.main(["bench", "--federated", "all", "--device", "cuda"]) == SetupError.exit_code
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *of: None if name == "flwr" else find(name, *of))
    assert main.main(BENCH) == SetupError.exit_code
    assert "needs Flower (flwr), which is not installed" in capsys.readouterr().err
