"""What one run leaves for `unsloth-multigpu verify`: samples, loss and gradient norm of each step, and updates."""

from __future__ import annotations

import json
import platform
import shutil
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from unsloth_multigpu.accelerator import KINDS
from unsloth_multigpu.errors import SetupError
from unsloth_multigpu.group.engine import find_engine
from unsloth_multigpu.group.fingerprint import fingerprints
from unsloth_multigpu.group.shards import has_shards, reshard, whole_of
from unsloth_multigpu.options import MultiGPUConfig
from unsloth_multigpu.part import Override
from unsloth_multigpu.report import RunReport
from unsloth_multigpu.tools.first_steps import FirstSteps
from unsloth_multigpu.tools.verify.reasons import Reason, find_precision, find_reasons, turn_dropout_off
from unsloth_multigpu.tools.verify.tool import ReceiptRequest, write_steps_done
from unsloth_multigpu.trainer_protocol import ArgumentsLike, ControlLike, StateLike, TrainerLike
from unsloth_multigpu.versions import installed_version
from unsloth_multigpu.words import gib

UPDATES_FILE = "updates.safetensors"
_LIBRARIES = ("unsloth-multigpu", "torch", "transformers", "trl", "peft", "accelerate", "datasets", "unsloth")


class Recorder(FirstSteps):
    """Follows one training of this rank, and ends it after the steps that were asked for.

    Args:
        trainer: A `transformers.Trainer` or subclass.
        request: What to record.
        rank: This rank.
        config: The run's options.
        steps: What deals the samples; None where the training is not steered.

    Raises:
        SetupError: The training is not one of whole weights on every rank.
    """

    def __init__(
        self,
        trainer: TrainerLike,
        request: ReceiptRequest,
        rank: int,
        config: MultiGPUConfig,
        steps: Any = None,
    ) -> None:
        if trainer.is_deepspeed_enabled or (trainer.is_fsdp_enabled and find_engine(trainer) is None):
            raise SetupError(
                "verify compares the weights of a training that this package steers; FSDP 1 or DeepSpeed is on.",
                hint="Switch it off for this comparison.",
            )
        super().__init__(trainer, request.num_steps)
        self._request = request
        self._rank = rank
        self._config = config
        self._steps = steps
        self._samples: dict[int, Counter[str]] = defaultdict(Counter)
        self._figures: dict[int, dict[str, float | None]] = defaultdict(dict)
        self._gradient_shares: dict[str, float] = {}
        self._weights_before: dict[str, torch.Tensor] | None = None
        self._facts: dict[str, Any] = {}

    def overrides(self) -> dict[str, Override]:
        return {"training_step": self._training_step}

    def _training_step(self, original: Callable[..., Any], model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        current = None if self._steps is None else self._steps.current
        if (
            current is None or not current.piece.is_filler
        ):  # A filler only keeps this rank in the exchange of gradients.
            self._samples[self._step() + 1].update(fingerprints(inputs))
        return original(model, inputs, *args, **kwargs)

    def on_train_begin(self, args: ArgumentsLike, state: StateLike, control: ControlLike, **kwargs: Any) -> None:
        super().on_train_begin(args, state, control, **kwargs)
        trainer = self._trainer
        if not self._request.dropout:
            turn_dropout_off(trainer.model)
        self._facts = _facts(trainer, self._config)
        if self._rank == 0:
            trained = [p for p in trainer.model.parameters() if p.requires_grad]
            _check_space(self._request, sum(p.numel() * p.element_size() for p in trained))
        self._weights_before = {name: value.to("cpu", copy=True) for name, value in self._weights()}

    def _weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Names and values of what is trained, on rank 0. Collective where it is sharded: all ranks must go through."""
        model = self._trainer.model
        reshard(model)
        if self._rank == 0 or has_shards(model):
            for name, p in model.named_parameters():
                if p.requires_grad:
                    whole = whole_of(p.detach())
                    if self._rank == 0:
                        yield name, whole

    def on_pre_optimizer_step(self, args: ArgumentsLike, state: StateLike, control: ControlLike, **kwargs: Any) -> None:
        named = [(n, p.grad) for n, p in self._trainer.model.named_parameters() if p.grad is not None]
        if not named or (self._rank != 0 and not has_shards(self._trainer.model)):
            return
        device = self._trainer.args.device
        # Of sharded gradients all ranks are here.
        norms = torch.stack([whole_of(torch.linalg.vector_norm(g.detach().float())).to(device) for _, g in named])
        total = float(torch.linalg.vector_norm(norms))
        # Without clipping some versions of transformers do not log it; with it, this comes after it.
        if not self._trainer.args.max_grad_norm:
            self._figures[self._step() + 1]["grad_norm"] = total
        if total > 0 and torch.isfinite(norms).all():
            for (name, _), share in zip(named, (norms / total).tolist(), strict=True):
                self._gradient_shares[name] = max(share, self._gradient_shares.get(name, 0.0))

    def on_log(self, args: ArgumentsLike, state: StateLike, control: ControlLike, **kwargs: Any) -> None:
        logs = kwargs["logs"]
        if "loss" in logs:
            found = {name: float(logs[name]) for name in ("loss", "grad_norm") if name in logs}
            self._figures[self._step()].update(found)

    def on_step_end(self, args: ArgumentsLike, state: StateLike, control: ControlLike, **kwargs: Any) -> None:
        if self._rank == 0:
            write_steps_done(self._request.folder, self._step())
        super().on_step_end(args, state, control, **kwargs)

    def _steer(self, control: ControlLike) -> None:
        """Each step is logged."""
        super()._steer(control)
        control.should_log = True
        if control.should_training_stop:
            # Not after train(), which may end with other weights.
            self._save_updates()

    def _save_updates(self) -> None:
        from safetensors.torch import save_file

        if self._weights_before is None:
            return
        before, self._weights_before = self._weights_before, None
        # One tensor at a time, so that only one is in memory twice.
        updates = {n: value.cpu().sub(before.pop(n)).contiguous() for n, value in self._weights() if n in before}
        if self._rank == 0:
            save_file(updates, Path(self._request.folder) / UPDATES_FILE)

    def write(self, report: RunReport | None) -> None:
        """Leaves what was recorded in the request's folder.

        Args:
            report: What all ranks have measured; None where they have not.
        """
        self._save_updates()
        if self._steps is not None and (inexact := self._steps.inexact):
            # Found before the first step, or in a later one.
            self._facts["sources"].append(asdict(Reason("loss", inexact.cause, inexact.ways.rstrip("."))))
        steps = [
            {
                "step": step,
                "loss": None,
                "grad_norm": None,
                **self._figures.get(step, {}),
                "samples": self._samples[step],
            }
            for step in range(1, self._step() + 1)
        ]
        record = {
            "rank": self._rank,
            "steps": steps,
            "gradient_shares": self._gradient_shares,
            "facts": self._facts,
            "ranks": [] if report is None else [asdict(share) for share in report.ranks],
        }
        (Path(self._request.folder) / f"rank_{self._rank}.json").write_text(json.dumps(record), encoding="utf-8")


def _facts(trainer: TrainerLike, config: MultiGPUConfig) -> dict[str, Any]:
    device = trainer.args.device
    on_card = device.type in KINDS
    return {
        "world_size": int(trainer.args.world_size),
        "device": getattr(torch, device.type).get_device_name(device) if on_card else f"cpu, {platform.machine()}",
        "trainer": type(trainer).__name__,
        "optimizer": str(getattr(trainer.args.optim, "value", trainer.args.optim)),
        "precision": find_precision(trainer),
        "sources": [asdict(source) for source in find_reasons(trainer, config)],
        "config": config.plain_values(),
        "versions": {"python": platform.python_version(), **{name: installed_version(name) for name in _LIBRARIES}},
    }


def _check_space(request: ReceiptRequest, num_bytes: int) -> None:
    # The file of one process is still there when the ranks write theirs.
    needed, free = num_bytes * (2 if request.num_gpus == 1 else 1), shutil.disk_usage(request.folder).free
    if needed > free:
        raise SetupError(
            f"verify needs {gib(needed, 1)} for the updates of the weights, and {request.folder} has {gib(free, 1)}.",
            hint="Set TMPDIR to a folder with more room.",
        )
