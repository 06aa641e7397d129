"""What `make gpu` measures, as data: a table of steps, and what each result has to show. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

Result = dict[str, Any]
Judge = Callable[[Result], list[str]]
# Steps of a call; it may take ten minutes, of which the last seconds are for ending and writing.
PART_LIMIT_S = 580
PARTS = {
    1: "Does it run, and what does the line cost?",
    2: "The planner, and two ranks on one card",
    3: "Unsloth",
    4: "Several cards over NCCL train as one",
    5: "How much sooner several cards are done",
}
# The line's share of a step, and how much slower a planned step may be than one that is dealt in order.
MAX_LINE_COST = 0.01
MAX_SLOWDOWN = 1.15
# Of a gradient norm, relative: fp32 on a card, and bf16, whose sums depend on how many micro-batches there are.
FP32_BOUND, BF16_BOUND = 1e-4, 3e-2


@dataclass(frozen=True)
class Step:
    """One measurement: a command with a limit of its own.

    Args:
        name: Short; the key of its result.
        part: Steps of one part fit into one call, see `PART_LIMIT_S`.
        text: What it shows.
        limit_s: Most seconds; then it is ended and has failed.
        command: Arguments of Python. "{json}" stands for the file in which it leaves its result.
        num_cards: Fewer of them, and it is left out.
        only_cards: It sees so many cards; None = all.
        variables: Of its environment.
        prints: It prints its result in place of writing a file.
        judge: What is wrong with its result, in words.
    """

    name: str
    part: int
    text: str
    limit_s: int
    command: tuple[str, ...]
    num_cards: int = 1
    only_cards: int | None = None
    variables: dict[str, str] = field(default_factory=dict)
    prints: bool = False
    judge: Judge = lambda result: []


def steps_of(device: str, *, is_tiny: bool) -> tuple[Step, ...]:
    """The table.

    Args:
        device: "cuda"; "cpu" in a rehearsal.
        is_tiny: Sizes with which everything ends within minutes on two cores, and shows nothing but that it runs.
    """
    is_cuda = device == "cuda"
    bench = _Bench(device, is_tiny)
    return (
        Step("libraries", 1, "versions, and seconds that imports take", 130, _fact("libraries")),
        Step(
            "device",
            1,
            "a supervised rank: its group of one, its allocator",
            100,
            _fact("device"),
            judge=judge_device(is_cuda),
        ),
        Step(
            "doctor",
            1,
            "what the doctor says",
            100,
            ("-m", "unsloth_multigpu.cli.main", "doctor", "--json", "--timeout-s", "160" if is_tiny else "80"),
            prints=True,
        ),
        bench.step(
            "line",
            1,
            "what the line costs in one process",
            240,
            "--ranks 1 --arms one_process,line_one,guarded_one --interleave steps",
            warmup=6,
            repeats=2,
            judge=judge_line(is_tiny),
        ),
        *(
            bench.step(
                f"planner_{accumulation}",
                2,
                f"the planner against no plan and batch_rebalance, accumulation {accumulation}",
                limit_s,
                f"--ranks 1 --accumulation {accumulation} --arms one_process,ours_one,rebalance",
                judge=judge_arms(BF16_BOUND, ("ours_one",), than=None if is_tiny else "one_process"),
            )
            for accumulation, limit_s in ((1, 130), (4, 170))
        ),
        Step("costs", 2, "time of a micro-batch by its size", 70, _fact("costs")),
        *(
            bench.step(
                f"shared_{train}",
                2,
                f"two ranks on one card over gloo train as one process, {train}",
                limit_s,
                f"--ranks 2 --train {train} --arms {arms}",
                small=True,
                only_cards=1,
                judge=judge_arms(FP32_BOUND, ("ours",), is_expandable=is_cuda or None),
            )
            for train, limit_s, arms in (
                ("lora", 120, "one_process,ours,ours_off,torchrun"),
                ("full", 80, "one_process,ours"),
            )
        ),
        *_unsloth_steps(bench, is_tiny=is_tiny),
        *_nccl_steps(bench, is_tiny=is_tiny),
    )


def _unsloth_steps(bench: _Bench, *, is_tiny: bool) -> tuple[Step, ...]:
    common = "--library unsloth --gradient-checkpointing"
    # Unsloth's CPU backend, which a rehearsal has, always pads.
    end_to_end = "" if bench.device == "cpu" else "--padding-free"
    # Not torchrun: ranks of its own that share a card wait on cards that there are not.
    two = f"{common} --ranks 2 --arms one_process,ours,ours_off"
    is_expandable = None if bench.device == "cpu" else True
    rows = (
        (
            "unsloth_line",
            "one process: with the line, and planned",
            f"{common} {end_to_end} --ranks 1 --arms one_process,line_one,ours_one",
            ("line_one", "ours_one"),
            "one_process",
        ),
        ("unsloth_lora", "two ranks, rows end to end", f"{two} {end_to_end}", ("ours",), "ours_off"),
        ("unsloth_padded", "two ranks, padded rows", two, ("ours",), "ours_off"),
        (
            "unsloth_4bit",
            "two ranks, 4-bit weights and adamw_8bit",
            f"{two} {end_to_end} --four-bit --optim adamw_8bit",
            ("ours",),
            "ours_off",
        ),
    )
    return tuple(
        bench.step(
            name,
            3,
            f"Unsloth, LoRA, its gradient checkpointing: {text}",
            142,
            arguments,
            warmup=8,
            steps=12,
            judge=judge_arms(BF16_BOUND, arms, than=None if is_tiny else than, is_expandable=is_expandable),
        )
        for name, text, arguments, arms, than in rows
    )


def _nccl_steps(bench: _Bench, *, is_tiny: bool) -> tuple[Step, ...]:
    tests = ("-m", "pytest", "-q", "-rs", "-p", "no:cacheprovider", "tests/gpu/test_nccl.py")
    arms = "--arms one_process,ours,torchrun"
    unsloth = "--library unsloth --gradient-checkpointing" + ("" if bench.device == "cpu" else " --padding-free")
    judge = judge_arms(BF16_BOUND, ("ours",), than=None if is_tiny else "torchrun")
    return (
        Step(
            "parity",
            4,
            "LoRA, Unsloth's LoRA, all weights and DPO, uneven steps too",
            300,
            (*tests, "-k", "as_one and not notebook"),
            2,
            2,
        ),
        Step(
            "recovery",
            4,
            "save and resume, notebook, srun's cards, compression",
            270,
            (*tests, "-k", "not (as_one and not notebook)"),
            2,
            2,
        ),
        *(
            bench.step(
                name, 5, f"two cards against one, {text}", limit_s, f"--ranks 2 {more}", num_cards=2, judge=judge
            )
            for name, text, limit_s, more in (
                ("speed_lora", "LoRA", 125, f"{arms},rebalance"),
                ("speed_full", "all weights", 125, f"--train full {arms}"),
                ("speed_unsloth", "Unsloth's LoRA", 120, f"{unsloth} {arms}"),
            )
        ),
        *(
            bench.step(
                f"speed_lora_{count}",
                5,
                f"{count} cards against one, LoRA",
                100,
                f"--ranks {count} {arms}",
                num_cards=count,
                judge=judge,
            )
            for count in (4, 8)
        ),
    )


def _fact(group: str) -> tuple[str, ...]:
    return ("-m", "tests.gpu.fact", group, "{json}")


@dataclass(frozen=True)
class _Bench:
    """Makes steps that run `unsloth-multigpu bench`."""

    device: str
    is_tiny: bool

    def step(
        self,
        name: str,
        part: int,
        text: str,
        limit_s: int,
        arguments: str,
        *,
        warmup: int = 20,
        steps: int = 20,
        repeats: int = 1,
        small: bool = False,
        num_cards: int = 1,
        only_cards: int | None = None,
        judge: Judge,
    ) -> Step:
        """A step; `small` = a small fp32 model, whose gradients can be compared closely."""
        size = ["--model-size", "1b", "--dtype", "bf16"]
        if small:
            size, warmup, steps = ["--model-size", "small"], 2, 4
        if self.is_tiny:
            size = ["--model-size", "tiny", "--lengths", "lognormal:20:64", "--batch-size", "4"]
            warmup, steps, repeats = 2, 2, 1
        given = arguments.split()
        counts = ["--warmup", str(warmup), "--steps", str(steps), "--repeats", str(repeats)]
        train = [] if "--train" in given else ["--train", "lora"]
        command = ["-m", "unsloth_multigpu.cli.main", "bench", "--device", self.device, *size, *train, *given, *counts]
        # A run that hangs is to be ended by the benchmark, which says more than the limit of the step.
        command += ["--timeout-s", str(limit_s - 20), "--json", "{json}"]
        seen = only_cards or max(num_cards, 2 if "--ranks 2" in arguments else num_cards)
        return Step(name, part, text, limit_s, tuple(command), num_cards, seen, judge=judge)


def short_result(outcome: Result) -> Result:
    """What of a benchmark's JSON is kept: not the samples of every step."""
    if "runs" not in outcome:
        return outcome
    runs = outcome["runs"]
    return {
        "conditions": outcome["conditions"],
        "results": outcome["results"],
        "planner": {name: rounds[-1][0]["planner"] for name, rounds in runs.items() if rounds[-1][0]["planner"]},
        "ratios": {name: step_ratio(rounds, runs["one_process"], outcome) for name, rounds in runs.items()},
    }


def step_ratio(rounds: list[Any], reference: list[Any], outcome: Result) -> float:
    """Median over the timed steps of an arm's time over that of one process in the same step, which has its samples.

    Args:
        rounds: `rounds[round][rank]` = a record of the benchmark's JSON.
    """
    first = outcome["options"]["num_warmup"]

    def times(ranks: Sequence[Any]) -> list[float]:
        return [
            max(step["wall_s"] for step in steps) for steps in zip(*(r["steps"][first:] for r in ranks), strict=True)
        ]

    return median(
        mine / one
        for ranks, other in zip(rounds, reference, strict=True)
        for mine, one in zip(times(ranks), times(other), strict=True)
    )


def judge_device(is_cuda: bool) -> Judge:
    """A group of one over NCCL that adds up, segments that expand, and a collective that waits is named."""

    def judge(result: Result) -> list[str]:
        rank = result["rank"]
        expected: Result = {"launcher": "unsloth_multigpu", "backend": "nccl" if is_cuda else "gloo", "sum": 8.0}
        if is_cuda:
            expected |= {"is_expandable": True, "pending": "all_reduce [1234]"}
        return [
            f"{name}: {rank.get(name)!r}, not {value!r}" for name, value in expected.items() if rank.get(name) != value
        ]

    return judge


def judge_line(is_tiny: bool) -> Judge:
    """The line costs no more than one step in a hundred."""

    def judge(result: Result) -> list[str]:
        if is_tiny:
            return []
        costs = {name: result["ratios"][name] - 1 for name in ("line_one", "guarded_one")}
        return [f"{name} costs {cost:.1%} of a step" for name, cost in costs.items() if cost > MAX_LINE_COST]

    return judge


def judge_arms(
    bound: float, arms: Sequence[str], *, than: str | None = None, is_expandable: bool | None = None
) -> Judge:
    """These arms have the samples and gradients of one process.

    Args:
        bound: Of gradient norms, relative.
        than: None of them takes clearly longer than this arm; None = times are not judged.
        is_expandable: What the allocator has to have; None = anything.
    """

    def judge(result: Result) -> list[str]:
        found = {arm["name"]: arm for arm in result["results"]}
        problems = [f"{name}: no result" for name in arms if name not in found]
        for name in (name for name in arms if name in found):
            arm = found[name]
            if not arm["has_same_samples"]:
                problems.append(f"{name}: other samples in a step than one process has")
            elif not float(arm["norm_difference"]) < bound:
                problems.append(f"{name}: gradient norms differ by {arm['norm_difference']}, bound {bound:g}")
            if is_expandable is not None and arm["is_expandable"] is not is_expandable:
                problems.append(f"{name}: expandable segments: {arm['is_expandable']}")
            if than is not None:
                slowdown = found[than]["tokens_per_s"]["median"] / arm["tokens_per_s"]["median"]
                problems += [f"{name}: {slowdown:.2f} times as long as {than}"] if slowdown > MAX_SLOWDOWN else []
        return problems

    return judge
