"""One training of a sharded model: what an engine does not check, or leaves to the one who starts the ranks."""

from __future__ import annotations

import dataclasses
import gc
import sys
import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, cast

import torch
from torch import nn

from unsloth_multigpu.errors import SetupError
from unsloth_multigpu.group.engine import Engine, check_versions, find_engine
from unsloth_multigpu.group.manager import DDPManager
from unsloth_multigpu.group.shards import class_of, has_shards, is_sharded, named_as_before, part_of, reshard
from unsloth_multigpu.logs import get_logger
from unsloth_multigpu.options import MultiGPUConfig
from unsloth_multigpu.part import Override, Part
from unsloth_multigpu.shard.groups import grouped, refusal_of
from unsloth_multigpu.shard.optimizer import trains_parts
from unsloth_multigpu.step.feed import StepFeed
from unsloth_multigpu.step.loss import Inexact
from unsloth_multigpu.step.own_code import hooked
from unsloth_multigpu.strategy import DDP
from unsloth_multigpu.trainer_protocol import ArgumentsLike, ControlLike, StateLike, TrainerLike
from unsloth_multigpu.words import listed

logger = get_logger(__name__)

_NUM_NAMED = 4


class Sharding(Part):
    """Stands in the place of DDP where the weights are sharded: gradients meet in the engine's reduce-scatter.

    Args:
        trainer: A `transformers.Trainer` or subclass.
        manager: This rank's manager, one of several.
        engine: Who shards the model.
        steps: Decides how samples are dealt once the model is there.
    """

    place = "exchange"

    def __init__(self, trainer: TrainerLike, manager: DDPManager, engine: Engine, steps: StepFeed) -> None:
        self._trainer = trainer
        self._manager = manager
        self._engine = engine
        self._steps = steps
        # Of the parameters before accelerate has them.
        self._dtypes: dict[str, torch.dtype] = {}
        # What the engine is told while it divides the model. Nothing that is raised later is about that.
        self._until_placed = ExitStack()
        self._is_placed = False
        # Parameters of before they were divided.
        self._whole: list[tuple[str, weakref.ref[nn.Parameter]]] = []
        self._is_begun = False
        # Of an optimizer that has trained parts already.
        self._groups: list[list[nn.Parameter]] = []

    @contextmanager
    def around(self) -> Iterator[None]:
        """Gives all ranks rank 0's weights: each is about to keep its part of its own. Collective.

        Raises:
            SetupError: Checkpoints are asked for that could not be resumed from.
        """
        model, args = self._trainer.model, self._trainer.args
        if model is not None and has_shards(model):
            # An evaluation may have left whole weights, and the Trainer asks for its class.
            reshard(model)
            named_as_before(model)
        if (
            self._engine is Engine.TRANSFORMERS
            and str(getattr(args.save_strategy, "value", args.save_strategy)) != "no"
        ):
            raise SetupError(
                f"save_strategy={str(args.save_strategy)!r}, but a Trainer saves rank 0's part alone of a model that "
                "transformers has sharded by DistributedConfig.",
                hint="Set save_strategy='no', or load the model without it and call enable_multi_gpu(shard='on').",
            )
        self._check_named_optimizer()
        if self._engine is Engine.ACCELERATE:
            self._sum_in_32_bits()
            self._dtypes = {} if model is None else {n: p.dtype for n, p in model.named_parameters()}
        if self._engine is Engine.ACCELERATE and has_shards(model) and self._trainer.optimizer is not None:
            self._groups = [list(group["params"]) for group in self._trainer.optimizer.param_groups]
        if self._engine is Engine.ACCELERATE and model is not None and not has_shards(model):
            self._check_own_optimizer(model)
            check_no_hooks(model)
            self._whole = [(name, weakref.ref(p)) for name, p in model.named_parameters()]
            # Frozen ones too, as DDP does: a rank may have made them by random numbers.
            self._manager.broadcast_tensors(model.parameters())
            with self._until_placed:
                self._until_placed.enter_context(grouped(model, self._plugin))
                yield from self._told()
            return
        yield

    def _told(self) -> Iterator[None]:
        """An error of the engine says that it cannot shard this model.

        Raises:
            SetupError: So it is.
        """
        try:
            yield
        except Exception as error:
            refusal = None if self._is_placed else refusal_of(self._trainer.model, error)
            if refusal is None:
                raise
            raise refusal from error

    @property
    def _plugin(self) -> Any:
        return cast(Any, self._trainer.accelerator).state.fsdp_plugin

    def _sum_in_32_bits(self) -> None:
        """accelerate lets bf16 gradients be summed over ranks in bf16; DDP's are those of the weights, fp32."""
        plugin = self._plugin
        policy = plugin.mixed_precision_policy
        if policy is not None and policy.reduce_dtype in (torch.bfloat16, torch.float16):
            single = {"reduce_dtype": torch.float32, "output_dtype": torch.float32}
            plugin.mixed_precision_policy = dataclasses.replace(policy, **single)

    def overrides(self) -> dict[str, Override]:
        return {"prepare_model": self._prepare_model, "_save_checkpoint": self._save}

    def _save(self, original: Callable[..., None], *args: Any, **kwargs: Any) -> None:
        """`Trainer._save_checkpoint`: what is saved belongs to the optimizer's parts, also after an evaluation."""
        reshard(self._trainer.model)
        original(*args, **kwargs)

    def _prepare_model(self, original: Callable[..., Any], model: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """`Accelerator.prepare_model`, which refuses a model that transformers has sharded."""
        if self._engine is not Engine.TRANSFORMERS:
            return original(model, *args, **kwargs)
        # An evaluation's model is neither moved nor wrapped, and otherwise prepared in the same way.
        return original(model, **{**kwargs, "device_placement": False, "evaluation_mode": True})

    def on_train_begin(self, args: ArgumentsLike, state: StateLike, control: ControlLike, **kwargs: Any) -> None:
        """Checks that the model is sharded, and that the optimizer trains the parts.

        Raises:
            SetupError: It is not, or a trainable weight would never change.
        """
        self._is_placed = True
        self._until_placed.close()
        # accelerate prepares it again, and knows parts by their address, which all empty parts of a rank share.
        for group, parameters in zip(self._trainer.optimizer.param_groups, self._groups, strict=False):
            group["params"] = parameters
        model = self._trainer.model
        check_is_sharded(model)
        self._check_held()
        named_as_before(model)
        if _reshard_without_gradient not in model._forward_hooks.values():
            # Also after the training: what is left whole is another tensor than the one that is saved.
            model.register_forward_hook(_reshard_without_gradient)
        if self._manager.config.shard_offload:
            check_is_offloaded(model, self._engine)
        self._check_optimizer(model)
        self._tell_dtypes(model)
        self._steps.decide()
        if self._manager.identity.rank > 0:
            return
        parameters = list(model.parameters())
        whole = sum(p.numel() * p.element_size() for p in parameters)
        mine = sum(part_of(p).numel() * p.element_size() for p in parameters)
        logger.info(
            "sharded by FSDP2 of %s: a rank holds %.1f %% of the weights", self._engine.value, 100 * mine / whole
        )

    def _tell_dtypes(self, model: nn.Module) -> None:
        """Under mixed precision accelerate trains 16-bit weights as 32-bit ones."""
        now = {name: p.dtype for name, p in model.named_parameters()}
        wider = [name for name, dtype in self._dtypes.items() if now.get(name, dtype).itemsize > dtype.itemsize]
        if wider and self._manager.identity.rank == 0:
            logger.warning(
                "accelerate's FSDP2 trains %d of %d weights in 32 bits that were loaded in 16 (%s, say): they are not "
                "rounded after each step as in one process, and memory and saved files are those of 32 bits",
                len(wider),
                len(now),
                wider[0],
            )

    def on_step_begin(self, args: ArgumentsLike, state: StateLike, control: ControlLike, **kwargs: Any) -> None:
        """A forward pass without a backward, of an evaluation say, leaves whole weights on some modules."""
        reshard(self._trainer.model)
        is_begun, self._is_begun = self._is_begun, True
        if not is_begun:
            check_no_hooks(self._trainer.model)  # Of callbacks, at the begin of the training.

    def on_train_end(self, args: ArgumentsLike, state: StateLike, control: ControlLike, **kwargs: Any) -> None:
        reshard(self._trainer.model)

    def _check_held(self) -> None:
        """A parameter that is still held was taken from the model before it was divided: it does not train.

        Raises:
            SetupError: There is one, and `inexact="raise"`.
        """
        refs, self._whole = self._whole, []
        if all(ref() is None for _, ref in refs):
            return
        gc.collect()  # What only a circle holds.
        now = {id(p) for p in self._trainer.model.parameters()}
        held = [name for name, ref in refs if (p := ref()) is not None and id(p) not in now]
        if not held:
            return
        what = (
            f"{len(held)} parameter(s) of before the model was sharded are still held ({', '.join(held[:_NUM_NAMED])}, "
            "say). They do not train, and what is done with them (a penalty, a moving average, freezing) has no effect."
        )
        hint = "Take parameters from the model when they are used: model.named_parameters(), in a callback or the loss."
        if self._manager.config.inexact == "raise":
            raise SetupError(what, hint=hint)
        self._steps.inexact = Inexact(what, hint)
        if self._manager.identity.rank == 0:
            logger.warning("%s %s", what, hint)

    def _check_named_optimizer(self) -> None:
        """Refuses an optimizer that would fail in the first step, by an error of torch that does not name it.

        Raises:
            SetupError: It cannot train parts.
        """
        optimizer, named = self._trainer.optimizer, self._trainer.args.optim
        name = str(getattr(named, "value", named))
        is_own = optimizer is not None and type(optimizer).__module__.startswith("bitsandbytes.")
        if not is_own and (optimizer is not None or trains_parts(name, with_unsloth=self._engine is Engine.UNSLOTH)):
            return
        what = f"The script's optimizer ({type(optimizer).__name__})" if is_own else f"optim={name!r}"
        raise SetupError(
            f"{what} does not train weights that FSDP2 of {self._engine.value} has sharded.",
            hint="Set optim='adamw_torch_fused': each rank has only its part of the states.",
        )

    def _check_own_optimizer(self, model: nn.Module) -> None:
        """An optimizer of the script gets parts in the place of the weights that it was made of; its state does not.

        Raises:
            SetupError: It has state, or tensors that are no weights of the model.
        """
        optimizer = self._trainer.optimizer
        if optimizer is None:
            return
        name, own = type(optimizer).__name__, {id(p) for p in model.parameters()}
        if any(optimizer.state.values()):
            raise SetupError(
                f"The script's optimizer ({name}) has state already, of whole weights, and accelerate's FSDP2 divides "
                "weights alone.",
                hint="Give the Trainer one that has made no step, or name it by optim= in TrainingArguments.",
            )
        groups = optimizer.param_groups
        if strangers := [p for group in groups for p in group["params"] if id(p) not in own]:
            raise SetupError(
                f"The script's optimizer ({name}) has {len(strangers)} tensor(s) that are no weights of "
                f"{class_of(model).__name__}, the first of shape {tuple(strangers[0].shape)}.",
                hint="Make it of the parameters of the model that the Trainer is given.",
            )

    def _check_optimizer(self, model: nn.Module) -> None:
        trained = {id(p) for group in self._trainer.optimizer.param_groups for p in group["params"]}
        missing = [name for name, p in model.named_parameters() if p.requires_grad and id(p) not in trained]
        if missing:
            raise SetupError(
                f"The optimizer does not train {listed(missing)}, which require a gradient: it "
                "was made of other tensors than the parts of the sharded model.",
                hint="Let the Trainer make the optimizer, and freeze what is not to be trained.",
            )


def _reshard_without_gradient(model: nn.Module, inputs: Any, output: Any) -> None:
    """Frees what a forward pass leaves whole for a backward pass, where there will be none."""
    if not torch.is_grad_enabled():
        reshard(model)


def check_no_hooks(model: nn.Module) -> None:
    """Refuses the script's hooks on gradients, which no engine calls: it adds gradients up without autograd.

    Raises:
        SetupError: A trainable parameter has one.
    """
    name = next(hooked(model), None)
    if name is None:
        return
    raise SetupError(
        f"The script's hook on the gradient of {name} is never called where the model is sharded.",
        hint="Change gradients in a callback's on_pre_optimizer_step, by model.named_parameters(), or leave shard out.",
    )


def check_options(config: MultiGPUConfig, engine: Engine, *, is_notebook: bool = False) -> None:
    """Refuses what is possible for DDP only, where the script itself has asked for FSDP2.

    Raises:
        SetupError: Such an option was given, the ranks are those of a notebook, or a library is older than any with
            which the engine was run.
    """
    if is_notebook:
        raise SetupError(
            f"FSDP2 of {engine.value} shards the model, and the ranks of a notebook need whole weights: after an "
            "interrupt they get the kernel's.",
            hint="Train it in a script, or without FSDP2.",
        )
    if config.strategy != DDP():
        raise SetupError(
            f"strategy={str(config.strategy)!r} is not possible where FSDP2 of {engine.value} shards the model and "
            "exchanges the gradients.",
            hint="Leave one of them out.",
        )
    check_versions("torch", *(["unsloth"] if engine is Engine.UNSLOTH else ["transformers"]))


def check_is_placed(trainer: TrainerLike) -> None:
    """Refuses an evaluation before the first training, for which accelerate has no model: it shards it in `train()`.

    Raises:
        SetupError: It is not sharded yet.
    """
    if find_engine(trainer) is Engine.ACCELERATE and not has_shards(trainer.model):
        raise SetupError(
            "evaluate() comes before train(): accelerate's FSDP2 shards a model together with its optimizer.",
            hint="Evaluate after train(), or in a script of its own without shard.",
        )


def check_is_offloaded(model: nn.Module, engine: Engine) -> None:
    """Refuses a sharded model whose parts are on the accelerator.

    Raises:
        SetupError: At least one is.
    """
    parts = ((name, part_of(p.detach()).device) for name, p in model.named_parameters() if is_sharded(p))
    elsewhere = [(name, device) for name, device in parts if device.type != "cpu"]
    if not elsewhere:
        return
    name, device = elsewhere[0]
    hint = "Leave shard_offload out."
    if engine is Engine.TRANSFORMERS:
        hint = "Load the model with DistributedConfig(fsdp_cpu_offload=True, ...), or leave shard_offload out."
    raise SetupError(
        f"shard_offload=True, but FSDP2 of {engine.value} keeps this rank's part of {name} on {device}.", hint=hint
    )


def check_is_sharded(model: nn.Module | None) -> None:
    """Refuses a model of which every rank holds everything.

    Raises:
        SetupError: No parameter is sharded, or there is no model yet.
    """
    if model is None:
        raise SetupError(
            "shard='on', but the model is made in train() by model_init, which Unsloth's FSDP2 does not shard.",
            hint="Give the Trainer a model, or leave shard out.",
        )
    if has_shards(model):
        return
    check_versions("torch", "unsloth" if "unsloth" in sys.modules else "transformers")
    if next(model.parameters()).device.type == "cpu" and "unsloth" not in sys.modules:
        hint = "accelerate's FSDP2 does not shard CPU ranks: leave shard out. Unsloth's does."
    else:
        hint = "Call enable_multi_gpu(shard='on') before `import unsloth` and before TrainingArguments are made."
    raise SetupError(
        f"shard='on', but no weight of {class_of(model).__name__} is sharded: every rank holds all of it.", hint=hint
    )
