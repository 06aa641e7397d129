"""Counts the memory that a script's training needs, by running its first step on fake tensors, sharded or not.

The model, the collator, the Trainer's `training_step`, the optimizer and torch's `fully_shard` are the real ones.
torch's fake process group stands for the other ranks, and sends nothing.
"""

from __future__ import annotations

import copy
import os
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from unsloth_multigpu.errors import MultiGPUError, SetupError
from unsloth_multigpu.group.model import base_model
from unsloth_multigpu.group.shards import Engine, part_of
from unsloth_multigpu.options import MultiGPUConfig
from unsloth_multigpu.part import generates_samples
from unsloth_multigpu.shard.fake import ByteCounter, fake_memory
from unsloth_multigpu.shard.memory import WITHOUT_FORECAST, MemoryForecast, Mode, StepBytes, Training, forecast_of
from unsloth_multigpu.shard.sharding import check_optimizer, check_versions, layers_of

# At most this many samples are searched for the longest one.
_MAX_SAMPLES = 20_000
_QUANTIZED = ("Params4bit", "Int8Params")
# accelerate's FSDP plugin sets it, and transformers reads it when it loads weights.
_RAM_EFFICIENT_LOADING = "FSDP_CPU_RAM_EFFICIENT_LOADING"


def describe(trainer: Any, config: MultiGPUConfig | None = None, tokens: int | None = None) -> Training:
    """Returns the training that `trainer.train()` would run with these options (None = the defaults).

    `tokens` is the length of the longest sample; None = as in the data set.
    """
    config = config or MultiGPUConfig()
    args, model = trainer.args, trainer.model
    parameters = [*model.parameters()]
    optimizer = str(getattr(args.optim, "value", args.optim))
    if trainer.optimizer is not None:
        optimizer = type(trainer.optimizer).__name__
    why, hint = only_whole = _only_whole(optimizer, config.sequence_parallel)
    num_tokens, source = _max_tokens(trainer, tokens)
    notes = [f"micro-batches of {args.per_device_train_batch_size} x {num_tokens or '?'} tokens ({source})"]
    if why:
        notes.append(f"{why}. {hint}")
    return Training(
        model=type(base_model(model)).__name__,
        num_parameters=sum(map(_numel, parameters)),
        num_trainable=sum(p.numel() for p in parameters if p.requires_grad),
        num_quantised=sum(_numel(p) for p in parameters if type(p).__name__ in _QUANTIZED),
        optimizer=optimizer,
        autocast={"bf16": "bfloat16", "fp16": "float16"}.get(str(trainer.accelerator.mixed_precision), ""),
        checkpointing=bool(args.gradient_checkpointing or getattr(model, "is_gradient_checkpointing", False)),
        rows=args.per_device_train_batch_size,
        tokens=num_tokens,
        accumulation=args.gradient_accumulation_steps,
        keeps_batch=config.keeps_global_batch,
        offload=config.shard_offload,
        num_sharing=config.sequence_parallel,
        only_whole=only_whole,
        notes=tuple(notes),
    )


def _only_whole(optimizer: str, num_sharing: int) -> tuple[str, str]:
    """See `Training.only_whole`."""
    if num_sharing > 1:
        return f"sequence_parallel={num_sharing} keeps weights whole on each rank", "Leave it out to shard them."
    with_unsloth = "unsloth.models._utils" in sys.modules
    try:
        check_versions("torch", "unsloth" if with_unsloth else "transformers")
        check_optimizer(optimizer, Engine.UNSLOTH if with_unsloth else Engine.ACCELERATE)
    except SetupError as error:
        return str(error.args[0]).removesuffix("."), error.hint
    return "", ""


def micro_batch(trainer: Any, training: Training, num_rows: int) -> Any:
    """Returns what the script's collator makes of `num_rows` samples: the longest one, repeated, and the shortest.

    The shortest one makes the collator pad the batch.
    """
    data, collator = trainer.train_dataset, trainer.data_collator
    if hasattr(data, "column_names"):
        data = trainer._remove_unused_columns(data, "training")
    else:
        collator = trainer._get_collator_with_removed_columns(collator, "training")
    longest, shortest = _longest_and_shortest(data)
    longest = _with_tokens(longest, training.tokens)
    return collator([*[longest] * (num_rows - 1), shortest] if num_rows > 1 else [longest])


def _max_tokens(trainer: Any, tokens: int | None) -> tuple[int, str]:
    """Returns the tokens of the longest sample (0 = not known before samples are collated), and where that is from."""
    data = trainer.train_dataset
    if tokens is not None:
        if not _num_tokens(_longest_and_shortest(data)[0]):
            raise SetupError(f"tokens={tokens}, but the samples have no input_ids.", hint="Leave --tokens out.")
        return tokens, "as given"
    num_tokens = _num_tokens(_longest_and_shortest(data)[0]) if _is_indexable(data) else 0
    if not num_tokens:
        return 0, "the first samples, which the collator tokenizes"
    limit = getattr(trainer.args, "max_length", None) or getattr(trainer.args, "max_seq_length", None)
    of = f"the first {_MAX_SAMPLES}" if len(data) > _MAX_SAMPLES else len(data)
    return min(num_tokens, limit or num_tokens), f"the longest of {of} samples"


def _is_indexable(data: Any) -> bool:
    """True if samples can be accessed by index."""
    return hasattr(data, "__len__") and hasattr(data, "__getitem__")


def _num_tokens(sample: Any) -> int:
    ids = sample.get("input_ids") if isinstance(sample, Mapping) else None
    return 0 if ids is None else len(ids)


def _longest_and_shortest(data: Any) -> tuple[Any, Any]:
    """Returns the longest and the shortest sample, or the first two if lengths are not known."""
    if not _is_indexable(data):
        stream = iter(data)
        first = next(stream)
        return first, next(stream, first)
    lengths = [_num_tokens(data[index]) for index in range(min(len(data), _MAX_SAMPLES))]
    if not any(lengths):
        return data[0], data[min(1, len(data) - 1)]
    return data[lengths.index(max(lengths))], data[lengths.index(min(lengths))]


def _with_tokens(sample: Any, num_tokens: int) -> Any:
    """Cuts or repeats the columns of a sample to `num_tokens` tokens."""
    length = _num_tokens(sample)
    if not length or not num_tokens:
        return sample

    def resized(column: Any) -> Any:
        if not hasattr(column, "__len__") or isinstance(column, str) or len(column) != length:
            return column
        return [*column, *(column[i % length] for i in range(num_tokens - length))][:num_tokens]

    return {name: resized(column) for name, column in sample.items()}


def _numel(parameter: Any) -> int:
    """Returns the number of elements before quantization."""
    state = getattr(parameter, "quant_state", None)
    return int(torch.Size(parameter.shape if state is None else state.shape).numel())


def forecasts(trainer: Any, training: Training, cases: Iterable[tuple[Mode, int]]) -> Iterator[MemoryForecast]:
    """Yields the memory of a rank for each mode and number of ranks. Called before the Trainer's `train()`.

    Raises:
        SetupError: The Trainer generates its samples, or its step cannot be run on fake tensors.
    """
    if generates_samples(trainer):
        raise SetupError(
            f"The memory of a {type(trainer).__name__} cannot be forecast, because it generates its samples.",
            hint=WITHOUT_FORECAST,
        )
    counted: dict[tuple[int, int, int | None, int], StepBytes] = {}
    for mode, num_ranks in cases:
        num_rows, accumulation = training.on_ranks(num_ranks)
        is_sharded = mode == "sharded"
        # Gradients exist before the last of several passes, and in DDP's buckets from the second step on.
        num_passes = 2 if accumulation > 1 or (num_ranks > 1 and not is_sharded) else 1
        num_sharing = training.num_sharing if num_ranks > 1 else 1
        key = (num_rows, num_passes, num_ranks if is_sharded else None, num_sharing)
        try:
            if key not in counted:
                counted[key] = count_step(trainer, micro_batch(trainer, training, num_rows), *key[1:])
        except MultiGPUError:
            raise
        except Exception as error:  # From any code of the script or its libraries.
            raise SetupError(
                f"{training.model}: the first step cannot be run on tensors without values: "
                f"{type(error).__name__}: {error}",
                hint=WITHOUT_FORECAST,
            ) from error
        yield forecast_of(counted[key], training, mode, num_ranks)


def count_step(
    trainer: Any, batch: Any, num_passes: int, num_ranks: int | None = None, num_sharing: int = 1
) -> StepBytes:
    """Runs a step of a Trainer on fake tensors and counts the bytes that it allocates.

    Args:
        trainer: A `transformers.Trainer` or subclass, before its `train()`. Its attributes are restored.
        batch: A micro-batch of a rank, from the script's collator.
        num_passes: Number of forward and backward passes. Only the last one is counted.
        num_ranks: Number of ranks over which the model is sharded, as by accelerate; None = not sharded.
        num_sharing: Number of ranks that share each sample. The step is that of the first one.
    """
    device, is_sharded = trainer.args.device, num_ranks is not None
    models = {name: value for name, value in vars(trainer).items() if isinstance(value, nn.Module)}
    with ExitStack() as stack:
        stack.callback(vars(trainer).update, dict(vars(trainer)))
        stack.callback(vars(trainer).clear)
        mesh = None
        if num_ranks is not None:
            stack.callback(os.environ.pop, _RAM_EFFICIENT_LOADING, None)
            from torch.distributed.device_mesh import init_device_mesh

            stack.enter_context(_fake_group(num_ranks))
            mesh = init_device_mesh(device.type, (num_ranks,), mesh_dim_names=("shard",))
        counter = stack.enter_context(fake_memory(device))
        vars(trainer).update(_fake_copies(models, device, is_sharded=is_sharded))
        if trainer.args.gradient_checkpointing:
            # As train() does.
            trainer.model.gradient_checkpointing_enable(trainer.args.gradient_checkpointing_kwargs)
        trainer.model_wrapped = trainer.accelerator.prepare_model(trainer.model, device_placement=False)
        if mesh is not None:
            _shard(trainer, mesh)
        if trainer.optimizer is not None:
            trainer.optimizer = _same_optimizer(trainer.optimizer, models["model"], trainer.model)
        parts = [p for p in trainer.model.parameters() if hasattr(p, "_local_tensor")]
        before = StepBytes(counter.now, sum(map(_num_bytes, parts)), 0, 0, 0, 0)
        if num_sharing > 1:
            batch = stack.enter_context(_sample_sharing(trainer, batch, num_sharing))
        return _count_passes(trainer, batch, counter, before, num_passes)


def _count_passes(trainer: Any, batch: Any, counter: ByteCounter, before: StepBytes, num_passes: int) -> StepBytes:
    """Counts the last of `num_passes` forward and backward passes, and the optimizer step."""
    optimizer, model = trainer.create_optimizer(), trainer.model_wrapped
    without_gradients = counter.now
    (batch,), num_items = trainer.get_batch_samples(iter([batch]), 1, trainer.args.device)
    trainer.current_gradient_accumulation_steps = num_passes
    for number in range(1, num_passes + 1):
        if before.sharded:
            model.set_requires_gradient_sync(number == num_passes)
        if number == num_passes:
            counter.reset_peak()
        trainer.training_step(model, copy.copy(batch), num_items)
    peak = counter.peak - without_gradients
    gradients = sum(_num_bytes(p.grad) for p in trainer.model.parameters() if p.grad is not None)
    optimizer.step()
    held = counter.now
    counter.reset_peak()
    # In the second optimizer step, its states exist already.
    optimizer.step()
    update = counter.peak - held
    kept = [value for state in optimizer.state.values() for value in state.values() if isinstance(value, torch.Tensor)]
    storages = {part_of(tensor).untyped_storage() for tensor in kept}
    states = sum({storage._cdata: storage.nbytes() for storage in storages}.values())
    return replace(before, gradients=gradients, optimizer=states, peak=peak, update=update)


@contextmanager
def _fake_group(num_ranks: int) -> Iterator[None]:
    """Opens a process group of `num_ranks` ranks within the context. Only rank 0 exists, and nothing is sent."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=num_ranks)
    try:
        yield
    finally:
        dist.destroy_process_group()


@contextmanager
def _sample_sharing(trainer: Any, batch: Any, num_ranks: int) -> Iterator[Any]:
    """Within the context, this is the first of `num_ranks` ranks that share each sample. Yields its part of it."""
    from unsloth_multigpu.step.sequence import SharedSequence

    with _fake_group(num_ranks):
        group, _ = dist.new_subgroups(group_size=num_ranks)
        sequence = SharedSequence(trainer.model, group)
        sequence.is_on = True
        with sequence.around(), sequence.part_of(batch) as mine:
            yield mine


def _fake_copies(models: dict[str, nn.Module], device: torch.device, *, is_sharded: bool) -> dict[str, nn.Module]:
    """Copies models, also from the meta device, to fake tensors on `device`. Shared tensors stay shared."""
    made: dict[int, Any] = {}
    for model in models.values():
        for tensor in (*model.parameters(), *model.buffers()):
            if id(tensor) not in made:
                made[id(tensor)] = _fake_copy(tensor, device, is_sharded=is_sharded)
    copies = copy.deepcopy(models, made)
    for module in (module for model in copies.values() for module in model.modules()):
        state = getattr(getattr(module, "weight", None), "quant_state", None)
        if state is not None:
            module.quant_state = state
    return copies


def _fake_copy(tensor: torch.Tensor, device: torch.device, *, is_sharded: bool) -> torch.Tensor:
    """Returns a fake copy of a tensor, as a plain parameter: bitsandbytes' parameter classes cannot be fake."""
    kind = type(tensor).__name__
    if kind == "Params4bit":
        return _quantized_copy(tensor, device, is_sharded=is_sharded)
    if kind == "Int8Params":
        raise SetupError("The memory of 8-bit weights cannot be forecast.", hint=WITHOUT_FORECAST)
    # Not `empty_like`: for a real tensor it returns a real one.
    empty = torch.empty(tensor.shape, dtype=tensor.dtype, device=device)
    return nn.Parameter(empty, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else empty


def _quantized_copy(weight: Any, device: torch.device, *, is_sharded: bool) -> nn.Parameter:
    """Returns a fake copy of a 4-bit weight; if it is to be sharded, in a floating-point dtype, which FSDP2 needs."""
    from bitsandbytes.functional import quantize_4bit

    # Without a `quant_state` the weight is not quantized yet.
    before = weight.quant_state or weight
    data, state = quantize_4bit(
        torch.empty(before.shape, dtype=before.dtype, device=device),
        blocksize=weight.blocksize,
        compress_statistics=weight.compress_statistics,
        quant_type=weight.quant_type,
        quant_storage=before.dtype if is_sharded else weight.quant_storage,
    )
    parameter: Any = nn.Parameter(data, requires_grad=False)
    parameter.quant_state = state
    return parameter  # type: ignore[no-any-return]


def _shard(trainer: Any, mesh: Any) -> None:
    """Shards the model as accelerate does."""
    from accelerate import FullyShardedDataParallelPlugin
    from accelerate.utils.fsdp_utils import fsdp2_prepare_model
    from torch.distributed.fsdp import MixedPrecisionPolicy

    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(str(trainer.accelerator.mixed_precision))
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2,
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=layers_of(trainer.model_wrapped),
        cpu_ram_efficient_loading=False,
        reshard_after_forward=True,
        mixed_precision_policy=None if dtype is None else MixedPrecisionPolicy(dtype, torch.float32),
    )
    accelerator: Any = SimpleNamespace(
        state=SimpleNamespace(fsdp_plugin=plugin),
        torch_device_mesh=mesh,
        parallelism_config=SimpleNamespace(fsdp_dim_names=("shard",)),
        mixed_precision=trainer.accelerator.mixed_precision,
        is_main_process=True,
        device=trainer.args.device,
    )
    fsdp2_prepare_model(accelerator, trainer.model_wrapped)


def _same_optimizer(optimizer: torch.optim.Optimizer, before: nn.Module, now: nn.Module) -> torch.optim.Optimizer:
    """Returns an optimizer of the same class with the same parameter groups, for the model's copy."""
    names = {id(parameter): name for name, parameter in before.named_parameters()}
    parameters = dict(now.named_parameters())
    groups = [
        {**group, "params": [parameters[names[id(p)]] for p in group["params"] if id(p) in names]}
        for group in optimizer.param_groups
    ]
    return type(optimizer)(groups, **optimizer.defaults)


def _num_bytes(tensor: Any) -> int:
    return int(part_of(tensor).nbytes)
