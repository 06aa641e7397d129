"""Records a run for `unsloth-multigpu verify`: samples, loss and gradient of each step, and updates of the weights.

Rank 0's `rank_0.json` has `steps` (number, loss, gradient norm before clipping, samples, and the ranks' own comparison
with one process), `updates` (for each trained tensor a sketch of its change, and whether that is more than rounding),
`facts`, and `sources`: reasons for legitimate differences. Of other ranks only the samples are used.
"""

from __future__ import annotations

import platform
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch

from unsloth_multigpu.accelerator import KINDS
from unsloth_multigpu.errors import SetupError
from unsloth_multigpu.group.shards import find_engine, has_shards, whole_of
from unsloth_multigpu.options import MultiGPUConfig
from unsloth_multigpu.part import ArgumentsLike, ControlLike, Override, Part, StateLike, TrainerLike, generates_samples
from unsloth_multigpu.recorders.fingerprint import fingerprints, trained_weights
from unsloth_multigpu.recorders.first_steps import FirstSteps
from unsloth_multigpu.step.comparison import FINE, rounding_bound, sketch_of
from unsloth_multigpu.step.snapshot import WithoutDropout

# A tensor with fewer changed elements, unless nearly all have changed, is left out: in bf16 weights a small learning
# rate is lost by rounding in most elements, and chance decides in which. Measured: with 73 of 4096 changed elements
# updates differ by 0.13, from 300 of 4096 on by less than 0.08.
_MIN_MOVED = 500
_NEARLY_ALL = 0.9
_DROPOUT = "dropout"


class Verify(FirstSteps):
    """Records the first steps of a run, and ends its ranks."""

    name = "verify"
    draws_alike = True

    def adjusted(self, config: MultiGPUConfig) -> MultiGPUConfig:
        # Both runs train as without the tool. The ranks also compute each step as one process does, and compare.
        compared = {"check_first_step": "every"} if self._num_gpus > 1 else {}
        return self.alone(config, verify_every=1, **compared)

    def part(self, trainer: TrainerLike, session: Any, steps: Any) -> Part:
        """Returns itself. Raises SetupError if the training uses FSDP 1 or DeepSpeed."""
        if trainer.is_deepspeed_enabled or (trainer.is_fsdp_enabled and find_engine(trainer) is None):
            raise SetupError(
                "verify does not support FSDP 1 and DeepSpeed, and the script uses one of them.",
                hint="Turn it off for this comparison.",
            )
        unknown: dict[str, Any] = {"loss": None, "grad_norm": None, "compared": {}}
        self._figures: dict[int, dict[str, Any]] = defaultdict(lambda: {**unknown, "samples": Counter()})
        self._gradient_shares: dict[str, float] = {}
        self._weights_before: dict[str, torch.Tensor] | None = None
        # Sketches of the updates, and whether more than rounding decided which elements have changed.
        self._updates: dict[str, tuple[list[float], bool]] = {}
        return super().part(trainer, session, steps)

    def overrides(self) -> dict[str, Override]:
        return {"training_step": self._training_step}

    @contextmanager
    def around(self) -> Iterator[None]:
        with super().around(), nullcontext() if self._dropout else WithoutDropout():
            yield

    def _training_step(self, original: Callable[..., Any], model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        current = None if self._steps is None else self._steps.passes.current
        # A filler has no sample of its own.
        if current is None or not current.piece.is_filler:
            self._figures[self._step() + 1]["samples"].update(fingerprints(inputs))
        return original(model, inputs, *args, **kwargs)

    def on_train_begin(self, args: ArgumentsLike, state: StateLike, control: ControlLike, **kwargs: Any) -> None:
        super().on_train_begin(args, state, control, **kwargs)
        weights = trained_weights(self._trainer.model, self._rank)
        self._weights_before = {name: value.to("cpu", copy=True) for name, value in weights}

    def on_pre_optimizer_step(self, args: ArgumentsLike, state: StateLike, control: ControlLike, **kwargs: Any) -> None:
        named = [(n, p.grad) for n, p in self._trainer.model.named_parameters() if p.grad is not None]
        if not named or (self._rank != 0 and not has_shards(self._trainer.model)):
            return
        device = self._trainer.args.device
        # Sharded gradients need all ranks here.
        norms = torch.stack([whole_of(torch.linalg.vector_norm(g.detach().float())).to(device) for _, g in named])
        total = float(torch.linalg.vector_norm(norms))
        # Some versions of transformers do not log the norm without clipping. With it, gradients are clipped here.
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

    def _steer(self, control: ControlLike) -> None:
        """Also logs each step, and records its comparison."""
        super()._steer(control)
        control.should_log = True
        compared = None if self._steps is None else self._steps.proof.last
        if compared is not None and compared.step == self._trainer.state.global_step:
            self._figures[self._step()]["compared"] = compared.values()
        if control.should_training_stop:
            # Here and not after train(), which may restore other weights.
            self._note_updates()

    def _note_updates(self) -> None:
        if self._weights_before is None:
            return
        before, self._weights_before = self._weights_before, None
        for name, value in trained_weights(self._trainer.model, self._rank):
            if name in before:
                update = value.cpu().sub(before.pop(name))
                self._updates[name] = (sketch_of(update), _moved(update))

    def record(self) -> dict[str, Any]:
        self._note_updates()
        facts, shares = _facts(self._trainer, self._config), self._gradient_shares
        # A smaller share of the gradient may be rounding, which Adam still turns into full steps.
        noise = 1e-6 if facts["rounding"] <= FINE else 1e-3
        reasons = [*find_reasons(self._trainer, self._config), *self._found()]
        return {
            "rank": self._rank,
            "steps": [{"step": step, **self._figures[step]} for step in range(1, self._step() + 1)],
            "updates": {
                n: (found, moved and shares.get(n, 1.0) >= noise) for n, (found, moved) in self._updates.items()
            },
            "facts": facts,
            "sources": [dict(zip(("name", "found", "advice"), reason, strict=True)) for reason in reasons],
        }

    def _found(self) -> Iterator[tuple[str, str, str]]:
        """Yields reasons for differences that the comparison of the steps has found; see `find_reasons`."""
        drawing = {name for figures in self._figures.values() for name in figures["compared"].get("draws", ())}
        for name in sorted(drawing if self._dropout else drawing - {_DROPOUT}):
            advice = "--no-dropout" if name == _DROPOUT else "turn off its randomness"
            yield name, "draws random numbers, which differ between ranks and one process", advice
        if self._steps is not None and self._steps.inexact:
            yield "loss", self._steps.inexact, self._steps.ways_out.rstrip(".")


def find_reasons(trainer: TrainerLike, config: MultiGPUConfig) -> Iterator[tuple[str, str, str]]:
    """Finds reasons in the options why one process and several ranks may legitimately differ.

    Yields a name, the reason, and how to avoid it.
    """
    if not config.keeps_global_batch:
        option = "global_batch='scale'" if config.global_batch == "scale" else "batch_size_per_gpu"
        found = f"{option}: a step of several ranks has more samples than a step of one process"
        yield "larger steps", found, f"leave {option} out"
    if not config.is_synchronous:
        found = f"strategy='{config.strategy}': ranks step independently, unlike one process"
        yield "local steps", found, "compare with strategy='ddp'"
    if generates_samples(trainer):
        found = f"{type(trainer).__name__} trains on texts that it samples"
        yield "sampling", found, "compare another trainer; sampled texts differ between numbers of ranks"
    if (bound := rounding_bound(trainer)) > FINE:
        found = f"sums in another order round differently, gradients by up to {bound:.0e}; the bounds allow for it"
        yield "precision", found, "train in fp32"
    if "8bit" in str(trainer.args.optim):
        yield "8-bit optimizer", "it rounds its state; the bounds allow for it", "set optim='adamw_torch'"
    if trainer.args.device.type == "cuda" and not torch.are_deterministic_algorithms_enabled():
        yield "kernels", "some GPU kernels sum in a varying order", "set full_determinism=True"


def _moved(update: torch.Tensor) -> bool:
    """True if more than rounding decided which elements have changed. NaN counts as a change."""
    num_moved = int(torch.count_nonzero(update))
    return num_moved > 0 and (num_moved >= _MIN_MOVED or num_moved >= _NEARLY_ALL * update.numel())


def _facts(trainer: TrainerLike, config: MultiGPUConfig) -> dict[str, Any]:
    device = trainer.args.device
    has_gpu = device.type in KINDS
    return {
        "world_size": int(trainer.args.world_size),
        "device": getattr(torch, device.type).get_device_name(device) if has_gpu else f"cpu, {platform.machine()}",
        "trainer": type(trainer).__name__,
        "optimizer": str(getattr(trainer.args.optim, "value", trainer.args.optim)),
        "rounding": rounding_bound(trainer),
        "config": config.plain_values(),
    }
