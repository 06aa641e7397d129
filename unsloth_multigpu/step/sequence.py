"""Shares samples among several ranks (DeepSpeed-Ulysses): each computes some positions, and in attention some heads.

The model computes embeddings, masks and position embeddings for the whole row. Decoder layers get the positions of
this rank. The attention function, whichever it is, gets all positions of this rank's heads.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from unsloth_multigpu.errors import SetupError
from unsloth_multigpu.group.model import base_model, text_config
from unsloth_multigpu.part import TrainerLike
from unsloth_multigpu.seam import instance_attribute
from unsloth_multigpu.step.loss import IGNORED, LossReduction, has_own_step, name_of

_WITHOUT = "Leave sequence_parallel out."


class SharedSequence:
    """Lets the ranks of a group share each sequence of a training, for models of transformers, with PEFT or without.

    Attributes:
        rank: Index of this rank in the group.
        is_on: All ranks of the group call the model with the same inputs.
        num_targets: Number of labels in this rank's part of the latest micro-batch.
        number: Number of the latest micro-batch: greater than 0, and unique among all groups.
    """

    def __init__(self, model: nn.Module, group: dist.ProcessGroup) -> None:
        self._model = base_model(model)
        self._group, self._size, self.rank = group, group.size(), group.rank()
        self._layers = layers_of(self._model, self._size)
        self._modules = {id(module) for layer in self._layers for module in layer.modules()}
        self._length = self._num_shared = self.num_targets = 0
        self.number = dist.get_rank() // self._size + 1
        self.is_on = False

    def check_loss(self, trainer: TrainerLike, reduction: LossReduction) -> None:
        """Raises SetupError if a loss is not known to be a sum over tokens, or layers are compiled."""
        if getattr(trainer.args, "torch_compile", False):
            raise SetupError(
                "sequence_parallel changes layers, so they cannot be compiled (torch_compile=True).", hint=_WITHOUT
            )
        if not reduction.is_token_normalized or has_own_step(trainer):
            raise SetupError(
                "sequence_parallel shares losses that are sums over tokens, but it is not known whether "
                f"{name_of(trainer)} is one.",
                hint="Leave sequence_parallel out; or set loss_reduction='token_sum' where it is one, divided by "
                "num_items_in_batch, and reads labels and logits alone.",
            )

    @contextmanager
    def around(self) -> Iterator[None]:
        """Surrounds a training."""
        from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

        name = text_config(self._model)._attn_implementation
        shared = functools.partial(self._attend, ALL_ATTENTION_FUNCTIONS[name])
        with ExitStack() as stack:
            for layer in self._layers:
                stack.callback(layer.register_forward_pre_hook(self._before_layer, with_kwargs=True).remove)
            stack.callback(self._layers[-1].register_forward_hook(self._after_last).remove)
            ALL_ATTENTION_FUNCTIONS[name] = shared  # Hides the registered function of this name.
            stack.callback(ALL_ATTENTION_FUNCTIONS.pop, name)
            yield

    @contextmanager
    def part_of(self, inputs: Any) -> Iterator[Any]:
        """Surrounds the computation of a loss, and yields its inputs with this rank's labels.

        The model's output has this rank's positions and an additional one, which is not used: a loss that shifts labels
        by one is then the sum over this rank's labels.

        Raises:
            SetupError: Attention was not computed by transformers' interface.
        """
        length = inputs["input_ids"].shape[1]
        part = -(-length // self._size)
        labels = nn.functional.pad(inputs["labels"], (0, part * self._size + 1 - length), value=IGNORED)
        self._length, self._num_shared = length, 0
        self.number += dist.get_world_size() // self._size
        labels = labels[:, self.rank * part :][:, : part + 1]
        self.num_targets = int(labels[:, 1:].ne(IGNORED).sum())
        yield {**inputs, "labels": labels}
        if self._num_shared < len(self._layers):
            raise SetupError(
                f"{type(self._model).__name__} computed attention in {self._num_shared} of {len(self._layers)} layers "
                "by transformers' interface, the only one that sequence_parallel shares.",
                hint=_WITHOUT,
            )

    def _before_layer(self, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not self.is_on:
            return None
        if layer is self._layers[0]:
            if args[0].shape[1] != self._length:
                raise SetupError(
                    "The model adds positions to those of its input_ids, which cannot be shared.", hint=_WITHOUT
                )
            args = (self._own(args[0]), *args[1:])
        if (places := kwargs.get("position_embeddings")) is not None:
            kwargs = {**kwargs, "position_embeddings": tuple(self._own(each) for each in places)}
        return args, kwargs

    def _own(self, value: torch.Tensor) -> torch.Tensor:
        """Returns this rank's positions, which are the second dimension."""
        part = -(-self._length // self._size)
        value = value[:, self.rank * part : (self.rank + 1) * part]
        return nn.functional.pad(value, (0, 0, 0, part - value.shape[1]))

    def _after_last(self, _layer: nn.Module, _args: Any, output: Any) -> Any:
        if not self.is_on:
            return None
        hidden, *others = output if isinstance(output, tuple) else (output,)
        hidden = nn.functional.pad(hidden, (0, 0, 0, 1))
        return (hidden, *others) if isinstance(output, tuple) else hidden

    def _attend(
        self,
        attend: Callable[..., Any],
        module: nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        """Replaces an attention function of transformers, for (batch, heads, own positions, dim) inputs."""
        if not self.is_on or id(module) not in self._modules:
            return attend(module, query, key, value, *args, **kwargs)
        self._num_shared += 1
        groups = query.shape[1] // key.shape[1]
        with ExitStack() as stack:
            if key.shape[1] % self._size:  # Key heads cannot be divided: each query head gets a copy.
                key, value = (each.repeat_interleave(groups, dim=1) for each in (key, value))
                stack.enter_context(instance_attribute(module, "num_key_value_groups", 1))
            query, key, value = (self._all_positions(each) for each in (query, key, value))
            output, *others = attend(module, query, key, value, *args, **kwargs)
        return self._all_heads(output), *others

    def _all_positions(self, states: torch.Tensor) -> torch.Tensor:
        batch, num_heads, part, dim = states.shape
        sent = states.reshape(batch, self._size, num_heads // self._size, part, dim).movedim(1, 0)
        received = _exchanged(sent, self._group)
        return received.permute(1, 2, 0, 3, 4).flatten(2, 3)[:, :, : self._length]

    def _all_heads(self, output: torch.Tensor) -> torch.Tensor:
        batch, length, num_heads, dim = output.shape
        part = -(-length // self._size)
        whole = nn.functional.pad(output, (0, 0, 0, 0, 0, part * self._size - length))
        sent = whole.reshape(batch, self._size, part, num_heads, dim).movedim(1, 0)
        received = _exchanged(sent, self._group)
        return received.permute(1, 2, 0, 3, 4).flatten(2, 3)


class _Exchange(torch.autograd.Function):
    """Sends the i-th of k blocks to the i-th of k ranks, and the gradients back."""

    @staticmethod
    def forward(ctx: Any, blocks: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group = group
        received = torch.empty_like(blocks)
        dist.all_to_all_single(received, blocks, group=group)
        return received

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return _exchanged(gradient, ctx.group), None


def _exchanged(blocks: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    return _Exchange.apply(blocks.contiguous(), group)  # type: ignore[no-any-return, no-untyped-call]


def layers_of(model: Any, size: int) -> list[nn.Module]:
    """Returns the decoder layers of a model whose samples `size` ranks share; raises SetupError if they cannot."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    config = text_config(model)
    layers = getattr(model.get_decoder(), "layers", None) if hasattr(model, "get_decoder") else None
    attention, num_heads = getattr(config, "_attn_implementation", None), getattr(config, "num_attention_heads", 0)
    why, hint = "", _WITHOUT
    if not isinstance(layers, nn.ModuleList) or not num_heads:
        why = f"{type(model).__name__} is not a transformers model with decoder layers"
    elif any("unsloth" in type(module).forward.__module__.lower() for module in layers.modules()):
        why = "Unsloth computes attention by code of its own, which sequence_parallel does not share"
    elif attention not in ALL_ATTENTION_FUNCTIONS:
        why = f"attn_implementation={attention!r} is not among the functions of transformers' attention interface"
        hint = "Load the model with attn_implementation='sdpa'."
    elif num_heads % size:
        why = f"sequence_parallel={size} does not divide {num_heads} attention heads"
        hint = f"Set a divisor of {num_heads}."
    if why:
        raise SetupError(f"{why}.", hint=hint)
    return list(layers or ())
