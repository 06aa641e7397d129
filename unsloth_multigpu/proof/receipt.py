"""What one run leaves for `unsloth-multigpu verify`: samples, loss and gradient norm of each step, and updates."""

from __future__ import annotations

import atexit
import json
import os
import platform
import random
import shutil
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NoReturn

import torch

from unsloth_multigpu.core.seam import instance_attribute, steered
from unsloth_multigpu.errors import SetupError
from unsloth_multigpu.options import ENV_RECEIPT, MultiGPUConfig
from unsloth_multigpu.proof.fingerprint import fingerprints
from unsloth_multigpu.proof.source import Source, find_precision, find_sources, turn_dropout_off
from unsloth_multigpu.versions import installed_version

UPDATES_FILE = "updates.safetensors"
_LIBRARIES = ("unsloth-multigpu", "torch", "transformers", "trl", "peft", "accelerate", "datasets", "unsloth")
# Nothing of a run that is compared may land in the user's folders or accounts.
_SAVERS = (
    *("save_model", "save_state", "_save_checkpoint", "save_pretrained", "push_to_hub"),
    # Unsloth's, on the model.
    *("save_pretrained_merged", "save_pretrained_gguf", "push_to_hub_merged", "push_to_hub_gguf"),
)
# The limit of checkpoints removes some at the end.
_SETTINGS = {"logging_nan_inf_filter": False, "eval_on_start": False, "save_total_limit": None}
_TRACKERS = "transformers.integrations"


@dataclass(frozen=True)
class ReceiptRequest:
    """What `verify` asks of a run.

    Args:
        folder: Where every rank leaves `rank_N.json`, and rank 0 its updates.
        num_steps: Optimizer steps after which the run ends.
        num_gpus: Ranks of this run; wins over the script's own number.
        dropout: False = every dropout probability is set to 0.
    """

    folder: str
    num_steps: int
    num_gpus: int
    dropout: bool

    @classmethod
    def read(cls, environment: Mapping[str, str]) -> ReceiptRequest | None:
        """The request that `environment` carries, if it does."""
        text = environment.get(ENV_RECEIPT)
        return None if text is None else cls(**json.loads(text))

    def variables(self) -> dict[str, str]:
        """The environment that carries this request."""
        return {ENV_RECEIPT: json.dumps(asdict(self))}


def same_random_choices() -> None:
    """Lets a script that shuffles, splits or makes LoRA weights without a seed do the same in both runs."""
    import numpy

    random.seed(0)
    numpy.random.seed(0)
    torch.manual_seed(0)


class Recorder:
    """Follows one training of this rank, and ends it after the steps that were asked for.

    Args:
        trainer: A `transformers.Trainer` or subclass.
        request: What to record.
        rank: This rank.
        config: The run's options.
        is_filler: Tells whether the inputs of `training_step` only keep this rank in the exchange of gradients.
        inexact: Tells why ranks cannot share the loss of a micro-batch exactly; "" where they can, or do not.

    Raises:
        SetupError: The training is not one of whole weights on every rank.
    """

    def __init__(
        self,
        trainer: Any,
        request: ReceiptRequest,
        rank: int,
        config: MultiGPUConfig,
        is_filler: Callable[[], bool],
        inexact: Callable[[], str] = lambda: "",
    ) -> None:
        if trainer.is_fsdp_enabled or trainer.is_deepspeed_enabled:
            raise SetupError(
                "verify compares runs in which every rank has all weights; FSDP or DeepSpeed is on.",
                hint="Switch it off for this comparison.",
            )
        self._trainer = trainer
        self._request = request
        self._rank = rank
        self._config = config
        self._is_filler = is_filler
        self._inexact = inexact
        self._first_step = 0
        self._samples: dict[int, Counter[str]] = defaultdict(Counter)
        self._figures: dict[int, dict[str, float | None]] = defaultdict(dict)
        self._gradient_shares: dict[str, float] = {}
        self._weights_before: dict[str, torch.Tensor] | None = None
        self._facts: dict[str, Any] = {}

    @contextmanager
    def on_trainer(self) -> Iterator[None]:
        """Records while it is open. Enter it before anything else puts methods on the trainer."""
        trainer, handler = self._trainer, self._trainer.callback_handler
        with ExitStack() as stack:
            for name, value in _SETTINGS.items():
                stack.enter_context(instance_attribute(trainer.args, name, value))
            stack.enter_context(steered(trainer, "training_step", self._training_step))
            for owner in (trainer, trainer.model):
                for name in (n for n in _SAVERS if hasattr(owner, n)):
                    stack.enter_context(instance_attribute(owner, name, _do_nothing))
            stack.enter_context(
                instance_attribute(handler, "callbacks", [c for c in handler.callbacks if not _is_tracker(c)])
            )
            trainer.add_callback(_recording_callback(self))
            yield

    def _training_step(self, original: Callable[..., Any], model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        if not self._is_filler():
            self._samples[self._step() + 1].update(fingerprints(inputs))
        return original(model, inputs, *args, **kwargs)

    def _step(self) -> int:
        """Optimizer steps done since the training began, also where it resumed from a checkpoint."""
        return int(self._trainer.state.global_step) - self._first_step

    def begin(self) -> None:
        """Called when the training begins, with the model that it trains."""
        trainer, state = self._trainer, self._trainer.state
        self._first_step = int(state.global_step)
        # A run that was resumed brings it; the Trainer would load it at the end, and remove the others.
        state.best_model_checkpoint = None
        if not self._request.dropout:
            turn_dropout_off(trainer.model)
        self._facts = _facts(trainer, self._config)
        if self._rank == 0:
            trained = {name: p.detach() for name, p in trainer.model.named_parameters() if p.requires_grad}
            _check_space(self._request, sum(p.nbytes for p in trained.values()))
            self._weights_before = {name: p.to("cpu", copy=True) for name, p in trained.items()}

    def note_gradients(self) -> None:
        """Called between the last backward and the optimizer's step."""
        named = [(n, p.grad) for n, p in self._trainer.model.named_parameters() if p.grad is not None]
        if self._rank != 0 or not named:
            return
        device = self._trainer.args.device
        norms = torch.stack([torch.linalg.vector_norm(g.detach().float()).to(device) for _, g in named])
        total = float(torch.linalg.vector_norm(norms))
        # Without clipping some versions of transformers do not log it; with it, this comes after it.
        if not self._trainer.args.max_grad_norm:
            self._figures[self._step() + 1]["grad_norm"] = total
        if total > 0 and torch.isfinite(norms).all():
            for (name, _), share in zip(named, (norms / total).tolist(), strict=True):
                self._gradient_shares[name] = max(share, self._gradient_shares.get(name, 0.0))

    def note_logs(self, logs: Mapping[str, Any]) -> None:
        """Called with what the Trainer logs after a step."""
        if "loss" in logs:
            found = {name: float(logs[name]) for name in ("loss", "grad_norm") if name in logs}
            self._figures[self._step()].update(found)

    def steer(self, control: Any) -> None:
        """Called at the end of a step and of an epoch: each step is logged, nothing saved, and the last one ends it."""
        control.should_log = True
        control.should_save = control.should_evaluate = False
        if self._step() >= self._request.num_steps:
            control.should_training_stop = True
        if control.should_training_stop:
            # Not after train(), which may end with other weights.
            self._save_updates()

    def _save_updates(self) -> None:
        from safetensors.torch import save_file

        if self._weights_before is None:
            return
        before, self._weights_before = self._weights_before, None
        now = {name: p.detach() for name, p in self._trainer.model.named_parameters() if name in before}
        # One by one: only one of them is in memory twice.
        updates = {name: p.cpu().sub(before.pop(name)).contiguous() for name, p in now.items()}
        save_file(updates, Path(self._request.folder) / UPDATES_FILE)

    def write(self) -> None:
        """Leaves what was recorded in the request's folder."""
        self._save_updates()
        if inexact := self._inexact():
            # Found before the first step, or in a later one.
            advice = "set gradient_accumulation_steps to a multiple of the ranks"
            self._facts["sources"].append(asdict(Source("loss", inexact, advice)))
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
        record = {"rank": self._rank, "steps": steps, "gradient_shares": self._gradient_shares, "facts": self._facts}
        (Path(self._request.folder) / f"rank_{self._rank}.json").write_text(json.dumps(record), encoding="utf-8")


def leave_process() -> NoReturn:
    """Ends this process well, before the script's next line, which may save over the user's model.

    No SystemExit: a `finally` or `except` around the training would go on with the script. Exit handlers run, as
    multiprocessing runs them at the end of its children: they close the process group and end data loading workers.
    """
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def _facts(trainer: Any, config: MultiGPUConfig) -> dict[str, Any]:
    device = trainer.args.device
    on_card = device.type in ("cuda", "xpu")
    return {
        "world_size": int(trainer.args.world_size),
        "device": getattr(torch, device.type).get_device_name(device) if on_card else f"cpu, {platform.machine()}",
        "trainer": type(trainer).__name__,
        "optimizer": str(getattr(trainer.args.optim, "value", trainer.args.optim)),
        "precision": find_precision(trainer),
        "sources": [asdict(source) for source in find_sources(trainer, config)],
        "config": config.plain_values(),
        "versions": {"python": platform.python_version(), **{name: installed_version(name) for name in _LIBRARIES}},
    }


def _check_space(request: ReceiptRequest, num_bytes: int) -> None:
    # The file of one process is still there when the ranks write theirs.
    needed, free = num_bytes * (2 if request.num_gpus == 1 else 1), shutil.disk_usage(request.folder).free
    if needed > free:
        raise SetupError(
            f"verify needs {needed / 2**30:.1f} GiB for the updates of the weights, and {request.folder} has "
            f"{free / 2**30:.1f}.",
            hint="Set TMPDIR to a folder with more room.",
        )


def _is_tracker(callback: Any) -> bool:
    return any(cls.__module__.startswith(_TRACKERS) for cls in type(callback).__mro__)


def _do_nothing(*args: Any, **kwargs: Any) -> None:
    """Stands in for what saves or uploads."""


def _recording_callback(recorder: Recorder) -> Any:
    from transformers import TrainerCallback

    class Recording(TrainerCallback):  # type: ignore[misc, unused-ignore]
        def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            recorder.begin()

        def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            recorder.note_gradients()

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            recorder.steer(control)

        def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            recorder.steer(control)

        def on_log(self, args: Any, state: Any, control: Any, logs: Mapping[str, Any], **kwargs: Any) -> None:
            recorder.note_logs(logs)

    return Recording()
