"""Saves the checkpoints of one training: written to a hidden folder, sealed, and renamed when they are whole."""

from __future__ import annotations

import functools
import json
import os
import shutil
import uuid
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, cast

from unsloth_multigpu.checkpoint.claim import MARK, Claim, take
from unsloth_multigpu.checkpoint.manifest import PART_FOLDER, Manifest, put_in_place, rotate, seal, settle
from unsloth_multigpu.checkpoint.resume import ORDER_FILE, Resume
from unsloth_multigpu.errors import DistributedError, MultiGPUError, SaveError
from unsloth_multigpu.group.exchange import GradientExchange
from unsloth_multigpu.group.manager import DDPManager
from unsloth_multigpu.group.random_state import draw_base_seed, read_random_state, write_random_state
from unsloth_multigpu.part import Override, Part
from unsloth_multigpu.seam import steered
from unsloth_multigpu.step.feed import StepFeed
from unsloth_multigpu.step.memory import is_out_of_memory
from unsloth_multigpu.step.sampler import StepSampler
from unsloth_multigpu.step.stream import StepStream
from unsloth_multigpu.trainer_protocol import ArgumentsLike, ControlLike, OptionalTrainer, StateLike, TrainerLike

_STATE_FILE = "trainer_state.json"
# Of the Trainer, of accelerate's FSDP, and of what FSDP writes by torch.distributed.checkpoint.
_OPTIMIZER_FILES = ("optimizer.pt", "optimizer.bin", "optimizer_*/.metadata")
# Reading and flushing what was written may take long; if its writer dies meanwhile, the launcher ends the run.
_SEAL_LIMIT_S = 86_400.0


class Checkpoints(Part):
    """Saves the checkpoints of one `train()`.

    Args:
        trainer: A `transformers.Trainer` or subclass.
        manager: This rank's manager.
        steps: What feeds the trainer; its planner's measurements are kept.
        exchange: The gradient strategy in DDP's place, whose state is kept.
        resume: Knows who writes, and what training this is.
    """

    place = "checkpoints"

    def __init__(
        self,
        trainer: TrainerLike,
        manager: DDPManager,
        steps: StepFeed,
        exchange: GradientExchange | None,
        resume: Resume,
    ) -> None:
        self._trainer = trainer
        self._manager = manager
        self._steps = steps
        self._exchange = exchange
        self._resume = resume
        self._before_evaluation: dict[str, Any] | None = None

    def overrides(self) -> dict[str, Override]:
        return {"_save_checkpoint": self._save, "evaluate": self._evaluate, "on_evaluate": self._decide_alike}

    def _evaluate(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """`Trainer.evaluate`: notes the random state for a checkpoint of a training that is stopped in it."""
        outer, self._before_evaluation = self._before_evaluation, read_random_state()
        try:
            metrics = original(*args, **kwargs)
        finally:
            self._before_evaluation = outer
        if not isinstance(metrics, dict):
            return metrics
        return self._agree(metrics)  # An `evaluate` of the script may have added some.

    def _decide_alike(
        self, original: Callable[..., Any], args: ArgumentsLike, state: StateLike, control: ControlLike, metrics: Any
    ) -> Any:
        """`CallbackHandler.on_evaluate`, by which early stopping decides."""
        metrics.update(self._agree(metrics))
        return original(args, state, control, metrics)

    def _agree(self, metrics: dict[str, Any]) -> dict[str, Any]:
        """Returns rank 0's metrics: sampled ones differ between ranks, and all ranks must decide alike. Collective."""
        numbers = {name: value for name, value in metrics.items() if isinstance(value, (int, float))}
        return {**metrics, **json.loads(self._manager.gather_texts(json.dumps(numbers))[0])}

    def _save(self, original: Callable[..., Any], model: Any, trial: Any = None) -> None:
        """`Trainer._save_checkpoint`: a folder has its name only when it is whole. Collective."""
        trainer = self._trainer
        run_dir = trainer._get_output_dir(trial)
        final = Path(run_dir, f"checkpoint-{trainer.state.global_step}")
        part = final.parent / PART_FOLDER / final.name
        pushes: list[Any] = []
        if self._before_evaluation is not None:
            # Stopped in an evaluation, which is not made again after a resume. The training goes on with the state
            # that it would have left behind: a data loader draws its base seed at its begin.
            write_random_state(self._before_evaluation)
            draw_base_seed()
        with self._claimed(part, final) as claim:
            # No rank writes into the folder before it is claimed: until then another run may remove it.
            self._manager.gather_texts("")
            before = _listing(final) if self._resume.is_writer else {}
            with ExitStack() as stack:
                stack.enter_context(self._steps.accumulation_of_script())
                stack.enter_context(steered(trainer, "_get_output_dir", lambda *_, **__: os.fspath(part.parent)))
                if hasattr(trainer, "_push_from_checkpoint"):
                    push = steered(trainer, "_push_from_checkpoint", lambda _, folder: pushes.append(folder))
                    stack.enter_context(push)
                if self._manager.identity.rank != 0 and hasattr(trainer.model, "should_save_on_this_rank"):
                    # transformers 5 knows rank 0 only, and would leave other nodes' folders without weights.
                    own = steered(trainer.model, "should_save_on_this_rank", lambda _, is_main: is_main)
                    stack.enter_context(own)
                original(model, trial)
            best = os.path.join(run_dir, f"checkpoint-{trainer.state.best_global_step}")
            if trainer.state.best_model_checkpoint == os.fspath(part):
                trainer.state.best_model_checkpoint = os.path.join(run_dir, final.name)
            elif trainer.state.best_global_step and os.path.isdir(best):
                # As the Trainer does, which looked for it next to the hidden folder.
                trainer.state.best_model_checkpoint = best
            # Every rank has written its files. Rank 0 chooses an identifier of this save.
            is_first = self._manager.identity.rank == 0
            told = json.dumps([uuid.uuid4().hex, trainer.state.stateful_callbacks if is_first else None])
            name, callbacks = json.loads(self._manager.gather_texts(told)[0])
            if not is_first:
                # The Trainer reads the callbacks' state only on the rank that writes it.
                trainer.state.stateful_callbacks = callbacks
            self._in_writers(name, final, functools.partial(self._complete, claim, final, before))
        if pushes:
            cast(OptionalTrainer, trainer)._push_from_checkpoint(os.fspath(final))

    def _in_writers(self, name: str, final: Path, complete: Callable[[], None]) -> None:
        """Runs `complete` on the writers while the others wait, longer than a collective may take. Collective."""
        rank = self._manager.identity.rank
        keys = {writer: f"checkpoints/{name}/{writer}" for writer in self._resume.writers}
        is_alone = self._manager.identity.world_size == 1
        outcome = "failed"
        try:
            if rank in self._resume.writers:
                complete()
            outcome = "done"
        finally:
            if rank in self._resume.writers and not is_alone:
                self._manager.publish(keys[rank], outcome)
        for writer, key in keys.items() if not is_alone else ():
            if self._manager.wait_for(key, f"rank {writer} to save {final}", timeout_s=_SEAL_LIMIT_S) != "done":
                raise DistributedError(f"rank {writer} failed to save {final}.", hint="The cause is that rank's error.")

    def _complete(self, claim: Claim | None, final: Path, before: dict[str, tuple[int, int]]) -> None:
        """Adds what Hugging Face does not save, seals the folder, renames it and deletes older ones."""
        assert claim is not None  # Only writers complete a save.
        trainer, state, part = self._trainer, self._trainer.state, claim.part
        _move_changed(final, before, part)
        _check_kept(claim, final)
        if [path.name for path in part.iterdir()] == [MARK]:
            claim.unmark()
            part.rmdir()
            return  # The script's own saving writes to another place.
        loader = self._steps.loader
        order = getattr(getattr(loader, "batch_sampler", None), "order_state", None)
        if trainer.args.should_save:
            if (part / _STATE_FILE).is_file():
                # The path of the best checkpoint is its final one only now.
                state.save_to_json(os.fspath(part / _STATE_FILE))
            if self._exchange is not None:
                self._exchange.save_state(part)
            if order is not None:
                (part / ORDER_FILE).write_text(json.dumps(order), encoding="ascii")
        manifest = Manifest(
            run_id=self._resume.context.run_id or "",
            step=state.global_step,
            world_size=self._manager.identity.world_size,
            is_resumable=(part / _STATE_FILE).is_file() and _has_optimizer(part) and _has_weights(part),
            facts=self._resume.facts,
            cursor=self._cursor(loader),
            planner=self._steps.balancer.state_dict(),
            is_sharded=self._resume.is_sharded,
            first_step=self._steps.proof.values(),
        )
        seal(part, manifest)
        # Once more: what was removed before it was sealed is in no checksum.
        _check_kept(claim, final)
        claim.unmark()
        put_in_place(part, final)
        best = Path(state.best_model_checkpoint or "").name.removeprefix("checkpoint-")
        keep = {state.global_step, *([int(best)] if best.isdecimal() else [])}
        limit, saves_only_model = trainer.args.save_total_limit, trainer.args.save_only_model
        rotate(final.parent, limit, keep, saves_only_model=saves_only_model)

    def _cursor(self, loader: Any) -> dict[str, int]:
        """The position in the epoch, with steps and samples where this package deals them."""
        state = self._trainer.state
        if isinstance(getattr(loader, "dataset", None), StepStream):
            return dict(loader.dataset.cursor())
        if not isinstance(getattr(loader, "batch_sampler", None), StepSampler):
            return {"epoch": int((state.epoch or 0) + 1e-6)}
        epoch, step = divmod(state.global_step, max(1, len(loader)))
        num_samples = step * self._trainer._train_batch_size * self._steps.num_accumulated
        return {"epoch": epoch, "steps": step, "samples": min(num_samples, len(loader.dataset))}

    @contextmanager
    def _claimed(self, part: Path, final: Path) -> Iterator[Claim | None]:
        """On a writer, the folder belongs to this run meanwhile, and is removed where the save fails."""
        from safetensors import SafetensorError

        claim = None
        try:
            if self._resume.is_writer:
                claim = _claim(part, final)
                settle(part, final)  # One whose writer still lived when this run began may have been killed since.
                claim.mark()
            yield claim
        except BaseException as error:
            is_lost = claim is not None and claim.is_lost
            room = _room(final.parent)  # Before what was written so far is removed.
            if claim is not None and not is_lost:
                shutil.rmtree(part, ignore_errors=True)
            # torch and safetensors raise errors of their own where a disk is full.
            is_disks = isinstance(error, (OSError, RuntimeError, SafetensorError)) and not is_out_of_memory(error)
            if is_disks and not isinstance(error, MultiGPUError):
                if is_lost:
                    raise _taken_away(part, final) from error
                told = f"{final} could not be saved, earlier checkpoints are untouched{room}: {error}"
                raise OSError(told) from error
            raise
        finally:
            if claim is not None:
                claim.release()


def _room(folder: Path) -> str:
    """torch and safetensors do not say of a full disk that it is full. "" where the folder is gone."""
    try:
        return f"; the disk of {folder} has {shutil.disk_usage(folder).free:,} bytes free"
    except OSError:
        return ""


def _claim(part: Path, final: Path) -> Claim:
    """Makes the folder this run's.

    Raises:
        SaveError: Another run that lives is writing it.
    """
    claim = take(part, is_for_writing=True)
    if claim is None:
        raise SaveError(
            f"{final} could not be saved, earlier checkpoints are untouched: another run is saving it at this moment.",
            hint="Give each run an output_dir of its own, or end the other one first.",
        )
    return claim


def _check_kept(claim: Claim, final: Path) -> None:
    if claim.is_lost:
        raise _taken_away(claim.part, final)


def _taken_away(part: Path, final: Path) -> SaveError:
    return SaveError(
        f"{final} could not be saved, earlier checkpoints are untouched: {part} was removed or emptied while it was "
        "written.",
        hint="Another run saves in the same output_dir: give each its own. If there is none, a _save_checkpoint of the "
        "script must not empty its folder.",
    )


def _listing(folder: Path) -> dict[str, tuple[int, int]]:
    """Time and size of each file: what shows that it was written."""
    stats = {p.relative_to(folder).as_posix(): p.stat() for p in folder.rglob("*") if p.is_file()}
    return {name: (stat.st_mtime_ns, stat.st_size) for name, stat in stats.items()}


def _has_optimizer(folder: Path) -> bool:
    return any(next(folder.glob(name), None) is not None for name in _OPTIMIZER_FILES)


def _has_weights(folder: Path) -> bool:
    names = {p.name for p in folder.rglob("*") if p.suffix in (".safetensors", ".bin", ".distcp")}
    return bool(names - {"training_args.bin", "optimizer.bin"})


def _move_changed(folder: Path, before: dict[str, tuple[int, int]], target: Path) -> None:
    """A trainer that saves by itself writes into the final folder; what it wrote belongs to the new checkpoint."""
    for name, seen in _listing(folder).items():
        if before.get(name) != seen:
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            os.replace(folder / name, target / name)
