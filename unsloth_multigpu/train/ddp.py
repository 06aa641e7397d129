"""DDP for one training: accelerate wraps the model, with our settings, and DDP follows what the script unfreezes."""

from __future__ import annotations

import re
from collections import UserDict
from collections.abc import Callable, Iterator, Set
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn

from unsloth_multigpu.errors import SetupError
from unsloth_multigpu.group.manager import DDPManager
from unsloth_multigpu.group.model import all_reduce_bytes, base_model, num_bytes
from unsloth_multigpu.part import ArgumentsLike, ControlLike, GradientExchange, Override, Part, StateLike, TrainerLike
from unsloth_multigpu.seam import instance_attribute
from unsloth_multigpu.words import listed

# Attributes of a model's config that let some steps leave parameters without a gradient: mixtures of experts, towers
# for images or sound, dropped layers.
_CONDITIONAL = re.compile(
    r'"(num_experts|num_local_experts|n_routed_experts|moe_num_experts|(vision|audio|speech)_config|'
    r'add_cross_attention|cross_attention_layers|(encoder_|decoder_)?layerdrop)": '
    r"(?!null|false|0(\.0)?[,}\s]|\[\]|\{\})"
)
# The same by parts of parameter names, for modules that the config does not mention.
_CONDITIONAL_NAMES = ("expert", "mtp", "projector", "pooler")
# Unsloth's fused loss and its embeddings read the base weights of these modules, and ignore their LoRA.
_READ_BY_WEIGHT = ("lm_head", "embed")
_LIBRARIES = ("transformers.", "unsloth")
# Attributes of a model that losses of scripts read from the wrapped model. Not modules or methods such as `generate`:
# their forward passes would bypass DDP, and gradients would not be exchanged.
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
        """Undoes how `evaluate()` or another `strategy` prepared the model, since accelerate prepares it only once."""
        model, wrapped = self._trainer.model, self._trainer.model_wrapped
        if not isinstance(getattr(wrapped, "_orig_mod", wrapped), nn.parallel.DistributedDataParallel):
            self._trainer.model_wrapped = model
            is_prepared = vars(model).pop("_is_accelerate_prepared", False)
            if is_prepared and "_original_forward" in vars(model):  # accelerate applies mixed precision again.
                model.forward = vars(model).pop("_original_forward")
        with ExitStack() as self._hooks:
            yield

    def overrides(self) -> dict[str, Override]:
        return {"prepare_model": self._prepare_model}

    def on_train_begin(self, args: ArgumentsLike, state: StateLike, control: ControlLike, **kwargs: Any) -> None:
        """Copies rank 0's parameters that are trained outside the model, such as the classifier of a loss."""
        trainer = self._trainer
        # With fp16, the optimizer has already checked each rank's own gradient for overflows.
        if trainer.accelerator.scaler is None:
            self._outside = [p for _, p in parameters_beside_the_model(trainer) if p.dtype != torch.float16]
        self._manager.broadcast_tensors(self._outside)

    def on_pre_optimizer_step(self, args: ArgumentsLike, state: StateLike, control: ControlLike, **kwargs: Any) -> None:
        self._manager.average_gradients(self._outside)

    def _prepare_model(self, original: Callable[..., Any], model: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """Overrides `Accelerator.prepare_model`, which creates DDP with the settings of `ddp_handler`."""
        # The settings are restored: the next `train()` must find the script's own. transformers 4 creates them anew.
        from accelerate.utils import DistributedDataParallelKwargs

        accelerator = self._trainer.accelerator
        handler = accelerator.ddp_handler or DistributedDataParallelKwargs()
        settings = ddp_settings(model, self._trainer.args)
        with ExitStack() as stack:
            stack.enter_context(instance_attribute(accelerator, "ddp_handler", handler))
            for name, value in settings.items():
                stack.enter_context(instance_attribute(handler, name, value))
            stack.enter_context(
                instance_attribute(model, "_ddp_params_and_buffers_to_ignore", names_outside_ddp(model))
            )
            wrapped = original(model, *args, **kwargs)
        inner = getattr(wrapped, "_orig_mod", wrapped)
        is_trained = not kwargs.get("evaluation_mode") and any(p.requires_grad for p in model.parameters())
        if is_trained and not isinstance(inner, nn.parallel.DistributedDataParallel):
            raise SetupError("accelerate did not wrap the model in DDP.", hint="Load the model again.")
        if is_trained:
            inner.exchanged, inner.default_find_unused = exchanged_of(model), handler.find_unused_parameters
            for name in _READ_BY_SCRIPTS:
                if (value := getattr(model, name, None)) is not None:
                    setattr(inner, name, value)
            if handler.find_unused_parameters:
                self._hooks.callback(model.register_forward_hook(_as_plain_dict).remove)
        return wrapped

    def sent_bytes(self, num_steps: int) -> int:
        model, identity = self._trainer.model, self._manager.identity
        size = num_bytes(*(p for p in model.parameters() if p.requires_grad))
        # DDP broadcasts rank 0's weights at the start, and its buffers in each step.
        first, buffers = num_bytes(*model.parameters(), *model.buffers()), num_bytes(*model.buffers())
        forwarded = first + num_steps * buffers if identity.rank < identity.world_size - 1 else 0
        return forwarded + num_steps * all_reduce_bytes(size, identity.world_size)


class TrainedParameters(Part):
    """Checks in every step that DDP synchronizes the gradients of all trainable parameters, and rebuilds it if not.

    DDP is made for the parameters that are trainable at that time. If a callback unfreezes layers between two steps,
    DDP is rebuilt on all ranks and the new parameters start with rank 0's values, so the training is that of one
    process. A change within a step comes too late and is an error. Other strategies, and a DDP made by the script,
    cannot be rebuilt: there additional trainable parameters are an error.

    Cost: two walks over the model's modules per step. Ranks communicate only after a change.

    Attributes:
        is_changed: DDP was rebuilt, and the ranks have not been compared since.
        of_step: Ids of the parameters that were trainable when this step started; None before the first one.
    """

    place = "trained"

    def __init__(self, trainer: TrainerLike, manager: DDPManager, exchange: GradientExchange, training: int) -> None:
        super().__init__(trainer, manager)
        self._exchange = exchange
        self._training = training
        self.is_changed = False
        self._num_changes = 0
        self.of_step: frozenset[int] | None = None

    def on_step_begin(self, args: ArgumentsLike, state: StateLike, control: ControlLike, **kwargs: Any) -> None:
        """Makes sure that the gradients of all trainable parameters are synchronized."""
        trained = frozenset(id(p) for p in all_parameters(self._trainer.model) if p.requires_grad)
        before, self.of_step = self.of_step, trained
        if trained == before:
            return
        model = self._trainer.model_wrapped
        ddp, kept = getattr(model, "_orig_mod", model), self._exchange.parameters
        if kept is None and hasattr(ddp, "exchanged"):
            wanted = exchanged_of(ddp.module)
            # With find_unused_parameters, DDP skips frozen parameters by itself.
            if wanted - ddp.exchanged or (ddp.exchanged - wanted and not ddp.find_unused_parameters):
                from unsloth_multigpu.train.unfreezing import follow

                self._num_changes += 1
                follow(self._trainer, self._manager, ddp, self._training, self._num_changes)
                self.is_changed = True
            return
        known = before if kept is None else frozenset(map(id, kept))
        if known is not None and (added := trained - known):
            from unsloth_multigpu.train.unfreezing import refusal

            raise refusal(self._trainer, added, "" if kept is None else str(self._manager.config.strategy))

    def on_pre_optimizer_step(self, args: ArgumentsLike, state: StateLike, control: ControlLike, **kwargs: Any) -> None:
        """Refuses parameters that were frozen or unfrozen within the step: their gradients were not synchronized."""
        trained, model = self.of_step or frozenset(), self._trainer.model_wrapped
        is_searched = getattr(getattr(model, "_orig_mod", model), "find_unused_parameters", True)
        missed = {
            id(p)
            for p in all_parameters(self._trainer.model)
            if (p.requires_grad and id(p) not in trained and p.grad is not None)
            or (not p.requires_grad and id(p) in trained and p.grad is None and not is_searched)
        }
        if missed:
            raise SetupError(
                f"{names_of(self._trainer.model, missed)} became trainable or frozen within step "
                f"{state.global_step + 1}: its gradient in this step is not that of all ranks.",
                hint="Change `requires_grad` between steps: in on_epoch_begin, on_step_begin or on_step_end of a "
                "callback.",
            )


def _as_plain_dict(_model: nn.Module, _args: Any, output: Any) -> Any:
    """A forward hook. DDP finds no tensors in a `BatchEncoding`, and would take all parameters for unused."""
    return dict(output) if isinstance(output, UserDict) else output


def names_outside_ddp(model: nn.Module) -> list[str]:
    """Returns the value of `_ddp_params_and_buffers_to_ignore`: names of parameters and buffers that DDP ignores.

    DDP refuses a model whose parameters are on several types of devices. Frozen parameters on another type are
    therefore ignored: Unsloth leaves the originals of trained embeddings on the CPU, and accelerate does not move
    quantized models.
    """
    # A PEFT model has this attribute from its base model, whose parameter names differ. DDP reads it anyway.
    others: list[str] = list(getattr(model, "_ddp_params_and_buffers_to_ignore", None) or ())
    kinds = {p.device.type for p in model.parameters() if p.requires_grad}
    frozen = [(name, p) for name, p in model.named_parameters() if kinds and not p.requires_grad]
    return others + [name for name, p in frozen if p.device.type not in kinds]


def exchanged_of(model: nn.Module) -> frozenset[int]:
    """Returns the ids of the parameters whose gradients a new DDP would exchange."""
    ignored = getattr(model, "_ddp_params_and_buffers_to_ignore", ())
    return frozenset(id(p) for n, p in model.named_parameters() if p.requires_grad and n not in ignored)


def ddp_settings(model: nn.Module, args: ArgumentsLike) -> dict[str, Any]:
    """Returns settings of DDP that the script has not set: attributes of accelerate's `DistributedDataParallelKwargs`.

    Other settings keep their defaults. `bucket_cap_mb` had no measurable effect on a CPU, `static_graph` fails for
    steps with several micro-batches, and the broadcast of buffers comes when ranks have just synchronized.
    docs/benchmarks.md has the figures.
    """
    # Gradients are views of the buckets, not copies: they take half of the memory and have the same values.
    settings: dict[str, Any] = {"gradient_as_bucket_view": True}
    if args.ddp_find_unused_parameters is None and uses_every_parameter(model):
        settings["find_unused_parameters"] = False
    return settings


def uses_every_parameter(model: nn.Module) -> bool:
    """True if each trainable parameter certainly gets a gradient in every step, so that DDP need not search the graph.

    This is certain for dense text models by their config, if all parameters are trained, or LoRA on some of them. It is
    not certain for models with conditional modules, without a config, or of a class that is not transformers'; for
    several adapters; and for LoRA on embeddings or the output head.
    """
    config: Any = getattr(model, "config", None)  # PEFT has the attributes of the base model.
    # Unsloth compiles classes into its modules. Nothing is known of a class of the script.
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


def all_parameters(model: nn.Module) -> list[nn.Parameter]:
    """Returns the parameters of a model, shared ones repeatedly. `model.parameters()` is slower: it builds names."""
    return [p for module in model.modules() for p in module._parameters.values() if p is not None]


def names_of(model: nn.Module, ids: Set[int]) -> str:
    """Lists the names of parameters, which are given by their ids."""
    return listed([name for name, p in model.named_parameters() if id(p) in ids])


def parameters_beside_the_model(trainer: TrainerLike) -> list[tuple[str, Any]]:
    """Returns names and tensors that the optimizer trains outside the model, which DDP does not synchronize."""
    own = {id(p) for p in trainer.model.parameters()}
    return [
        (f"parameter {i} of the optimizer's group {g}, which is not in the model", p)
        for g, group in enumerate(trainer.optimizer.param_groups)
        for i, p in enumerate(group["params"])
        if p.requires_grad and id(p) not in own
    ]
