"""The table of `make gpu`, and what its runner does with steps that fail. Starts no GPU."""

import ast
import json
import math
import tarfile
from functools import partial

import pytest

from tests.gpu import kit
from tests.gpu.step import FACTS, FP32_BOUND, PART_LIMIT_S, PARTS, TESTS, Step, judge_arms, place_ranks, steps_of
from unsloth_multigpu import __main__ as main
from unsloth_multigpu.tools.bench.arm import BenchOptions

STEPS = steps_of("cuda", is_tiny=False)


def test_parts_fit_into_their_calls():
    assert len({step.name for step in STEPS}) == len(STEPS)
    for part in PARTS:
        limits = [step.limit_s for step in STEPS if step.part == part]
        assert 0 < sum(limits) <= PART_LIMIT_S - kit.END_LIMIT_S, part
    assert all(step.num_cards == 1 for step in STEPS if step.part <= 5)


def names_of(test):
    """What `-k` sees of a test: with each row's first value, where the rows are written out."""
    arguments = [call.args[-1] for call in test.decorator_list if isinstance(call, ast.Call)]
    rows = [row for argument in arguments for row in ast.iter_child_nodes(argument) if isinstance(row, ast.Tuple)]
    return [f"{test.name}[{ast.literal_eval(row)[0]}]" for row in rows] or [test.name]


@pytest.mark.parametrize("command", [TESTS, FACTS])
def test_each_test_of_a_file_is_in_one_step(command):
    file = next(word for word in command if word.endswith(".py"))
    nodes = ast.parse((kit.ROOT / file).read_text(encoding="utf-8")).body
    tests = [node for node in nodes if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")]
    chosen = {step.name: step.command[-1].split(" or ") for step in STEPS if step.command[:-1] == command}
    found = {
        test: [name for name, words in chosen.items() if any(word in test for word in words)]
        for node in tests
        for test in names_of(node)
    }
    assert {len(names) for names in found.values()} == {1}, found
    assert {name for (name,) in found.values()} == set(chosen)


@pytest.mark.parametrize(
    ("num_cards", "nccl", "backend", "num_used", "note"),
    [
        (8, [2, 28, 9], "nccl", 2, ""),
        (1, [2, 30, 7], "nccl", 1, "2 ranks shared one card over NCCL 2.30.7"),
        (1, [2, 29, 7], "gloo", 1, "over gloo, because NCCL can share one from 2.30 on, and here is NCCL 2.29.7"),
    ],
)
def test_ranks_share_a_card_over_what_can(num_cards, nccl, backend, num_used, note):
    place = place_ranks(2, num_cards, nccl)
    assert (place.backend, place.num_cards) == (backend, num_used)
    assert note in place.note
    assert bool(place.note) == (place.variables.get("NCCL_MULTI_RANK_GPU_ENABLE") == "1") == (num_used == 1)
    shard, parity = (next(step for step in STEPS if step.name == name) for name in ("shard", "parity"))
    machine = {"device": "cuda", "cards": ["Card X"] * num_cards, "nccl": nccl}
    assert kit.place_step(shard, machine) == (("", place.note) if backend == "nccl" else (place.note, ""))
    assert kit.place_step(parity, machine) == ("", place.note)


@pytest.mark.parametrize("is_tiny", [False, True])
def test_benchmarks_of_the_table_have_options_that_exist(is_tiny):
    benches = [step for step in steps_of("cuda", is_tiny=is_tiny) if "bench" in step.command]
    for step in benches:
        arguments = main.make_parser().parse_args(list(step.command[2:]))
        options = BenchOptions.read(arguments)
        assert (options.model_shape[0] == 64) == is_tiny
        assert options.timeout_s < step.limit_s
        # They use as many cards as they have ranks, or share one.
        assert step.only_cards in (options.ranks, 1)
    names = {name for step in benches for name in step.command[step.command.index("--arms") + 1].split(",")}
    assert {"line_one", "guarded_one", "ours_one", "rebalance", "ours", "torchrun"} <= names


def arm(name, **facts):
    usual = {"has_same_samples": True, "norm_difference": 1e-6, "tokens_per_s": {"median": 100.0}}
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
def test_result_has_to_show_what_the_step_is_for(facts, problem):
    judge = partial(judge_arms, FP32_BOUND, ("ours",), "torchrun")
    problems = judge({"results": [arm("one_process"), arm("ours", **facts), arm("torchrun")]})
    assert [problem in said for said in problems] == [True] if problem else problems == []
    assert judge({"results": [arm("one_process")]}) == ["ours: no result"]


def run(tmp_path, code, deadline_s=math.inf, limit_s=20, **facts):
    step = Step("one", 1, "a step", limit_s, ("-c", code), **facts)
    options = kit.parse(["--tiny", "--device", "cpu", "--out", str(tmp_path / "result.json")])
    return kit.run_step(step, options, deadline_s)


WRITES = "import os; open(os.environ['GPU_KIT_FACTS'], 'w').write('{\"a\": 1}')"


@pytest.mark.parametrize(
    ("code", "facts", "rc", "problems", "result"),
    [
        (WRITES, {}, 0, [], {"a": 1}),
        ("print('noise'); print('{\"ready\": true}')", {"prints": True}, 0, [], {"ready": True}),
        ("print('why'); raise SystemExit(3)", {}, 3, ["exit code 3"], None),
        (WRITES, {"judge": lambda result: [f"it is {result['a']}"]}, 0, ["it is 1"], {"a": 1}),
        ("pass", {"prints": True}, 0, ["its result cannot be read: ValueError: substring not found"], None),
        ("import time; time.sleep(60)", {"limit_s": 1}, 124, ["ended by its limit"], None),
        ("", {"deadline_s": 0.0}, None, ["no time left; call the part again"], None),
    ],
)
def test_step_is_recorded_with_its_end(tmp_path, monkeypatch, code, facts, rc, problems, result):
    monkeypatch.setattr(kit, "LEAST_S", 0.0)
    found = run(tmp_path, code, **facts)
    assert (found["rc"], found["problems"], found.get("result")) == (rc, problems, result)
    assert kit.has_passed(found) is (not problems)
    assert found.get("tail", []) == (["why"] if rc == 3 else [])


def test_part_goes_on_and_names_what_is_missing(tmp_path, monkeypatch, capsys):
    codes = {"bad": "raise SystemExit(2)", "good": WRITES, "wide": ""}
    table = [Step(name, 1, "", 20, ("-c", code), 16 if name == "wide" else 1) for name, code in codes.items()]
    monkeypatch.setattr(kit, "steps_of", lambda *_, **__: tuple(table))
    machine = {"cards": [], "device": "cpu", "is_tiny": True}
    monkeypatch.setattr(kit, "look_at_machine", lambda _: machine)
    arguments = f"--tiny --device cpu --part 1 --out {tmp_path}/r.json --pack {tmp_path}/gpu.tgz".split()
    assert kit.main(arguments) == 1
    record = json.loads((tmp_path / "r.json").read_text())
    passed = {name: kit.has_passed(step) for name, step in record["steps"].items()}
    assert passed == {"bad": False, "good": True, "wide": True}
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
