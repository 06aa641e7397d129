"""Finds the checkpoint that a training resumes from, and restores state that Hugging Face's loop does not restore."""

from __future__ import annotations

import dataclasses
import json
import os
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from unsloth_multigpu.checkpoint.choice import Wanted, check_asked, find_newest, refuse_other_mode
from unsloth_multigpu.checkpoint.manifest import Manifest, checkpoints_in, clear_parts, read_manifest
from unsloth_multigpu.deal.sampler import StepSampler
from unsloth_multigpu.deal.stream import StepStream
from unsloth_multigpu.errors import ResumeError, SetupError
from unsloth_multigpu.group.manager import DDPManager
from unsloth_multigpu.group.random_state import device_in_use, draw_seed, read_random_state, write_random_state
from unsloth_multigpu.logs import get_logger
from unsloth_multigpu.part import Override, Part
from unsloth_multigpu.step.feed import StepFeed
from unsloth_multigpu.trainer_protocol import ArgumentsLike, ControlLike, StateLike, TrainerLike
from unsloth_multigpu.wire.context import RunContext

logger = get_logger(__name__)

# The random state from which the order of the epoch was drawn, if it depends on one.
ORDER_FILE = "unsloth_multigpu_order.json"


@dataclass(eq=False, repr=False)
class Resume(Part):
    """Resumes one `train()` from a checkpoint, if there is one. Rank 0 decides.

    Args:
        arguments: Arguments of `train()`. `resume_from_checkpoint` is replaced.
        training: Number of earlier calls of `train()` in this process.

    Attributes:
        of_run: See `facts_of_run`. Set before `around`.
        facts: Identify the training, as JSON values. A checkpoint of this training has equal ones.
        is_sharded: Each rank holds a shard of the weights.
    """

    place = "resume"

    trainer: TrainerLike
    manager: DDPManager
    steps: StepFeed
    arguments: dict[str, Any]
    training: int
    context: RunContext
    of_run: dict[str, Any] = field(init=False, default_factory=dict)
    facts: dict[str, Any] = field(init=False, default_factory=dict)
    is_sharded: bool = field(init=False, default=False)
    _manifest: Manifest | None = field(init=False, default=None)
    _folder: Path | None = field(init=False, default=None)
    _has_begun: bool = field(init=False, default=False)
    _is_evaluation_due: bool = field(init=False, default=False)
    _is_over: bool = field(init=False, default=False)
    # The random state with which the first new step starts.
    _after_evaluation: dict[str, Any] | None = field(init=False, default=None)

    @contextmanager
    def around(self) -> Iterator[None]:
        """Chooses the checkpoint. Collective.

        Raises:
            ResumeError: The requested checkpoint is incomplete, or of another number of ranks.
            SetupError: It was written by a sharded training and this one is not sharded, or the reverse.
        """
        trainer = self.trainer
        # Rank 0's, because a name with the time or a random number differs between ranks.
        trainer.args.output_dir = self.manager.broadcast_json(os.fspath(trainer.args.output_dir))
        run_dir = trainer._get_output_dir(None)
        for name in clear_parts(Path(run_dir)) if self.manager.identity.rank == 0 else ():
            logger.warning(
                "another run is saving %s, which stays untouched. Give each run an output_dir of its own",
                Path(run_dir, name),
            )
        self.facts = self._training_facts()
        self.choose(run_dir)
        yield

    def overrides(self) -> dict[str, Override]:
        return {
            "_issue_warnings_after_load": self._check_loaded,
            "_load_rng_state": self._load_random_state,
            "get_batch_samples": self._batch_samples,
        }

    def _training_facts(self) -> dict[str, Any]:
        args, config, of_run = self.trainer.args, self.manager.config, self.of_run
        batch = args.per_device_train_batch_size * self.steps.num_accumulated
        if config.keeps_global_batch and hasattr(args, "steps_per_generation"):
            batch *= self.manager.identity.world_size  # It was divided when TrainingArguments were made.
        facts: dict[str, Any] = {
            "trainer": type(self.trainer).__name__,
            "number of the train() call": self.training + 1,
            "samples of a step on one GPU" if config.keeps_global_batch else "samples of a step on each rank": batch,
            **{name: of_run[name] for name in ("max_steps", "num_train_epochs", "seed", "learning_rate")},
            **{name: of_run[name] for name in ("trainable parameters", "samples", "sampled rows") if name in of_run},
        }
        return dict(json.loads(json.dumps(facts)))

    def choose(self, run_dir: str) -> None:
        """Replaces the argument `resume_from_checkpoint` by the checkpoint to use from `run_dir`; see `around`."""
        asked, run_id = self.arguments.get("resume_from_checkpoint") or None, self.context.run_id
        self.manager.check_same({"resume_from_checkpoint": str(asked), "run": run_id})
        # A node that was started again counts its attempts from 0.
        is_restarted = any(self.manager.gather_json(self.context.attempt))
        choice: dict[str, Any] | None = None
        if self.manager.identity.rank == 0:
            try:
                folder = self._find(Path(run_dir), asked, run_id if is_restarted else None)
                choice = {"folder": folder and os.fspath(folder)}
            except ResumeError as error:
                choice = {"error": error.args[0], "hint": error.hint}
        answer = self.manager.broadcast_json(choice)
        if "error" in answer:
            raise ResumeError(answer["error"], hint=answer["hint"])
        if answer["folder"] is not None:
            self.arguments["resume_from_checkpoint"] = asked = answer["folder"]
        if isinstance(asked, (str, os.PathLike)):
            self._folder, self._manifest = Path(asked), read_manifest(Path(asked))
            world_size = self.manager.identity.world_size
            self._is_evaluation_due = self._manifest is not None and self._manifest.is_evaluation_due
            refuse_other_mode(self._folder, self._manifest, is_sharded=self.is_sharded, world_size=world_size)
        if answer["folder"] is not None:
            logger.info("the training resumes from %s", asked)

    def _find(self, folder: Path, asked: Any, restarted_run: str | None) -> Path | None:
        """Returns the checkpoint to use in place of the script's own; None = the script's own is used.

        Raises:
            ResumeError: The script's checkpoint is incomplete, or of another number of ranks.
        """
        config = self.manager.config
        any_training = Wanted(self.manager.identity.world_size, grows_with_ranks=not config.keeps_global_batch)
        is_auto = config.resume == "auto"
        if is_auto or restarted_run:
            # Before the script's own checkpoint, which the same command names whatever was trained since.
            run_id = None if is_auto else restarted_run
            found = find_newest(folder, dataclasses.replace(any_training, facts=self.facts, run_id=run_id))
            if found is not None:
                return found
        if asked is True:
            found = find_newest(folder, any_training)
            # Without any checkpoint, Hugging Face raises its own error.
            if found is None and checkpoints_in(folder):
                raise ResumeError(f"{folder} has no complete checkpoint.", hint="Leave resume_from_checkpoint out.")
            return found
        if asked is not None:
            check_asked(Path(str(asked)), any_training)
        elif is_auto:
            logger.info("resume='auto': no complete checkpoint of this training in %s, so it begins at step 0", folder)
        return None

    def on_train_begin(self, args: ArgumentsLike, state: StateLike, control: ControlLike, **kwargs: Any) -> None:
        """Restores the order of samples of the resumed epoch."""
        # There is no first new step, before which an evaluation is repeated.
        if 0 < state.max_steps <= state.global_step:
            self._evaluate_again()
        loader = self.steps.loader
        sampler, stream = getattr(loader, "batch_sampler", None), getattr(loader, "dataset", None)
        if self._manifest is None or self._folder is None or not self._manifest.cursor.get("steps"):
            return
        file = self._folder / ORDER_FILE
        if isinstance(sampler, StepSampler) and file.is_file():
            # It is drawn with the first new step. A repeated evaluation saves a checkpoint before that.
            sampler.order_state = sampler.resumed_order_state = json.loads(file.read_text(encoding="ascii"))
        if isinstance(stream, StepStream) and not self.trainer.args.ignore_data_skip:
            # The Trainer skips the finished steps of a stream without length, also across several epochs.
            stream.go_on(self._manifest.cursor, self.trainer.state.global_step)

    def on_epoch_begin(self, args: ArgumentsLike, state: StateLike, control: ControlLike, **kwargs: Any) -> None:
        """Seeds ranks whose random state the checkpoint does not have, because it was written by fewer ranks."""
        is_first, self._has_begun = not self._has_begun, True
        name = f"rng_state_{args.process_index}.pth" if args.world_size > 1 else "rng_state.pth"
        if is_first and self._folder is not None and not (self._folder / name).is_file():
            from transformers import set_seed

            set_seed(draw_seed(args.seed, state.global_step, self.manager.identity.rank) % 2**32)

    def _check_loaded(self, original: Callable[..., Any], load_result: Any) -> Any:
        """Overrides `Trainer._issue_warnings_after_load`: refuses a checkpoint without all trained weights.

        transformers 5 saves some models under other names (ViT, LLaVA), which `Trainer` does not find again: it would
        load the rest and warn. All ranks read the same file.

        Raises:
            SetupError: Trained weights were not loaded.
        """
        lost, num_trained = lost_weights(self.trainer.model, load_result.missing_keys)
        if lost:
            raise SetupError(
                f"A checkpoint was loaded without {len(lost)} of {num_trained} trained weights, such as {lost[0]}: it "
                "has no weight of that name.",
                hint="transformers saves this model under other names, which the Trainer does not read back. "
                "from_pretrained does: load the model from that checkpoint. Train without resume (resume='off') and "
                "without load_best_model_at_end.",
            )
        return original(load_result)

    def _batch_samples(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Overrides `Trainer.get_batch_samples`: a training that resumes at its end would make one more step."""
        if self._is_evaluation_due and self._folder is not None:
            # Within an epoch, the loop loads the random state after it has fetched a step.
            self.trainer._load_rng_state(os.fspath(self._folder))
        state = self.trainer.state
        if self._is_over or 0 < state.max_steps <= state.global_step:
            self.trainer.control.should_training_stop = True
            return [], None
        return original(*args, **kwargs)

    def _load_random_state(self, original: Callable[..., Any], checkpoint: Any) -> None:
        """Overrides `Trainer._load_rng_state`, which the loop calls before its first new step."""
        original(checkpoint)
        if self._is_evaluation_due:
            self._evaluate_again()
            self._is_over = self.trainer.control.should_training_stop  # As by early stopping.
            self._after_evaluation = read_random_state(device_in_use())
        elif self._after_evaluation is not None:
            write_random_state(self._after_evaluation)

    def _evaluate_again(self) -> None:
        """Makes the evaluation before or in which the training was stopped, and saves as the loop does after it."""
        trainer = self.trainer
        is_due, self._is_evaluation_due = self._is_evaluation_due, False
        if not is_due or trainer.args.eval_strategy == "no":
            return
        step = trainer.state.global_step
        logger.info("the evaluation after step %d, which a stop left out or interrupted, is made now", step)
        trainer.control.should_evaluate = trainer.control.should_save = True
        ignored = self.arguments.get("ignore_keys_for_eval")
        nothing = torch.zeros((), device=trainer.args.device)
        trainer._maybe_log_save_evaluate(
            nothing, None, trainer.model_wrapped, None, trainer.state.epoch, ignored, time.time()
        )


def lost_weights(model: Any, missing: Collection[str]) -> tuple[list[str], int]:
    """Returns the trained weights that were not loaded, since the checkpoint lacks `missing`, and the number of all.

    A shared weight has several names, of which one is enough.
    """
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if parameter.requires_grad:
            names.setdefault(id(parameter), []).append(name)
    ignored = {*(getattr(model, "_keys_to_ignore_on_save", None) or ())}
    absent = {*missing} - ignored
    return [mine[0] for mine in names.values() if absent.issuperset(mine)], len(names)
