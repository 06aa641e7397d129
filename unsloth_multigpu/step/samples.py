"""Chooses the rows on which a loss is tried: they are to differ as those of the training do."""

from __future__ import annotations

import copy
import random
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch

from unsloth_multigpu.group.random_state import seeded_draws
from unsloth_multigpu.step.snapshot import has_random_state, kept_data_state
from unsloth_multigpu.step.weighing import IGNORED, count_rows
from unsloth_multigpu.trainer_protocol import TrainerLike

# Rows of a sample, and how many are read to choose them from.
_MOST_ROWS, _ROWS_READ = 8, 32
# Elements of all columns of a sample, if two rows have no more: some 2,000 tokens.
_MOST_ELEMENTS = 6_000
# Classes of a column that have samples of their own, and how many of these there are.
_MOST_CLASSES, _MOST_OF_CLASSES = 4, 6
# Fraction of a stride by which each look at the data is shifted: all looks differ as far as they can.
_GOLDEN = 0.6180339887498949
# A collator that mixes rows may do so in half of its batches, and a row may meet itself.
_MIXING_SEEDS = range(8)
_LABELS = ("labels", "label", "label_ids")
_MIXES = "the collator mixes the rows of a micro-batch, so that a part of it has other rows to mix"
COLLATOR_REMEMBERS = "the collator depends on what it was called with before, and each rank has calls of its own"


@dataclass(frozen=True)
class Sample:
    """A few rows as one micro-batch, and the same rows as several.

    Args:
        whole: Collated, on the device.
        parts: Of neighbouring rows, each collated by itself; empty where the collator draws, and its batch has no rows.
        problem: Why no parts make up the whole, whatever the loss is; "" = they may.
    """

    whole: Any
    parts: tuple[Any, ...]
    problem: str = ""


def draw_samples(
    trainer: TrainerLike, loader: Any, *, skip: int = 0, rows: Sequence[Any] | None = None
) -> list[Sample]:
    """A few samples of rows from all over the data, or of `rows`. Empty where no row has a label.

    Data may be sorted, or joined from several sources: the rows are spread evenly. Every rank gets the same. Collator
    and data set are left as they were.

    Args:
        trainer: Whose micro-batches they are like.
        loader: Of the training, as the Trainer built it.
        skip: Another number gives other rows.
        rows: Those of a stream, which is not read for the trial.
    """
    with kept_data_state(loader):
        # The training gets the rows of a stream as well, and a collator may write into them.
        read = _read(loader.dataset, skip) if rows is None else [_copied(row) for row in rows]
        return _samples(trainer, loader, read)


def _samples(trainer: TrainerLike, loader: Any, read: Sequence[Any]) -> list[Sample]:
    labelled = sorted((row for row in read if _has_label(row)), key=_size_of)
    unlabelled = [row for row in read if not _has_label(row)]
    chosen = list(choose_rows(labelled, unlabelled, int(trainer._train_batch_size)))
    collate = _collate_of(loader)
    pairs = [(collate(list(rows)), collate(list(rows))) for rows, _ in chosen]
    is_drawn = any(not _is_equal(*pair) for pair in pairs)
    problem = ""
    if chosen and _remembers(loader, list(labelled[: len(chosen[0][0])]), list(labelled[-len(chosen[0][0]) :])):
        problem = COLLATOR_REMEMBERS
    elif is_drawn and len(chosen[0][0]) > 1 and _mixes(loader, labelled):
        problem = _MIXES
    samples = []
    for (rows, cut), (whole, again) in zip(chosen, pairs, strict=True):
        parts = [part for part in (rows[:cut], rows[cut:]) if part]
        if len(parts) < 2:
            collated = [again]
        elif not is_drawn:
            collated = [collate(part) for part in parts]
        else:
            # A collator that draws would give the parts other masks than the whole.
            collated = _cut(whole, [slice(0, cut), slice(cut, len(rows))])
        prepared = [trainer._prepare_inputs(batch) for batch in (whole, *collated)]
        samples.append(Sample(prepared[0], tuple(prepared[1:]), problem))
    return samples


def choose_rows(labelled: Sequence[Any], unlabelled: Sequence[Any], batch_size: int) -> Iterator[tuple[list[Any], int]]:
    """Rows of samples, and how many of each are its first part.

    They never have more rows than the script's micro-batch, and take short ones, which cost little. In the first sample
    the second half is longer, so that padding shows. In the second the first row is the longest, and one has no label
    where there is such a row. Where a column has few values, such as a class, samples hold several of them, and for
    each class there is one where it stands against another: what depends on the classes of a micro-batch shows. The
    last has as many rows as the micro-batch, where that is larger and little.

    Args:
        labelled: The shortest first.
        unlabelled: Rows that have no label.
        batch_size: Rows of a micro-batch.
    """
    num_rows = _fitting(labelled, min(_MOST_ROWS, batch_size, len(labelled)))
    if not num_rows:
        return
    columns = list(_classes_of(labelled))
    short = list(labelled[: max(num_rows, len(labelled) // 2)])
    # Most rows may be equally long.
    longer = next((row for row in labelled if _size_of(row) > _size_of(short[0])), short[-1])
    if _size_of(short[0]) == _size_of(short[-1]):
        short[-1] = longer
    spread = [short[i * (len(short) - 1) // max(1, num_rows - 1)] for i in range(num_rows)]
    for classes in columns:
        spread = _varied(spread, labelled, classes)
    yield sorted(spread, key=_size_of), num_rows // 2 or 1
    if num_rows == 1:
        yield [short[-1]], 1
        return
    without = unlabelled[:1]
    second = [short[-1], *without, *short[: num_rows - 1 - len(without)]]
    yield second, 1
    for sample in islice(_against_each_other(labelled, columns, num_rows), _MOST_OF_CLASSES):
        yield sample, 1
    if num_rows < (many := min(batch_size, len(labelled))) and _fitting(labelled, many) == many:
        yield list(labelled[:many]), many // 2


def _fitting(rows: Sequence[Any], num_rows: int) -> int:
    """How many of the first rows are little together; two may be more."""
    while num_rows > 2 and sum(map(_size_of, rows[:num_rows])) > _MOST_ELEMENTS:
        num_rows -= 1
    return num_rows


def _classes_of(rows: Sequence[Any]) -> Iterator[dict[int, Any]]:
    """Columns of few values: for each its value in each row, by the row's id. Labels come first."""
    values: dict[Any, dict[int, Any]] = {}
    for row in rows:
        items = row.items() if isinstance(row, Mapping) else enumerate(row) if isinstance(row, (list, tuple)) else ()
        for name, value in items:
            scalar = _scalar_of(value)
            if isinstance(scalar, (int, float, str)) and not (name in _LABELS and scalar == IGNORED):
                values.setdefault(name, {})[id(row)] = scalar
    for name in sorted(values, key=lambda name: name not in _LABELS):
        if 2 <= len(set(values[name].values())) <= len(rows) // 2:
            yield values[name]


def _scalar_of(value: Any) -> Any:
    """The number in a tensor or array of one element; other values as they are."""
    size = value.numel() if isinstance(value, torch.Tensor) else getattr(value, "size", None)
    return value.item() if size == 1 and hasattr(value, "item") else value


def _varied(sample: Sequence[Any], rows: Sequence[Any], classes: Mapping[int, Any]) -> list[Any]:
    """The sample with rows of classes that it lacks, in place of rows whose class it has several times."""
    sample = list(sample)
    counts = Counter(classes.get(id(row)) for row in sample)
    for row in rows:
        kind = classes.get(id(row))
        if kind is None or counts[kind]:
            continue
        twice = [i for i, other in enumerate(sample) if counts[classes.get(id(other))] > 1]
        if not twice:
            break
        # The one of the nearest length.
        i = min(twice, key=lambda i: abs(_size_of(sample[i]) - _size_of(row)))
        counts[classes.get(id(sample[i]))] -= 1
        counts[kind] += 1
        sample[i] = row
    return sample


def _against_each_other(
    rows: Sequence[Any], columns: Sequence[Mapping[int, Any]], num_rows: int
) -> Iterator[list[Any]]:
    """For each class a row of another one and rows of it; of two rows also two of it."""
    for classes in columns:
        of_class: dict[Any, list[Any]] = {}
        for row in rows:
            if id(row) in classes:
                of_class.setdefault(classes[id(row)], []).append(row)
        kinds = sorted(of_class, key=lambda kind: -len(of_class[kind]))[:_MOST_CLASSES]
        for kind, before in zip(kinds, [kinds[-1], *kinds], strict=False):
            mine = of_class[kind]
            sample = [of_class[before][0], *mine[: num_rows - 1]]
            yield sample[: _fitting(sample, len(sample))]
            if num_rows == 2 and len(mine) > 1:
                yield mine[:2]


def _read(dataset: Any, skip: int) -> list[Any]:
    if hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__"):
        return [dataset[i] for i in spread_indices(len(dataset), skip)]
    # A sampler of the script knows its length.
    return list(islice(iter(dataset), _ROWS_READ))


def spread_indices(length: int, skip: int) -> list[int]:
    """Places all over the data, others for another `skip` where there are more rows than are read."""
    count = min(_ROWS_READ, length)
    shift = skip * _GOLDEN % 1.0
    indices = [min(int((i + shift) * length / count), length - 1) for i in range(count)]
    begin = skip % count if count else 0
    return indices[begin:] + indices[:begin]


def _copied(value: Any) -> Any:
    if type(value) is dict:
        return {name: _copied(v) for name, v in value.items()}
    if isinstance(value, MutableMapping):
        return copy.copy(value)
    if type(value) is list:
        return [_copied(v) for v in value]
    return value.clone() if isinstance(value, torch.Tensor) else value


def _has_label(row: Any) -> bool:
    labels = row.get("labels") if isinstance(row, Mapping) else None
    return not (isinstance(labels, (list, tuple)) and labels and all(label == IGNORED for label in labels))


def _size_of(row: Any) -> int:
    values = row.values() if isinstance(row, Mapping) else row if isinstance(row, (list, tuple)) else [row]
    return sum(
        int(v.numel()) if isinstance(v, torch.Tensor) else len(v) if hasattr(v, "__len__") else 1 for v in values
    )


def _collate_of(loader: Any, seed: int | None = None, *, generators: bool = True) -> Callable[[list[Any]], Any]:
    """The collator, which begins each call with the same state.

    Args:
        loader: Of the training.
        seed: Each call begins with these random numbers as well; None = they go on.
        generators: With a seed, the collator's own generators do not go on either.
    """

    def collate(rows: list[Any]) -> Any:
        with (
            kept_data_state(loader, generators=generators and seed is not None),
            nullcontext() if seed is None else seeded_draws(seed),
        ):
            # A collator may write into its rows, or take labels out of them.
            return loader.collate_fn([_copied(row) for row in rows])

    return collate


def _remembers(loader: Any, before: list[Any], rows: list[Any]) -> bool:
    """True where an earlier call changes what the collator makes of its rows."""
    collate = _collate_of(loader, 0, generators=False)
    fresh = collate(list(rows))
    if not _is_equal(fresh, collate(list(rows))):
        return False  # It has a generator of its own, which goes on.
    with kept_data_state(loader):
        for given in (before, rows):
            with seeded_draws(0):
                after = loader.collate_fn([_copied(row) for row in given])
        # One that it has made in its first call goes on as well.
        draws = any(has_random_state(value) for value in getattr(loader.collate_fn, "__dict__", {}).values())
    return not draws and not _is_equal(fresh, after)


def _mixes(loader: Any, labelled: Sequence[Any]) -> bool:
    """True where a collator that draws makes a row from others, as mixup does.

    With the same random numbers, the first row is then another one where the rows behind it have changed places. Masks
    and noise stay as they are. Rows of like length are taken, so that what is drawn for each token stays in its place.
    """
    num_rows = min(4, len(labelled))
    if num_rows < 3:
        return False
    num_near = min(2 * num_rows, len(labelled))
    begins = range(len(labelled) - num_near + 1)
    begin = min(begins, key=lambda i: _size_of(labelled[i + num_near - 1]) - _size_of(labelled[i]))
    for seed in _MIXING_SEEDS:
        # Two rows may be alike in what is mixed, such as their class.
        first, *rest = random.Random(seed).sample(labelled[begin : begin + num_near], num_rows)
        collate = _collate_of(loader, seed)
        one = collate([first, *rest])
        if seed == _MIXING_SEEDS[0] and not (isinstance(one, Mapping) and _is_equal(one, collate([first, *rest]))):
            return False  # It draws from elsewhere, and nothing can be seen.
        other = collate([first, *rest[1:], rest[0]])
        names = [n for n, v in one.items() if isinstance(v, torch.Tensor) and v.dim() and len(v) == num_rows]
        if not names or any(other[n].shape != one[n].shape for n in names):
            return False
        # A collator that shuffles its rows puts another row there, as it is.
        if not any(all(torch.equal(other[n][0], one[n][i]) for n in names) for i in range(num_rows)):
            return True
    return False


def _is_equal(first: Any, second: Any) -> bool:
    if isinstance(first, torch.Tensor):
        return first.shape == second.shape and torch.equal(first, second)
    if isinstance(first, Mapping):
        return all(name in second and _is_equal(first[name], second[name]) for name in first)
    return True


def _cut(whole: Any, parts: Sequence[slice]) -> list[Any]:
    """The parts of a collated batch; empty where it is not made of rows."""
    if not isinstance(whole, Mapping):
        return []
    rows = count_rows(whole)
    if any(isinstance(v, torch.Tensor) and v.dim() and len(v) != rows for v in whole.values()):
        return []
    return [{n: v[part] if hasattr(v, "__getitem__") else v for n, v in whole.items()} for part in parts]
