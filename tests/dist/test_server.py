"""GRPO with `generators`: two ranks train, and TRL's server generates on a third device.

TRL's Trainer, client and command are its own, and devices are in host memory; vLLM alone is the stand-in of
tests/helpers/stand_in_vllm, whose completions depend on the prompt and their place.
"""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest

from tests.helpers.fake_cuda import cards, needs_device, reports
from tests.helpers.outcome import assert_trained_as_one
from tests.helpers.run import ROOT, finish, light, orphans, run_python, run_well, start, wait_until
from tests.helpers.tiny import build_tiny
from unsloth_multigpu.errors import GeneratorError
from unsloth_multigpu.wire.process import is_alive

pytestmark = needs_device
SCRIPT = Path(__file__).parent / "scripts" / "server.py"
PLAIN = {
    **light("rich", "triton"),
    "PYTHONPATH": os.pathsep.join([str(ROOT / "tests" / "helpers" / "stand_in_vllm"), str(ROOT)]),
}


def served(path: Path, fault: str = "", **others: str) -> dict[str, str]:
    return {
        **PLAIN,
        **cards(3, report=path / "devices"),
        "UNSLOTH_MULTIGPU_GENERATORS": "1",
        "STAND_IN": fault,
        "STAND_IN_REPORT": str(path / "server.json"),
        **others,
    }


def facts_of(path: Path) -> dict:
    return json.loads((path / "server.json").read_text())


def assert_nothing_left(path: Path) -> None:
    """Neither the server nor what it has started."""
    server = facts_of(path)
    assert orphans(str(path)) == []
    assert [pid for pid in (server["pid"], server["child"]) if is_alive(pid)] == []


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return build_tiny(tmp_path_factory.mktemp("model") / "tiny")


def test_ranks_train_on_what_the_server_draws_with_their_weights_and_a_signal_ends_it_behind_them(tmp_path, model):
    one, two = tmp_path / "1", tmp_path / "2"
    one.mkdir()
    two.mkdir()
    run_well([SCRIPT, model, one, 3], one, PLAIN)
    process = start([SCRIPT, model, two, 10_000], two, served(two))
    try:
        written = [two / f"written_{rank}" for rank in range(2)]
        wait_until(lambda: all(path.exists() for path in written) or process.poll() is not None, 300, "three steps")
        process.send_signal(signal.SIGTERM)
    finally:
        run = finish(process)
    alone, first, second = assert_trained_as_one(one, two, "grpo")
    assert len(alone["grad_norm"]) == 3
    assert first["reward"] == pytest.approx(alone["reward"], rel=1e-5)

    server = first["server"]
    assert server["weights"] == pytest.approx(first["weights"], rel=1e-6)
    assert (server["calls"], len(set(server["weights"]))) == (3, 3)
    assert (server["devices"], first["devices"], second["devices"]) == ("2", "0,1", "0,1")
    assert [report.opened for report in reports(two / "devices")] == [[0], [1]]
    port = server["argv"][server["argv"].index("--port") + 1]
    assert first["address"] == second["address"] == f"http://127.0.0.1:{port}"
    assert "generators=1: the server starts, its log is " in run.err
    assert "Grpo: a server generates completions, so the run differs from that on one GPU" in run.err

    assert run.code == -signal.SIGTERM, run.err
    assert "stopped by SIGTERM after step" in run.err
    assert "the server" not in run.err.partition("the ranks finish their step")[2]
    assert_nothing_left(two)


def test_run_ends_with_a_server_that_dies(tmp_path, model):
    run = run_python([SCRIPT, model, tmp_path, 3], tmp_path, served(tmp_path, "dies:2"))
    assert run.code == GeneratorError.exit_code, run.err
    assert "generators=1: the server was ended by SIGKILL" in run.err
    assert f"Its log is {tmp_path / 'logs' / 'generators.log'}." in run.err
    assert_nothing_left(tmp_path)


@pytest.mark.thorough
def test_run_is_started_again_with_a_new_server(tmp_path, model):
    environment = served(tmp_path, "dies:2 once", UNSLOTH_MULTIGPU_MAX_RESTARTS="1")
    run = run_well([SCRIPT, model, tmp_path, 3], tmp_path, environment)
    assert "while it was serving. Starting all ranks again (1)" in run.err
    assert facts_of(tmp_path)["calls"] == 3
    assert_nothing_left(tmp_path)
