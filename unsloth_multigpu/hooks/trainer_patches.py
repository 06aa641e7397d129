"""Patches of the Trainer: the start of a training, its evaluations and loaders, and its arguments on several ranks."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from unsloth_multigpu.accelerator import CPU_BACKEND
from unsloth_multigpu.errors import SetupError
from unsloth_multigpu.logs import get_logger
from unsloth_multigpu.part import ArgumentsLike, TrainerLike
from unsloth_multigpu.patching import Patch

if TYPE_CHECKING:
    from unsloth_multigpu.deal.share import EvaluationLoaders
    from unsloth_multigpu.session import Session

logger = get_logger(__name__)

_SUPPORTS = "transformers>=4.57,<6"
_TRAINER = "transformers.trainer:Trainer"
_DEFAULT_DDP_TIMEOUT_S = 1800
# Argument classes for which Unsloth generates an `__init__` that multiplies the batch by the number of processes.
_MULTIPLIED_BY_UNSLOTH = (
    "trl.trainer.grpo_config:GRPOConfig.__init__",
    "trl.trainer.rloo_config:RLOOConfig.__init__",
    "trl.experimental.sdft.sdft_config:SDFTConfig.__init__",
)
# Subclasses of TrainingArguments that drop the last batch on several ranks; the name depends on the version.
_DROPS_LAST_BATCH = (
    "sentence_transformers.base.training_args:BaseTrainingArguments.__post_init__",
    "sentence_transformers.training_args:SentenceTransformerTrainingArguments.__post_init__",
)
# Attribute with the values before the division. Only plain numbers: a checkpoint pickles them.
_DIVIDED = "_unsloth_multigpu_divided"


@dataclass(eq=False)
class TrainerHooks:
    """Replacements for methods of `transformers.Trainer` and of `TrainingArguments`, in one session."""

    session: Session

    def patches(self) -> list[Patch]:
        """Returns all patches of the Trainer, which every process gets."""
        server, has_ranks = self.session.server, self._world_size > 1
        # In it, accelerate reads the rank and the number of ranks.
        adjusted = functools.partial(_with_world_size, self._world_size, self._adjusted_arguments)
        reason = "Sets arguments that are options of enable_multi_gpu(), and divides batches before TRL checks them."
        return [
            Patch(f"{_TRAINER}.train", _SUPPORTS, self._steered_train),
            *(self._patches_of_ranks() if has_ranks else []),
            Patch("transformers.training_args:TrainingArguments.__post_init__", _SUPPORTS, adjusted, reason),
            *([] if server is None else [server.patch()]),
        ]

    @property
    def _world_size(self) -> int:
        return self.session.identity.world_size

    def _patches_of_ranks(self) -> list[Patch]:
        as_one = functools.partial(_with_world_size, 1)
        reason = "Keeps Unsloth from multiplying the batch by the number of processes: ranks share that of one process."
        patch = functools.partial(Patch, wrap=as_one, reason=reason, optional=True, after="unsloth.models.llama")
        return [
            Patch(f"{_TRAINER}.evaluation_loop", _SUPPORTS, self._evaluated_by_batch),
            Patch("transformers.trainer_callback:CallbackHandler.on_train_begin", _SUPPORTS, self._noticed_beginning),
            Patch(f"{_TRAINER}.hyperparameter_search", _SUPPORTS, _refused_search),
            *(self._patches_of_loaders() if self.session.config.keeps_global_batch else []),
            *(patch(target, "unsloth>=2026.10.7") for target in _MULTIPLIED_BY_UNSLOTH),
        ]

    def _patches_of_loaders(self) -> list[Patch]:
        """Returns patches that are needed if a step has the samples of one process."""
        makers = (f"{_TRAINER}.get_{name}_dataloader" for name in ("train", "eval", "test"))
        gather = "accelerate.accelerator:Accelerator.gather_for_metrics"
        return [
            *(Patch(target, _SUPPORTS, self._undivided) for target in makers),
            Patch(gather, "accelerate>=1.4", self._gather_nothing),
            Patch("transformers.training_args:TrainingArguments.to_dict", _SUPPORTS, _given_arguments),
            *(Patch(t, "sentence-transformers>=3", _keeps_last_batch, optional=True) for t in _DROPS_LAST_BATCH),
        ]

    @functools.cached_property
    def _loaders(self) -> EvaluationLoaders:
        from unsloth_multigpu.deal.share import EvaluationLoaders  # It imports torch.

        return EvaluationLoaders()

    def _steered_train(
        self,
        original: Callable[..., Any],
        trainer: TrainerLike,
        /,
        resume_from_checkpoint: Any = None,
        *args: Any,
        **kw: Any,
    ) -> Any:
        """Runs the original loop with this package's parts, which choose the samples of each step and steer DDP."""
        arguments = {"resume_from_checkpoint": resume_from_checkpoint, "trial": args[0] if args else kw.get("trial")}

        def bound() -> Any:
            return original(trainer, arguments["resume_from_checkpoint"], *args, **kw)

        return self.session.run_training(trainer, bound, arguments)

    def _noticed_beginning(self, original: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """Detects a training that bypasses Trainer.train, in which every rank would silently train by itself."""
        self.session.notice_training()
        return original(*args, **kwargs)

    def _undivided(self, original: Callable[..., Any], trainer: TrainerLike, /, *args: Any, **kw: Any) -> Any:
        """Gives a script that asks for a loader the batches of one process. Trainings and evaluations divide them."""
        from unsloth_multigpu.deal.one_process import is_being_dealt
        from unsloth_multigpu.train.trainer import gets_batches_of_one_process

        is_whole = not is_being_dealt(trainer) and gets_batches_of_one_process(trainer, self._world_size)
        with self._loaders.building(trainer) if is_whole else nullcontext():
            return original(trainer, *args, **kw)

    def _gather_nothing(
        self, original: Callable[..., Any], accelerator: Any, /, input_data: Any, *args: Any, **kwargs: Any
    ) -> Any:
        """Gathers nothing in a script's own loop over an evaluation loader: each rank has all rows."""
        is_whole = self._loaders.is_whole(accelerator.gradient_state.active_dataloader)
        return input_data if is_whole else original(accelerator, input_data, *args, **kwargs)

    def _evaluated_by_batch(
        self, original: Callable[..., Any], trainer: TrainerLike, /, dataloader: Any, *args: Any, **kwargs: Any
    ) -> Any:
        """Makes an evaluation compute the losses and predictions of one process, batch by batch."""
        from unsloth_multigpu.train.evaluation import Evaluation

        counts = trainer.args.average_tokens_across_devices
        # Otherwise the loss of a batch is divided by the tokens of all ranks' batches and multiplied by the number of
        # ranks, even if the model divides it by the tokens of the batch.
        trainer.args.average_tokens_across_devices = False
        manager = self.session.manager()
        share = self._loaders.share(trainer, manager, dataloader)
        try:
            if share is None:
                return original(trainer, self._loaders.divided(dataloader), *args, **kwargs)
            return Evaluation(trainer, manager, share).run(lambda loader: original(trainer, loader, *args, **kwargs))
        finally:
            trainer.args.average_tokens_across_devices = counts
            # Callbacks read it, also in on_evaluate.
            trainer.callback_handler.eval_dataloader = dataloader

    def _adjusted_arguments(self, original: Callable[..., None], arguments: ArgumentsLike, /) -> None:
        from unsloth_multigpu.group.manager import local_device, sends_over_host

        session, config, has_ranks = self.session, self.session.config, self._world_size > 1
        session.tool.adjust_arguments(arguments)
        if session.server is not None:
            session.server.set_address(arguments)
        if has_ranks:
            # accelerate opens the process group next, and its error would not name a missing rank.
            session.manager().meet_ranks()
        if config.device == "cpu":
            arguments.use_cpu = True
        if has_ranks and local_device(session.identity, config).type == "cpu":
            # Without it accelerate finds no device, and every rank trains by itself.
            arguments.use_cpu = True
            # accelerate would open the process group next, for the CPU without a timeout.
            session.manager().open_group()
        if config.batch_size_per_gpu is not None:
            arguments.per_device_train_batch_size = config.batch_size_per_gpu
        if has_ranks and sends_over_host():
            arguments.ddp_backend = CPU_BACKEND
        if arguments.ddp_timeout == _DEFAULT_DDP_TIMEOUT_S:
            arguments.ddp_timeout = int(config.timeout_s) or 1
        if config.shard == "on" and has_ranks:
            from unsloth_multigpu.hooks.shard import ask_accelerate_to_shard

            ask_accelerate_to_shard(arguments, offload=config.shard_offload)
            if config.shard_offload:
                # accelerate would open the process group next, without a backend for tensors in host memory.
                session.manager().open_group()
        if config.keeps_global_batch and has_ranks and hasattr(arguments, "steps_per_generation"):
            from unsloth_multigpu.deal.generation import divide_arguments

            identity = session.identity
            setattr(arguments, _DIVIDED, divide_arguments(arguments, identity.world_size, identity.rank))
        original(arguments)
        if not has_ranks and arguments.n_gpu > 1:
            # Otherwise transformers uses nn.DataParallel. A rank has one device, and `legacy` divides batches itself.
            arguments._n_gpu = 1


def _with_world_size(world_size: int, call: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    """Calls a function with this value of the environment variable WORLD_SIZE, if the variable is set."""
    from accelerate.utils import patch_environment

    with patch_environment(WORLD_SIZE=world_size) if "WORLD_SIZE" in os.environ else nullcontext():
        return call(*args, **kwargs)


def followed_train_patch(is_followed: Callable[[], bool]) -> Patch:
    """Returns the patch that stops a training which `unsloth-multigpu verify` does not record."""
    error = SetupError(
        "verify cannot record this training, and so refuses it: enable_multi_gpu() is not in effect.",
        hint="Call it in the script before every train(), or not at all: verify then calls it.",
    )
    reason = "Refuses a training that verify does not record: it would run to its end and overwrite saved files."
    return Patch(f"{_TRAINER}.train", _SUPPORTS, functools.partial(_refused_unless, is_followed, error), reason)


def unsteered_train_patch(is_allowed: Callable[[], bool]) -> Patch:
    """Returns the patch for a process that multiprocessing has started, in which `enable_multi_gpu` did nothing.

    Args:
        is_allowed: Returns True if `enable_multi_gpu` is in effect by now, or the process is not a rank.
    """
    error = SetupError(
        "multiprocessing has started this process as a rank, and enable_multi_gpu() is not in effect: it was called "
        "while the script was imported, or before the variables of the rank were set.",
        hint="Call it in the function that multiprocessing starts, after RANK, LOCAL_RANK, WORLD_SIZE, MASTER_ADDR and "
        "MASTER_PORT are set; or start the script with `python train.py` and without spawn.",
    )
    reason = "Refuses the training of a rank that was taken for a helper process: it would train by itself."
    refused = functools.partial(_refused_unless, is_allowed, error)
    return Patch(f"{_TRAINER}.train", _SUPPORTS, refused, reason, optional=True)


def _refused_unless(
    is_allowed: Callable[[], bool], error: SetupError, original: Callable[..., Any], /, *args: Any, **kwargs: Any
) -> Any:
    if not is_allowed():
        raise error.with_traceback(None)  # A second call raises it again.
    return original(*args, **kwargs)


def _refused_search(original: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    """Refuses a search: one rank would choose the trials, and the others would wait for it forever."""
    raise SetupError(
        "hyperparameter_search does not work on several ranks: only one process chooses the trials.",
        hint="Set num_gpus=1, or write a search that starts one run with all ranks for each trial.",
    )


def _keeps_last_batch(original: Callable[..., None], /, self: ArgumentsLike) -> None:
    """Keeps the last batch. The original drops it on several ranks, and a training would have fewer steps."""
    is_dropped = self.dataloader_drop_last
    original(self)
    self.dataloader_drop_last = is_dropped


def _given_arguments(
    original: Callable[..., dict[str, Any]], /, self: ArgumentsLike, *args: Any, **kwargs: Any
) -> dict[str, Any]:
    """Returns the values before the division: arguments built from divided ones would be divided a second time."""
    values = original(self, *args, **kwargs)
    if not (divided := getattr(self, _DIVIDED, None)):
        return values
    from unsloth_multigpu.deal.generation import arguments_of_one_process

    return arguments_of_one_process(values, divided)
