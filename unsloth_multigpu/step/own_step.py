"""Looks at a script's own `training_step`: does it do more than compute the loss of the rows that it is given?

Where ranks share an optimizer step, a rank has other micro-batches than one process, and between two of them its own
part of the gradient. What is done there with the rows of a micro-batch together, or with the gradient so far, makes
another training of it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from unsloth_multigpu.group.manager import DDPManager
from unsloth_multigpu.group.shards import part_of
from unsloth_multigpu.seam import instance_attribute
from unsloth_multigpu.step.loss import owner_of
from unsloth_multigpu.trainer_protocol import TrainerLike

# Each tensor with its version, which counts writes to it.
_Kept = Mapping[str, tuple[torch.Tensor, int]]

_WHOLE = (
    "Set gradient_accumulation_steps={0} or a multiple of it, and balance='off': each micro-batch is then computed "
    "whole by one rank, which is exact. Or change each row by itself, in the data set."
)
_AT_ONCE = (
    "Set gradient_accumulation_steps=1, or do it in a callback at on_pre_optimizer_step, where the gradient is that of "
    "the whole step."
)


@dataclass(frozen=True)
class Seen:
    """What a script's own `training_step` does that ranks cannot share.

    Args:
        name: Of the method.
        problem: In words.
        ways: What the user can do about it.
    """

    name: str
    problem: str
    ways: str


class OwnStep:
    """Watches calls of a script's own `training_step`, each for one micro-batch.

    In steps 1, 2, 4, 8, ... and short ones alone, of which each is one collective. It computes nothing but two norms of
    the gradient for each micro-batch of these.

    Args:
        trainer: A `transformers.Trainer` or subclass.
        manager: This rank's manager.

    Attributes:
        is_looking: This step is watched, on all ranks.
        rows: What was seen of the rows that reach the loss, in words; "" = nothing.
        gradient: The same of the gradient.
    """

    def __init__(self, trainer: TrainerLike, manager: DDPManager) -> None:
        self._trainer = trainer
        self._manager = manager
        self._num_steps = 0
        self.is_looking = False
        self.rows = self.gradient = ""
        self._inputs: Any = None
        self._given: _Kept | None = None
        self._expected: _Kept = {}
        # Of each parameter the gradient, its version and its norm, when the last backward pass had ended.
        self._after_backward: list[tuple[torch.Tensor, torch.Tensor | None, int]] | None = None
        self._norms: list[torch.Tensor] = []

    def begin_step(self, *, is_short: bool) -> None:
        """Called before each step.

        Args:
            is_short: It has fewer micro-batches than others, and may be shared where these are whole.
        """
        self._num_steps += 1
        self.is_looking = is_short or not self._num_steps & (self._num_steps - 1)

    def end_step(self) -> Seen | None:
        """Called after each step; what a rank has seen in it. Collective in a step that was watched."""
        if not self.is_looking:
            return None
        texts = self._manager.gather_texts(json.dumps([self.rows, self.gradient]))
        rows, gradient = ([found for found in kind if found] for kind in zip(*map(json.loads, texts), strict=True))
        if not rows and not gradient:
            return None
        name = f"{owner_of(self._trainer, 'training_step').__name__}.training_step"
        ways = _AT_ONCE if gradient else _WHOLE.format(self._manager.identity.world_size)
        return Seen(name, (gradient or rows)[0], ways)

    @contextmanager
    def micro_batch(self, inputs: Any, *, is_whole: bool, is_all: bool) -> Iterator[None]:
        """Around one call of `training_step`.

        Args:
            inputs: What it is called with.
            is_whole: They are a micro-batch of one process.
            is_all: The step has no other micro-batch, on any rank.
        """
        self._inputs, self._given, self._expected = inputs, _kept(inputs), _kept(inputs)
        self._after_backward = None
        rows, gradient = self.rows, self.gradient
        with instance_attribute(self._trainer, "_prepare_inputs", self._preparing(self._trainer._prepare_inputs)):
            yield
        if self._has_changed_gradient():
            self.gradient = "it changes the gradient behind the backward pass of a micro-batch"
        if is_whole:
            self.rows = rows
        if is_all:
            self.gradient = gradient
        self._inputs, self._given, self._expected = None, None, {}
        self._after_backward, self._norms = None, []

    def _preparing(self, original: Callable[[Any], Any]) -> Callable[[Any], Any]:
        """What `_prepare_inputs` makes of the inputs is tried with the loss, and expected there."""

        def prepare(inputs: Any) -> Any:
            if inputs is not self._inputs:
                return original(inputs)
            self._compare(inputs)
            prepared = original(inputs)
            self._expected = _kept(prepared)
            return prepared

        return prepare

    def see_inputs(self, inputs: Any) -> None:
        """The loss is called with these."""
        if self._given is not None:
            self._compare(inputs)

    def _compare(self, inputs: Any) -> None:
        if changed := [name for name, value in _tensors(inputs) if _differs(value, self._expected.get(name))]:
            names = ", ".join(changed)
            self.rows = f"the loss is called with another {names} than the step was given"

    def see_loss(self, loss: torch.Tensor) -> None:
        """The loss has returned this."""
        if self._given is None or not loss.requires_grad:
            return
        if self._after_backward is not None:
            self.gradient = "it computes a loss once more behind the backward pass of a micro-batch"
        loss.register_hook(self._backward_begins)

    def _backward_begins(self, _gradient: torch.Tensor) -> None:
        engine = torch.autograd.Variable._execution_engine
        # Queued twice: what others queue meanwhile, as DDP its exchange, comes before.
        engine.queue_callback(lambda: engine.queue_callback(self._note_gradient))

    def _note_gradient(self) -> None:
        parameters = [p for p in self._trainer.model.parameters() if p.requires_grad]
        self._after_backward = [(p, p.grad, 0 if p.grad is None else _version(p.grad)) for p in parameters]
        self._norms = _norms(parameters)

    def _has_changed_gradient(self) -> bool:
        if self._after_backward is None:
            return False
        if any(p.grad is not g or (g is not None and _version(g) != v) for p, g, v in self._after_backward):
            return True
        # Writing to `grad.data` is not counted.
        after = _norms([p for p, *_ in self._after_backward])
        return not torch.allclose(_stacked(self._norms), _stacked(after), rtol=0.0, atol=0.0, equal_nan=True)


def _tensors(inputs: Any) -> list[tuple[str, torch.Tensor]]:
    items = inputs.items() if isinstance(inputs, Mapping) else ()
    return [(name, value) for name, value in items if isinstance(value, torch.Tensor)]


def _kept(inputs: Any) -> _Kept:
    return {name: (value, _version(value)) for name, value in _tensors(inputs)}


def _version(tensor: torch.Tensor) -> int:
    return 0 if tensor.is_inference() else int(tensor._version)


def _differs(value: torch.Tensor, expected: tuple[torch.Tensor, int] | None) -> bool:
    if expected is None:
        return value.dim() > 0  # One that the step has made.
    tensor, version = expected
    if _version(tensor) != version or value.shape != tensor.shape:
        return True
    return value is not tensor and not torch.equal(value, tensor.to(value))


def _norms(parameters: list[torch.Tensor]) -> list[torch.Tensor]:
    gradients = [part_of(p.grad.detach()) for p in parameters if p.grad is not None]
    return [torch.linalg.vector_norm(g, dtype=torch.float32) for g in gradients if not g.is_sparse]


def _stacked(norms: list[torch.Tensor]) -> torch.Tensor:
    return torch.stack([norm.cpu() for norm in norms]) if norms else torch.zeros(0)
