"""Finds the checkpoint that a training resumes from, and restores what Hugging Face's loop does not."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from unsloth_multigpu.checkpoint.choice import Found, Wanted, check_asked, find_newest, refuse_other_mode
from unsloth_multigpu.checkpoint.manifest import Manifest, checkpoints_in, clear_parts, read_manifest
from unsloth_multigpu.errors import ResumeError, SetupError
from unsloth_multigpu.group.facts import facts_of_run
from unsloth_multigpu.group.manager import DDPManager
from unsloth_multigpu.group.random_state import draw_seed, seeded_draws
from unsloth_multigpu.logs import get_logger
from unsloth_multigpu.part import Override, Part
from unsloth_multigpu.step.feed import StepFeed
from unsloth_multigpu.step.sampler import StepSampler
from unsloth_multigpu.step.snapshot import kept_objects
from unsloth_multigpu.step.stream import StepStream
from unsloth_multigpu.trainer_protocol import ArgumentsLike, ControlLike, StateLike, TrainerLike
from unsloth_multigpu.wire.context import RunContext

logger = get_logger(__name__)

# The random state from which the order of the epoch was drawn, where it depends on one.
ORDER_FILE = "unsloth_multigpu_order.json"


@dataclass(eq=False, repr=False)
class Resume(Part):
    """The checkpoint that one `train()` resumes from, if any. Rank 0 decides.

    Args:
        steps: What feeds the trainer.
        arguments: Of the call of `train()`; its `resume_from_checkpoint` is replaced.
        training: How many calls of `train()` this process made before.
        context: Tells whether the ranks were started again.

    Attributes:
        facts: What the training is, see `training_facts`.
        is_sharded: Each rank holds a part of the weights.
    """

    place = "resume"

    trainer: TrainerLike
    manager: DDPManager
    steps: StepFeed
    arguments: dict[str, Any]
    training: int
    context: RunContext
    facts: dict[str, Any] = field(init=False, default_factory=dict)
    is_sharded: bool = field(init=False, default=False)
    _manifest: Manifest | None = field(init=False, default=None)
    _folder: Path | None = field(init=False, default=None)
    _has_begun: bool = field(init=False, default=False)

    @contextmanager
    def around(self) -> Iterator[None]:
        """Decides what the training resumes from. Collective.

        Raises:
            ResumeError: The checkpoint that is asked for is incomplete, or of another number of ranks.
            SetupError: It was written by a sharded training and this one is not, or the reverse.
        """
        trainer = self.trainer
        # A name that contains the time or a random number differs between ranks.
        trainer.args.output_dir = self.manager.gather_texts(trainer.args.output_dir)[0]
        run_dir = trainer._get_output_dir(None)
        for name in clear_parts(Path(run_dir)) if self.manager.identity.rank == 0 else ():
            logger.warning(
                "another run is saving %s; this one leaves it alone. Give each run an output_dir of its own",
                Path(run_dir, name),
            )
        self.facts = training_facts(trainer, self.manager, self.steps.num_accumulated, self.training)
        self.choose(run_dir, self.arguments, self.facts)
        yield

    def overrides(self) -> dict[str, Override]:
        return {
            "_issue_warnings_after_load": self._check_loaded,
            "get_batch_samples": self._batch_samples,
        }

    def choose(self, run_dir: str, arguments: dict[str, Any], facts: dict[str, Any]) -> None:
        """Replaces `resume_from_checkpoint` in the arguments by what this training really resumes from; see `around`.

        Args:
            run_dir: Folder of the checkpoints.
        """
        asked, run_id = arguments.get("resume_from_checkpoint") or None, self.context.run_id
        self.manager.check_same({"resume_from_checkpoint": str(asked), "run": run_id})
        # A node that has just joined counts from 0 again.
        is_restarted = any(attempt for (attempt,) in self.manager.gather_int64([self.context.attempt]))
        told = ""
        if self.manager.identity.rank == 0:
            try:
                found = self._find(Path(run_dir), asked, facts, run_id if is_restarted else None)
                told = json.dumps({"folder": found.folder and os.fspath(found.folder)})
                for line in dict.fromkeys(found.lines):
                    logger.warning("%s", line)
            except ResumeError as error:
                told = json.dumps({"error": error.args[0], "hint": error.hint})
        answer = json.loads(self.manager.gather_texts(told)[0])
        if "error" in answer:
            raise ResumeError(answer["error"], hint=answer["hint"])
        if answer["folder"] is not None:
            arguments["resume_from_checkpoint"] = asked = answer["folder"]
        if isinstance(asked, (str, os.PathLike)):
            self._folder, self._manifest = Path(asked), read_manifest(Path(asked))
            world_size = self.manager.identity.world_size
            refuse_other_mode(self._folder, self._manifest, is_sharded=self.is_sharded, world_size=world_size)
        if answer["folder"] is not None:
            logger.info("the training resumes from %s", asked)

    def _find(self, folder: Path, asked: Any, facts: dict[str, Any], restarted_run: str | None) -> Found:
        """What to resume from, in place of what the script asks for; None = what it asks for.

        Raises:
            ResumeError: The checkpoint that it asks for is incomplete, or of another number of ranks.
        """
        config = self.manager.config
        lines: list[str] = []
        any_training = Wanted(self.manager.identity.world_size, grows_with_ranks=not config.keeps_global_batch)
        wanted = [dataclasses.replace(any_training, facts=facts, run_id=restarted_run)] if restarted_run else []
        # Before the script's own choice: the same command names the same checkpoint after any progress.
        wanted += [dataclasses.replace(any_training, facts=facts)] if config.resume == "auto" else []
        for kind in wanted:
            found = find_newest(folder, kind)
            lines += found.lines
            if found.folder is not None:
                return Found(found.folder, tuple(lines))
        if asked is True:
            found = find_newest(folder, any_training)
            # Without any checkpoint, Hugging Face's own error is right.
            if found.folder is None and checkpoints_in(folder):
                raise ResumeError(f"{folder} has no complete checkpoint.", hint="Leave resume_from_checkpoint out.")
            return Found(found.folder, (*lines, *found.lines))
        if asked is not None:
            return Found(None, (*lines, *check_asked(Path(str(asked)), any_training)))
        if config.resume == "auto":
            logger.info("resume='auto': no complete checkpoint of this training in %s, it begins at step 0", folder)
        return Found(None, tuple(lines))

    def on_train_begin(self, args: ArgumentsLike, state: StateLike, control: ControlLike, **kwargs: Any) -> None:
        """Gives the resumed epoch the order that it was begun with."""
        loader = self.steps.loader
        sampler, stream = getattr(loader, "batch_sampler", None), getattr(loader, "dataset", None)
        if self._manifest is None or self._folder is None or not self._manifest.cursor.get("steps"):
            return
        file = self._folder / ORDER_FILE
        if isinstance(sampler, StepSampler) and file.is_file():
            sampler.resumed_order_state = json.loads(file.read_text(encoding="ascii"))
        if isinstance(stream, StepStream) and not self.trainer.args.ignore_data_skip:
            # Of a stream without length the Trainer skips as many steps as there were, in however many passes.
            stream.go_on(self._manifest.cursor, self.trainer.state.global_step)

    def on_epoch_begin(self, args: ArgumentsLike, state: StateLike, control: ControlLike, **kwargs: Any) -> None:
        """Ranks that the checkpoint does not have begin with a random state of their own. The Trainer loads none."""
        is_first, self._has_begun = not self._has_begun, True
        name = f"rng_state_{args.process_index}.pth" if args.world_size > 1 else "rng_state.pth"
        if is_first and self._folder is not None and not (self._folder / name).is_file():
            from transformers import set_seed

            set_seed(draw_seed(args.seed, state.global_step, self.manager.identity.rank) % 2**32)

    def _check_loaded(self, original: Callable[..., Any], load_result: Any) -> Any:
        """`Trainer._issue_warnings_after_load`: a training does not go on from other weights than its checkpoint's.

        transformers 5 writes some models under other names (ViT, LLaVA), and `Trainer` does not find them again: it
        loads what fits and warns of the rest. All ranks read the same file.

        Raises:
            SetupError: Trained weights were not loaded.
        """
        lost, num_trained = lost_weights(self.trainer.model, load_result.missing_keys)
        if lost:
            raise SetupError(
                f"A checkpoint was loaded without {len(lost)} of {num_trained} trained weights, {lost[0]} for example: "
                "it has none of that name.",
                hint="transformers writes this model under other names than it has and does not read them back. "
                "from_pretrained does: load the model from that checkpoint. Train without resume (resume='off') and "
                "without load_best_model_at_end.",
            )
        return original(load_result)

    def _batch_samples(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """`Trainer.get_batch_samples`: none for a training that resumes at its end; it would do one more step."""
        state = self.trainer.state
        if 0 < state.max_steps <= state.global_step:
            self.trainer.control.should_training_stop = True
            return [], None
        return original(*args, **kwargs)


def lost_weights(model: Any, missing: Collection[str]) -> tuple[list[str], int]:
    """Trained weights that have been loaded under none of their names, and how many are trained.

    Args:
        model: A shared weight has several names, and one is enough.
        missing: Names that were not found.
    """
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if parameter.requires_grad:
            names.setdefault(id(parameter), []).append(name)
    ignored = {*(getattr(model, "_keys_to_ignore_on_save", None) or ())}
    absent = {*missing} - ignored
    return [mine[0] for mine in names.values() if absent.issuperset(mine)], len(names)


def training_facts(trainer: TrainerLike, manager: DDPManager, num_accumulated: int, training: int) -> dict[str, Any]:
    """What must be equal for a checkpoint to be one of this training: name -> JSON value.

    Args:
        num_accumulated: Micro-batches of a step that the script asked for.
        training: How many calls of `train()` this process made before.
    """
    args, config = trainer.args, manager.config
    batch = args.per_device_train_batch_size * num_accumulated
    if config.keeps_global_batch and hasattr(args, "steps_per_generation"):
        batch *= manager.identity.world_size  # It was divided when the arguments were made.
    # A data set that draws random numbers gives the same rows whatever was drawn before.
    with seeded_draws(0), kept_objects(trainer.train_dataset):
        found = facts_of_run(trainer, config, num_accumulated)
    facts: dict[str, Any] = {
        "trainer": type(trainer).__name__,
        "number of the train() call": training + 1,
        "samples of a step on one GPU" if config.keeps_global_batch else "samples of a step on each rank": batch,
        **{name: found[name] for name in ("max_steps", "num_train_epochs", "seed", "learning_rate")},
        **{name: found[name] for name in ("trainable parameters", "samples", "sampled rows") if name in found},
    }
    return dict(json.loads(json.dumps(facts)))
