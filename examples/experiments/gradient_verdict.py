"""What the figures of gradient_sync.py say. Conditions choose each sentence: other figures, another verdict."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from gradient_result import DDP, NEAR, SAME, VERIFY_BOUND, Figures

OfTasks = dict[str, dict[str, Figures]]
# The variant with a learning rate that makes up for its more numerous updates.
SLOWED = {"step_per_worker": "step_per_worker_over_4"}
ACCURACY_LOST = 0.1


def verdict(results: dict[str, Any], of_tasks: OfTasks) -> Iterator[str]:
    """Items of a Markdown list."""
    yield from _strategies(of_tasks)
    yield _one_process(results, of_tasks)
    yield from _caught(of_tasks)
    yield from _other_weights(of_tasks)
    yield from _not_seen(of_tasks)
    yield from _hidden_scale(of_tasks)
    yield _hardly_learns(of_tasks)
    yield from _learns_best(of_tasks)
    yield from _slowed(of_tasks)
    yield from _sum_is_rate(of_tasks)
    yield from _saved_model(of_tasks)


def _strategies(of_tasks: OfTasks) -> Iterator[str]:
    found = [f for f in _all(of_tasks) if f.kind == "strategy"]
    right = [f for f in found if f.distance_from_ddp <= SAME]
    if right:
        worst = max(f.distance_from_ddp for f in right)
        same = "in every task and seed" if right == found else "but not in every task"
        yield (
            f"- **Done right, it does not matter how gradients are synchronized.** {_labels(right)} end where DDP "
            f"ends: the weights differ by at most {worst:.0e} of their size, {same}."
        )
    for f in found:
        if f not in right:
            yield f"- **{f.label} does not end where DDP ends**: the weights differ by {f.distance_from_ddp:.0e}."


def _one_process(results: dict[str, Any], of_tasks: OfTasks) -> str:
    distances = {task: figures["one_process"].distance_from_ddp for task, figures in of_tasks.items()}
    listed = ", ".join(f"{task} {distance:.0e}" for task, distance in distances.items())
    text = f"- DDP against one process with the whole batch, distance of the weights: {listed}."
    far = [task for task, distance in distances.items() if distance > SAME]
    if far and all(results["tasks"][task]["has_buffers"] for task in far):
        text += f" In {_and(far)} BatchNorm sees a rank's own rows, where one process sees the whole batch."
    return text


def _caught(of_tasks: OfTasks) -> Iterator[str]:
    for is_caught in (True, False):
        # Caught means: in every task and seed.
        names = [
            n for n, f in _first(of_tasks).items() if f.is_bug and _everywhere(of_tasks, n, _is_caught) is is_caught
        ]
        listed = "; ".join(f"{_first(of_tasks)[name].label} ({proofs(of_tasks, name)})" for name in names)
        if names and is_caught:
            example = _first(of_tasks)[names[0]].proofs[0].partition(": ")[2].rstrip(".")
            yield f"- **The replica proof catches mistakes by which replicas drift apart**: {listed}."
            yield f"  It says: `{example}.`"
        elif names:
            yield f"- **THE REPLICA PROOF MISSED**: {listed}."


def _other_weights(of_tasks: OfTasks) -> Iterator[str]:
    cosines = []
    for task, figures in of_tasks.items():
        own, shared = figures["no_broadcast"], figures[DDP]
        if own.cosine is None or shared.cosine is None or own.cosine >= shared.cosine:
            return
        cosines.append(f"{task} {own.cosine:.2f} (DDP {shared.cosine:.2f})")
    yield (
        f"- {_label(of_tasks, 'no_broadcast')} shows before the first step: the ranks' gradients have less in common, "
        f"cosine in {', '.join(cosines)}."
    )


def _is_caught(f: Figures) -> bool:
    return f.is_caught


def _not_seen(of_tasks: OfTasks) -> Iterator[str]:
    first = _first(of_tasks)
    equal = [n for n, f in first.items() if f.kind == "mistake" and _everywhere(of_tasks, n, lambda f: f.is_equal)]
    if not equal:
        return
    yield (
        f"- **It cannot see what all ranks do alike**: {_labels([first[n] for n in equal])} change the mathematics and "
        "keep the replicas equal."
    )
    by_norm = [n for n in equal if _everywhere(of_tasks, n, lambda f: abs(f.norm_ratio - 1) > VERIFY_BOUND)]
    if by_norm:
        ratios = "; ".join(f"{first[n].label} {span([f[n].norm_ratio for f in of_tasks.values()])}" for n in by_norm)
        yield (
            "- The norm of the first step's gradient shows it, which `unsloth-multigpu verify` compares with one "
            f"process (allowed {VERIFY_BOUND:.0e}): {ratios}."
        )
    if others := [n for n in equal if n not in by_norm]:
        yield f"- That norm does not show it in every task: {_labels([first[n] for n in others])}."
    if counted := [n for n in equal if _everywhere(of_tasks, n, lambda f: f.update_ratio != 1)]:
        ratios = "; ".join(f"{first[n].label} {span([f[n].update_ratio for f in of_tasks.values()])}" for n in counted)
        yield f"- The number of optimizer updates shows it: {ratios}."


def _hidden_scale(of_tasks: OfTasks) -> Iterator[str]:
    found = []
    for name in ("sum", "double_division"):
        gaps = {task: _largest_gap(figures[name], figures[DDP]) for task, figures in of_tasks.items()}
        hidden = [f"{task} ({gap:.1%})" for task, gap in gaps.items() if gap < NEAR]
        plain = [f"{task} ({gap:.0%})" for task, gap in gaps.items() if gap >= NEAR]
        if hidden:
            found.append(
                f"{_label(of_tasks, name)} in {_and(hidden)}" + (f", but not in {_and(plain)}" if plain else "")
            )
    if found:
        yield (
            "- **A loss curve does not prove a gradient.** The loss stays near DDP's (largest difference in an epoch) "
            f"with {'; with '.join(found)}."
        )


def _largest_gap(f: Figures, other: Figures) -> float:
    """Of two loss curves, relative: over all epochs and seeds."""
    pairs = zip(f.losses, other.losses, strict=True)
    return max(abs(a - b) / b for one, two in pairs for a, b in zip(one, two, strict=True))


def _hardly_learns(of_tasks: OfTasks) -> str:
    same = all(figures[n].pace == "as DDP" for figures in of_tasks.values() for n in ("allreduce_each", "allreduce"))
    right = "All-reduce as it should be learns as DDP does" if same else "HERE ALL-REDUCE DOES NOT LEARN AS DDP DOES"
    mistakes = [name for name, f in _first(of_tasks).items() if f.kind == "mistake"]
    paces = {name: [figures[name].pace for figures in of_tasks.values()] for name in mistakes}
    counts = {name: pace.count("slower") + pace.count("fails") for name, pace in paces.items()}
    slower = [f"{_label(of_tasks, name)} ({count})" for name, count in counts.items() if count]
    return (
        f'- **"Manual all-reduce hardly learns."** {right}. Slower than DDP halfway, in how many of {len(of_tasks)} '
        f"tasks: {', '.join(slower) or 'none'}."
    )


def _learns_best(of_tasks: OfTasks) -> Iterator[str]:
    same = all(figures["parameter_server"].pace == "as DDP" for figures in of_tasks.values())
    server = "It learns as DDP does" if same else "HERE IT DOES NOT LEARN AS DDP DOES"
    ahead: dict[str, list[str]] = {}
    unexplained = []
    for task, figures in of_tasks.items():
        for f in figures.values():
            if f.pace == "faster" and f.kind in ("strategy", "mistake"):
                ahead.setdefault(f.label, []).append(task)
                unexplained += [] if f.trains_more else [f"{f.label} ({task})"]
    listed = "; ".join(f"{label} ({', '.join(tasks)})" for label, tasks in ahead.items())
    yield f'- **"The parameter server learns best."** {server}. Ahead of DDP halfway: {listed or "nothing"}.'
    if ahead and not unexplained:
        yield "- Whatever is ahead makes more updates than DDP, or has a larger gradient in them."
    elif unexplained:
        yield f"- Ahead of DDP without more or larger updates: {'; '.join(unexplained)}."


def _slowed(of_tasks: OfTasks) -> Iterator[str]:
    for name, slowed in SLOWED.items():
        was_ahead = [task for task, figures in of_tasks.items() if figures[name].pace == "faster"]
        kept = [task for task in was_ahead if of_tasks[task][slowed].pace == "faster"]
        if not was_ahead:
            say = "is ahead nowhere in the first place"
        else:
            say = f"stays ahead in {_and(kept)}" if kept else f"is no longer ahead in {_and(was_ahead)}"
        yield f"- With a quarter of the learning rate, {_label(of_tasks, name)} {say}."


def _sum_is_rate(of_tasks: OfTasks) -> Iterator[str]:
    gaps = {task: _largest_gap(figures["sum"], figures["ddp_times_4"]) for task, figures in of_tasks.items()}
    if same := [f"{task} (loss within {gap:.0e})" for task, gap in gaps.items() if gap <= SAME]:
        yield f"- The sum for the mean is four times the learning rate, and nothing else, in {_and(same)}."
    if other := [f"{task} (loss differs by up to {gap:.0%})" for task, gap in gaps.items() if gap > SAME]:
        yield f"- It is something else than four times the learning rate in {_and(other)}."


def _saved_model(of_tasks: OfTasks) -> Iterator[str]:
    for task, figures in of_tasks.items():
        for f in figures.values():
            if f.is_equal and f.best_accuracy - f.rank_0_accuracy > ACCURACY_LOST:
                yield (
                    f"- **The model that rank 0 saves is not the one that was trained** in {task} with {f.label}: "
                    f"{f.rank_0_accuracy:.0%} correct on rank 0, {f.best_accuracy:.0%} on the best rank, with equal "
                    "weights. What differs are buffers, at which the replica proof does not look."
                )


def span(ratios: list[float]) -> str:
    """ "x 1.00 to 1.32"."""
    low, high = f"{min(ratios):.2f}", f"{max(ratios):.2f}"
    return f"x {low}" if low == high else f"x {low} to {high}"


def proofs(of_tasks: OfTasks, name: str) -> str:
    """What the replica proof said of a variant, each saying once."""
    return ", ".join(dict.fromkeys(figures[name].proof for figures in of_tasks.values()))


def _all(of_tasks: OfTasks) -> list[Figures]:
    return [f for figures in of_tasks.values() for f in figures.values()]


def _first(of_tasks: OfTasks) -> dict[str, Figures]:
    return next(iter(of_tasks.values()))


def _label(of_tasks: OfTasks, name: str) -> str:
    return _first(of_tasks)[name].label


def _labels(figures: list[Figures]) -> str:
    return _and(list(dict.fromkeys(f.label for f in figures)))


def _and(texts: list[str]) -> str:
    return " and ".join(filter(None, [", ".join(texts[:-1]), texts[-1]]))


def _everywhere(of_tasks: OfTasks, name: str, holds: Callable[[Figures], bool]) -> bool:
    return all(holds(figures[name]) for figures in of_tasks.values())
