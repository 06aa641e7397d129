"""What one run leaves for `unsloth-multigpu forecast`: times of micro-batches and steps, and what they were made of."""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Callable, Mapping, Sequence
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

import torch

from unsloth_multigpu.errors import SetupError
from unsloth_multigpu.group.bucket import num_bytes
from unsloth_multigpu.group.model import text_config
from unsloth_multigpu.options import MultiGPUConfig
from unsloth_multigpu.part import Override
from unsloth_multigpu.step.cost import CostModel
from unsloth_multigpu.step.forecast import BACKWARD, BACKWARD_FROZEN
from unsloth_multigpu.step.measure import attention_of
from unsloth_multigpu.strategy import DDP, LocalSGD, ParameterServer
from unsloth_multigpu.tools.first_steps import FirstSteps
from unsloth_multigpu.tools.forecast.sweep import WARM_UP_STEPS, Sweep
from unsloth_multigpu.tools.forecast.tool import MeasureRequest
from unsloth_multigpu.train.outlook import epochs_of
from unsloth_multigpu.trainer_protocol import ArgumentsLike, ControlLike, StateLike, TrainerLike

# Steps of the sampler's order that the forecast is made for, beside those that were trained.
_DRAWN_STEPS = 64


class Clock:
    """Points in time on a device, and the seconds between two of them.

    Args:
        kind: "wall" or "cpu", see `MeasureRequest`.
        device: Where the model is. On a GPU it is the device's own clock, and nothing waits for it.
    """

    def __init__(self, kind: str, device: torch.device) -> None:
        if kind == "cpu" and (device.type != "cpu" or torch.get_num_threads() > 1):
            raise SetupError(
                f"--clock cpu counts what one thread computes; this is {device.type} with {torch.get_num_threads()} "
                "threads.",
                hint="Leave it out, or set OMP_NUM_THREADS=1 and --device cpu.",
            )
        self._read = time.thread_time if kind == "cpu" else time.perf_counter
        self._device = device

    def now(self) -> Any:
        """This moment, for `seconds`."""
        if self._device.type == "cpu":
            return self._read()
        event = torch.Event(device=self._device, enable_timing=True)
        event.record()
        return event

    def seconds(self, begin: Any, end: Any) -> float:
        """Waits for the device if it has to."""
        if self._device.type == "cpu":
            return float(end - begin)
        end.synchronize()
        return float(begin.elapsed_time(end)) / 1000


@dataclasses.dataclass
class _Lap:
    """One micro-batch: its step, when it was computed, its samples' places, and what tells the lengths of its rows."""

    step: int
    begin: Any
    end: Any
    positions: tuple[int, ...]
    rows: Callable[[], list[int]]


class Recorder(FirstSteps):
    """Times one training of this rank, and ends it after the steps that were asked for.

    Args:
        trainer: A `transformers.Trainer` or subclass.
        request: What to record.
        rank: This rank.
        asked: The options of the script, without what the tool has changed for one process.
        steps: What deals the samples.

    Raises:
        SetupError: The training is one that nothing can be said of.
    """

    def __init__(
        self, trainer: TrainerLike, request: MeasureRequest, rank: int, asked: MultiGPUConfig, steps: Any
    ) -> None:
        _refuse_what_is_not_known(trainer, request, asked)
        super().__init__(trainer, request.num_steps)
        self._request = request
        self._rank = rank
        self._asked = asked
        self._steps = steps
        self._clock = Clock(request.clock, trainer.args.device)
        self._num_steps = 0
        self._laps: list[_Lap] = []
        self._ends: list[Any] = []
        self._sweep: Sweep | None = None
        self._regroup = self._whole = False

    def overrides(self) -> dict[str, Override]:
        return {"training_step": self._training_step}

    def _training_step(self, original: Callable[..., Any], model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        begin = self._clock.now()
        loss = original(model, inputs, *args, **kwargs)
        current = self._steps.current
        positions = () if current is None else current.piece.positions
        self._laps.append(_Lap(self._step() + 1, begin, self._clock.now(), positions, _rows_of(inputs)))
        return loss

    def on_train_begin(self, args: ArgumentsLike, state: StateLike, control: ControlLike, **kwargs: Any) -> None:
        super().on_train_begin(args, state, control, **kwargs)
        self._num_steps = int(state.max_steps)
        if self._steps.loader is None and self._asked.keeps_global_batch:
            raise SetupError(
                f"{type(self._trainer).__name__} builds batches of its own; its global batch cannot be kept by ranks.",
                hint='Use enable_multi_gpu(global_batch="scale") for this trainer, also for its forecast.',
            )
        reduction, sampler = self._steps.reduction, getattr(self._steps.loader, "batch_sampler", None)
        self._whole = self._steps.is_whole
        self._regroup = reduction.is_token_normalised
        if sampler is not None and self._request.num_gpus == 1:
            self._sweep = Sweep(self._steps.balancer, self._regroup, self._whole)
            self._steps.loader.deal(dataclasses.replace(sampler.shape, planner=self._sweep))

    def on_step_end(self, args: ArgumentsLike, state: StateLike, control: ControlLike, **kwargs: Any) -> None:
        self._ends.append(self._clock.now())
        super().on_step_end(args, state, control, **kwargs)

    def write(self) -> None:
        """Leaves what was recorded in the request's folder."""
        timed = range(min(WARM_UP_STEPS, max(1, len(self._ends) - 1)), len(self._ends))
        steps: list[dict[str, Any]] = [
            {
                "step": k + 1,
                "seconds": self._clock.seconds(self._ends[k - 1], self._ends[k]),
                "computed_s": sum(self._clock.seconds(lap.begin, lap.end) for lap in self._laps if lap.step == k + 1),
            }
            for k in timed
        ]
        record: dict[str, Any] = {"rank": self._rank, "steps": steps, "first_step": self._steps.proof.values()}
        if self._request.num_gpus == 1:
            record |= self._facts({step["step"] for step in steps})
        (Path(self._request.folder) / f"rank_{self._rank}.json").write_text(json.dumps(record), encoding="utf-8")

    def _facts(self, timed: set[int]) -> dict[str, Any]:
        """All that a forecast needs beside the times of the steps."""
        balancer, config = self._steps.balancer, self._asked
        epochs = None if config.keeps_global_batch else epochs_of(self._trainer)
        is_known = balancer.balance is not None
        cost: CostModel = balancer.balance.cost if is_known else self._assumed_cost()
        laps = [lap for lap in self._laps if lap.step in timed]
        if self._sweep is not None and is_known:
            trained, sizes = self._sweep.steps, self._sweep.sizes[1]
            rows = {id(lap): [trained[lap.step][p] for p in lap.positions] for lap in self._laps}
        else:
            rows = {id(lap): lap.rows() for lap in self._laps}
            numbers = sorted({lap.step for lap in self._laps})
            trained = {n: tuple(x for lap in self._laps if lap.step == n for x in rows[id(lap)]) for n in numbers}
            sizes = tuple(len(rows[id(lap)]) for lap in self._laps if lap.step == 1)
            if self._sweep is not None:
                sizes = self._sweep.sizes[1]
        full = {n: lengths for n, lengths in trained.items() if len(lengths) == sum(sizes)}
        return {
            **_facts_of(self._trainer, config),
            "micro_batches": [[rows[id(lap)], self._clock.seconds(lap.begin, lap.end)] for lap in laps],
            "micro_steps": [lap.step for lap in laps],
            "trained": {n: lengths for n, lengths in full.items() if n in timed},
            "drawn": (self._drawn(balancer.lengths, sizes) if is_known else []) or list(full.values()),
            "sizes": sizes,
            "cost": {**dataclasses.asdict(cost), "possible": ()},
            "num_steps": self._num_steps,
            "epochs": None if epochs is None else dataclasses.asdict(epochs),
            "is_planned": is_known,
            "regroup": balancer.may_regroup if is_known else self._regroup,
            "whole": self._whole,
            "max_tokens": config.max_tokens_per_micro_batch,
            "is_length_known": bool(balancer.lengths),
        }

    def _assumed_cost(self) -> CostModel:
        flat = any(lap.rows.__name__ == "flat" for lap in self._laps)
        return CostModel(attention=attention_of(self._trainer.model), is_padded=not flat)

    def _drawn(self, lengths: Sequence[int], sizes: Sequence[int]) -> list[tuple[int, ...]]:
        """Steps of an order that the script's sampler draws. The process is about to end: nothing hears of it."""
        batches = islice(iter(self._steps.loader.one_process.batch_sampler), _DRAWN_STEPS * len(sizes))
        rows = [[lengths[i] for i in batch] for batch in batches]
        steps = [rows[k : k + len(sizes)] for k in range(0, len(rows), len(sizes))]
        return [tuple(x for part in step for x in part) for step in steps if [len(p) for p in step] == list(sizes)]


def _refuse_what_is_not_known(trainer: TrainerLike, request: MeasureRequest, asked: MultiGPUConfig) -> None:
    name = type(trainer).__name__
    if request.num_gpus == 1 and (trainer.is_deepspeed_enabled or trainer.is_fsdp_enabled):
        raise SetupError(
            "forecast knows DDP, and shards that the line asks for; the script switches FSDP or DeepSpeed on itself.",
            hint='Leave it out of the script for this forecast, and set enable_multi_gpu(shard="on") for shards.',
        )
    if hasattr(trainer.args, "steps_per_generation"):
        raise SetupError(
            f"{name} makes its samples while it trains: how long they will be is not known.",
            hint="Time some steps on one GPU and on two.",
        )


def _facts_of(trainer: TrainerLike, config: MultiGPUConfig) -> dict[str, Any]:
    """Model, device and options."""
    model, device = trainer.model, trainer.args.device
    trained = [p for p in model.parameters() if p.requires_grad]
    numel, trained_numel = (sum(p.numel() for p in some) for some in (model.parameters(), trained))
    is_frozen = trained_numel < numel / 2
    hides = 0.0
    if device.type != "cpu" and isinstance(config.strategy, DDP):
        hides = BACKWARD_FROZEN if is_frozen else BACKWARD
    exchange, every_steps = "gradients", 1
    if isinstance(config.strategy, LocalSGD):
        exchange, every_steps = "now and then", config.strategy.every_steps
    elif isinstance(config.strategy, ParameterServer):
        exchange = "through one rank"
    is_halved = config.grad_compression in ("bf16", "fp16")
    on_card = device.type != "cpu"
    layers = getattr(text_config(model), "num_hidden_layers", 0)
    return {
        "trainer": type(trainer).__name__,
        "model": type(model.get_base_model() if hasattr(model, "get_base_model") else model).__name__,
        "num_parameters": numel,
        "num_trained": trained_numel,
        "device": getattr(torch, device.type).get_device_name(device) if on_card else "CPU",
        "is_cpu": not on_card,
        "asked": {
            "strategy": str(config.strategy),
            "shard": config.shard,
            "grad_compression": config.grad_compression,
            "keeps_batch": config.keeps_global_batch,
        },
        "exchange": exchange,
        "every_steps": every_steps,
        "gradient_bytes": 2 * trained_numel if is_halved and config.shard != "on" else num_bytes(*trained),
        "weight_bytes": num_bytes(*model.parameters()),
        "num_units": (layers if isinstance(layers, int) else 0) + 1,
        "hides": hides,
    }


def _rows_of(inputs: Any) -> Callable[[], list[int]]:
    """What tells the tokens of each row of a micro-batch, when it is asked: a device is not waited for before."""
    batch = inputs if isinstance(inputs, Mapping) else {}
    ids, mask, places = (batch.get(name) for name in ("input_ids", "attention_mask", "position_ids"))
    if not isinstance(ids, torch.Tensor) or ids.dim() != 2:
        first = next((v for v in batch.values() if isinstance(v, torch.Tensor) and v.dim()), None)
        count = 1 if first is None else int(first.shape[0])
        return lambda: [1] * count
    if ids.shape[0] == 1 and isinstance(places, torch.Tensor) and not isinstance(mask, torch.Tensor):

        def flat() -> list[int]:
            starts = [*(places.reshape(-1) == 0).nonzero().reshape(-1).tolist(), ids.shape[1]]
            return [b - a for a, b in pairwise(starts) if b > a] or [int(ids.shape[1])]

        return flat
    if isinstance(mask, torch.Tensor) and mask.shape == ids.shape:
        return lambda: [max(1, int(n)) for n in mask.sum(1).tolist()]
    shape = tuple(ids.shape)
    return lambda: [shape[1]] * shape[0]
