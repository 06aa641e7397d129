"""The table of `make gpu`, what its runner does with steps that fail, and the section that it writes. Starts no GPU."""

from __future__ import annotations

import argparse
import ast
import json
import math
import tarfile
import time
from pathlib import Path
from typing import Any

import pytest

from tests.gpu import kit, page
from tests.gpu.place import place_ranks
from tests.gpu.step import (
    FP32_BOUND,
    PART_LIMIT_S,
    PARTS,
    PYTEST,
    TESTS,
    Step,
    judge_arms,
    judge_device,
    judge_failure,
    judge_fp16,
    judge_line,
    judge_recompiled,
    judge_waits,
    steps_of,
)
from unsloth_multigpu.cli import main
from unsloth_multigpu.tools.bench.bench_option import BenchOptions

STEPS = steps_of("cuda", is_tiny=False)


def test_parts_fit_into_their_calls() -> None:
    assert len({step.name for step in STEPS}) == len(STEPS)
    for part in PARTS:
        limits = [step.limit_s for step in STEPS if step.part == part]
        assert 0 < sum(limits) <= PART_LIMIT_S - kit.END_LIMIT_S, part
    assert all(step.num_cards == 1 for step in STEPS if step.part <= 5)


def test_each_test_of_nccl_is_in_one_step() -> None:
    module = ast.parse((kit.ROOT / "tests" / "gpu" / "test_nccl.py").read_text(encoding="utf-8"))
    tests = [node.name for node in module.body if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")]
    chosen = {step.name: step.command[-1].split(" or ") for step in STEPS if step.command[:-1] == TESTS}
    assert len(chosen) == 5
    for test in tests:
        assert len([name for name, words in chosen.items() if any(word in test for word in words)]) == 1, test


@pytest.mark.parametrize(
    ("num_cards", "nccl", "backend", "num_used", "note"),
    [
        (8, [2, 28, 9], "nccl", 2, ""),
        (1, [2, 30, 7], "nccl", 1, "2 ranks shared one card over NCCL 2.30.7"),
        (1, [2, 29, 7], "gloo", 1, "over gloo, because NCCL can share one from 2.30 on, and here is NCCL 2.29.7"),
    ],
)
def test_ranks_share_a_card_over_what_can(
    num_cards: int, nccl: list[int] | None, backend: str, num_used: int, note: str
) -> None:
    place = place_ranks(2, num_cards, nccl)
    assert (place.backend, place.num_cards) == (backend, num_used)
    assert note in place.note
    assert bool(place.note) == (place.variables.get("NCCL_MULTI_RANK_GPU_ENABLE") == "1") == (num_used == 1)
    shard, parity = (next(step for step in STEPS if step.name == name) for name in ("shard", "parity"))
    machine = {"device": "cuda", "cards": ["Card X"] * num_cards, "nccl": nccl}
    assert kit.place_step(shard, machine) == (("", place.note) if backend == "nccl" else (place.note, ""))
    assert kit.place_step(parity, machine) == ("", place.note)


@pytest.mark.parametrize("is_tiny", [False, True])
def test_benchmarks_of_the_table_have_options_that_exist(is_tiny: bool) -> None:
    benches = [step for step in steps_of("cuda", is_tiny=is_tiny) if "bench" in step.command]
    for step in benches:
        arguments = main.make_parser(main.find_commands()).parse_args(list(step.command[2:]))
        options = BenchOptions.read(arguments)
        assert (options.model_shape[0] == 64) == is_tiny
        assert options.timeout_s < step.limit_s
        # They use as many cards as they have ranks, or share one.
        assert step.only_cards in (options.ranks, 1)
    names = {name for step in benches for name in step.command[step.command.index("--arms") + 1].split(",")}
    assert {"line_one", "guarded_one", "ours_one", "rebalance", "ours", "torchrun"} <= names


def arm(name: str, **facts: Any) -> dict[str, Any]:
    usual = {
        "has_same_samples": True,
        "norm_difference": 1e-6,
        "tokens_per_s": {"median": 100.0},
    }
    return {"name": name, **usual, **facts}


@pytest.mark.parametrize(
    ("facts", "problem"),
    [
        ({}, None),
        ({"norm_difference": 2e-4}, "gradient norms differ by 0.0002"),
        ({"norm_difference": "inf"}, "gradient norms differ by inf"),
        ({"has_same_samples": False, "norm_difference": None}, "other samples"),
        ({"tokens_per_s": {"median": 80.0}}, "1.25 times as long as torchrun"),
    ],
)
def test_result_has_to_show_what_the_step_is_for(facts: dict[str, Any], problem: str | None) -> None:
    judge = judge_arms(FP32_BOUND, ("ours",), than="torchrun")
    problems = judge({"results": [arm("one_process"), arm("ours", **facts), arm("torchrun")]})
    assert [problem in said for said in problems] == [True] if problem else problems == []
    assert judge({"results": [arm("one_process")]}) == ["ours: no result"]


def test_line_may_cost_a_hundredth_of_a_step() -> None:
    assert judge_line(False)({"ratios": {"line_one": 1.009, "guarded_one": 1.02}}) == [
        "guarded_one costs 2.0% of a step"
    ]
    rank = {"launcher": "unsloth_multigpu", "backend": "nccl", "sum": 8.0, "is_expandable": False, "pending": ""}
    assert judge_device(True)({"rank": rank}) == [
        "is_expandable: False, not True",
        "pending: '', not 'all_reduce [1234]'",
    ]


def waits(**per_step: float) -> dict[str, Any]:
    lines = {"own": "unsloth_multigpu/train/check.py:9", "other": "site-packages/transformers/trainer.py:9"}
    return {"is_counted": True, "per_step": {lines[name]: count for name, count in per_step.items()}}


def test_waits_of_a_step_have_a_bound() -> None:
    judge = judge_waits(True)
    assert judge({"host_waits": {"without": waits(other=28.0), "ours": waits(own=1.7, other=9.0)}}) == []
    assert judge({"host_waits": {"without": waits(other=9.0), "ours": waits(own=3.0, other=7.0)}}) == [
        "3 waits in a step begin in our lines, bound 2",
        "10 waits in a step, 9 without the line",
    ]
    assert judge({"host_waits": {"without": {"is_counted": False}, "ours": waits()}}) == ["waits were not counted"]


def test_fp16_has_to_skip_the_steps_of_one_process() -> None:
    one = {"scales": [8.0, 4.0, 4.0], "norms": ["0.5", "nan", "0.25"]}
    # The same steps, but at another scale.
    assert judge_fp16({"loss_scale": {"one_process": one, "ours": {**one, "scales": [4.0, 2.0, 2.0]}}}) != []
    ours = {"scales": [8.0, 4.0, 2.0], "norms": ["0.5", "nan", "inf"]}
    problems = judge_fp16({"loss_scale": {"one_process": one, "ours": ours}})
    assert [problem.partition(":")[0] for problem in problems] == ["scales", "norms"]
    # Rows of any number use what is compiled for the first.
    found = {"4": 1, "8": 0, "1": 1}
    assert judge_recompiled({"recompiled": {"rows that are free": found}}) == []
    assert judge_recompiled({"recompiled": {"rows that are free": {**found, "2": 1}}}) == [
        "compiled again: 2 graphs behind 1 of the first shape"
    ]


def test_failure_has_to_be_explained() -> None:
    judge = judge_failure("fault", ("device-side assert",))
    message = "rank 1 failed after step 2: AcceleratorError: CUDA error: device-side assert triggered"
    assert judge({"fault": {"code": 1, "message": message}}) == []
    assert judge({"fault": {"code": 0, "message": "rank 0 was killed by SIGABRT after step 2"}}) == [
        "it ended well",
        "its message lacks 'rank 1 '",
        "its message lacks the reason: 'device-side assert'",
    ]


def options(tmp_path: Path) -> argparse.Namespace:
    return kit.parse(["--tiny", "--device", "cpu", "--out", str(tmp_path / "result.json")])


def run(tmp_path: Path, code: str, **facts: Any) -> dict[str, Any]:
    step = Step("one", 1, "a step", facts.pop("limit_s", 20), ("-c", code, "{json}"), **facts)
    return kit.run_step(step, options(tmp_path), math.inf)


def test_step_that_fails_is_recorded_with_the_end_of_its_output(tmp_path: Path) -> None:
    good = run(tmp_path, "import sys; open(sys.argv[1], 'w').write('{\"a\": 1}')")
    assert (good["rc"], good["problems"], good["result"], kit.has_passed(good)) == (0, [], {"a": 1}, True)
    failed = run(tmp_path, "print('why'); raise SystemExit(3)")
    assert (failed["rc"], failed["problems"], failed["tail"]) == (3, ["exit code 3"], ["why"])
    judged = run(tmp_path, "import sys; open(sys.argv[1], 'w').write('{}')", judge=lambda result: ["it is empty"])
    assert (judged["rc"], judged["problems"], kit.has_passed(judged)) == (0, ["it is empty"], False)
    assert run(tmp_path, "pass")["problems"] == ["it left no result"]
    printed = run(tmp_path, "print('noise'); print('{\"ready\": true}')", prints=True)
    assert printed["result"] == {"ready": True}
    assert not kit.has_passed(None)


def test_step_whose_tests_are_all_skipped_has_not_passed(tmp_path: Path) -> None:
    def tested(code: str) -> dict[str, Any]:
        file = tmp_path / "test_some.py"
        file.write_text(f"import pytest\n{code}")
        return kit.run_step(Step("some", 1, "", 60, (*PYTEST, str(file))), options(tmp_path), math.inf)

    skips = "@pytest.mark.skip(reason='needs 2 GPUs')\ndef test_{}(): pass\n"
    outcome = tested(skips.format("a") + skips.format("b"))
    assert outcome == {"skipped": "all tests skipped: needs 2 GPUs"}
    assert kit.said(outcome) == "left out: all tests skipped: needs 2 GPUs"
    some = tested(skips.format("a") + "def test_b(): pass\n")
    assert ("skipped" in some, kit.has_passed(some), some["rc"]) == (False, True, 0)


def test_step_beyond_its_limit_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kit, "LEAST_S", 0.0)
    ended = run(tmp_path, "import time; time.sleep(60)", limit_s=1)
    assert (ended["rc"], ended["problems"]) == (124, ["ended by its limit"])
    late = kit.run_step(Step("late", 1, "", 20, ("-c", "")), options(tmp_path), time.monotonic())
    assert (late["rc"], kit.has_passed(late)) == (None, False)


def test_part_goes_on_and_names_what_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write = "import sys; open(sys.argv[1], 'w').write('{}')"
    table = [
        Step("bad", 1, "", 20, ("-c", "raise SystemExit(2)")),
        Step("good", 1, "", 20, ("-c", write, "{json}")),
        Step("wide", 1, "", 20, ("-c", ""), num_cards=16),
    ]
    monkeypatch.setattr(kit, "steps_of", lambda *_, **__: tuple(table))
    machine = {"cards": [], "device": "cpu", "is_tiny": True}
    monkeypatch.setattr(kit, "look_at_machine", lambda _: machine)
    arguments = ["--tiny", "--device", "cpu", "--part", "1", "--out", str(tmp_path / "r.json")]
    arguments += ["--pack", str(tmp_path / "gpu.tgz")]
    assert kit.main(arguments) == 1
    record = json.loads((tmp_path / "r.json").read_text())
    assert [(name, kit.has_passed(step)) for name, step in record["steps"].items()] == [
        ("bad", False),
        ("good", True),
        ("wide", True),
    ]
    assert record["steps"]["wide"]["skipped"] == "needs 16 cards, 2 visible"
    assert "not passed: bad" in capsys.readouterr().out
    with tarfile.open(tmp_path / "gpu.tgz") as tar:
        assert tar.getnames() == ["r.json", "bad.log", "good.log"]
    table[0] = Step("bad", 1, "", 20, ("-c", "pass"))
    assert kit.main(arguments) == 0
    assert "== good: passed before" in capsys.readouterr().out
    machine["cards"] = ["another"]
    with pytest.raises(SystemExit, match=r"Give another --out"):
        kit.main(arguments)


def test_page_says_that_nothing_was_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert page.section([]) == page.NOTHING
    shown = page.PAGE.read_text(encoding="utf-8")
    inside = shown.partition(page.BEGIN)[2].partition(page.END)[0].strip()
    assert inside == page.NOTHING or inside.startswith("### ")
    assert (
        page.with_section(f"a\n{page.BEGIN}\nold\n{page.END}\nb\n", "new") == f"a\n{page.BEGIN}\nnew\n{page.END}\nb\n"
    )
    with pytest.raises(SystemExit, match="lacks its markers"):
        page.with_section("no markers", "new")
    file = tmp_path / "tiny.json"
    file.write_text(json.dumps({"machine": {"is_tiny": True}}))
    monkeypatch.setattr(page, "PAGE", tmp_path / "page.md")
    with pytest.raises(SystemExit, match="rehearsal"):
        page.main([str(file)])
