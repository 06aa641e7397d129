"""Describes the training of a script's Trainer for a forecast, and makes a micro-batch of its longest samples."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

import torch

from unsloth_multigpu.errors import SetupError
from unsloth_multigpu.group.model import base_model
from unsloth_multigpu.group.shards import check_versions
from unsloth_multigpu.options import MultiGPUConfig
from unsloth_multigpu.shard.memory import Training, trains_parts

# Samples among which the longest one is searched.
_MAX_SAMPLES = 20_000
_PACKED = ("Params4bit", "Int8Params")


def describe(trainer: Any, config: MultiGPUConfig | None = None, tokens: int | None = None) -> Training:
    """Describes what `trainer.train()` would train with these options, None = the defaults.

    `tokens` is the length of the longest sample; None = that of the data set.
    """
    config = config or MultiGPUConfig()
    args, model = trainer.args, trainer.model
    parameters = [*model.parameters()]
    packed = [p for p in parameters if type(p).__name__ in _PACKED]
    optimizer = str(getattr(args.optim, "value", args.optim))
    if trainer.optimizer is not None:
        optimizer = type(trainer.optimizer).__name__
    why, hint = only_whole = _only_whole(optimizer, config.sequence_parallel)
    longest, source = _longest(trainer, tokens)
    notes = [f"micro-batches of {args.per_device_train_batch_size} x {longest or '?'} tokens ({source})"]
    if why:
        notes.append(f"{why}. {hint}")
    return Training(
        model=type(base_model(model)).__name__,
        num_parameters=sum(map(_numel, parameters)),
        num_trainable=sum(p.numel() for p in parameters if p.requires_grad),
        num_quantised=sum(map(_numel, packed)),
        optimizer=optimizer,
        autocast={"bf16": "bfloat16", "fp16": "float16"}.get(str(trainer.accelerator.mixed_precision), ""),
        checkpointing=bool(args.gradient_checkpointing or getattr(model, "is_gradient_checkpointing", False)),
        rows=args.per_device_train_batch_size,
        tokens=longest,
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
    except SetupError as error:
        return str(error.args[0]).removesuffix("."), error.hint
    if trains_parts(optimizer, with_unsloth=with_unsloth):
        return "", ""
    hint = "Set optim='adamw_torch_fused', whose states are sharded, too."
    return f"optim={optimizer!r} does not train sharded weights", hint


def micro_batch(trainer: Any, training: Training, num_rows: int) -> Any:
    """Returns a batch of the script's collator with `num_rows` rows: the longest sample, repeated, and the shortest.

    The shortest sample makes the collator pad the batch.
    """
    data, collator = trainer.train_dataset, trainer.data_collator
    if hasattr(data, "column_names"):
        data = trainer._remove_unused_columns(data, "training")
    else:
        collator = trainer._get_collator_with_removed_columns(collator, "training")
    first, last = _ends(data)
    longest = _with_tokens(first, training.tokens)
    return collator([*[longest] * (num_rows - 1), last] if num_rows > 1 else [longest])


def _longest(trainer: Any, tokens: int | None) -> tuple[int, str]:
    """Returns the tokens of the longest sample, 0 = not known before it is collated, and the source of the number."""
    if tokens is not None:
        return tokens, "as given"
    data = trainer.train_dataset
    longest = _num_tokens(_ends(data)[0]) if _has_numbers(data) else 0
    if not longest:
        return 0, "the first samples, which the collator tokenizes"
    limit = getattr(trainer.args, "max_length", None) or getattr(trainer.args, "max_seq_length", None)
    of = f"the first {_MAX_SAMPLES}" if len(data) > _MAX_SAMPLES else len(data)
    return min(longest, limit or longest), f"the longest of {of} samples"


def _has_numbers(data: Any) -> bool:
    """True if samples can be accessed by index."""
    return hasattr(data, "__len__") and hasattr(data, "__getitem__")


def _num_tokens(sample: Any) -> int:
    ids = sample.get("input_ids") if isinstance(sample, Mapping) else None
    return 0 if ids is None else len(ids)


def _ends(data: Any) -> tuple[Any, Any]:
    """Returns the longest and the shortest sample, or the first two if lengths are not known."""
    if not _has_numbers(data):
        stream = iter(data)
        first = next(stream)
        return first, next(stream, first)
    lengths = [_num_tokens(data[index]) for index in range(min(len(data), _MAX_SAMPLES))]
    if not any(lengths):
        return data[0], data[min(1, len(data) - 1)]
    return data[lengths.index(max(lengths))], data[lengths.index(min(lengths))]


def _with_tokens(sample: Any, longest: int) -> Any:
    """Cuts or repeats the columns of a sample to `longest` tokens."""
    length = _num_tokens(sample)
    if not length or not longest:
        return sample

    def resized(column: Any) -> Any:
        if not hasattr(column, "__len__") or isinstance(column, str) or len(column) != length:
            return column
        return [*column, *(column[i % length] for i in range(longest - length))][:longest]

    return {name: resized(column) for name, column in sample.items()}


def _numel(parameter: Any) -> int:
    """Returns the number of elements before quantization."""
    state = getattr(parameter, "quant_state", None)
    return int(torch.Size(parameter.shape if state is None else state.shape).numel())
