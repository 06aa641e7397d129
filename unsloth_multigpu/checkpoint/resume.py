"""Finds the checkpoint that a training resumes from, and restores state that Hugging Face's loop does not restore."""

from __future__ import annotations

import json
import os
import time
import uuid
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from unsloth_multigpu.checkpoint.manifest import MANIFEST, Manifest, check, checkpoints_in, clear_parts, read_manifest
from unsloth_multigpu.deal.sampler import StepLoader, StepSampler
from unsloth_multigpu.errors import ResumeError, SetupError
from unsloth_multigpu.group.manager import DDPManager
from unsloth_multigpu.group.random_state import device_in_use, read_random_state, write_random_state
from unsloth_multigpu.logs import get_logger
from unsloth_multigpu.part import ArgumentsLike, ControlLike, GradientExchange, Override, Part, StateLike, TrainerLike
from unsloth_multigpu.step.feed import StepFeed
from unsloth_multigpu.wire.context import RunContext

logger = get_logger(__name__)

# The random state from which the order of the epoch was drawn, if it depends on one.
ORDER_FILE = "unsloth_multigpu_order.json"
_OF_ANOTHER_RUN = "another run wrote it"
_HELD = {True: "a part of the weights (sharded)", False: "all weights (not sharded)"}
# Long, because rank 0 reads each file of a checkpoint, to compare its checksum.
_CHOICE_LIMIT_S = 86_400.0


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
    exchange: GradientExchange
    of_run: dict[str, Any] = field(init=False, default_factory=dict)
    facts: dict[str, Any] = field(init=False, default_factory=dict)
    is_sharded: bool = field(init=False, default=False)
    _manifest: Manifest | None = field(init=False, default=None)
    _folder: Path | None = field(init=False, default=None)
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
        if self.manager.identity.rank == 0 and not clear_parts(Path(run_dir)):
            logger.warning("another run is saving in %s. Give each run an output_dir of its own", run_dir)
        self.facts = self._training_facts()
        self.choose(run_dir)
        yield

    def overrides(self) -> dict[str, Override]:
        found: dict[str, Override] = {}
        if self._folder is not None or self.trainer.args.load_best_model_at_end:
            found["_issue_warnings_after_load"] = self._check_loaded
        if self._folder is not None:
            found["get_batch_samples"] = self._batch_samples
        if self._is_evaluation_due:
            found["_load_rng_state"] = self._load_random_state
        return found

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
        ranks = self.manager.gather_json([self.context.attempt, uuid.uuid4().hex])
        restarted_run = run_id if any(attempt for attempt, _ in ranks) else None
        found = self.manager.lead(
            f"resume/{ranks[0][1]}",
            "choosing a checkpoint",
            lambda: self._find(Path(run_dir), asked, restarted_run),
            timeout_s=_CHOICE_LIMIT_S,
        )
        if found is not None:
            self.arguments["resume_from_checkpoint"] = found
            self._folder, self._manifest = Path(found), read_manifest(Path(found))
            self._is_evaluation_due = self._manifest is not None and self._manifest.is_evaluation_due
            if self._folder.is_dir():
                logger.info("the training resumes from %s", found)

    def _find(self, run_dir: Path, asked: Any, restarted_run: str | None) -> str | None:
        """Returns the checkpoint to resume from, or None: if one was asked for, Hugging Face then raises."""
        is_auto, found = self.manager.config.resume == "auto", None
        if is_auto or restarted_run:
            # It has priority over the script's own argument, which is the same whenever the command is started.
            found = find_newest(run_dir, self.facts, None if is_auto else restarted_run)
        if found is None and asked is True:
            found = find_newest(run_dir)
            if found is None and checkpoints_in(run_dir):
                raise ResumeError(f"{run_dir} has no complete checkpoint.", hint="Leave resume_from_checkpoint out.")
        elif found is None and asked is not None:
            found = Path(str(asked))
            check_asked(found)
        elif found is None and is_auto:
            logger.info("resume='auto': no complete checkpoint of this training in %s, so it begins at step 0", run_dir)
        if found is None:
            return None
        self._refuse_other_ranks(found)
        return os.fspath(found)

    def _refuse_other_ranks(self, folder: Path) -> None:
        """Refuses a checkpoint with other samples per step, or that only one of the two trainings shards."""
        manifest, num_ranks = read_manifest(folder), self.manager.identity.world_size
        if manifest is None:
            return  # It is left to the libraries.
        if manifest.world_size != num_ranks and not self.manager.config.keeps_global_batch:
            raise ResumeError(
                f"{folder} was written by {manifest.world_size} rank(s), but there are {num_ranks} now: with "
                "global_batch='scale' a step would have other samples.",
                hint=f"Set num_gpus={manifest.world_size}, or begin a new training with resume='off'.",
            )
        was = manifest.is_sharded
        if was not in (None, self.is_sharded):
            mode = "sharded again (shard='on') on two GPUs or more" if was else "without sharding again (shard='off')"
            raise SetupError(
                f"{folder} was written by ranks that each held {_HELD[bool(was)]}, and now each holds "
                f"{_HELD[self.is_sharded]}: a training cannot resume in the other mode.",
                hint=f"Train {mode}, or begin a new training: load the model from that folder, set resume='off' and "
                "leave resume_from_checkpoint out.",
            )

    def on_train_begin(self, args: ArgumentsLike, state: StateLike, control: ControlLike, **kwargs: Any) -> None:
        """Restores the order of samples of the resumed epoch, and the state of the gradient exchange."""
        if self._folder is not None:
            self.exchange.load_state(self._folder)
        # No step follows before which the evaluation would be repeated.
        if 0 < state.max_steps <= state.global_step:
            self._evaluate_again()
        loader = self.steps.loader
        sampler = getattr(loader, "batch_sampler", None)
        if self._manifest is None or self._folder is None or not self._manifest.cursor.get("steps"):
            return
        file = self._folder / ORDER_FILE
        if isinstance(sampler, StepSampler) and file.is_file():
            # The order is drawn with the first new step. A repeated evaluation saves a checkpoint before that.
            sampler.order_state = sampler.resumed_order_state = json.loads(file.read_text(encoding="ascii"))
        if isinstance(loader, StepLoader) and loader.is_stream and not self.trainer.args.ignore_data_skip:
            # The Trainer skips the finished steps of a stream without length, also across several epochs.
            loader.steps.go_on(self._manifest.cursor, self.trainer.state.global_step)

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
        """Runs the evaluation before or in which the training was stopped, and saves as the loop does after it."""
        trainer = self.trainer
        is_due, self._is_evaluation_due = self._is_evaluation_due, False
        if not is_due or trainer.args.eval_strategy == "no":
            return
        step = trainer.state.global_step
        logger.info("the evaluation after step %d, which a stop prevented or interrupted, runs now", step)
        trainer.control.should_evaluate = trainer.control.should_save = True
        ignored = self.arguments.get("ignore_keys_for_eval")
        nothing = torch.zeros((), device=trainer.args.device)
        trainer._maybe_log_save_evaluate(
            nothing, None, trainer.model_wrapped, None, trainer.state.epoch, ignored, time.time()
        )


def find_newest(output_dir: Path, facts: Mapping[str, Any] | None = None, run_id: str | None = None) -> Path | None:
    """Returns the newest complete checkpoint, and warns of newer ones that are skipped.

    Args:
        facts: Facts that must be equal, see `Resume.facts`. None = any training.
        run_id: The run that must have written it. None = any.
    """
    for _, folder in checkpoints_in(output_dir):
        problem = _problem(folder, facts, run_id)
        if problem is None:
            return folder
        if problem != _OF_ANOTHER_RUN:
            logger.warning("%s is skipped: %s", folder, problem)
    return None


def check_asked(folder: Path) -> None:
    """Checks a checkpoint that the script names. If it does not exist, Hugging Face raises its own error.

    Raises:
        ResumeError: It is incomplete, or has no optimizer.
    """
    problem = _problem(folder) if folder.is_dir() else None
    if problem is not None:
        newest = next((other for _, other in checkpoints_in(folder.parent) if _problem(other) is None), None)
        other = "Its folder has no complete checkpoint" if newest is None else f"Use {newest}"
        raise ResumeError(
            f"a training cannot resume from {folder}: {problem}.",
            hint=f"{other}, or load the model from it and begin a new training. If you changed the files on purpose, "
            f"delete its {MANIFEST}.",
        )


def _problem(folder: Path, facts: Mapping[str, Any] | None = None, run_id: str | None = None) -> str | None:
    """Returns why a training cannot resume from a checkpoint; None if it can. See `find_newest`."""
    try:
        manifest = read_manifest(folder)
    except ValueError as error:
        return str(error)
    if manifest is None:
        if facts is not None:
            return f"it has no {MANIFEST}, which identifies the training"
        logger.warning("%s has no %s, so it cannot be checked for completeness", folder, MANIFEST)
        return None
    if run_id not in (None, manifest.run_id):
        return _OF_ANOTHER_RUN
    if facts is not None:
        for name in {**facts, **manifest.facts}:
            theirs, mine = manifest.facts.get(name), facts.get(name)
            if theirs != mine:
                return f"{name} was {theirs}, now it is {mine}"
    return check(folder) if manifest.is_resumable else "it has no optimizer (save_only_model=True)"


def lost_weights(model: Any, missing: Collection[str]) -> tuple[list[str], int]:
    """Returns the trained weights that were not loaded, since the checkpoint lacks `missing`, and how many are trained.

    A shared weight has several names, of which one is enough.
    """
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if parameter.requires_grad:
            names.setdefault(id(parameter), []).append(name)
    ignored = {*(getattr(model, "_keys_to_ignore_on_save", None) or ())}
    absent = {*missing} - ignored
    return [mine[0] for mine in names.values() if absent.issuperset(mine)], len(names)
