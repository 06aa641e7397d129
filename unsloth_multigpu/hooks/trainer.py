"""Seams of the Trainer: how a training starts, and what its arguments mean for several ranks."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, cast
from weakref import WeakKeyDictionary

from unsloth_multigpu.accelerator import CPU_BACKEND
from unsloth_multigpu.errors import SetupError
from unsloth_multigpu.logs import get_logger
from unsloth_multigpu.options import MultiGPUConfig
from unsloth_multigpu.patching import Patch
from unsloth_multigpu.step.generation import (
    GenerationShape,
    arguments_of_one_process,
    divide_generation,
    divided_arguments,
)
from unsloth_multigpu.trainer_protocol import ArgumentsLike, OptionalArguments, TrainerLike

if TYPE_CHECKING:
    from unsloth_multigpu.group.manager import DDPManager
    from unsloth_multigpu.step.one_process import EvaluationLoaders
    from unsloth_multigpu.step.share import Share

logger = get_logger(__name__)

_SUPPORTS = "transformers>=4.57,<6"
_DEFAULT_DDP_TIMEOUT_S = 1800
# Arguments whose `__init__`, as Unsloth writes it anew, raises the batch by the number of processes.
_RAISED_BY_UNSLOTH = (
    "trl.trainer.grpo_config:GRPOConfig.__init__",
    "trl.trainer.rloo_config:RLOOConfig.__init__",
    "trl.experimental.sdft.sdft_config:SDFTConfig.__init__",
)
# Of arguments that were divided: what each was. Plain numbers, because they are pickled with a checkpoint.
_DIVIDED = "_unsloth_multigpu_divided"
# What replaces `Trainer.train`: gets the trainer, its bound original `train`, and the arguments which that reads
# when it is called.
RunTraining = Callable[[TrainerLike, Callable[[], Any], dict[str, Any]], Any]


def trainer_patches(
    config: MultiGPUConfig,
    world_size: int,
    device_type: str,
    run: RunTraining,
    get_manager: Callable[[], DDPManager],
    notice: Callable[[], None] = lambda: None,
    adjust: Callable[[ArgumentsLike], None] = lambda _: None,
) -> list[Patch]:
    """Patches of `transformers.Trainer` and `TrainingArguments`.

    Args:
        config: The run's options.
        world_size: Ranks of the run.
        device_type: "cuda", "xpu" or "cpu".
        get_manager: Gives the manager, which opens the group of CPU ranks and gathers an evaluation's metrics.
        notice: Called where a training begins.
        adjust: Called with new `TrainingArguments` before they check themselves.
        run: Called with the trainer, its bound original `train` and the arguments that it will read, in place of
            `train`.
    """
    get_loaders = functools.cache(_make_loaders)  # Behind the import of torch.
    evaluation = Patch(
        target="transformers.trainer:Trainer.evaluation_loop",
        supports=_SUPPORTS,
        wrap=functools.partial(_evaluated_by_batch, get_manager, get_loaders),
        reason="Losses and predictions of an evaluation are those of one process: each batch counts for itself.",
    )
    beginning = Patch(
        target="transformers.trainer_callback:CallbackHandler.on_train_begin",
        supports=_SUPPORTS,
        wrap=functools.partial(_noticed_beginning, notice),
        reason="A training that does not come by Trainer.train would be another one on each rank, without a word.",
    )
    search = Patch(
        target="transformers.trainer:Trainer.hyperparameter_search",
        supports=_SUPPORTS,
        wrap=_refused_search,
        reason="Of several ranks one would choose the trials, and the others wait for it without a limit.",
    )
    loader = Patch(
        target="transformers.trainer:Trainer.get_train_dataloader",
        supports=_SUPPORTS,
        wrap=functools.partial(_loader_of_one_process, world_size),
        reason="Outside a training its length is that of one process: scripts count the steps of a schedule by it.",
    )
    loaders = [loader, *_evaluation_loader_patches(world_size, get_loaders)]
    as_given = Patch(
        target="transformers.training_args:TrainingArguments.to_dict",
        supports=_SUPPORTS,
        wrap=_given_arguments,
        reason="Arguments that are built from those of GRPO or RLOO would be divided by the ranks a second time.",
    )
    return [
        Patch(
            target="transformers.trainer:Trainer.train",
            supports=_SUPPORTS,
            wrap=functools.partial(_steered_train, run),
            reason="DDPTrainer chooses the samples of each step and steers DDP around the original loop.",
        ),
        *([evaluation, beginning, search] if world_size > 1 else []),
        *([*loaders, as_given] if world_size > 1 and config.keeps_global_batch else []),
        *(_raised_argument_patches() if world_size > 1 else []),
        Patch(
            target="transformers.training_args:TrainingArguments.__post_init__",
            supports=_SUPPORTS,
            wrap=functools.partial(_adjusted_arguments, config, world_size, device_type, get_manager, adjust),
            reason="Options of the one line that are arguments of the Trainer; batches that TRL checks at once.",
        ),
    ]


def _evaluation_loader_patches(world_size: int, get_loaders: Callable[[], EvaluationLoaders]) -> list[Patch]:
    built = [
        Patch(
            target=target,
            supports=_SUPPORTS,
            wrap=functools.partial(_whole_for_readers, world_size, get_loaders),
            reason="A script that reads it gets the batches of one process; the evaluation loop divides them.",
        )
        for target in (
            "transformers.trainer:Trainer.get_eval_dataloader",
            "transformers.trainer:Trainer.get_test_dataloader",
        )
    ]
    older = Patch(
        target="transformers.trainer:Trainer.prediction_loop",
        supports=_SUPPORTS,
        wrap=functools.partial(_divided_for_loop, get_loaders),
        reason="The loop of use_legacy_prediction_loop takes a rank's share, as evaluation_loop does.",
        optional=True,
    )
    gathering = Patch(
        target="accelerate.accelerator:Accelerator.gather_for_metrics",
        supports="accelerate>=1.4",
        wrap=functools.partial(_alone_over_whole_rows, get_loaders),
        reason="A script's own loop over such a loader has all rows on each rank: those of the others are copies.",
    )
    return [*built, older, gathering]


def _raised_argument_patches() -> list[Patch]:
    return [
        Patch(
            target=target,
            supports="unsloth>=2026.10.7",
            wrap=_told_world_size(1),
            reason="Unsloth raises the batch to num_generations, where that is needed, by the processes that it sees; "
            "what one process has is divided by the ranks.",
            optional=True,
            after="unsloth.models.llama",
        )
        for target in _RAISED_BY_UNSLOTH
    ]


@contextmanager
def _told_world_size(world_size: int) -> Iterator[None]:
    """What WORLD_SIZE says meanwhile, where it is set."""
    before = os.environ.get("WORLD_SIZE")
    if before is None:
        yield
        return
    os.environ["WORLD_SIZE"] = str(world_size)
    try:
        yield
    finally:
        os.environ["WORLD_SIZE"] = before


def followed_train_patch(is_followed: Callable[[], bool]) -> Patch:
    """The patch of a program that `unsloth-multigpu verify` runs, below those of `trainer_patches`.

    Args:
        is_followed: True where the training is recorded, and ended after the steps that were asked for.
    """
    return Patch(
        target="transformers.trainer:Trainer.train",
        supports=_SUPPORTS,
        wrap=functools.partial(_followed_train, is_followed),
        reason="A training that verify does not follow would run to its end, over what the user has saved.",
    )


def unsteered_train_patch(is_lone: Callable[[], bool]) -> Patch:
    """The patch of a process in which the line has done nothing, because multiprocessing has started it.

    Args:
        is_lone: True where `enable_multi_gpu` is in effect after all, and in a process that is not a rank.
    """
    return Patch(
        target="transformers.trainer:Trainer.train",
        supports=_SUPPORTS,
        wrap=functools.partial(_unsteered_train, is_lone),
        reason="A rank that multiprocessing started, and that the line took for a helper, would train by itself.",
        optional=True,
    )


def _unsteered_train(is_lone: Callable[[], bool], original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def train(self: TrainerLike, *args: Any, **kwargs: Any) -> Any:
        if not is_lone():
            raise SetupError(
                "multiprocessing has started this process as a rank, and enable_multi_gpu() is not in effect: it was "
                "called while the script was imported, or before the variables of the rank were set.",
                hint="Call it in the function that multiprocessing starts, once RANK, LOCAL_RANK, WORLD_SIZE, "
                "MASTER_ADDR and MASTER_PORT are set; or start the script with `python train.py` and without spawn.",
            )
        return original(self, *args, **kwargs)

    return train


def _followed_train(is_followed: Callable[[], bool], original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def train(*args: Any, **kwargs: Any) -> Any:
        if not is_followed():
            raise SetupError(
                "verify cannot follow this training and does not begin it: enable_multi_gpu() is not in effect.",
                hint="Let the script call it on every way to train(), or take it out: verify then does it.",
            )
        return original(*args, **kwargs)

    return train


def _steered_train(run: RunTraining, original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def train(self: TrainerLike, resume_from_checkpoint: Any = None, *args: Any, **kwargs: Any) -> Any:
        trial = args[0] if args else kwargs.get("trial")
        arguments = {"resume_from_checkpoint": resume_from_checkpoint, "trial": trial}

        def bound() -> Any:
            return original(self, arguments["resume_from_checkpoint"], *args, **kwargs)

        return run(self, bound, arguments)

    return train


def _noticed_beginning(notice: Callable[[], None], original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def on_train_begin(*args: Any, **kwargs: Any) -> Any:
        notice()
        return original(*args, **kwargs)

    return on_train_begin


def _loader_of_one_process(world_size: int, original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def get_train_dataloader(self: TrainerLike, *args: Any, **kwargs: Any) -> Any:
        from unsloth_multigpu.step.one_process import batches_of_one_process, is_being_dealt
        from unsloth_multigpu.train.trainer import counts_as_one_process

        is_asked_aside = not is_being_dealt(self) and counts_as_one_process(self, world_size)
        with batches_of_one_process(self) if is_asked_aside else nullcontext():
            return original(self, *args, **kwargs)

    return get_train_dataloader


def _make_loaders() -> EvaluationLoaders:
    from unsloth_multigpu.step.one_process import EvaluationLoaders

    return EvaluationLoaders()


def _whole_for_readers(
    world_size: int, get_loaders: Callable[[], EvaluationLoaders], original: Callable[..., Any]
) -> Callable[..., Any]:
    @functools.wraps(original)
    def get_dataloader(self: TrainerLike, *args: Any, **kwargs: Any) -> Any:
        from unsloth_multigpu.train.trainer import counts_as_one_process

        is_whole = counts_as_one_process(self, world_size)
        with get_loaders().building(self) if is_whole else nullcontext():
            return original(self, *args, **kwargs)

    return get_dataloader


def _alone_over_whole_rows(
    get_loaders: Callable[[], EvaluationLoaders], original: Callable[..., Any]
) -> Callable[..., Any]:
    @functools.wraps(original)
    def gather_for_metrics(self: Any, input_data: Any, *args: Any, **kwargs: Any) -> Any:
        is_whole = get_loaders().is_whole(self.gradient_state.active_dataloader)
        return input_data if is_whole else original(self, input_data, *args, **kwargs)

    return gather_for_metrics


def _divided_for_loop(get_loaders: Callable[[], EvaluationLoaders], original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def prediction_loop(self: TrainerLike, dataloader: Any, *args: Any, **kwargs: Any) -> Any:
        return original(self, get_loaders().divided(dataloader), *args, **kwargs)

    return prediction_loop


def _refused_search(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def hyperparameter_search(*args: Any, **kwargs: Any) -> Any:
        raise SetupError(
            "hyperparameter_search on several ranks: its trials are chosen by one process.",
            hint="Set num_gpus=1, or let a study of your own start one run of all ranks for each trial.",
        )

    return hyperparameter_search


def _evaluated_by_batch(
    get_manager: Callable[[], DDPManager],
    get_loaders: Callable[[], EvaluationLoaders],
    original: Callable[..., Any],
) -> Callable[..., Any]:
    # Workers of a loader may live as long as it. A share is of one trainer and one manager.
    shares: WeakKeyDictionary[Any, tuple[TrainerLike, DDPManager, Share | None]] = WeakKeyDictionary()

    def share_of_rank(trainer: TrainerLike, loader: Any) -> Share | None:
        from torch.utils.data import DataLoader

        from unsloth_multigpu.step.share import share_of

        if not isinstance(loader, DataLoader):
            return None
        manager, found = get_manager(), shares.get(loader)
        if found is None or found[0] is not trainer or found[1] is not manager:
            share = share_of(trainer, manager, loader, is_whole=get_loaders().is_whole(loader))
            found = shares[loader] = (trainer, manager, share)
        return found[2]

    @functools.wraps(original)
    def evaluation_loop(self: TrainerLike, dataloader: Any, *args: Any, **kwargs: Any) -> Any:
        from unsloth_multigpu.train.evaluation import Evaluation

        if self.is_fsdp_enabled and not self.is_in_train:
            from unsloth_multigpu.shard.sharding import check_is_placed

            check_is_placed(self)
        counts = self.args.average_tokens_across_devices
        # Else a batch's loss is divided by the tokens of all ranks' batches and multiplied by the number of ranks, also
        # where the model divides by its own.
        self.args.average_tokens_across_devices = False
        share = share_of_rank(self, dataloader)
        try:
            if share is None:
                return original(self, get_loaders().divided(dataloader), *args, **kwargs)
            cuts_last = self.gather_function != self.accelerator.gather
            evaluation = Evaluation(self, get_manager(), share, cuts_last=cuts_last)
            with evaluation.on_trainer():
                output = original(self, share.loader, *args, **kwargs)
            return evaluation.completed(output)
        finally:
            self.args.average_tokens_across_devices = counts
            # What callbacks read, in on_evaluate too.
            self.callback_handler.eval_dataloader = dataloader

    return evaluation_loop


def _adjusted_arguments(
    config: MultiGPUConfig,
    world_size: int,
    device_type: str,
    get_manager: Callable[[], DDPManager],
    adjust: Callable[[ArgumentsLike], None],
    original: Callable[..., None],
) -> Callable[..., None]:
    @functools.wraps(original)
    @_told_world_size(world_size)  # Here transformers has accelerate read the rank.
    def __post_init__(self: ArgumentsLike) -> None:
        from unsloth_multigpu.group.manager import sends_over_host

        adjust(self)
        if world_size > 1:
            # transformers has accelerate open the group, which would not name a missing rank.
            get_manager().meet_ranks()
        if config.device == "cpu":
            self.use_cpu = True
        if world_size > 1 and device_type == "cpu":
            # Without it accelerate sees no device to distribute over, and every rank trains for itself.
            self.use_cpu = True
            # Here transformers has accelerate open the group, on the CPU without a timeout.
            get_manager().open_group()
        if config.batch_size_per_gpu is not None:
            self.per_device_train_batch_size = config.batch_size_per_gpu
        if world_size > 1 and sends_over_host():
            self.ddp_backend = CPU_BACKEND
        if self.ddp_timeout == _DEFAULT_DDP_TIMEOUT_S:
            self.ddp_timeout = int(config.timeout_s) or 1
        if config.shard == "on" and world_size > 1:
            from unsloth_multigpu.hooks.shard import ask_accelerate_to_shard

            ask_accelerate_to_shard(self, offload=config.shard_offload)
            if config.shard_offload:
                # Here transformers has accelerate open the group, without a way to send what lies in the host's memory.
                get_manager().open_group()
        if config.keeps_global_batch and world_size > 1 and hasattr(self, "steps_per_generation"):
            _divide_generation_batch(cast(OptionalArguments, self), world_size, get_manager)
        original(self)
        if world_size == 1 and self.n_gpu > 1:
            # transformers would make batches larger and cut them by nn.DataParallel. One rank has one device, and the
            # legacy path cuts batches itself.
            self._n_gpu = 1

    return __post_init__


def _given_arguments(original: Callable[..., dict[str, Any]]) -> Callable[..., dict[str, Any]]:
    @functools.wraps(original)
    def to_dict(self: ArgumentsLike, *args: Any, **kwargs: Any) -> dict[str, Any]:
        return arguments_of_one_process(original(self, *args, **kwargs), getattr(self, _DIVIDED, {}))

    return to_dict


def _divide_generation_batch(args: OptionalArguments, world_size: int, get_manager: Callable[[], DDPManager]) -> None:
    """Keeps the global batch of trainers that generate their own samples (GRPO, RLOO): they deal it to ranks.

    Raises:
        ConfigError: The ranks cannot share the completions evenly.
    """
    batch, accumulation = args.per_device_train_batch_size, args.gradient_accumulation_steps
    asked = args.steps_per_generation
    # Not in every version of TRL.
    num_generated = getattr(args, "generation_batch_size", None)
    if num_generated is not None and (asked is not None or num_generated % batch):
        return  # TRL refuses it, with one process as well.
    steps = asked or (accumulation if num_generated is None else num_generated // batch)
    one = GenerationShape(batch, accumulation, steps)
    mine = divide_generation(one, world_size, getattr(args, "num_generations", None) or 1)
    args.per_device_train_batch_size, args.gradient_accumulation_steps = mine.batch, mine.accumulation
    args.steps_per_generation = None if asked is None else mine.generation_steps
    setattr(args, _DIVIDED, divided_arguments(one, mine))
    if get_manager().identity.rank == 0:
        logger.info(
            "completions per step: %d = %d ranks x %d completions x %d accumulation",
            batch * accumulation,
            world_size,
            mine.batch,
            mine.accumulation,
        )
        if parts := _means_of_micro_batches(args, is_same_batch=mine.batch == batch):
            logger.warning(
                "%s: it is a mean over the micro-batches that the ranks compute at once, which are %d x %d completions "
                "and not %d; other tokens are averaged together than on one GPU",
                " and ".join(parts),
                world_size,
                mine.batch,
                batch,
            )


def _means_of_micro_batches(args: OptionalArguments, *, is_same_batch: bool) -> list[str]:
    """Options of TRL whose meaning depends on the shape of a micro-batch, as they were given."""
    given = {
        "loss_type": ("bnpo", getattr(args, "loss_type", None) == "bnpo" and not is_same_batch),
        "entropy_coef": (
            getattr(args, "entropy_coef", 0),
            bool(getattr(args, "entropy_coef", 0)) and not is_same_batch,
        ),
        # Its limit is found among the tokens of all ranks.
        "top_entropy_quantile": (
            getattr(args, "top_entropy_quantile", 1),
            getattr(args, "top_entropy_quantile", 1) < 1,
        ),
    }
    return [f"{name}={value!r}" for name, (value, is_affected) in given.items() if is_affected]
