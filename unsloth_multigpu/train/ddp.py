"""DDP for one training: accelerate wraps the model, with the settings of this package."""

from __future__ import annotations

import re
from collections import UserDict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn

from unsloth_multigpu.errors import SetupError
from unsloth_multigpu.group.bucket import all_reduce_bytes, num_bytes
from unsloth_multigpu.group.manager import DDPManager
from unsloth_multigpu.group.model import base_model
from unsloth_multigpu.logs import get_logger
from unsloth_multigpu.part import GradientExchange, Override
from unsloth_multigpu.seam import instance_attribute
from unsloth_multigpu.trainer_protocol import ArgumentsLike, ControlLike, StateLike, TrainerLike

logger = get_logger(__name__)

# Attributes of a model's config which mean that some steps leave some parameters without a gradient: mixtures of
# experts, towers for images or sound, dropped layers.
_CONDITIONAL = re.compile(
    r'"(num_experts|num_local_experts|n_routed_experts|moe_num_experts|(vision|audio|speech)_config|'
    r'add_cross_attention|cross_attention_layers|(encoder_|decoder_)?layerdrop)": '
    r"(?!null|false|0(\.0)?[,}\s]|\[\]|\{\})"
)
# The same by names of parameters, for parts that the config does not mention. Unsloth's fused loss and its embeddings
# read the base weight and pass by a LoRA on the last two.
_CONDITIONAL_NAMES = ("expert", "mtp", "projector", "pooler")
_READ_BY_WEIGHT = ("lm_head", "embed")
_LIBRARIES = ("transformers.", "unsloth")
# Attributes of a model that losses of scripts read.
_READ_BY_SCRIPTS = (
    "config",
    "dtype",
    "generation_config",
    "get_input_embeddings",
    "named_parameters",
    "num_labels",
    "peft_config",
)


class DDPWrapping(GradientExchange):
    """Synchronizes gradients by DDP."""

    def __init__(self, trainer: TrainerLike, manager: DDPManager) -> None:
        super().__init__(trainer, manager)
        self._hooks = ExitStack()  # On the model, while it is trained.
        self._outside: list[nn.Parameter] = []

    @contextmanager
    def around(self) -> Iterator[None]:
        forget_evaluation(self._trainer)
        with ExitStack() as self._hooks:
            yield

    def overrides(self) -> dict[str, Override]:
        return {"prepare_model": self._prepare_model}

    def on_train_begin(self, args: ArgumentsLike, state: StateLike, control: ControlLike, **kwargs: Any) -> None:
        """Copies rank 0's values of parameters that are trained outside the model, such as the classifier of a loss."""
        trainer = self._trainer
        # With fp16, the optimizer has already checked each rank's own gradient for overflows.
        if trainer.accelerator.scaler is None:
            self._outside = [p for _, p in parameters_beside_the_model(trainer) if p.dtype != torch.float16]
        self._manager.broadcast_tensors(self._outside)

    def on_pre_optimizer_step(self, args: ArgumentsLike, state: StateLike, control: ControlLike, **kwargs: Any) -> None:
        self._manager.average_gradients(self._outside)

    def _prepare_model(self, original: Callable[..., Any], model: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """Overrides `Accelerator.prepare_model`, which makes DDP and is the only reader of its settings."""
        # transformers 4 makes new ones just before. They are taken back: the next `train()` must find the script's own.
        from accelerate.utils import DistributedDataParallelKwargs

        accelerator = self._trainer.accelerator
        handler = accelerator.ddp_handler or DistributedDataParallelKwargs()
        settings = ddp_settings(model, self._trainer.args)
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
            raise SetupError("accelerate did not wrap the model in DDP.", hint="Load the model again.")
        if is_trained:
            make_readable(inner, model, handler.find_unused_parameters)
            if handler.find_unused_parameters:
                self._hooks.callback(model.register_forward_hook(_as_plain_dict).remove)
        return wrapped

    def sent_bytes(self, num_steps: int) -> int:
        model, identity = self._trainer.model, self._manager.identity
        size = num_bytes(*(p for p in model.parameters() if p.requires_grad))
        # DDP gives every rank rank 0's weights first, and its buffers in each step.
        first, buffers = num_bytes(*model.parameters(), *model.buffers()), num_bytes(*model.buffers())
        followed = first + num_steps * buffers if identity.rank < identity.world_size - 1 else 0
        return followed + num_steps * all_reduce_bytes(size, identity.world_size)


def _as_plain_dict(_model: nn.Module, _args: Any, output: Any) -> Any:
    """A forward hook. DDP looks for tensors in a dict alone: in a `BatchEncoding`, every parameter would be unused."""
    return dict(output) if isinstance(output, UserDict) else output


def make_readable(ddp: Any, model: nn.Module, default_find_unused: bool) -> None:
    """Notes on a DDP what it exchanges, and gives it what scripts read of the model in their loss.

    Not its other methods and its modules: what they compute would bypass DDP, and gradients would not be exchanged.
    """
    ddp.exchanged, ddp.default_find_unused = exchanged_of(model), default_find_unused
    for name in _READ_BY_SCRIPTS:
        if (value := getattr(model, name, None)) is not None:
            setattr(ddp, name, value)


class NamesOutsideDDP:
    """Names of parameters and buffers that DDP is to leave alone, as `_ddp_params_and_buffers_to_ignore` holds them.

    DDP refuses a model whose parameters lie on several kinds of devices. Those that are not trained need not meet: with
    embeddings that are trained, Unsloth leaves the ones that they were copied from on the CPU, and accelerate moves no
    quantised model. Where they lie is looked up when DDP asks: accelerate moves other models just before.
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


def exchanged_of(model: nn.Module) -> frozenset[int]:
    """ids of the parameters whose gradients a new DDP would exchange."""
    ignored = getattr(model, "_ddp_params_and_buffers_to_ignore", ())
    return frozenset(id(p) for n, p in model.named_parameters() if p.requires_grad and n not in ignored)


def rebuild_ddp(ddp: Any, find_unused_parameters: bool) -> None:
    """Lets DDP exchange the gradients of the parameters that are trainable now. Between two steps, on all ranks.

    The object stays, since the loop and accelerate hold it. What it exchanges is in its reducer, which is rebuilt as
    where a copy of DDP is unpickled; the old one takes its hooks off the parameters when it goes.

    Raises:
        SetupError: DDP has a state that belongs to the parameters it was made with.
    """
    hooks = list(getattr(ddp, "_comm_hooks", ()))
    if any("PowerSGDState" in type(state).__name__ for _, state in hooks):
        raise SetupError(
            "DDP's PowerSGD hook carries what it has left out for the parameters that it began with.",
            hint="Use another hook where parameters become trainable or frozen later.",
        )
    if getattr(ddp, "_use_python_reducer", False):
        raise SetupError(
            "DDP with torch's Python reducer cannot be rebuilt.", hint="Set torch._dynamo.config.optimize_ddp=True."
        )
    ddp.find_unused_parameters = find_unused_parameters
    ddp.__setstate__(ddp.__getstate__())
    ddp._comm_hooks = []
    for hook, hook_state in hooks:
        ddp.register_comm_hook(hook_state, hook)
    ddp.exchanged = exchanged_of(ddp.module)


def forget_evaluation(trainer: TrainerLike) -> None:
    """Undoes how `evaluate()` or another `strategy` prepared the model: accelerate does not prepare a model twice."""
    model, wrapped = trainer.model, trainer.model_wrapped
    if isinstance(getattr(wrapped, "_orig_mod", wrapped), nn.parallel.DistributedDataParallel):
        return
    trainer.model_wrapped = model
    is_prepared = vars(model).pop("_is_accelerate_prepared", False)
    if is_prepared and "_original_forward" in vars(model):  # Without mixed precision, which is applied again.
        model.forward = vars(model).pop("_original_forward")


def ddp_settings(model: nn.Module, args: ArgumentsLike) -> dict[str, Any]:
    """Settings of DDP where the script gave none: attributes of accelerate's `DistributedDataParallelKwargs`.

    Left alone are `bucket_cap_mb`, whose effect was within noise on a CPU; `static_graph`, which fails where a step has
    several micro-batches; and `broadcast_buffers`, which DDP does as a step begins, where the ranks have just met.
    The Trainer's optimizer is the fused one by itself. Figures are in docs/benchmarks.md.
    """
    # Gradients are views of the buckets, not copies: one set of gradients less in memory, the same numbers.
    settings: dict[str, Any] = {"gradient_as_bucket_view": True}
    if args.ddp_find_unused_parameters is None and uses_every_parameter(model):
        settings["find_unused_parameters"] = False
    return settings


def uses_every_parameter(model: nn.Module) -> bool:
    """True if each trainable parameter surely gets a gradient in every step, so that DDP need not search the graph.

    Sure are dense text models whose config says so, with all parameters trained or with LoRA on some of them. Models
    with conditional parts, without a config or of a class that is not transformers', several adapters, and LoRA on
    embeddings or the output head are not.
    """
    config: Any = getattr(model, "config", None)  # PEFT passes reads of attributes on to the base model.
    # Unsloth compiles classes into its modules. A class of the script may do anything, whatever its name says.
    if not hasattr(config, "to_json_string") or not type(base_model(model)).__module__.startswith(_LIBRARIES):
        return False
    trainable = [name for name, p in model.named_parameters() if p.requires_grad]
    is_conditional = any(word in name.lower() for name in trainable for word in _CONDITIONAL_NAMES)
    if is_conditional or _CONDITIONAL.search(config.to_json_string(use_diff=False)):
        return False
    if hasattr(model, "peft_config"):
        lora = [name for name in trainable if ".lora_" in name]
        adapters = {name.partition(".lora_")[2].split(".")[1] for name in lora}
        # Prompt and prefix tuning have parameters of other kinds.
        is_only_lora = all(name in lora or ".modules_to_save." in name for name in trainable)
        return len(adapters) == 1 and is_only_lora and not any(w in n.lower() for n in lora for w in _READ_BY_WEIGHT)
    # Full training: other heads may leave a mask embedding without a gradient.
    return bool(trainable) and type(model).__name__.endswith("ForCausalLM")


def parameters_beside_the_model(trainer: TrainerLike) -> list[tuple[str, Any]]:
    """Returns names and tensors that the optimizer trains outside the model, which DDP does not synchronize."""
    own = {id(p) for p in trainer.model.parameters()}
    return [
        (f"parameter {i} of the optimizer's group {g}, which is not in the model", p)
        for g, group in enumerate(trainer.optimizer.param_groups)
        for i, p in enumerate(group["params"])
        if p.requires_grad and id(p) not in own
    ]
