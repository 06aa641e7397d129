"""DDPTrainer: steers one `Trainer.train()` call. The loop is Hugging Face's; which samples it gets is ours."""

from __future__ import annotations

import inspect
import os
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import nn

from unsloth_multigpu.core.buffer import EqualBuffers, RunningStatistics
from unsloth_multigpu.core.check import StepCheck
from unsloth_multigpu.core.checkpoint import Checkpoints
from unsloth_multigpu.core.control import OneDecision
from unsloth_multigpu.core.exchange import Exchange
from unsloth_multigpu.core.facts import facts_of_run
from unsloth_multigpu.core.guard import Guard
from unsloth_multigpu.core.inject import planted_faults
from unsloth_multigpu.core.manager import DDPManager, gradient_backend
from unsloth_multigpu.core.seam import instance_attribute, steered, verify_calls, verify_seams
from unsloth_multigpu.core.steps import StepFeed
from unsloth_multigpu.core.traffic import ddp_sent_bytes
from unsloth_multigpu.core.trainable import TrainedParameters, parameters_beside_the_model
from unsloth_multigpu.core.view import CallbackView
from unsloth_multigpu.errors import DivergenceError, SetupError
from unsloth_multigpu.fault.beat import BeatPage
from unsloth_multigpu.fault.preempt import Preemption
from unsloth_multigpu.logs import get_logger
from unsloth_multigpu.options import ENV_RUN_DIR, MultiGPUConfig
from unsloth_multigpu.proof.replicas import ReplicaProof
from unsloth_multigpu.report import EventWriter, RankReport, RunReport
from unsloth_multigpu.row import Scope
from unsloth_multigpu.strategy import DDP, LocalSGD
from unsloth_multigpu.sync.compression import check_compression, compression_settings
from unsloth_multigpu.sync.ddp import NamesOutsideDDP, ReadableDDP, ddp_settings, forget_evaluation, make_readable

logger = get_logger(__name__)


class DDPTrainer:
    """One training of one Trainer on this rank.

    Args:
        trainer: A `transformers.Trainer` or subclass.
        manager: This rank's manager.
        events: Where the rank's events go, if a supervisor reads them.
        beat: This rank's page, on which it says where it is.
    """

    def __init__(self, trainer: Any, manager: DDPManager, events: EventWriter | None, beat: BeatPage) -> None:
        self.trainer = trainer
        self.manager = manager
        self.config: MultiGPUConfig = manager.config
        self.report: RunReport | None = None
        # Called once all ranks are about to train this trainer.
        self.on_agreed: Callable[[], None] = lambda: None
        self.events = events
        self.steps = StepFeed(trainer, manager, beat)
        self.statistics = RunningStatistics(trainer, manager, self.steps)
        self.check = StepCheck(trainer, manager, self.steps)
        self.guard = Guard(trainer, manager, events, beat)
        self.replicas = ReplicaProof(manager, self.steps.balancer.state)
        is_wrapped = isinstance(self.config.sync, DDP) or manager.identity.world_size == 1
        self.exchange = None if is_wrapped else Exchange(trainer, manager)
        self.preemption = Preemption(trainer, manager, events, os.environ.get(ENV_RUN_DIR), beat, self._may_stop)
        self.decision = OneDecision(trainer, manager, os.environ.get(ENV_RUN_DIR), beat)
        self.checkpoints = Checkpoints(trainer, manager, self.steps, self.exchange)
        self.trained = TrainedParameters(trainer, manager, self.exchange, self._ask_for_proof)
        self.num_steps = 0
        self._is_proof_due = False
        # False from the start of a training by DDP until its first forward pass.
        self._is_forward_seen = True

    def run(self, original_train: Callable[[], Any], arguments: dict[str, Any] | None = None, number: int = 0) -> Any:
        """Runs `original_train` with this rank's share of every step, and returns what it returns.

        It reads `arguments` when it is called; for these and for `number` see `Checkpoints`.
        """
        if not self._is_plain_ddp():
            return original_train()
        self._refuse_what_cannot_work()
        verify_seams(self.trainer)
        self.manager.open_group()
        self.manager.check_same(facts_of_run(self.trainer, self.config, self.steps.num_accumulated))
        self.on_agreed()
        start = time.monotonic()
        with ExitStack() as stack:
            stack.enter_context(self.decision.on_trainer())
            stack.enter_context(planted_faults(self.trainer, self.manager, self.steps))
            if self._deals_steps():
                stack.enter_context(self.statistics.of_micro_batches())
                stack.enter_context(self.steps.on_trainer())
                stack.enter_context(self.statistics.of_steps())
                stack.enter_context(CallbackView(self.trainer, self.steps).on_trainer())
            stack.enter_context(self.steps.metrics.on_trainer())
            stack.enter_context(self.check.on_trainer())
            stack.enter_context(self._settings_of_ddp() if self.exchange is None else self.exchange.on_trainer())
            stack.enter_context(self.trained.on_trainer(number))
            stack.enter_context(EqualBuffers(self.trainer, self.manager).on_trainer())
            stack.enter_context(self.checkpoints.on_trainer({} if arguments is None else arguments, number))
            stack.enter_context(self.guard.on_trainer())
            stack.enter_context(self._progress())
            stack.enter_context(self.preemption.on_trainer())
            # Every rank has rank 0's weights when the first step begins: new LoRA weights differ before.
            result = original_train()
        # Code around train() runs on every rank, and must make the same random choices there.
        self.manager.broadcast_random_state()
        self._report(time.monotonic() - start)
        return result

    def _is_plain_ddp(self) -> bool:
        """False where the script asked for another kind of parallelism, which then has the field to itself."""
        accelerator = self.trainer.accelerator
        parallelism = getattr(accelerator, "parallelism_config", None)
        other = {
            "FSDP": self.trainer.is_fsdp_enabled,
            "DeepSpeed": self.trainer.is_deepspeed_enabled,
            "parallelism_config": parallelism is not None and parallelism.non_data_parallel_size > 1,
        }
        for name, is_on in other.items():
            asked = self.config.asked(Scope.TRAINER)
            if is_on and asked:
                raise SetupError(
                    f"{asked[0]} steers DDP, but {name} is on.", hint=f"Leave it out, or train without {name}."
                )
            if is_on:
                logger.warning("%s is on: unsloth_multigpu leaves this training to it", name)
        return not any(other.values())

    def _refuse_what_cannot_work(self) -> None:
        args = self.trainer.args
        num_processes = self.trainer.accelerator.num_processes
        if num_processes != self.manager.identity.world_size:
            raise SetupError(
                f"This Trainer was built for {num_processes} process(es), the run has "
                f"{self.manager.identity.world_size} ranks: each would train for itself.",
                hint="Call enable_multi_gpu() before `import unsloth` and before TrainingArguments are made.",
            )
        if args.auto_find_batch_size:
            raise SetupError(
                "auto_find_batch_size=True lets one rank shrink its batch while the others go on.",
                hint="Set auto_find_batch_size=False and a batch size that fits.",
            )
        if str(getattr(args, "train_sampling_strategy", "")) == "batch_rebalance" and self.config.keeps_global_batch:
            raise SetupError(
                "train_sampling_strategy='batch_rebalance' deals samples to ranks itself, and others than one GPU "
                "would see.",
                hint="Remove train_sampling_strategy, or set global_batch='scale'.",
            )

    def _deals_steps(self) -> bool:
        """True where we choose the samples of a step; trainers that generate their samples do it themselves."""
        if not self.config.keeps_global_batch:
            return False
        # Older trainers of TRL may first note what a reference model says of all samples; else they hand on.
        notes_all_first = bool(getattr(self.trainer.args, "precompute_ref_log_probs", False))
        makers = [cls for cls in type(self.trainer).__mro__ if "get_train_dataloader" in vars(cls)]
        owner = next(cls for cls in makers if notes_all_first or not _hands_on(vars(cls)["get_train_dataloader"]))
        if hasattr(self.trainer.args, "steps_per_generation"):
            if plan := self.config.asked(Scope.PLANNER):
                raise SetupError(
                    f"{plan[0]} deals samples by their length, but {owner.__name__} makes its samples while it trains.",
                    hint="Leave it out for this trainer.",
                )
            return False
        # Unsloth writes TRL's trainers anew, in modules of their names.
        if owner.__module__.startswith(("trl.", "unsloth", "Unsloth")):
            if self.manager.identity.world_size == 1 and not self.config.asked(Scope.TRAINER):
                return False  # Its own batches are those of one process.
            raise SetupError(
                f"{owner.__name__} builds batches of its own; its global batch cannot be kept.",
                hint='Use enable_multi_gpu(global_batch="scale") for this trainer.',
            )
        return True

    @contextmanager
    def _settings_of_ddp(self) -> Iterator[None]:
        """Lets accelerate wrap the model with our settings while this is open.

        Raises:
            SetupError: The gradients cannot be compressed as asked.
        """
        accelerator, compression = self.trainer.accelerator, self.config.grad_compression
        if self.manager.identity.world_size == 1:
            yield  # Nothing is wrapped.
            return
        if compression is not None:
            backend = gradient_backend(self.trainer.args.device)
            hook = str(getattr(accelerator.ddp_handler, "comm_hook", "no"))
            check_compression(compression, backend, hook, is_loss_scaled=accelerator.scaler is not None)
            logger.info("grad_compression=%s: gradients are sent smaller and are no longer exact", compression)
        forget_evaluation(self.trainer)
        with steered(accelerator, "prepare_model", self._prepare_model):
            yield

    def _prepare_model(self, original: Callable[..., Any], model: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """`Accelerator.prepare_model`, which makes DDP and is all that reads its settings."""
        # transformers 4 makes new ones just before. They are taken back: the next `train()` must find the script's own.
        from accelerate.utils import DistributedDataParallelKwargs

        accelerator, compression = self.trainer.accelerator, self.config.grad_compression
        handler = accelerator.ddp_handler or DistributedDataParallelKwargs()
        settings = ddp_settings(model, self.config, self.trainer.args)
        if compression is not None:
            settings.update(compression_settings(compression))
        with ExitStack() as stack:
            stack.enter_context(instance_attribute(accelerator, "ddp_handler", handler))
            for name, value in settings.items():
                stack.enter_context(instance_attribute(handler, name, value))
            left_alone = NamesOutsideDDP(model)
            stack.enter_context(instance_attribute(model, "_ddp_params_and_buffers_to_ignore", left_alone))
            wrapped = original(model, *args, **kwargs)
        inner = getattr(wrapped, "_orig_mod", wrapped)
        is_trained = not kwargs.get("evaluation_mode") and any(p.requires_grad for p in model.parameters())
        if is_trained and not isinstance(inner, nn.parallel.DistributedDataParallel):
            raise SetupError("accelerate did not wrap the model in DDP.", hint="Load the model anew.")
        if is_trained:
            make_readable(inner, model, handler.find_unused_parameters)
        return wrapped

    def watch_forward(self, wrapped: Any) -> None:
        """Looks for the first forward pass by DDP."""
        if not isinstance(wrapped, ReadableDDP):
            return  # Another strategy, one process, or a compiler around it, which would trace the hook.

        def see(*_: Any) -> None:
            self._is_forward_seen = True
            handle.remove()

        self._is_forward_seen = False
        handle = wrapped.register_forward_pre_hook(see)

    def check_forward(self, step: int) -> None:
        """After a step, and before its weights are saved.

        Raises:
            DivergenceError: Each rank has stepped with its own gradients.
        """
        if not self._is_forward_seen:
            raise DivergenceError(
                f"The forward pass passed by DDP in step {step}: the model that compute_loss is given was not called, "
                "and the ranks' gradients did not meet.",
                hint="Call the model that compute_loss(model, inputs) is given, not self.model or model.module.",
            )

    @contextmanager
    def _progress(self) -> Iterator[None]:
        """Tells the supervisor where this rank is."""
        callback = _progress_callback(self)
        self.trainer.add_callback(callback)
        if self.events is not None:
            self.events.write("training")
        try:
            yield
        except BaseException as error:
            if self.events is not None and not self.preemption.number:
                facts = {"exit_code": _exit_code(error)} if isinstance(error, SystemExit) else {}
                self.events.write("left_training", error=f"{type(error).__name__}: {error}", **facts)
            raise
        finally:
            self.trainer.remove_callback(callback)
        if self.events is not None:
            self.events.write("trained")

    def _may_stop(self) -> bool:
        """Ranks that meet now and then stop where they meet: one more meeting would be another training."""
        sync = self.exchange and self.exchange.sync
        return not sync or not isinstance(self.config.sync, LocalSGD) or sync.are_replicas_equal

    def _report(self, train_s: float) -> None:
        counts = [self.num_steps, self.steps.num_samples, self.steps.num_micro_batches]
        if self.exchange is None:
            sent_bytes = ddp_sent_bytes(self.trainer.model, self.manager, self.num_steps)
        else:
            sent_bytes = None if self.exchange.sync is None else self.exchange.sync.sent_bytes
        rows = self.manager.gather_floats([*counts, train_s, -1 if sent_bytes is None else sent_bytes])
        self.report = RunReport(
            tuple(
                RankReport(rank, int(r[0]), int(r[1]), int(r[2]), r[3], None if r[4] < 0 else int(r[4]))
                for rank, r in enumerate(rows)
            ),
            self.steps.balancer.state_dict(),
        )
        if self.steps.num_micro_batches:
            logger.info("%s", self.report.summary())

    def prove_replicas(self, step: int) -> None:
        """Compares the ranks' weights where it is time, once they are to be equal. Collective."""
        self._is_proof_due = self._is_proof_due or self.replicas.is_due(step)
        if self._is_proof_due and self.are_replicas_equal:
            self.replicas.check(self.trainer.model, step, self.beside_the_model())
            self._is_proof_due = False

    def beside_the_model(self) -> list[tuple[str, Any]]:
        """What the optimizer trains beside the model. An asynchronous server steps on copies of its own on rank 0."""
        return parameters_beside_the_model(self.trainer) if self.config.meets_every_step else []

    def _ask_for_proof(self) -> None:
        self._is_proof_due = self.config.verify_every > 0

    @property
    def are_replicas_equal(self) -> bool:
        """False between two meetings of ranks that step by themselves."""
        return self.exchange is None or self.exchange.sync is None or self.exchange.sync.are_replicas_equal


def _hands_on(method: Callable[..., Any]) -> bool:
    """True if a method calls the one of the same name that it overrides."""
    code = getattr(inspect.unwrap(method), "__code__", None)
    return code is not None and {"super", code.co_name} <= set(code.co_names)


def _exit_code(error: SystemExit) -> int:
    """What Python ends with: the number given, 0 for None, 1 for a text."""
    return error.code if isinstance(error.code, int) else int(error.code is not None)


def _progress_callback(steered: DDPTrainer) -> Any:
    from transformers import TrainerCallback, set_seed

    rank = steered.manager.identity.rank

    class Progress(TrainerCallback):  # type: ignore[misc, unused-ignore]
        def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            steered.watch_forward(steered.trainer.model_wrapped)
            if steered.config.seed_per_rank and rank > 0:
                set_seed(args.seed + rank)

        def on_epoch_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if not steered.num_steps:  # Later ones are told by the loop, which counts passes of a stream, too.
                steered.steps.begin_epoch(int((state.epoch or 0) + 1e-6))

        def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            self._verify_first_step()

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            steered.num_steps += 1
            if steered.num_steps == 1:
                verify_calls(steered.trainer, "step")
            steered.check_forward(state.global_step)
            # The Trainer saves the checkpoint of this step after this.
            steered.prove_replicas(state.global_step)

        def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            verify_calls(steered.trainer, "save")

        def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            self._verify_first_step()
            # What the script saves now is what has been compared; the best checkpoint was loaded a moment ago.
            if steered.replicas.is_unchecked(state.global_step, is_reloaded=args.load_best_model_at_end):
                steered.replicas.check(steered.trainer.model, state.global_step, steered.beside_the_model())

        def _verify_first_step(self) -> None:
            # Logging and saving come behind `on_step_end`.
            if steered.num_steps == 1:
                verify_calls(steered.trainer, "step end")

    return Progress()
