"""Finds the description of a training in its Trainer, on any device. Imported inside functions only."""

from __future__ import annotations

import os
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from unsloth_multigpu.errors import SetupError
from unsloth_multigpu.shard.description import (
    Attention,
    Checkpointing,
    Decoder,
    Description,
    Loss,
    Packing,
    Tensors,
    Training,
)
from unsloth_multigpu.shard.offload import asked_of_accelerate, asked_of_unsloth
from unsloth_multigpu.shard.optimizer import is_paged, trains_parts

_NO_FORECAST = "Decide without a forecast: shard='on' or shard='off'."
# Samples that are looked at for the longest one.
_MOST_SAMPLES = 20_000
_OWN_OPTIMIZERS = {"AdamW": "adamw_torch", "Adam": "adamw_torch", "SGD": "sgd", "Adafactor": "adafactor"}


def describe(
    trainer: Any, *, tokens: int | None = None, keeps_batch: bool = True, is_offloaded: bool = False
) -> Description:
    """The description of what `trainer.train()` would do.

    Args:
        trainer: A `transformers.Trainer` or subclass.
        tokens: Of the longest sample; None = the longest of the data set.
        keeps_batch: Several ranks share the samples of one process's step.
        is_offloaded: `shard_offload=True` was given. The script's own way to ask for it is looked for.

    Raises:
        SetupError: Something is there that no forecast is known for.
    """
    model, notes = trainer.model, []
    _check_trainer(trainer)
    tensors, units = describe_tensors(model)
    decoder = describe_decoder(model)
    if not any(name not in ("head", "embedding", "rest") for name, _ in units):
        notes.append(f"{_name(model)} names no layers (_no_split_modules): FSDP2 would gather it whole")
    if decoder is not None and not decoder.exact:
        notes.append(
            f"the layers of {_name(model)} are not those of a dense decoder like Llama: the activations are those of "
            "one with its sizes, and may be far off"
        )
    if decoder is not None and decoder.adapters == () and _is_peft(model):
        notes.append("what the adapter adds to the activations is not known, and left out")
    if _has_unsloth():
        notes.append(
            "Unsloth's kernels and its checkpointing keep less than the formula counts, which is transformers'"
        )
    training, of_training = _training(trainer, model, tokens, keeps_batch)
    if is_paged(training.optimizer):
        notes.append("paged states are counted in full; the driver may move them to the host's memory")
    training = replace(training, offload=is_offloaded or _asks_for_offload(trainer.args))
    return Description(_name(model), tensors, decoder, training, units, (*notes, *of_training))


def describe_tensors(model: nn.Module) -> tuple[tuple[Tensors, ...], tuple[tuple[str, int], ...]]:
    """Its parameters and buffers, alike ones together, and the units that FSDP2 gathers."""
    kinds: Counter[tuple[Any, ...]] = Counter()
    units: dict[str, set[str]] = {}
    embeddings = {id(m.weight) for m in model.modules() if _is_a(m, "Embedding")}
    adapters = {id(p) for module in _adapted(model) for p in _adapter_parameters(module)}
    unit_of = _Units(model)
    for name, parameter in model.named_parameters():  # A shared one comes once.
        shape, dtype, packing = _form(parameter)
        unit, place = unit_of(name, parameter)
        units.setdefault(unit, set()).add(place)
        is_embedding, is_adapter = id(parameter) in embeddings, id(parameter) in adapters
        kinds[(shape, dtype, bool(parameter.requires_grad), packing, unit, is_embedding, is_adapter)] += 1
    for _, buffer in model.named_buffers():
        kinds[(tuple(buffer.shape), _dtype(buffer.dtype), False, "", "", False, False)] += 1
    tensors = tuple(
        Tensors(shape, dtype, count, trainable, packing, unit, embedding, adapter)
        for (shape, dtype, trainable, packing, unit, embedding, adapter), count in kinds.items()
    )
    return tensors, tuple((name, len(places)) for name, places in units.items())


class _Units:
    """Which unit a parameter belongs to, as accelerate and Unsloth wrap a model."""

    def __init__(self, model: nn.Module) -> None:
        self._layers = set(getattr(model, "_no_split_modules", None) or ())
        self._classes = {name: type(module).__name__ for name, module in model.named_modules()}
        output, inputs = _embedding(model, "get_output_embeddings"), _embedding(model, "get_input_embeddings")
        self._head, self._embedding = (
            set() if m is None else {id(p) for p in m.parameters()} for m in (output, inputs)
        )

    def __call__(self, name: str, parameter: nn.Parameter) -> tuple[str, str]:
        """The unit's name, and where that one of its kind lies."""
        parts = name.split(".")
        for end in range(1, len(parts)):
            place = ".".join(parts[:end])
            if self._classes.get(place) in self._layers:
                return self._classes[place], place
        if id(parameter) in self._head:
            return "head", ""
        return ("embedding" if id(parameter) in self._embedding else "rest"), ""


def _embedding(model: nn.Module, method: str) -> nn.Module | None:
    found = getattr(model, method, lambda: None)()
    return found if isinstance(found, nn.Module) else None


def describe_decoder(model: nn.Module) -> Decoder | None:
    """Sizes of a decoder; None where the model's configuration does not have them."""
    config = getattr(model, "config", None)
    if config is None or isinstance(config, Mapping):
        return None
    config = config.get_text_config(decoder=True) if hasattr(config, "get_text_config") else config
    names = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "vocab_size")
    if not all(isinstance(getattr(config, name, None), int) for name in names):
        return None
    heads, hidden = config.num_attention_heads, config.hidden_size
    size = getattr(config, "head_dim", None) or hidden // heads
    key = (getattr(config, "num_key_value_heads", None) or heads) * size
    implementation = getattr(config, "_attn_implementation", None) or "eager"
    attention: Attention = "flash" if "flash" in implementation or "flex" in implementation else "sdpa"
    adapters = Counter(row for module in _adapted(model) for row in _ranks(module))
    adapted = [p for module in _adapted(model) for p in _adapter_parameters(module)]
    drops = any(
        _is_a(drop, "Dropout") and drop.p > 0
        for module in _adapted(model)
        for drop in getattr(module, "lora_dropout", {}).values()
    )
    decoder = Decoder(
        hidden=hidden,
        intermediate=config.intermediate_size,
        num_layers=config.num_hidden_layers,
        query=heads * size,
        key=key,
        num_heads=heads,
        vocabulary=config.vocab_size,
        attention="eager" if implementation == "eager" else attention,
        adapters=tuple((into, out, rank, count) for (into, out, rank), count in adapters.items()),
        adapter_dtype=_dtype(adapted[0].dtype) if adapted else "float32",
        adapter_dropout=drops,
    )
    return decoder if _has_its_layers(model, decoder) else replace(decoder, exact=False)


def _has_its_layers(model: nn.Module, decoder: Decoder) -> bool:
    """True where the matrices of its layers are those of gated attention and MLP, and nothing else."""
    layers = set(getattr(model, "_no_split_modules", None) or ())
    adapters = {id(p) for module in _adapted(model) for p in _adapter_parameters(module)}
    found = Counter(
        tuple(sorted(_form(p)[0]))
        for module in model.modules()
        if type(module).__name__ in layers
        for p in module.parameters()
        if p.dim() == 2 and id(p) not in adapters
    )
    hidden = decoder.hidden
    each = Counter(
        tuple(sorted(shape))
        for shape in [(hidden, decoder.query)] * 2 + [(hidden, decoder.key)] * 2 + [(hidden, decoder.intermediate)] * 3
    )
    return found == Counter({shape: count * decoder.num_layers for shape, count in each.items()})


def _form(parameter: torch.Tensor) -> tuple[tuple[int, ...], str, Packing]:
    """Shape and dtype as they are computed in, and how bitsandbytes stores it."""
    kind = type(parameter).__name__
    if kind == "Params4bit":
        packing: Packing = "4bit double" if getattr(parameter, "compress_statistics", True) else "4bit"
        state = getattr(parameter, "quant_state", None)
        if state is not None:
            return tuple(state.shape), _dtype(state.dtype), packing
        return tuple(parameter.shape), "bfloat16", packing
    return tuple(parameter.shape), _dtype(parameter.dtype), "8bit" if kind == "Int8Params" else ""


def _dtype(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _adapted(model: nn.Module) -> Iterator[nn.Module]:
    """Modules that an adapter of PEFT stands around."""
    return (m for m in model.modules() if isinstance(getattr(m, "adapter_layer_names", None), tuple))


def _adapter_parameters(module: nn.Module) -> Iterator[nn.Parameter]:
    for name in getattr(module, "adapter_layer_names", ()):
        held = getattr(module, name, None)
        if isinstance(held, nn.Module):  # A dictionary of layers or of parameters.
            yield from held.parameters()


def _ranks(module: nn.Module) -> Iterator[tuple[int, int, int]]:
    """Features in, features out and rank of each LoRA."""
    into, out = getattr(module, "in_features", None), getattr(module, "out_features", None)
    ranks = getattr(module, "r", None)
    if isinstance(into, int) and isinstance(out, int) and isinstance(ranks, dict) and hasattr(module, "lora_A"):
        yield from ((into, out, rank) for rank in ranks.values())


def _is_peft(model: nn.Module) -> bool:
    return hasattr(model, "peft_config")


def _is_a(module: nn.Module, name: str) -> bool:
    """True for a class of torch.nn of that name, and for what is made of it."""
    return any(c.__name__ == name and c.__module__.startswith("torch.nn.") for c in type(module).__mro__)


def _name(model: nn.Module) -> str:
    base: Any = model
    return type(base.get_base_model() if _is_peft(model) and hasattr(base, "get_base_model") else base).__name__


def _check_trainer(trainer: Any) -> None:
    """Refuses trainers that compute with more than one model, or with more samples than the arguments say."""
    of_trl = [c.__name__ for c in type(trainer).__mro__ if c.__module__.startswith("trl.") and "Trainer" in c.__name__]
    kinds = [name for name in of_trl if not name.startswith(("_", "Base"))]
    if kinds and "SFTTrainer" not in kinds:
        raise SetupError(f"The memory of a {kinds[0]} cannot be forecast.", hint=_NO_FORECAST)


def _training(trainer: Any, model: nn.Module, tokens: int | None, keeps_batch: bool) -> tuple[Training, list[str]]:
    args, notes = trainer.args, []
    precision = {"bf16": "bfloat16", "fp16": "float16"}.get(str(trainer.accelerator.mixed_precision), "")
    longest, shortest, source = _lengths(trainer) if tokens is None else (tokens, 0, "as given")
    rows = args.per_device_train_batch_size
    notes.append(f"micro-batches of {rows} x {longest} tokens ({source})")
    is_packed = bool(getattr(args, "packing", False) or getattr(args, "padding_free", False))
    optimizer = _optimizer(trainer)
    is_divisible = trains_parts(optimizer, with_unsloth=_has_unsloth())
    if not is_divisible:
        notes.append(f"optim={optimizer!r} does not train sharded weights; optim='adamw_torch_fused' does")
    training = Training(
        optimizer=optimizer,
        optimizer_arguments=_arguments(args.optim_args),
        autocast=precision,
        checkpointing=_checkpointing(args, model),
        rows=rows,
        tokens=longest,
        accumulation=args.gradient_accumulation_steps,
        padded=rows > 1 and shortest < longest and not is_packed,
        loss=_loss(trainer),
        keeps_batch=keeps_batch,
        trains_parts=is_divisible,
    )
    return training, notes


def _asks_for_offload(args: Any) -> bool:
    """True where the script itself asks the engine that it would shard with."""
    if "unsloth" in sys.modules:
        return asked_of_unsloth(os.environ)
    return asked_of_accelerate(getattr(args, "fsdp_plugin_args", None))


def _optimizer(trainer: Any) -> str:
    """The name that `TrainingArguments.optim` has, also of one that the script has made."""
    if trainer.optimizer is None:
        return str(getattr(trainer.args.optim, "value", trainer.args.optim))
    name = type(trainer.optimizer).__name__
    if name not in _OWN_OPTIMIZERS:
        raise SetupError(f"How much memory the script's own optimizer {name} needs is not known.", hint=_NO_FORECAST)
    return _OWN_OPTIMIZERS[name]


def _arguments(text: Any) -> tuple[tuple[str, str], ...]:
    if isinstance(text, Mapping):
        return tuple((str(name), str(value)) for name, value in text.items())
    pairs = (pair.partition("=") for pair in str(text or "").replace(" ", "").split(",") if pair)
    return tuple((name, value) for name, _, value in pairs)


def _checkpointing(args: Any, model: nn.Module) -> Checkpointing:
    is_on = args.gradient_checkpointing or bool(getattr(model, "is_gradient_checkpointing", False))
    return "on" if is_on else "off"


def _loss(trainer: Any) -> Loss:
    """TRL's fused head, Liger's and Unsloth's never have all logits at a time."""
    if trainer.compute_loss_func is not None or trainer.label_smoother is not None:
        return "whole logits"
    modules = (sys.modules.get(c.__module__) for c in type(trainer).__mro__)
    is_fused = any(hasattr(module, "add_fused_lm_head") for module in modules)
    is_liger = getattr(trainer.args, "use_liger_kernel", False)
    return "in chunks" if is_fused or _has_unsloth() or is_liger else "whole logits"


def _has_unsloth() -> bool:
    """True where its code for GPUs is loaded."""
    return "unsloth.models._utils" in sys.modules


def _lengths(trainer: Any) -> tuple[int, int, str]:
    """Tokens of the longest and of the shortest sample, and where the numbers come from."""
    args, data = trainer.args, trainer.train_dataset
    limit = getattr(args, "max_length", None) or getattr(args, "max_seq_length", None)
    if getattr(args, "packing", False) and limit:
        return limit, limit, "packed to max_length"
    lengths = []
    num = min(len(data), _MOST_SAMPLES) if hasattr(data, "__len__") and hasattr(data, "__getitem__") else 0
    for index in range(num):
        row = data[index]
        ids = row.get("input_ids") if isinstance(row, Mapping) else None
        if ids is None:
            break
        lengths.append(len(ids))
    if lengths:
        longest = min(max(lengths), limit) if limit else max(lengths)
        seen = "samples" if num == len(data) else f"first {num} samples"
        return longest, min(lengths), f"the longest of {num} {seen}" if num == len(data) else f"longest of the {seen}"
    if limit:
        return limit, 0, "max_length: the data set is tokenised while it trains"
    raise SetupError(
        "How long the samples are cannot be read: the training data set has no input_ids, and the arguments no "
        "max_length.",
        hint="Give --tokens to `unsloth-multigpu plan`; where shard='auto' asks, set shard='on' or 'off'.",
    )
