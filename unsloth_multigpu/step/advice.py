"""What a forecast means, in words: useful up to how many GPUs, what limits, what to change. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from unsloth_multigpu.step.forecast import TimeForecast, Workload, forecast_time, ladder
from unsloth_multigpu.step.link import Network
from unsloth_multigpu.words import duration

# A GPU that does less than half of what one alone does is better used elsewhere.
USEFUL = 0.5
# With fewer samples for each rank no plan can make the ranks equal.
_FEW_SAMPLES = 4
_MORE_DATA = "More data, or fewer samples in a step of each GPU, keep more GPUs busy."
# The line about a second GPU is for trainings that take at least this long.
_LONG_S = 600


def useful_up_to(rows: Sequence[TimeForecast]) -> int:
    """The largest number of ranks before the efficiency first falls below `USEFUL`.

    Args:
        rows: From one rank on, see `forecast.curve`.
    """
    useful = 1
    for row in rows:
        if row.efficiency < USEFUL:
            break
        useful = row.num_ranks
    return useful


def advise(work: Workload, rows: Sequence[TimeForecast], network: Network, most: int) -> list[str]:
    """Sentences for a user.

    Args:
        work: What was measured.
        rows: Of every number of ranks of `forecast.ladder` that has samples, from one on.
        network: What joins the ranks.
        most: Of the numbers that were looked at.
    """
    useful = useful_up_to(rows)
    beyond = next((row for row in rows if row.num_ranks > useful), None)
    if beyond is None:
        refused = next((n for n in ladder(most) if not work.has_samples(n)), None)
        if refused is None:
            return [f"Useful up to {useful:,} GPUs and more: each does at least {USEFUL:.0%} of what one alone does."]
        has = f"a step has {work.most_ranks:,} samples"
        if not work.keeps_batch:
            has = f"an epoch has {work.most_ranks:,} whole batches"
        return [
            f"Useful up to {work.most_ranks:,} GPUs: {has}, and the run refuses more GPUs than that.",
            _more_samples(work) if work.keeps_batch else _MORE_DATA,
        ]
    head = (
        f"Useful up to {useful:,} GPU{'s' if useful > 1 else ''}: there each does at least {USEFUL:.0%} of what one "
        f"alone does; with {beyond.num_ranks:,} it is {beyond.efficiency:.0%}."
    )
    return [head, *_limit(work, beyond, network)]


def _limit(work: Workload, row: TimeForecast, network: Network) -> list[str]:
    """What takes most of a row's time, and what would change it."""
    ideal = row.efficiency  # Of a rank's time: what one process would need for its part.
    lost = {
        "link": row.link,
        "waiting": row.waiting,
        "update": row.update * (1 - 1 / row.num_ranks) if work.keeps_batch else 0.0,
        "data": 0.0 if work.keeps_batch else row.computing * (1 - work.times_the_batch(row.num_ranks) / row.num_ranks),
    }
    rest = 1 - ideal - row.link - row.waiting - row.update * (1 - 1 / row.num_ranks) - lost["data"]
    lost["small"] = max(0.0, rest)
    most = max(lost, key=lambda name: lost[name])
    each = work.num_samples / row.num_ranks if work.keeps_batch else float(work.num_samples)
    is_few = work.keeps_batch and each < _FEW_SAMPLES
    shown = f"{lost[most]:.0%} of the ranks' time with {row.num_ranks:,} GPUs"
    if most == "data":
        assert work.epochs is not None
        batches = f"an epoch has {work.epochs.num_batches:,} micro-batches for {row.num_ranks:,} GPUs"
        return [f"What limits is the data set: {batches}, so samples are computed twice or left out.", _MORE_DATA]
    if most == "link":
        return [f"What limits is the link, {shown}: {network.describe(row.num_ranks)}.", *_less_link(work, row)]
    if most == "waiting" and not is_few:
        how = "are dealt in order" if not work.is_planned else "differ too much to be evened out"
        return [
            f"What limits is waiting for the slowest rank, {shown}: samples of different length {how}.",
            _even_lengths(work),
        ]
    if most == "small" and not is_few:
        return [
            f"What limits is the time that a micro-batch takes whatever is in it, {shown}.",
            "Raise per_device_train_batch_size: larger micro-batches cost less for each token.",
        ]
    if most == "update" and not is_few:
        return [
            f"What limits is what each rank does beside computing, {shown}: the optimizer, loading, logging.",
            _more_samples(work),
        ]
    samples = f"{work.num_samples:,} samples in a step are {each:.3g} for each of {row.num_ranks:,} GPUs"
    return [f"What limits is the number of samples in a step: {samples}.", _more_samples(work)]


def _more_samples(work: Workload) -> str:
    larger = 'global_batch="scale" lets each GPU take as many samples as one process does now: another training'
    if not work.keeps_batch:
        return "Raise gradient_accumulation_steps or per_device_train_batch_size: that changes the training."
    return (
        "Raise gradient_accumulation_steps or per_device_train_batch_size, which changes the training as it does on "
        f"one GPU; {larger}."
    )


def _less_link(work: Workload, row: TimeForecast) -> list[str]:
    if row.mode == "sharded":
        return [
            "A faster link, fewer and larger micro-batches, or DDP where the model fits: shards send all weights in "
            "each micro-batch."
        ]
    ways = ["a faster link", "more samples in a step (gradient_accumulation_steps)"]
    if work.gradient_bytes > work.weight_bytes / 4:
        ways.append(f"LoRA, which sends a few per cent of these {work.gradient_bytes / 1e9:.3g} GB")
        ways.append('strategy="ddp:grad_compression=bf16"')
    if work.exchange == "gradients":
        ways.append('strategy="diloco", which meets seldom and is another training')
    return ["What helps: " + ", ".join(ways) + "."]


def _even_lengths(work: Workload) -> str:
    if not work.keeps_batch:
        return 'Group samples by length (train_sampling_strategy="group_by_length"), or pack them.'
    if not work.is_planned:
        return "Tokenize before the training, so that samples can be dealt by length; or group them by length."
    return "More samples in a step (gradient_accumulation_steps), or shorter longest samples, even them out."


def compare_two(work: Workload, network: Network) -> str | None:
    """One line about a second GPU; None where it says nothing useful: a short training, or little to gain."""
    if not work.has_samples(2):
        return None
    one, two = (forecast_time(work, n, network) for n in (1, 2))
    if one.total_s < _LONG_S or two.total_s > 0.9 * one.total_s:
        return None
    times = f"{duration(two.total_s)} instead of {duration(one.total_s)}"
    # Lengths that are not known are all 1.
    equal = ", samples of equal length assumed" if max(map(max, work.steps)) == 1 else ""
    return f"2 GPUs would take {times} (forecast, {network.inner.name} assumed{equal})"
