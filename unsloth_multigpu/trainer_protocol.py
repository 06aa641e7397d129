"""Protocols of a Trainer and its objects, with the members that this package uses.

mypy reports the use of any other member. Replaced methods and their parameters are in `seam.SEAMS`. A contract test
compares all members with the trainers of transformers and TRL.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Protocol


class ArgumentsLike(Protocol):
    """`transformers.TrainingArguments`."""

    _n_gpu: int
    auto_find_batch_size: bool
    average_tokens_across_devices: bool
    batch_eval_metrics: bool
    dataloader_drop_last: bool
    ddp_backend: str | None
    ddp_find_unused_parameters: bool | None
    ddp_timeout: int
    device: Any  # torch.device
    eval_do_concat_batches: bool
    gradient_accumulation_steps: Any  # int; for one call of compute_loss the feed sets a float.
    gradient_checkpointing: bool
    ignore_data_skip: bool
    length_column_name: str
    load_best_model_at_end: bool
    logging_nan_inf_filter: bool
    logging_steps: float
    max_grad_norm: float
    max_steps: int
    n_gpu: int
    num_train_epochs: float
    optim: Any  # OptimizerNames, equal to its text
    output_dir: str
    per_device_eval_batch_size: int
    per_device_train_batch_size: int
    process_index: int
    push_to_hub: bool
    eval_strategy: str
    eval_on_start: bool
    save_strategy: Any  # SaveStrategy, equal to its text
    save_total_limit: int | None
    seed: int
    should_save: bool
    use_cpu: bool
    world_size: int


class OptionalArguments(ArgumentsLike, Protocol):
    """Arguments that only some of TRL's trainers or versions have."""

    fsdp: Any
    fsdp_config: Any  # dict, a file's name, or None
    loss_type: Any  # DPO: list of texts
    steps_per_generation: int | None  # GRPO, RLOO
    use_vllm: bool  # GRPO, RLOO
    vllm_mode: str  # GRPO, RLOO


class StateLike(Protocol):
    """`transformers.TrainerState`."""

    best_global_step: int | None
    best_model_checkpoint: str | None
    epoch: float  # None before the first training
    global_step: int
    max_steps: int
    stateful_callbacks: dict[str, Any]

    def save_to_json(self, json_path: str) -> None: ...


class ControlLike(Protocol):
    """`transformers.TrainerControl`."""

    should_epoch_stop: bool
    should_evaluate: bool
    should_log: bool
    should_save: bool
    should_training_stop: bool


class CallbackHandlerLike(Protocol):
    """`transformers.trainer_callback.CallbackHandler`."""

    callbacks: list[Any]
    eval_dataloader: Any
    train_dataloader: Any

    def remove_callback(self, callback: Any) -> None: ...
    def on_save(self, args: ArgumentsLike, state: StateLike, control: ControlLike) -> Any: ...
    def on_evaluate(self, args: ArgumentsLike, state: StateLike, control: ControlLike, metrics: Any) -> Any: ...


class AcceleratorLike(Protocol):
    """`accelerate.Accelerator`."""

    _models: list[Any]
    dataloader_config: Any
    ddp_handler: Any
    distributed_type: Any
    gradient_state: Any
    mixed_precision: str
    num_processes: int
    scaler: Any
    sync_gradients: bool
    use_seedable_sampler: bool

    def autocast(self) -> AbstractContextManager[Any]: ...
    def backward(self, loss: Any) -> None: ...
    def no_sync(self, model: Any) -> AbstractContextManager[Any]: ...
    def gather(self, tensor: Any) -> Any: ...
    def gather_for_metrics(self, input_data: Any) -> Any: ...


class TrainerLike(Protocol):
    """`transformers.Trainer` or a subclass. A model and its optimizer may be anything, None between trainings."""

    _globalstep_last_logged: int
    _train_batch_size: int
    accelerator: AcceleratorLike
    args: ArgumentsLike
    callback_handler: CallbackHandlerLike
    compute_loss_func: Callable[..., Any] | None
    control: ControlLike
    current_gradient_accumulation_steps: int
    data_collator: Any
    eval_dataset: Any
    gather_function: Callable[..., Any]
    is_deepspeed_enabled: bool
    is_fsdp_enabled: bool
    is_in_train: bool
    label_smoother: Any
    model: Any
    model_accepts_loss_kwargs: bool
    model_wrapped: Any
    optimizer: Any
    state: StateLike
    train: Callable[..., Any]
    train_dataset: Any

    def _prepare_inputs(self, inputs: Any) -> Any: ...
    def add_callback(self, callback: Any) -> None: ...
    def create_optimizer(self) -> Any: ...
    def get_batch_samples(self, epoch_iterator: Any, num_batches: int, device: Any) -> Any: ...
    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Any: ...
    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any: ...
    def _save_checkpoint(self, model: Any, trial: Any) -> None: ...
    def _maybe_log_save_evaluate(self, tr_loss: Any, grad_norm: Any, model: Any, trial: Any, *args: Any) -> None: ...
    def _load_rng_state(self, checkpoint: str) -> None: ...
    def _get_output_dir(self, trial: Any) -> str: ...


class OptionalTrainer(TrainerLike, Protocol):
    """Members that only some trainers or versions have. Cast to it after `hasattr`."""

    _buffered_inputs: list[dict[str, Any]] | None  # GRPO, RLOO: the micro-batches of a generation
    _step: int  # calls of training_step
    processing_class: Any

    def _push_from_checkpoint(self, checkpoint_folder: str) -> None: ...
    def _rotate_checkpoints(self, use_mtime: bool, output_dir: str) -> None: ...
