"""The training of a sharded model: checks and work that the sharding engine (Unsloth, accelerate) leaves to us.

accelerate (1.15, `fsdp2_prepare_model`) calls `fully_shard` on each module whose class is in `_no_split_modules`, on
the input embeddings, on the last norm with the head (and with embeddings that are tied to it), and on the model for
the rest. That fits decoders, with or without a vision tower.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from unsloth_multigpu.errors import SetupError
from unsloth_multigpu.group.manager import DDPManager
from unsloth_multigpu.group.shards import Engine, class_of, fsdp_modules, has_shards, part_of, reshard
from unsloth_multigpu.logs import get_logger
from unsloth_multigpu.options import MultiGPUConfig
from unsloth_multigpu.part import ArgumentsLike, ControlLike, GradientExchange, StateLike, TrainerLike
from unsloth_multigpu.shard.quantized import check_rows, partial_layers, restore_states
from unsloth_multigpu.step.feed import StepFeed
from unsloth_multigpu.step.loss import hooked
from unsloth_multigpu.strategy import DDP
from unsloth_multigpu.versions import check_version
from unsloth_multigpu.words import listed

logger = get_logger(__name__)

# The oldest versions with which sharding was tested.
OLDEST = {"unsloth": "2026.10.9", "transformers": "5.17", "torch": "2.7"}
# Optimizers of bitsandbytes without "bnb" in their names.
_OF_BITSANDBYTES = {"adamw_8bit", "lion_8bit", "lion_32bit", "ademamix", "ademamix_8bit"}


class Sharding(GradientExchange):
    """Replaces DDP if the weights are sharded: the engine's reduce-scatter sums the gradients."""

    def __init__(self, trainer: TrainerLike, manager: DDPManager, engine: Engine, steps: StepFeed) -> None:
        super().__init__(trainer, manager)
        self._engine = engine
        self._steps = steps
        # Parameters of each group of an optimizer that has trained shards already.
        self._param_groups: list[list[nn.Parameter]] = []
        # 4-bit layers of whose weights this rank has loaded only its rows.
        self._partial_layers: list[Any] = []

    @contextmanager
    def around(self) -> Iterator[None]:
        """Broadcasts rank 0's weights before accelerate shards them. Collective.

        Raises:
            SetupError: The optimizer, hooks or shared weights are not supported in a sharded training.
        """
        model = self._trainer.model
        is_sharded_already = has_shards(model)
        if is_sharded_already:
            # An evaluation may have left weights gathered. The Trainer reads the name of the model's class.
            reshard(model)
            restore_class_names(model)
        if self._trainer.optimizer is None:  # torch's error in the first step would not name the optimizer.
            named = self._trainer.args.optim
            check_optimizer(str(getattr(named, "value", named)), self._engine)
        if self._engine is Engine.ACCELERATE:
            self._reduce_in_fp32()
            if not is_sharded_already and model is not None:
                # Autograd, which calls hooks, accumulates gradients of gathered weights. FSDP2 sets those of shards.
                if (name := next(hooked(model), None)) is not None:
                    raise SetupError(
                        f"The script's hook on the gradient of {name} is never called in a sharded training.",
                        hint="Change gradients in a callback's on_pre_optimizer_step, by model.named_parameters(), or "
                        "leave shard out.",
                    )
                check_shared(model)
                # Also frozen weights, as DDP does: they may be initialized randomly.
                self._partial_layers = partial_layers(model)
                packed = {id(layer.weight) for layer in self._partial_layers}
                self._manager.broadcast_tensors(p for p in model.parameters() if id(p) not in packed)
                if self._plugin.transformer_cls_names_to_wrap is None:
                    self._plugin.transformer_cls_names_to_wrap = layers_of(model)
                restore_states(self._partial_layers)
            elif self._trainer.optimizer is not None:
                self._param_groups = [list(group["params"]) for group in self._trainer.optimizer.param_groups]
        yield

    @property
    def _plugin(self) -> Any:
        return self._trainer.accelerator.state.fsdp_plugin

    def _reduce_in_fp32(self) -> None:
        """Makes FSDP2 of accelerate reduce gradients in fp32, as DDP does, and not in bf16 or fp16."""
        plugin = self._plugin
        policy = plugin.mixed_precision_policy
        if policy is not None and policy.reduce_dtype in (torch.bfloat16, torch.float16):
            single = {"reduce_dtype": torch.float32, "output_dtype": torch.float32}
            plugin.mixed_precision_policy = dataclasses.replace(policy, **single)

    def before_read(self) -> None:
        """Reshards the model: an evaluation may have left weights gathered."""
        reshard(self._trainer.model)

    def on_train_begin(self, args: ArgumentsLike, state: StateLike, control: ControlLike, **kwargs: Any) -> None:
        """Checks that the model is sharded and that the optimizer trains the shards.

        Raises:
            SetupError: The model is not sharded, or the optimizer lacks a trainable weight.
        """
        # accelerate has prepared the optimizer again. It finds shards by `data_ptr()`, which empty ones share.
        for group, parameters in zip(self._trainer.optimizer.param_groups, self._param_groups, strict=False):
            group["params"] = parameters
        model = self._trainer.model
        check_is_sharded(model)
        check_rows(self._partial_layers, self._manager.identity.rank, self._manager.identity.world_size)
        restore_class_names(model)
        if _reshard_without_gradient not in model._forward_hooks.values():
            # It stays after the training: otherwise `parameters()` after an evaluation would be gathered weights.
            model.register_forward_hook(_reshard_without_gradient)
        self._check_optimizer(model)
        self._steps.decide()  # How samples are divided, now that the model is sharded.
        parameters = list(model.parameters())
        percent = 100 * sum(part_of(p).nbytes for p in parameters) / sum(p.nbytes for p in parameters)
        logger.info("sharded by FSDP2 of %s: a rank holds %.1f %% of the weights", self._engine.value, percent)

    def on_step_begin(self, args: ArgumentsLike, state: StateLike, control: ControlLike, **kwargs: Any) -> None:
        """Reshards the model: a forward pass without a backward pass, as in an evaluation, leaves weights gathered."""
        reshard(self._trainer.model)

    def on_train_end(self, args: ArgumentsLike, state: StateLike, control: ControlLike, **kwargs: Any) -> None:
        reshard(self._trainer.model)

    def _check_optimizer(self, model: nn.Module) -> None:
        trained = {id(p) for group in self._trainer.optimizer.param_groups for p in group["params"]}
        missing = [name for name, p in model.named_parameters() if p.requires_grad and id(p) not in trained]
        if missing:
            raise SetupError(
                f"The optimizer does not train {listed(missing)}, which require a gradient: it was created with other "
                "tensors than the shards of the model.",
                hint="Let the Trainer create the optimizer, and freeze weights that are not to be trained.",
            )


def _reshard_without_gradient(model: nn.Module, inputs: Any, output: Any) -> None:
    """Forward hook: reshards the model after a forward pass without gradients, which no backward pass follows."""
    if not torch.is_grad_enabled():
        reshard(model)


def check_options(config: MultiGPUConfig, engine: Engine) -> None:
    """Refuses a sharded training that this package does not support, also if the script itself asks for FSDP2.

    Raises:
        SetupError: `strategy` was given, transformers has sharded the model, or a library is too old for the engine.
    """
    if engine is Engine.TRANSFORMERS:
        raise SetupError(
            "distributed_config has sharded the model during loading, and a Trainer would save only rank 0's shard.",
            hint="Leave distributed_config out, and call enable_multi_gpu(shard='on').",
        )
    if config.strategy != DDP():
        raise SetupError(
            f"strategy={str(config.strategy)!r} is not possible: FSDP2 of {engine.value} shards the model, and reduces "
            "the gradients itself.",
            hint="Leave one of them out.",
        )
    check_versions("torch", *(["unsloth"] if engine is Engine.UNSLOTH else ["transformers"]))


def check_optimizer(name: str, engine: Engine) -> None:
    """Refuses an optimizer of `TrainingArguments.optim` that cannot train the shards of FSDP2.

    bitsandbytes' optimizers need plain tensors. Unsloth's FSDP2 (2026.10.9) passes these to Adam and AdamW only.
    transformers' Adafactor keeps plain tensors of rows and columns, which it cannot combine with shards (DTensor).

    Raises:
        SetupError: It cannot.
    """
    is_of_bitsandbytes = "bnb" in name or name.startswith("paged_") or name in _OF_BITSANDBYTES
    if name == "adafactor" or (is_of_bitsandbytes and not (engine is Engine.UNSLOTH and "adam" in name)):
        raise SetupError(
            f"optim={name!r} cannot train weights that are sharded by FSDP2 of {engine.value}.",
            hint="Set optim='adamw_torch_fused', whose states are sharded, too.",
        )


def check_is_sharded(model: nn.Module | None) -> None:
    """Checks that the model is sharded.

    Raises:
        SetupError: No parameter is sharded.
    """
    if has_shards(model):
        return
    check_versions("torch", "unsloth" if "unsloth" in sys.modules else "transformers")
    hint = "Call enable_multi_gpu(shard='on') before `import unsloth` and before TrainingArguments are made."
    if model is None:
        hint = "Pass a model to the Trainer in place of model_init, or leave shard out."
    elif next(model.parameters()).device.type == "cpu" and "unsloth" not in sys.modules:
        hint = "FSDP2 of accelerate shards nothing on CPU ranks: leave shard out, or import Unsloth, whose FSDP2 does."
    name = "the model" if model is None else class_of(model).__name__
    raise SetupError(f"shard='on', but no weight of {name} is sharded: every rank has the whole model.", hint=hint)


def layers_of(model: nn.Module) -> list[str]:
    """Returns the classes of `_no_split_modules` that occur in the model and contain neither embeddings nor head."""
    ends = {id(module) for module in _embeddings_and_head(model)}
    modules = list(model.modules())
    present = {type(m).__name__ for m in modules}
    around_them = {type(m).__name__ for m in modules for i in m.modules() if i is not m and id(i) in ends}
    names = getattr(model, "_no_split_modules", None) or ()
    return [name for name in names if name in present and name not in around_them]


def check_shared(model: nn.Module) -> None:
    """Refuses a model in which two FSDP modules share a trainable weight: each would update its own copy.

    Raises:
        SetupError: Modules other than input embeddings and head share a trainable weight.
    """
    ends = {id(module) for end in _embeddings_and_head(model) for module in end.modules()}
    users: dict[int, list[str]] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        for name, parameter in module.named_parameters(recurse=False):
            if parameter.requires_grad and id(module) not in ends:
                users.setdefault(id(parameter), []).append(f"{path}.{name}".lstrip("."))
    tied = {id(parameter) for end in _embeddings_and_head(model) for parameter in end.parameters()}
    for key, names in users.items():
        if len(names) > 1 or key in tied:
            others = " and ".join(names[:2]) if len(names) > 1 else f"{names[0]} and the embeddings"
            raise SetupError(
                f"{class_of(model).__name__}: {others} share one weight, of which accelerate's FSDP2 would make two, "
                "because it shards the modules separately.",
                hint="Leave shard out: DDP trains this model.",
            )


def _embeddings_and_head(model: nn.Module) -> list[nn.Module]:
    """Returns the input embeddings and the head, if the model has them."""
    found = []
    for getter in ("get_input_embeddings", "get_output_embeddings"):
        try:
            found.append(getattr(model, getter, lambda: None)())
        except NotImplementedError:  # Many models of transformers without token embeddings raise it.
            continue
    return [module for module in found if isinstance(module, nn.Module)]


def check_versions(*libraries: str) -> None:
    """Checks that libraries are not older than in `OLDEST`.

    Raises:
        SetupError: One is older.
    """
    for row in (check_version(f"{library}>={OLDEST[library]}") for library in libraries):
        if row.installed is not None and not row.ok:
            raise SetupError(
                f"shard='on' needs {row.name}{row.supported}, and {row.installed} is installed.",
                hint=f"Upgrade {row.name}, or leave shard out.",
            )


def restore_class_names(model: nn.Module) -> None:
    """Gives the classes of sharded modules the names that they had before `fully_shard`.

    Libraries read them: for label smoothing the Trainer shifts labels if the name is that of a causal language model,
    and accelerate finds layers by the names of their classes.
    """
    for module in fsdp_modules(model):
        own = class_of(module)
        type(module).__name__, type(module).__qualname__ = own.__name__, own.__qualname__
