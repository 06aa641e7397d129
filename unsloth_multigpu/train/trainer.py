"""DDPTrainer: runs one `Trainer.train()` call with this package's parts. The training loop is Hugging Face's."""

from __future__ import annotations

import inspect
import os
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from unsloth_multigpu.checkpoint.resume import Resume
from unsloth_multigpu.checkpoint.save import Checkpoints
from unsloth_multigpu.errors import SetupError
from unsloth_multigpu.group.facts import facts_of_evaluation, facts_of_run
from unsloth_multigpu.group.random_state import device_in_use, read_random_state, seeded_draws, write_random_state
from unsloth_multigpu.group.replicas import ReplicaProof
from unsloth_multigpu.group.shards import Engine, find_engine, has_shards
from unsloth_multigpu.logs import get_logger
from unsloth_multigpu.option_type import Scope
from unsloth_multigpu.part import GradientExchange, Part, TrainerLike, generates_samples
from unsloth_multigpu.report import RankReport, RunReport
from unsloth_multigpu.seam import verify_seams
from unsloth_multigpu.step.feed import StepFeed
from unsloth_multigpu.step.snapshot import KeptObjects
from unsloth_multigpu.strategy import DDP
from unsloth_multigpu.train.check import StepCheck
from unsloth_multigpu.train.ddp import DDPWrapping, TrainedParameters
from unsloth_multigpu.train.evaluation import EqualEvaluations
from unsloth_multigpu.train.figures import LogFigures, Meter, Waiting
from unsloth_multigpu.train.lead import Lead, OneDecision, Preemption
from unsloth_multigpu.train.loop import Loop
from unsloth_multigpu.train.progress import CallbackPhase, PhaseMarks, Progress

if TYPE_CHECKING:
    from unsloth_multigpu.session import Session

logger = get_logger(__name__)


class DDPTrainer:
    """One training of one Trainer on this rank.

    Args:
        session: The session of this process.
        arguments: Arguments of the call of `train()`; `resume_from_checkpoint` may be replaced in it.
        training: Number of earlier calls of `train()` in this process.

    Attributes:
        of_tool: The part of the run's tool, if it has one. Also attached if the training is left to a library.
        report: Figures of the training, after it has ended.
    """

    def __init__(
        self, trainer: TrainerLike, session: Session, arguments: dict[str, Any] | None = None, training: int = 0
    ) -> None:
        self.trainer = trainer
        self.manager = manager = session.manager()
        self.config = manager.config
        self.report: RunReport | None = None
        self.arguments = {} if arguments is None else arguments
        self._beat = session.beat
        self._resume: Resume | None = None
        self._lead = lead = Lead(manager, session.beat)
        self.steps = StepFeed(trainer, manager, session.beat)
        self.steps.plans_one_process = session.tool.plans_one_process
        of_tool = session.tool.part(trainer, session, self.steps)
        self.of_tool = [] if of_tool is None else [of_tool]
        self._is_alone = manager.identity.world_size == 1
        self._engine = None if self._is_alone else find_engine(trainer)
        self.exchange = self._make_exchange()
        trained = None if self._is_alone else TrainedParameters(trainer, manager, self.exchange, training)
        self.meter = Meter(trainer, manager, session.beat, self.steps)
        preemption = Preemption(trainer, manager, session.events, lead, self.exchange)
        replicas = ReplicaProof(manager, self.steps.facts)
        self.progress = Progress(trainer, manager, session.events, replicas, self.exchange, trained, preemption)
        # `train.loop.PLACES` has their order.
        self.parts: list[Part] = [
            self.steps.metrics,
            self.meter,
            StepCheck(trainer, manager, self.steps, lead),
            CallbackPhase(session.beat),
            PhaseMarks(trainer, session.beat),
            self.progress,
            preemption,
        ]
        if trained is not None:
            self.parts += [OneDecision(trainer, manager, lead, self.exchange), Waiting(trainer, manager)]
            self.parts += [self.exchange, trained, EqualEvaluations(trainer, manager, self.exchange)]
        if not session.tool.is_comparison:  # A comparison saves nothing, and resumes only if the script asks for it.
            if trained is not None and manager.identity.rank == 0:
                self.parts.append(LogFigures(trainer, self.meter, session.context.run_dir))
            self._resume = Resume(
                trainer, manager, self.steps, self.arguments, training, session.context, self.exchange
            )
            checkpoints = Checkpoints(trainer, manager, self.steps, self.exchange, self._resume, session.beat)
            checkpoints.is_evaluation_due = lambda: preemption.cuts_off_evaluation
            self.parts += [self._resume, checkpoints]

    def run(self, original_train: Callable[[], Any], on_agreed: Callable[[Loop], None] = lambda _: None) -> Any:
        """Runs `original_train`, which reads `arguments` when it is called, with this rank's share of every step.

        `on_agreed` is called with the loop when all ranks are ready to train.
        """
        if others := _other_parallelism(self.trainer, self._engine):
            self._step_aside(others)
            with Loop(self.trainer, self.of_tool).steering() if self.of_tool else nullcontext():
                return original_train()
        self._refuse_what_cannot_work()
        verify_seams(self.trainer)
        self.manager.open_group()
        self._shard()
        # Reading rows for the comparison must not change counters of a data set. It is seeded, so that one that draws
        # random numbers returns the same rows on all ranks and when the training resumes.
        with seeded_draws(0), KeptObjects(self.trainer.train_dataset, self.trainer.eval_dataset):
            facts = facts_of_run(self.trainer, self.config, self.steps.num_accumulated)
            if self._resume is not None:
                self._resume.of_run = facts
            facts = facts | facts_of_evaluation(self.trainer)
        self.manager.check_same(facts)
        self._lead.begin()
        self._deal()
        loop = Loop(self.trainer, [*self.parts, *self.of_tool])
        on_agreed(loop)
        start = time.monotonic()
        with loop.steering():
            # DDP copies rank 0's weights to all ranks before the first step: new LoRA weights may differ until then.
            result = original_train()
        # Code after train() runs on every rank, and must draw the same random numbers there.
        write_random_state(self.manager.broadcast_json(read_random_state(device_in_use())))
        self._report(time.monotonic() - start)
        return result

    def _deal(self) -> None:
        """Adds the part that divides samples or completions among the ranks, if this package is to divide them.

        Raises:
            SetupError: The trainer makes its own batches, and an option does not allow that.
        """
        name, generates = type(self.trainer).__name__, hasattr(self.trainer.args, "steps_per_generation")
        is_planned = self.config.balance != "off" and self.config.is_synchronous and self.config.keeps_global_batch
        if self._deals_steps():
            self.parts.append(self.steps)
        elif self.config.sequence_parallel > 1:
            raise SetupError(
                f"sequence_parallel needs samples that this package divides, but {name} makes its own.",
                hint="Leave sequence_parallel out for this trainer.",
            )
        elif generates and is_planned and not self._is_alone:
            from unsloth_multigpu.step.completions import CompletionDeal

            self.parts.append(CompletionDeal(self.trainer, self.manager, self.steps, self._beat))
        if not self._is_alone and self.manager.identity.rank == 0 and generates_samples(self.trainer):
            who = "a server generates completions" if self.config.generators else "each rank generates completions"
            logger.info("%s: %s, so the run differs from that on one GPU", name, who)

    def _step_aside(self, others: list[str]) -> None:
        """Warns that another kind of parallelism runs the training, with the resulting size of an optimizer step.

        Raises:
            SetupError: An option was given that only works with this package's own training.
        """
        name = others[0]
        if asked := self.config.asked(Scope.TRAINER):
            raise SetupError(f"{asked[0]} needs DDP, but {name} is on.", hint=f"Leave it out, or train without {name}.")
        parallelism = getattr(self.trainer.accelerator, "parallelism_config", None)
        apart = max(int(getattr(parallelism, "non_data_parallel_size", 1)), _context_parallel_size(self.trainer))
        num = self.manager.identity.world_size // apart
        one = self.steps.num_accumulated * self.trainer._train_batch_size
        hint = "; FSDP 2 (fsdp_config={'version': 2}) keeps it" if name == "FSDP" else ""
        larger = (
            f". An optimizer step sees {num * one} samples ({num} ranks x {one}), {num} times those of one process: "
            f"divide per_device_train_batch_size or gradient_accumulation_steps to keep it{hint}. Save by "
            "trainer.save_model()"
        )
        logger.warning("%s is on: unsloth_multigpu leaves this training to it%s", name, larger if num > 1 else "")

    def _make_exchange(self) -> GradientExchange:
        if self._engine is not None:
            from unsloth_multigpu.shard.sharding import Sharding

            return Sharding(self.trainer, self.manager, self._engine, self.steps)
        if self._is_alone or isinstance(self.config.strategy, DDP):
            return DDPWrapping(self.trainer, self.manager)
        from unsloth_multigpu.strategies.strategy_exchange import Exchange

        return Exchange(self.trainer, self.manager)

    def _shard(self) -> None:
        """Prepares for a model that an engine has sharded or will shard.

        Raises:
            SetupError: `shard="on"`, but no engine shards this model.
        """
        if self._engine is None and (self._is_alone or self.config.shard != "on"):
            return
        from unsloth_multigpu.shard.sharding import check_is_sharded, check_options

        if self._engine is None:
            check_is_sharded(self.trainer.model)
            return
        check_options(self.config, self._engine)
        self.steps.passes.is_lockstep = self.meter.is_sharded = True
        self.steps.is_placed_later = self._engine is Engine.ACCELERATE
        if self._resume is not None:
            self._resume.is_sharded = True

    def _refuse_what_cannot_work(self) -> None:
        args = self.trainer.args
        num_processes = self.trainer.accelerator.num_processes
        if num_processes != self.manager.identity.world_size:
            raise SetupError(
                f"This Trainer was built for {num_processes} process(es), the run has "
                f"{self.manager.identity.world_size} ranks: each would train alone.",
                hint="Call enable_multi_gpu() before `import unsloth` and before TrainingArguments are made.",
            )
        if args.auto_find_batch_size:
            raise SetupError(
                "auto_find_batch_size=True lets one rank shrink its batch while the others do not.",
                hint="Set auto_find_batch_size=False and a batch size that fits; `unsloth-multigpu plan` counts the "
                "memory of a step.",
            )
        if str(getattr(args, "train_sampling_strategy", "")) == "batch_rebalance" and self.config.keeps_global_batch:
            raise SetupError(
                "train_sampling_strategy='batch_rebalance' chooses the samples of each rank, and they differ from "
                "those on one GPU.",
                hint="Remove train_sampling_strategy, or set global_batch='scale'.",
            )

    def _deals_steps(self) -> bool:
        """True if this package chooses the samples of a step. Trainers that generate samples do it themselves."""
        if not self.config.keeps_global_batch:
            return False
        # Older TRL trainers may first compute the log-probabilities of all samples. Otherwise they call the base class.
        precomputes = bool(getattr(self.trainer.args, "precompute_ref_log_probs", False))
        makers = [cls for cls in type(self.trainer).__mro__ if "get_train_dataloader" in vars(cls)]
        owner = next(cls for cls in makers if precomputes or not _hands_on(vars(cls)["get_train_dataloader"]))
        if hasattr(self.trainer.args, "steps_per_generation"):
            if plan := [name for name in self.config.asked(Scope.PLANNER) if not name.startswith("balance=")]:
                raise SetupError(
                    f"{plan[0]} divides samples by length, but {owner.__name__} generates its samples during training.",
                    hint="Leave it out for this trainer.",
                )
            return False
        # Unsloth puts rewritten TRL trainers into modules named after them.
        if owner.__module__.startswith(("trl.", "unsloth", "Unsloth")):
            if self._is_alone and not self.config.asked(Scope.PLANNER):
                return False  # In one process, its own batches are right.
            raise SetupError(
                f"{owner.__name__} builds batches of its own; its global batch cannot be kept.",
                hint='Use enable_multi_gpu(global_batch="scale") for this trainer.',
            )
        return True

    def _report(self, train_s: float) -> None:
        counts = (self.progress.num_steps, self.steps.passes.num_samples, self.steps.passes.num_micro_batches)
        mine = self.meter.report(counts, train_s, self.exchange.sent_bytes(self.progress.num_steps))
        folder = self.arguments.get("resume_from_checkpoint")
        ranks = self.manager.gather_json(asdict(mine))
        self.report = RunReport(
            tuple(RankReport(**{**values, "rank": rank}) for rank, values in enumerate(ranks)),
            self.steps.balancer.state_dict(),
            self.meter.figures.max_steps,
            self.meter.resumed_step,
            os.path.basename(folder.rstrip("/")) if isinstance(folder, str) else "",
            self.steps.proof.values(),
            self.steps.inexact,
        )
        # A single process that trains its own batches ends as without enable_multi_gpu().
        has_trained = not self._is_alone and self.progress.num_steps > 0
        if has_trained or self.steps.passes.num_micro_batches or self.report.had_nothing_to_do:
            logger.info("%s", self.report.summary())


def _hands_on(method: Callable[..., Any]) -> bool:
    """True if a method calls the overridden method of its base class."""
    code = getattr(inspect.unwrap(method), "__code__", None)
    return code is not None and {"super", code.co_name} <= set(code.co_names)


def gets_batches_of_one_process(trainer: TrainerLike, world_size: int) -> bool:
    """True if this Trainer gets the batches of one process in a run that keeps the global batch."""
    is_ours = trainer.accelerator.num_processes == world_size and not _other_parallelism(trainer, find_engine(trainer))
    # GRPO and similar trainers divide their batches themselves.
    return is_ours and not hasattr(trainer.args, "steps_per_generation")


def _other_parallelism(trainer: TrainerLike, engine: Engine | None) -> list[str]:
    """Returns the kinds of parallelism of the script that this package does not steer."""
    parallelism = getattr(trainer.accelerator, "parallelism_config", None)
    is_fsdp = trainer.is_fsdp_enabled
    others = {
        "FSDP": is_fsdp and engine is None,
        "DeepSpeed": trainer.is_deepspeed_enabled,
        "parallelism_config": parallelism is not None and parallelism.non_data_parallel_size > 1,
        "Unsloth's context parallelism": _context_parallel_size(trainer) > 1,
        "tensor parallelism": engine is None and not is_fsdp and has_shards(trainer.model),
    }
    return [name for name, is_on in others.items() if is_on]


def _context_parallel_size(trainer: TrainerLike) -> int:
    """Returns the number of ranks that share a sample by Unsloth's own context parallelism."""
    return int(getattr(trainer.args, "context_parallel_size", None) or 1)
