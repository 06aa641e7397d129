"""What `make gpu` measures, as data: steps, how their ranks get cards, and what each result has to show. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Any

Result = dict[str, Any]
Judge = Callable[[Result], list[str]]
# Seconds of a call. Three calls and what comes before each (a machine that starts, packages that are unpacked) fit into
# half an hour, and one fits into ten minutes.
PART_LIMIT_S = 530
# By value: whoever has a card for 25 minutes runs the first three.
PARTS = {
    1: "Does it run, and do ranks train as one process does?",
    2: "Unsloth, fp16, sharding, and where the host waits",
    3: "Faults, and what the user sees of them",
    4: "The planner",
    5: "Unsloth in one process and with padded rows",
    6: "How much sooner several cards are done",
    7: "What the line costs; commands, notebooks, clients and plain loops on two cards",
}
# The line's share of a step, and how much slower a planned step may be than one that is dealt in order.
MAX_LINE_COST = 0.01
MAX_SLOWDOWN = 1.15
# Of a gradient norm, relative: fp32 on a card, and bf16, whose sums depend on how many micro-batches there are.
FP32_BOUND, BF16_BOUND = 1e-4, 3e-2
PYTEST = ("-m", "pytest", "-q", "-rs", "-p", "no:cacheprovider", "-m", "")
TESTS = (*PYTEST, "tests/gpu/test_nccl.py", "-k")
FACTS = (*PYTEST, "tests/gpu/test_facts.py", "-k")


@dataclass(frozen=True)
class Step:
    """One measurement: a command with a limit of its own.

    Args:
        name: Short; the key of its result.
        part: Steps of one part fit into one call, see `PART_LIMIT_S`.
        text: What it shows.
        limit_s: Most seconds; then it is ended and has failed.
        command: Arguments of Python. Tests may leave a result in the file GPU_KIT_FACTS.
        num_cards: Fewer of them, and it is left out.
        only_cards: It sees so many cards; None = all.
        num_ranks: Ranks, placed by `place_ranks`. Where there are fewer cards, they share one, over NCCL or gloo.
        only_nccl: It is left out where these ranks would share a card over gloo.
        prints: It prints its result.
        judge: What is wrong with its result, in words.
    """

    name: str
    part: int
    text: str
    limit_s: int
    command: tuple[str, ...]
    num_cards: int = 1
    only_cards: int | None = None
    num_ranks: int = 1
    only_nccl: bool = False
    prints: bool = False
    judge: Judge = lambda result: []


def steps_of(device: str, *, is_tiny: bool) -> tuple[Step, ...]:
    """The table, in the order in which it is measured: by part, and by value in each.

    Args:
        device: "cuda"; "cpu" in a rehearsal.
        is_tiny: Sizes with which everything ends within minutes on two cores, and shows nothing but that it runs.
    """
    doctor = ("-m", "unsloth_multigpu", "doctor", "--json", "--timeout-s", "160" if is_tiny else "70")
    tools = (*PYTEST, "tests/gpu/test_device_tools.py")
    steps = (
        _fact("device", 1, "a supervised rank: its group of one, its allocator", 80, 1),
        Step("doctor", 1, "what the doctor says", 80, doctor, prints=True),
        *_bench_steps(device, is_tiny),
        *_nccl_steps(),
        Step("tools", 7, "commands, notebooks, clients and plain loops on cards of their own", 270, tools, num_cards=2),
        # Trainings of a minute.
        Step(
            "waits_fp16", 2, "where the host waits; steps that fp16 skips", 120, (*FACTS, "waits or fp16"), num_ranks=2
        ),
        _fact("beyond_vocabulary", 3, "what the user sees of a device-side assert", 45),
        _fact("out_of_memory", 3, "what the user sees of a rank out of memory", 45),
        _fact("recompiled", 4, "what torch compiles again for another number of rows", 50, 1),
    )
    return tuple(sorted(steps, key=lambda step: step.part))


def _fact(name: str, part: int, text: str, limit_s: int, num_ranks: int = 2) -> Step:
    """The tests of test_facts.py with this name."""
    return Step(name, part, text, limit_s, (*FACTS, name), num_ranks=num_ranks)


def _nccl_steps() -> Iterator[Step]:
    """The tests of test_nccl.py, each in one of these steps."""
    for name, part, text, limit_s, chosen, num_ranks in (
        ("parity", 1, "LoRA, Unsloth's LoRA, all weights and DPO, uneven steps too", 230, "two_ranks", 2),
        ("shard", 2, "all weights, sharded by FSDP2", 80, "sharded", 2),
        ("faults", 3, "a rank is killed, hangs, finds NaN", 130, "killed or hung or nan", 2),
        ("ways", 3, "notebook, srun's cards", 130, "notebook or see_one", 2),
        ("parity_4", 3, "four ranks, uneven steps too", 100, "four_ranks", 4),
    ):
        yield Step(name, part, text, limit_s, (*TESTS, chosen), num_ranks=num_ranks, only_nccl=name == "shard")


def _bench_steps(device: str, is_tiny: bool) -> Iterator[Step]:
    """Those that run `unsloth-multigpu bench`."""
    unsloth = "--library unsloth --gradient-checkpointing"
    # Unsloth's CPU backend, which a rehearsal has, always pads.
    flat = f"{unsloth}{'' if device == 'cpu' else ' --padding-free'}"
    # Not torchrun: ranks of its own that share a card wait on cards that there are not.
    two = "--ranks 2 --arms one_process,ours,ours_off"
    packed = f"{flat} {two} --four-bit --optim adamw_8bit"
    line = f"{flat} --ranks 1 --arms one_process,line_one,ours_one"
    planned = "--ranks 1 --arms one_process,ours_one,rebalance"
    guarded = "--ranks 1 --arms one_process,line_one,guarded_one"
    three = "--arms one_process,ours,torchrun"
    small = "two ranks on one card over gloo train as one process"
    cards, plan = "cards against one", "the planner against no plan and batch_rebalance"
    # Name, part, text, seconds, arguments, which arms are judged, against which arm they may not be slower.
    rows: tuple[tuple[str, int, str, int, str, str, str], ...] = (
        ("shared_lora", 1, f"{small}, LoRA", 120, f"{two},torchrun", "ours", ""),
        ("unsloth_lora", 2, "Unsloth, LoRA, two ranks, rows end to end", 142, f"{flat} {two}", "ours", "ours_off"),
        ("unsloth_4bit", 2, "Unsloth, two ranks, 4-bit weights and adamw_8bit", 142, packed, "ours", "ours_off"),
        ("shared_full", 4, f"{small}, full", 80, "--train full --ranks 2 --arms one_process,ours", "ours", ""),
        ("planner_1", 4, plan, 130, planned, "ours_one", "one_process"),
        ("planner_4", 4, f"{plan}, accumulation 4", 170, f"{planned} --accumulation 4", "ours_one", "one_process"),
        ("unsloth_line", 5, "Unsloth in one process: the line, a plan", 142, line, "line_one ours_one", "one_process"),
        ("unsloth_padded", 5, "Unsloth, LoRA, two ranks, padded rows", 142, f"{unsloth} {two}", "ours", "ours_off"),
        ("speed_lora", 6, f"2 {cards}, LoRA", 115, f"--ranks 2 {three},rebalance", "ours", "torchrun"),
        ("speed_full", 6, f"2 {cards}, all weights", 110, f"--ranks 2 --train full {three}", "ours", "torchrun"),
        ("speed_unsloth", 6, f"2 {cards}, Unsloth's LoRA", 110, f"--ranks 2 {flat} {three}", "ours", "torchrun"),
        ("speed_lora_4", 6, f"4 {cards}, LoRA", 90, f"--ranks 4 {three}", "ours", "torchrun"),
        ("speed_lora_8", 6, f"8 {cards}, LoRA", 90, f"--ranks 8 {three}", "ours", "torchrun"),
        ("line", 7, "what the line costs in one process", 240, guarded, "", ""),
    )
    for name, part, text, limit_s, arguments, arms, than in rows:
        # A small fp32 model, whose gradients can be compared closely.
        is_small = name.startswith("shared")
        num_cards = int(arguments.split()[1]) if name.startswith("speed") else 1
        seen = 1 if is_small else max(num_cards, 2 if "--ranks 2" in arguments else 1)
        bound = FP32_BOUND if is_small else BF16_BOUND
        judge = partial(judge_arms, bound, arms.split(), "" if is_tiny else than)
        if name == "line":
            judge = partial(judge_line, is_tiny)
        command = _bench(device, is_tiny, name, arguments, limit_s)
        yield Step(name, part, text, limit_s, command, num_cards, seen, prints=True, judge=judge)


def _bench(device: str, is_tiny: bool, name: str, arguments: str, limit_s: int) -> tuple[str, ...]:
    """The command of a benchmark."""
    size, counts = "--model-size 1b --dtype bf16", (20, 20, 1)
    if is_tiny:
        size, counts = "--model-size tiny --lengths lognormal:20:64 --batch-size 4", (2, 2, 1)
    elif name.startswith("shared"):
        size, counts = "--model-size small", (2, 4, 1)
    elif name.startswith("unsloth"):
        counts = (8, 12, 1)
    elif name == "line":
        counts = (6, 20, 3)
    train = "" if "--train" in arguments else "--train lora"
    # A run that hangs is to be ended by the benchmark, which says more than the limit of the step.
    last = "--warmup {} --steps {} --repeats {}".format(*counts) + f" --timeout-s {limit_s - 20} --json"
    words = f"bench --device {device} {size} {train} {arguments} {last}".split()
    return ("-m", "unsloth_multigpu", *words)


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
    first = outcome["options"]["warmup"]

    def times(ranks: Sequence[Any]) -> list[float]:
        return [
            max(step["wall_s"] for step in steps) for steps in zip(*(r["steps"][first:] for r in ranks), strict=True)
        ]

    return median(
        mine / one
        for ranks, other in zip(rounds, reference, strict=True)
        for mine, one in zip(times(ranks), times(other), strict=True)
    )


def judge_line(is_tiny: bool, result: Result) -> list[str]:
    """The line costs no more than one step in a hundred."""
    if is_tiny:
        return []
    costs = {name: result["ratios"][name] - 1 for name in ("line_one", "guarded_one")}
    return [f"{name} costs {cost:.1%} of a step" for name, cost in costs.items() if cost > MAX_LINE_COST]


def judge_arms(bound: float, arms: Sequence[str], than: str, result: Result) -> list[str]:
    """These arms have the samples and gradients of one process.

    Args:
        bound: Of gradient norms, relative.
        than: None of them takes clearly longer than this arm; "" = times are not judged.
    """
    found = {arm["name"]: arm for arm in result["results"]}
    problems = [f"{name}: no result" for name in arms if name not in found]
    for name in (name for name in arms if name in found):
        arm = found[name]
        if not arm["has_same_samples"]:
            problems.append(f"{name}: other samples in a step than one process has")
        elif not float(arm["norm_difference"]) < bound:
            problems.append(f"{name}: gradient norms differ by {arm['norm_difference']}, bound {bound:g}")
        if than:
            slowdown = found[than]["tokens_per_s"]["median"] / arm["tokens_per_s"]["median"]
            problems += [f"{name}: {slowdown:.2f} times as long as {than}"] if slowdown > MAX_SLOWDOWN else []
    return problems


# From this version on several ranks may use one card, where NCCL_MULTI_RANK_GPU_ENABLE=1.
SHARING_NCCL = (2, 30)


@dataclass(frozen=True)
class Place:
    """Cards and backend of some ranks.

    Args:
        backend: "nccl"; "gloo" where ranks share a card, and NCCL is too old for that.
        num_cards: So many of the visible cards.
        variables: Of the ranks, beside those that choose the cards.
        note: What a result has to say of it; "" where each rank has a card of its own.
    """

    backend: str
    num_cards: int
    variables: dict[str, str]
    note: str = ""


def place_ranks(num_ranks: int, num_cards: int, nccl: Sequence[int] | None) -> Place:
    """Cards for `num_ranks` ranks.

    Args:
        num_cards: Visible cards, one or more.
        nccl: NCCL's version, like (2, 29, 7); None = this torch has none.
    """
    if num_cards >= num_ranks:
        return Place("nccl", num_ranks, {})
    variables, shared = {"NCCL_MULTI_RANK_GPU_ENABLE": "1"}, f"{num_ranks} ranks shared one card"
    found = "no NCCL" if nccl is None else f"NCCL {'.'.join(map(str, nccl))}"
    if nccl is not None and tuple(nccl[:2]) >= SHARING_NCCL:
        return Place("nccl", 1, variables, f"{shared} over {found}")
    oldest = ".".join(map(str, SHARING_NCCL))
    note = f"{shared} over gloo, because NCCL can share one from {oldest} on, and here is {found}"
    return Place("gloo", 1, variables, note)
