"""The experiments run as they are, offline, and say what their figures carry."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from tests.helpers.run import LIGHT, ROOT, run_well

pytestmark = [pytest.mark.thorough, pytest.mark.slow, pytest.mark.timeout(300)]
EXPERIMENTS = ROOT / "examples" / "experiments"
ENV = {"PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""}


def test_hypernetwork_shows_that_ddp_is_its_simulation(tmp_path: Path) -> None:
    run_well([EXPERIMENTS / "hypernetwork.py", "--quick", "--out", "figures"], tmp_path, ENV)
    facts = json.loads((tmp_path / "figures" / "hypernetwork.json").read_text())
    assert facts["command"] == "python examples/experiments/hypernetwork.py --quick --out figures"
    assert list(facts["tasks"]) == ["text", "digits"]
    for task in facts["tasks"].values():
        arms = task["arms"]
        main = {"one 128", "one 256", "simulated", "ddp", "ddp same seed", "split 128", "half 128"}
        assert main | {"one 256, no dropout", "ddp, no dropout", "one 256, 2x epochs"} < set(arms)
        assert {f"{arm}, lr x 30" for arm in ("one 128", "one 256", "ddp")} < set(arms)
        assert task["max_weight_difference"]["ddp - simulated"] <= 1e-5
        assert arms["ddp"]["test_loss"]["seeds"] == arms["simulated"]["test_loss"]["seeds"]
        # The same would be seen if dropout, or training, did nothing.
        assert len({arms[arm]["test_loss"]["mean"] for arm in main}) == len(main) - 1
        assert task["max_weight_difference"]["ddp, no dropout - one 256, no dropout"] < 1e-3
        assert arms["one 128"]["num_updates"] == 2 * arms["ddp"]["num_updates"] > 0
    assert (tmp_path / "figures" / "hypernetwork.png").read_bytes().startswith(b"\x89PNG")
    page = (tmp_path / "figures" / "hypernetwork.md").read_text()
    assert all(page.count(f"**Experiment {number}: ") == 2 for number in (1, 2, 3, 4))
    assert facts["command"] in page


def test_gradient_sync_tells_mistakes_from_strategies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_well([EXPERIMENTS / "gradient_sync.py", "--quick", "--out", "figures"], tmp_path, ENV)
    results = json.loads((tmp_path / "figures" / "gradient_sync.json").read_text())
    variants = results["tasks"]["digits"]["variants"]
    runs = {name: variant["runs"][0] for name, variant in variants.items()}
    ddp = runs["ddp"]
    for name in ("one_process", "allreduce_each", "allreduce", "parameter_server"):
        assert runs[name]["distance_from_ddp"] < 1e-5
    assert runs["parameter_server"]["num_updates"] == [22, 0, 0, 0]
    caught = {name: run["proof"].partition(":")[0] for name, run in runs.items() if "caught" in run["proof"]}
    after_1, after_8 = "caught after step 1", "caught after step 8"
    assert caught == {"no_broadcast": after_1, "no_exchange": after_1, "skipped_updates": after_8}
    assert runs["skipped_updates"]["num_updates"] == [22, 22, 22, 20]
    assert runs["no_broadcast"]["epochs"][-1]["divergence"] > 0.5
    assert runs["no_broadcast"]["gradient_cosine"] < 0.1 < ddp["gradient_cosine"]
    assert runs["sum"]["gradient_norm"] == pytest.approx(4 * ddp["gradient_norm"], rel=1e-5)
    assert runs["double_division"]["gradient_norm"] == pytest.approx(ddp["gradient_norm"] / 4, rel=1e-5)
    assert runs["dedicated_server"]["num_updates"] == [29, 0, 0, 0]
    assert (tmp_path / "figures" / "gradient_sync_digits.png").read_bytes().startswith(b"\x89PNG")
    page = (tmp_path / "figures" / "gradient_sync.md").read_text()
    assert "it does not matter how gradients are synchronized" in page
    assert results["command"] in page
    assert all(f"| {variant['label']} | " in page for variant in variants.values())

    # Other figures, another verdict.
    monkeypatch.syspath_prepend(str(EXPERIMENTS))
    from gradient_result import broken_promises, figures_of
    from gradient_verdict import verdict

    assert broken_promises(results) == []
    runs["no_broadcast"]["proof"] = "equal"
    for name in ("allreduce_each", "allreduce", "parameter_server"):
        runs[name]["distance_from_ddp"] = 0.5
    assert len(broken_promises(results)) == 4
    text = "\n".join(verdict(results, {name: figures_of(task) for name, task in results["tasks"].items()}))
    assert "THE REPLICA PROOF MISSED" in text
    assert "it does not matter how gradients are synchronized" not in text


@pytest.mark.skipif(sys.version_info < (3, 11), reason="Flower needs Python 3.11")
def test_federated_aggregation_measures_three_ways(tmp_path: Path) -> None:
    run = run_well([EXPERIMENTS / "federated_aggregation.py", "--quick"], tmp_path, {**ENV, **LIGHT})
    assert [run.out.count(f"| {arm} |") for arm in ("mean", "project", "frozen A")] == [3, 3, 3]
