"""Saves the checkpoints of one training, first in a temporary folder, which is renamed when it is complete."""

from __future__ import annotations

import functools
import json
import os
import shutil
import uuid
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from unsloth_multigpu.checkpoint.manifest import PART_FOLDER, Manifest, put_in_place, saving_in, seal, settle
from unsloth_multigpu.checkpoint.resume import ORDER_FILE, Resume
from unsloth_multigpu.deal.sampler import StepLoader
from unsloth_multigpu.errors import MultiGPUError, SaveError
from unsloth_multigpu.group.manager import DDPManager
from unsloth_multigpu.group.random_state import device_in_use, read_random_state, write_random_state
from unsloth_multigpu.logs import get_logger
from unsloth_multigpu.part import GradientExchange, Override, Part, TrainerLike
from unsloth_multigpu.seam import steered
from unsloth_multigpu.step.feed import StepFeed
from unsloth_multigpu.wire.heartbeat import HeartbeatPage, Phase

logger = get_logger(__name__)

_STATE_FILE = "trainer_state.json"
# Of the Trainer, of accelerate's FSDP, and of torch.distributed.checkpoint.
_OPTIMIZER_FILES = ("optimizer.pt", "optimizer.bin", "optimizer_*/.metadata")
# Long, because large files take long. If rank 0 dies meanwhile, the launcher ends the run.
_SEAL_LIMIT_S = 86_400.0


@dataclass(eq=False, repr=False)
class Checkpoints(Part):
    """Saves the checkpoints of one `train()`.

    `is_evaluation_due` returns True if the training stops before or in an evaluation of the loop.
    """

    place = "checkpoints"

    trainer: TrainerLike
    manager: DDPManager
    steps: StepFeed
    exchange: GradientExchange
    resume: Resume
    beat: HeartbeatPage
    is_evaluation_due: Callable[[], bool] = lambda: False
    _before_evaluation: dict[str, Any] | None = field(init=False, default=None)

    def overrides(self) -> dict[str, Override]:
        return {"_save_checkpoint": self._save, "evaluate": self._evaluate}

    def _evaluate(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Overrides `Trainer.evaluate`: keeps the random state for a checkpoint, if the training is stopped in it."""
        with self.beat.within(Phase.EVALUATE):
            outer, self._before_evaluation = self._before_evaluation, read_random_state(device_in_use())
            try:
                metrics = original(*args, **kwargs)
            finally:
                self._before_evaluation = outer
            # The script's own `evaluate` may have added metrics.
            return self.manager.broadcast_numbers(metrics) if isinstance(metrics, dict) else metrics

    def _save(self, original: Callable[..., Any], model: Any, trial: Any = None) -> None:
        """Overrides `Trainer._save_checkpoint`: a checkpoint gets its name when it is complete. Collective."""
        trainer = self.trainer
        run_dir = trainer._get_output_dir(trial)
        final = Path(run_dir, f"checkpoint-{trainer.state.global_step}")
        part = final.parent / PART_FOLDER / final.name
        pushes: list[Any] = []
        if self._before_evaluation is not None:
            # Stopped in an evaluation. A resumed training repeats it, from the same random state. One that a callback
            # started is not repeated: only the draw of its data loader's base seed is.
            write_random_state(self._before_evaluation)
            if not self.is_evaluation_due():
                torch.empty((), dtype=torch.int64).random_()
        with self.beat.within(Phase.SAVE):
            self.exchange.before_read()
            with self._claimed(part, final):
                # Barrier: before the folder is locked, another run may remove it.
                self.manager.gather_json(None)
                before = _listing(final) if self._is_writer else {}
                with ExitStack() as stack:
                    stack.enter_context(self.steps.passes.accumulation_of_script())
                    stack.enter_context(steered(trainer, "_get_output_dir", lambda *_, **__: os.fspath(part.parent)))
                    if hasattr(trainer, "_push_from_checkpoint"):
                        push = steered(trainer, "_push_from_checkpoint", lambda _, folder: pushes.append(folder))
                        stack.enter_context(push)
                    original(model, trial)
                best = os.path.join(run_dir, f"checkpoint-{trainer.state.best_global_step}")
                if trainer.state.best_model_checkpoint == os.fspath(part):
                    trainer.state.best_model_checkpoint = os.path.join(run_dir, final.name)
                elif trainer.state.best_global_step and os.path.isdir(best):
                    # The Trainer looked for it beside the temporary folder.
                    trainer.state.best_model_checkpoint = best
                # Every rank has written its files. Rank 0 broadcasts an identifier of this save, and the state of
                # callbacks, which the Trainer collects only on the rank that writes it.
                mine = [uuid.uuid4().hex, trainer.state.stateful_callbacks if self._is_writer else None]
                name, callbacks = self.manager.broadcast_json(mine)
                if not self._is_writer:
                    trainer.state.stateful_callbacks = callbacks
                complete = functools.partial(self._complete, part, final, before)
                is_here = self.manager.lead(f"saved/{name}", f"saving {final}", complete, timeout_s=_SEAL_LIMIT_S)
                if is_here and self.manager.identity.local_rank == 0 and not final.exists():
                    logger.warning(
                        "rank %d does not see %s, so no training can resume from it. Use a folder that all nodes share",
                        self.manager.identity.rank,
                        final,
                    )
            if pushes:
                trainer._push_from_checkpoint(os.fspath(final))

    @property
    def _is_writer(self) -> bool:
        return self.manager.identity.rank == 0

    def _complete(self, part: Path, final: Path, before: dict[str, tuple[int, int]]) -> bool:
        """Adds state that Hugging Face does not save, seals and renames the folder, and deletes older checkpoints.

        Returns:
            False if the script's own saving has written to another folder.
        """
        trainer, state = self.trainer, self.trainer.state
        _move_changed(final, before, part)
        if not any(part.iterdir()):
            settle(part, final)
            return False
        loader = self.steps.loader
        order = getattr(getattr(loader, "batch_sampler", None), "order_state", None)
        if (part / _STATE_FILE).is_file():
            # Again, with the final path of the best checkpoint.
            state.save_to_json(os.fspath(part / _STATE_FILE))
        self.exchange.save_state(part)
        if order is not None:
            (part / ORDER_FILE).write_text(json.dumps(order), encoding="ascii")
        has_optimizer = any(any(part.glob(name)) for name in _OPTIMIZER_FILES)
        manifest = Manifest(
            run_id=self.resume.context.run_id or "",
            step=state.global_step,
            world_size=self.manager.identity.world_size,
            is_resumable=(part / _STATE_FILE).is_file() and has_optimizer and _has_weights(part),
            facts=self.resume.facts,
            cursor=self._cursor(loader),
            is_sharded=self.resume.is_sharded,
            first_step=self.steps.proof.values(),
            is_evaluation_due=self.is_evaluation_due(),
        )
        seal(part, manifest)
        put_in_place(part, final)
        _rotate(trainer, final.parent)
        return True

    def _cursor(self, loader: Any) -> dict[str, int]:
        """Returns the position in the epoch if this package divides its samples."""
        if not isinstance(loader, StepLoader):
            return {}
        return loader.steps.cursor if loader.is_stream else {"steps": self.trainer.state.global_step % len(loader)}

    @contextmanager
    def _claimed(self, part: Path, final: Path) -> Iterator[None]:
        """Locks the output folder on rank 0, and removes the new checkpoint if the save fails."""
        from safetensors import SafetensorError

        with ExitStack() as stack:
            is_locked = False
            try:
                if self._is_writer:
                    final.parent.mkdir(parents=True, exist_ok=True)
                    is_locked = stack.enter_context(saving_in(final.parent))
                    if not is_locked:
                        raise SaveError(
                            f"{final} could not be saved, earlier checkpoints are untouched: another run is saving in "
                            f"{final.parent}.",
                            hint="Give each run an output_dir of its own, or end the other run first.",
                        )
                    settle(part, final)  # A run that was killed meanwhile may have left an incomplete checkpoint.
                    part.mkdir(parents=True)
                yield
            except BaseException as error:
                free = _free_bytes(final.parent)  # Measured before the files are removed.
                if is_locked:
                    shutil.rmtree(part, ignore_errors=True)
                    settle(part, final)
                from unsloth_multigpu.step.out_of_memory import is_out_of_memory

                # torch and safetensors raise errors of their own on a full disk.
                is_disks = isinstance(error, (OSError, RuntimeError, SafetensorError)) and not is_out_of_memory(error)
                if is_disks and not isinstance(error, MultiGPUError):
                    message = f"{final} could not be saved, earlier checkpoints are untouched{free}: {error}"
                    raise OSError(message) from error
                raise


def _rotate(trainer: TrainerLike, folder: Path) -> None:
    """Applies Hugging Face's `save_total_limit`. The Trainer's own call has seen only the temporary folder."""
    output_dir, best = os.fspath(folder), trainer.state.best_model_checkpoint
    if hasattr(trainer, "_rotate_checkpoints"):  # transformers 4.
        trainer._rotate_checkpoints(use_mtime=True, output_dir=output_dir)
        return
    from transformers.trainer_utils import rotate_checkpoints

    limit = trainer.args.save_total_limit
    rotate_checkpoints(output_dir=output_dir, save_total_limit=limit, best_model_checkpoint=best, use_mtime=True)


def _free_bytes(folder: Path) -> str:
    """Describes the free bytes of the disk, which torch's and safetensors' errors lack; "" if the folder is gone."""
    try:
        return f"; the disk of {folder} has {shutil.disk_usage(folder).free:,} bytes free"
    except OSError:
        return ""


def _listing(folder: Path) -> dict[str, tuple[int, int]]:
    """Returns time and size of each file, to find changed files later."""
    stats = {p.relative_to(folder).as_posix(): p.stat() for p in folder.rglob("*") if p.is_file()}
    return {name: (stat.st_mtime_ns, stat.st_size) for name, stat in stats.items()}


def _has_weights(folder: Path) -> bool:
    names = {p.name for p in folder.rglob("*") if p.suffix in (".safetensors", ".bin", ".distcp")}
    return bool(names - {"training_args.bin", "optimizer.bin"})


def _move_changed(folder: Path, before: dict[str, tuple[int, int]], target: Path) -> None:
    """Moves changed files of the final folder, into which a trainer's own saving writes, to the new checkpoint."""
    for name, seen in _listing(folder).items():
        if before.get(name) != seen:
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            os.replace(folder / name, target / name)
