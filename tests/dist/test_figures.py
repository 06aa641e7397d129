"""What a rank measures of its training: two ranks and one process count alike, and log, pages and report agree."""

import json
import math
from pathlib import Path

import pytest

from tests.helpers.outcome import facts_of
from tests.helpers.run import BARE, run_well

SCRIPT = Path(__file__).parent / "scripts" / "figures.py"
SAVES = {"arguments": {"save_strategy": "steps", "save_steps": 3}}
JOBS = [
    {"name": "ragged", "rows": 27, "arguments": {"logging_steps": 2}},
    {"name": "once", "arguments": {"logging_steps": 3}},
    {"name": "slow", "slow": 0.6},
    {"name": "images", "kind": "images"},
    {"name": "end to end", "kind": "end to end"},
    {"name": "saved", **SAVES},
    {"name": "saved", **SAVES, "train": {"resume_from_checkpoint": True}},
]
OF_LOG = ("tokens_per_s", "waiting", "padding", "slowest_rank", "peak_memory_gib")


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    path = tmp_path_factory.mktemp("figures")
    found = {}
    for name, num_ranks, options in (("one", 1, {"resume": "auto"}), ("two", 2, {})):
        jobs = [job for job in JOBS if num_ranks > 1 or job["name"] not in ("slow", "saved")]
        run = run_well([SCRIPT, num_ranks, path / name, json.dumps(options), json.dumps(jobs)], path, BARE)
        found[name] = facts_of(path / name / "facts", num_ranks)
        found[f"{name} said"] = run.err
    return found


def rows_of(facts):
    return facts["report"]["ranks"]


@pytest.mark.parametrize("name", ["ragged", "once", "end to end"])
def test_two_ranks_count_the_tokens_of_one_process(runs, name):
    one, two = rows_of(runs["one"][0][name]), rows_of(runs["two"][0][name])
    assert sum(row["num_tokens"] for row in two) == one[0]["num_tokens"] > 0
    assert all(row["num_tokens"] > 0 for row in two)
    assert [row["waiting_s"] for row in one] == [0.0]
    is_padded = name != "end to end"
    assert all((row["num_padding_tokens"] > 0) == is_padded for row in [*one, *two])


def test_model_without_tokens_has_none(runs):
    for name in ("one", "two"):
        for row in rows_of(runs[name][0]["images"]):
            assert row["num_tokens"] is None
            assert row["num_padding_tokens"] is None
            assert row["step_s"] > 0
    keys = {key for line in runs["two"][0]["images"]["log"] for key in line if key.startswith("multigpu/")}
    assert keys == {"multigpu/waiting", "multigpu/slowest_rank", "multigpu/peak_memory_gib"}


def test_rank_that_is_held_up_lets_the_other_wait(runs):
    facts = runs["two"][0]["slow"]
    fast, slow = rows_of(facts)
    # Three steps, each held up by this much; on a busy machine both ranks wait for each other as well.
    assert 1.5 < fast["waiting_s"] < fast["loop_s"]
    assert slow["waiting_s"] < 0.5 * fast["waiting_s"]
    assert fast["step_s"] > 0.6
    lines = [line for line in facts["log"] if "loss" in line]
    assert [line["multigpu/slowest_rank"] for line in lines] == [1, 1, 1]
    assert all(0.25 < line["multigpu/waiting"] < 0.6 for line in lines[1:])
    # The callback has held it up.
    assert slow["phases_s"]["callbacks"] > 1.7
    assert fast["phases_s"]["callbacks"] < 0.5


def test_log_pages_and_report_say_the_same(runs):
    for name in ("once", "ragged", "slow"):
        facts = runs["two"][0][name]
        for rank, row in enumerate(rows_of(facts)):
            page = facts["pages"][str(rank)]["figures"]
            assert {key: page[key] for key in page if key in row} == {key: row[key] for key in page if key in row}
            assert page["max_steps"] == facts["report"]["max_steps"] == page["num_steps"] == row["num_steps"]
    facts = runs["two"][0]["once"]
    # One line for the whole training.
    (line,) = [line for line in facts["log"] if "loss" in line]
    tokens_per_s, waiting, padding = facts["numbers"]
    assert math.isclose(line["multigpu/tokens_per_s"], tokens_per_s, rel_tol=1e-3)
    assert math.isclose(line["multigpu/waiting"], waiting, abs_tol=1e-3)
    assert math.isclose(line["multigpu/padding"], padding, abs_tol=1e-4)
    peak = max(row["peak_bytes"] for row in rows_of(facts))
    assert math.isclose(line["multigpu/peak_memory_gib"], peak / 2**30, abs_tol=1e-3)


def test_numbers_are_logged_by_rank_0_with_each_training_loss(runs):
    first, second = (runs["two"][rank]["ragged"]["log"] for rank in (0, 1))
    for line in first:
        own = {key for key in line if key.startswith("multigpu/")}
        assert own == ({f"multigpu/{name}" for name in OF_LOG} if "loss" in line else set())
    for logs in (second, runs["one"][0]["ragged"]["log"]):
        assert not [key for line in logs for key in line if key.startswith("multigpu/")]
    # All ranks together, in each interval.
    assert sum(1 for line in first if "loss" in line) == 2


def test_end_is_told_with_the_trainers_own_seconds(runs):
    for name, num_ranks in (("one", 1), ("two", 2)):
        facts = runs[name][0]["ragged"]
        rows = rows_of(facts)
        shares = f" ({rows[0]['num_samples']} + {rows[1]['num_samples']})" if num_ranks > 1 else ""
        assert facts["summary"].startswith(f"trained 4 steps, 27 samples{shares} in {facts['runtime']:.1f} s (")
        assert f"unsloth_multigpu: {facts['summary']}\n" in runs[f"{name} said"]
        assert rows[0]["runtime_s"] == facts["runtime"]
        assert rows[0]["loop_s"] <= facts["runtime"] <= facts["seconds"]
        assert rows[0]["setup_s"] + rows[0]["loop_s"] <= facts["seconds"]


def test_resume_from_the_end_says_that_nothing_is_left(runs):
    text = (
        "checkpoint-3 is the end of this training (3 of 3 steps): nothing to do; another output_dir starts a new "
        "training"
    )
    assert runs["two"][0]["saved"]["summary"] == text
    assert text in runs["two said"]
