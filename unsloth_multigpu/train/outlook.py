"""One line after the first steps on one GPU: what would a second one bring?

Nothing is patched and nothing is waited for: the part reads a clock when a step ends, and twice in one step what the
device was doing. What it assumes is on the careful side: samples are dealt in order, GPUs are joined by PCIe.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import replace
from itertools import islice
from typing import Any

from unsloth_multigpu.errors import SetupError
from unsloth_multigpu.group.bucket import num_bytes
from unsloth_multigpu.logs import get_logger
from unsloth_multigpu.options import MultiGPUConfig
from unsloth_multigpu.part import Part
from unsloth_multigpu.step.advice import compare_two
from unsloth_multigpu.step.cost import CostModel
from unsloth_multigpu.step.forecast import BACKWARD, BACKWARD_FROZEN, Epochs, Workload
from unsloth_multigpu.step.length import read_lengths
from unsloth_multigpu.step.link import PCIE, Network
from unsloth_multigpu.step.measure import Lap, moment
from unsloth_multigpu.strategy import DDP
from unsloth_multigpu.trainer_protocol import ArgumentsLike, ControlLike, StateLike, TrainerLike

logger = get_logger(__name__)

# The first two steps compile and fill caches.
_WARM_UP_STEPS, _LAST_STEP = 2, 16
_UPDATE_STEP = 14
# Rows whose lengths are read, and steps that are made of them.
_MOST_ROWS, _MOST_STEPS = 2048, 32


def outlook_of(trainer: TrainerLike, config: MultiGPUConfig) -> Outlook | None:
    """The part for a training of one process; None where the line would say nothing, or is switched off."""
    args = trainer.args
    is_one_gpu = args.device.type != "cpu" and args.n_gpu == 1
    if not is_one_gpu or hasattr(args, "steps_per_generation"):
        return None
    if trainer.is_deepspeed_enabled or trainer.is_fsdp_enabled:
        return None
    if config.shard != "off" or config.strategy != DDP():
        return None  # `unsloth-multigpu forecast` knows these ways.
    return Outlook(trainer, config)


def epochs_of(trainer: TrainerLike) -> Epochs | None:
    """What one process is given by its data set, while it trains; None where its loader has no length."""
    loader: Any = trainer.callback_handler.train_dataloader
    try:
        num_batches = len(loader)
    except TypeError:
        return None
    # The batches are the sampler's; a stream has none.
    maker = getattr(loader, "batch_sampler", None) or loader
    drops_last = bool(getattr(maker, "drop_last", False))
    num_epochs = None if trainer.args.max_steps > 0 else float(trainer.args.num_train_epochs)
    return Epochs(num_batches, drops_last=drops_last, num_epochs=num_epochs)


class Outlook(Part):
    """Times the first steps of a training, and says what two GPUs would take where that is worth a line.

    Args:
        trainer: A `transformers.Trainer` or subclass.
        config: The run's options.
    """

    place = "recorder"

    def __init__(self, trainer: TrainerLike, config: MultiGPUConfig) -> None:
        self._trainer = trainer
        self._config = config
        # The feed of a steered process sets it to 1 for the loop.
        self._num_accumulated = int(trainer.args.gradient_accumulation_steps)
        self._first_step, self._first_epoch = 0, 0.0
        self._ends: list[float] = []
        self._update: list[Any] = []

    def on_train_begin(self, args: ArgumentsLike, state: StateLike, control: ControlLike, **kwargs: Any) -> None:
        self._first_step, self._first_epoch = int(state.global_step), float(state.epoch or 0)

    def on_pre_optimizer_step(self, args: ArgumentsLike, state: StateLike, control: ControlLike, **kwargs: Any) -> None:
        self._mark_update(state)

    def on_optimizer_step(self, args: ArgumentsLike, state: StateLike, control: ControlLike, **kwargs: Any) -> None:
        self._mark_update(state)

    def _mark_update(self, state: StateLike) -> None:
        if state.global_step - self._first_step == _UPDATE_STEP and len(self._update) < 2:
            self._update.append(moment(self._trainer.args.device))

    def on_step_end(self, args: ArgumentsLike, state: StateLike, control: ControlLike, **kwargs: Any) -> None:
        step = state.global_step - self._first_step
        if _WARM_UP_STEPS <= step <= _LAST_STEP:
            self._ends.append(time.perf_counter())
        if step == _LAST_STEP and state.max_steps - self._first_step > _LAST_STEP:
            try:
                line = compare_two(self._workload(state), Network(PCIE))
            except (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
                # A data set of an unknown kind must not end a training for the sake of this line.
                logger.debug("no forecast of two GPUs: %s: %s", type(error).__name__, error)
                line = None
            if line is not None:
                logger.info("%s", line)

    def _workload(self, state: StateLike) -> Workload:
        args, model = self._trainer.args, self._trainer.model
        step_s = statistics.median(b - a for a, b in zip(self._ends, self._ends[1:], strict=False))
        update_s = min(self._update_s(), step_s / 2)
        sizes = (int(self._trainer._train_batch_size),) * self._num_accumulated
        steps, cost = self._steps(sum(sizes))
        trained = [p for p in model.parameters() if p.requires_grad]
        is_frozen = sum(p.numel() for p in trained) < sum(p.numel() for p in model.parameters()) / 2
        one = Workload(
            cost=cost,
            timing=cost,
            token_s=1.0,
            update_s=update_s,
            steps=steps,
            sizes=sizes,
            num_steps=int(state.max_steps) - self._first_step,
            is_planned=False,
            keeps_batch=self._config.keeps_global_batch,
            epochs=None if self._config.keeps_global_batch else self._epochs_left(),
            gradient_bytes=num_bytes(*trained),
            hides=0.0 if args.device.type == "cpu" else BACKWARD_FROZEN if is_frozen else BACKWARD,
        )
        return one.scaled_to(step_s)

    def _epochs_left(self) -> Epochs | None:
        """After a resume as well: what the measured steps belong to."""
        found = epochs_of(self._trainer)
        if found is None or found.num_epochs is None:
            return found
        return replace(found, num_epochs=found.num_epochs - self._first_epoch)

    def _update_s(self) -> float:
        if len(self._update) < 2:
            return 0.0
        return Lap(*self._update).seconds()  # Of a step before the last: it is over.

    def _steps(self, num_samples: int) -> tuple[tuple[tuple[int, ...], ...], CostModel]:
        """Tokens of the samples of some steps; one for each sample where they are not known."""
        lengths = self._lengths(max(_MOST_ROWS, num_samples))
        if len(lengths) < num_samples:
            return ((1,) * num_samples,), CostModel(overhead_tokens=0.0)
        starts = range(0, len(lengths) - num_samples + 1, num_samples)
        return tuple(tuple(lengths[s : s + num_samples]) for s in islice(starts, _MOST_STEPS)), CostModel()

    def _lengths(self, most: int) -> Sequence[int]:
        loader = self._trainer.callback_handler.train_dataloader
        dataset: Any = getattr(getattr(loader, "one_process", loader), "dataset", None)
        if hasattr(dataset, "select_columns") and hasattr(dataset, "__len__"):
            dataset = dataset.select(range(min(most, len(dataset))))
        elif isinstance(dataset, list | tuple):
            dataset = dataset[:most]
        elif not hasattr(getattr(dataset, "lengths", None), "__len__"):
            return []
        try:
            return read_lengths(dataset, self._trainer.args.length_column_name, may_read_rows=False)[:most]
        except SetupError:
            return []  # Then samples count alike, and the line says so.
