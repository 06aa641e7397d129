"""The settings of DDP for a model."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any

from torch import nn

from unsloth_multigpu.errors import SetupError
from unsloth_multigpu.options import MultiGPUConfig
from unsloth_multigpu.trainer_protocol import ArgumentsLike, TrainerLike

# Attributes of a model's config which mean that some steps leave some parameters without a gradient.
_CONDITIONAL_PARTS = (
    "num_experts",
    "num_local_experts",
    "n_routed_experts",
    "moe_num_experts",
    "vision_config",
    "audio_config",
    "speech_config",
    "add_cross_attention",
    "cross_attention_layers",
)
_DROPPED_LAYERS = ("layerdrop", "encoder_layerdrop", "decoder_layerdrop")
# The same by names of parameters, for parts that the config does not mention.
_CONDITIONAL_NAMES = ("expert", "mtp", "projector", "pooler")
# Unsloth's fused loss and its embeddings read the base weight and pass by a LoRA on these.
_READ_BY_WEIGHT = ("lm_head", "embed")


class ReadableDDP(nn.parallel.DistributedDataParallel):
    """DDP that knows the plain values of the model in it: a loss that a script wrote reads `model.config`.

    Not its methods and modules: what they compute would pass by DDP, and gradients would not meet.

    Attributes:
        exchanged: ids of the parameters whose gradients it exchanges.
        default_find_unused: `find_unused_parameters` as it is where `ddp_settings` says nothing.
    """

    exchanged: frozenset[int]
    default_find_unused: bool

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            value = None if name.startswith("_") or name == "module" else getattr(self.module, name, None)
            if value is None or callable(value):
                raise
            return value


class NamesOutsideDDP:
    """Names of parameters and buffers that DDP is to leave alone, as `_ddp_params_and_buffers_to_ignore` holds them.

    DDP refuses a model whose parameters lie on several kinds of devices. Those that are not trained need not meet: with
    embeddings that are trained, Unsloth leaves the ones that they were copied from on the CPU, and accelerate moves no
    quantised model. Where they lie is looked up when DDP asks: accelerate moves other models just before.

    Args:
        model: The model that DDP is made for.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        # A PEFT model passes the attribute of its base on, whose names are others; DDP reads it all the same.
        self._others: list[str] = list(getattr(model, "_ddp_params_and_buffers_to_ignore", None) or ())

    def __iter__(self) -> Iterator[str]:
        kinds = {p.device.type for p in self._model.parameters() if p.requires_grad}
        yield from self._others
        for name, parameter in self._model.named_parameters():
            if kinds and not parameter.requires_grad and parameter.device.type not in kinds:
                yield name


def make_readable(ddp: nn.parallel.DistributedDataParallel, model: nn.Module, default_find_unused: bool) -> ReadableDDP:
    """Makes a `ReadableDDP` of a DDP that accelerate has just built around `model`."""
    ddp.__class__ = ReadableDDP
    assert isinstance(ddp, ReadableDDP)
    ddp.exchanged, ddp.default_find_unused = exchanged_of(model), default_find_unused
    return ddp


def exchanged_of(model: nn.Module) -> frozenset[int]:
    """ids of the parameters whose gradients a new DDP would exchange."""
    ignored = getattr(model, "_ddp_params_and_buffers_to_ignore", ())
    return frozenset(id(p) for n, p in model.named_parameters() if p.requires_grad and n not in ignored)


def rebuild_ddp(ddp: ReadableDDP, find_unused_parameters: bool) -> None:
    """Lets DDP exchange the gradients of the parameters that are trainable now. Between two steps, on all ranks.

    The object stays, since the loop and accelerate hold it. What it exchanges is in its reducer, which is rebuilt as
    where a copy of DDP is unpickled; the old one takes its hooks off the parameters when it goes.

    Raises:
        SetupError: DDP has a state that belongs to the parameters it was made with.
    """
    hooks = list(getattr(ddp, "_comm_hooks", ()))
    if any("PowerSGDState" in type(state).__name__ for _, state in hooks):
        raise SetupError(
            "grad_compression='powersgd' carries what it has left out for the parameters that it began with.",
            hint="Leave grad_compression out where parameters become trainable or frozen later.",
        )
    if getattr(ddp, "_use_python_reducer", False):
        raise SetupError(
            "DDP with torch's Python reducer cannot be rebuilt.", hint="Set torch._dynamo.config.optimize_ddp=True."
        )
    ddp.find_unused_parameters = find_unused_parameters
    state = ddp.__getstate__()  # type: ignore[no-untyped-call]
    ddp.__setstate__(state)  # type: ignore[no-untyped-call]
    ddp._comm_hooks = []
    for hook, hook_state in hooks:
        ddp.register_comm_hook(hook_state, hook)
    ddp.exchanged = exchanged_of(ddp.module)


def forget_evaluation(trainer: TrainerLike) -> None:
    """Undoes how `evaluate()` or another `sync` prepared the model: accelerate does not prepare a model twice."""
    model, wrapped = trainer.model, trainer.model_wrapped
    if model is None:
        return  # Between two trials of a search; train() makes a new one.
    if isinstance(getattr(wrapped, "_orig_mod", wrapped), nn.parallel.DistributedDataParallel):
        return
    trainer.model_wrapped = model
    is_prepared = vars(model).pop("_is_accelerate_prepared", False)
    if is_prepared and "_original_forward" in vars(model):  # Without mixed precision, which is applied again.
        model.forward = vars(model).pop("_original_forward")


def ddp_settings(model: nn.Module, config: MultiGPUConfig, args: ArgumentsLike) -> dict[str, Any]:
    """Settings of DDP where the script gave none: attributes of accelerate's `DistributedDataParallelKwargs`.

    Left alone are `bucket_cap_mb`, whose effect was within noise on a CPU; `static_graph`, which fails where a step has
    several micro-batches; and `broadcast_buffers`, which DDP does as a step begins, where the ranks have just met.
    The Trainer's optimizer is the fused one by itself. Figures are in docs/benchmarks.md.

    Args:
        model: The model without DDP's wrapper.
        config: The run's options.
        args: The script's `TrainingArguments`.
    """
    # Gradients are views of the buckets, not copies: one set of gradients less in memory, the same numbers.
    settings: dict[str, Any] = {"gradient_as_bucket_view": True}
    if config.find_unused_parameters is not None:
        settings["find_unused_parameters"] = config.find_unused_parameters
    elif args.ddp_find_unused_parameters is None and uses_every_parameter(model):
        settings["find_unused_parameters"] = False
    return settings


def uses_every_parameter(model: nn.Module) -> bool:
    """True if each trainable parameter surely gets a gradient in every step, so that DDP need not search the graph.

    Sure are dense text models whose config says so, with all parameters trained or with LoRA on some of them. Mixtures
    of experts, towers for images or sound, dropped layers, models without a config or of a class that is not
    transformers' and LoRA on embeddings or the output head are not.
    """
    # PEFT models pass attribute reads on to the base model; its config is the architecture's.
    config: Any = getattr(model, "config", None)
    if config is None or isinstance(config, dict):
        return False
    base: Any = model.get_base_model() if hasattr(model, "get_base_model") else model  # type: ignore[operator]
    if not type(base).__module__.startswith(("transformers.", "unsloth")):  # Unsloth compiles classes into its modules.
        return False  # A class of the script, whatever its name says.
    names = (*_CONDITIONAL_PARTS, *_DROPPED_LAYERS)
    # Read by attribute as well, since a config may map one name to another.
    if any(getattr(config, name, None) for name in names) or _has_any(config.to_dict(), names):
        return False
    trainable = [name for name, p in model.named_parameters() if p.requires_grad]
    if any(word in name.lower() for name in trainable for word in _CONDITIONAL_NAMES):
        return False
    if hasattr(model, "peft_config"):
        lora = [name for name in trainable if ".lora_" in name]
        if any(word in name.lower() for name in lora for word in _READ_BY_WEIGHT):
            return False
        # Prompt and prefix tuning, or several adapters of which one is active, have parameters of other kinds.
        return len(set(map(_adapter_of, lora))) == 1 and all(n in lora or ".modules_to_save." in n for n in trainable)
    # Full training: other heads may leave a mask embedding without a gradient.
    return bool(trainable) and type(model).__name__.endswith("ForCausalLM")


def _adapter_of(name: str) -> str:
    parts = name.split(".")
    position = next(i for i, part in enumerate(parts) if part.startswith("lora_"))
    return parts[position + 1] if len(parts) > position + 1 else ""


def _has_any(values: Mapping[Any, Any], names: Collection[str]) -> bool:
    """True if one of `names` is set at some depth: experts of a part, towers of a "thinker"."""
    return any(
        (value and key in names) or (isinstance(value, Mapping) and _has_any(value, names))
        for key, value in values.items()
    )
