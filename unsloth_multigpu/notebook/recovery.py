"""What is left of a notebook's trainings when their process group ends: rank 0's weights. Trainers are made again.

Imported inside functions only.
"""

from __future__ import annotations

import json
import sys
import weakref
from typing import Any, cast

import torch
from torch import nn

from unsloth_multigpu.errors import DistributedError, DivergenceError, SetupError
from unsloth_multigpu.group.manager import DDPManager
from unsloth_multigpu.group.model import inner_name
from unsloth_multigpu.group.replicas import persistent_buffers, replicated_tensors
from unsloth_multigpu.group.shards import has_shards
from unsloth_multigpu.notebook.parts import CUT, lose
from unsloth_multigpu.notebook.variables import RankVariables
from unsloth_multigpu.train.loop import Loop
from unsloth_multigpu.trainer_protocol import TrainerLike
from unsloth_multigpu.wire.digest import digest_of
from unsloth_multigpu.wire.identity import SINGLE_PROCESS


class Trainings:
    """The Trainers that the ranks have trained in this process group, by the number of their last training.

    A number is recorded once all ranks have agreed on the training, so it means the same Trainer on all of them, also
    where some ranks have released theirs.
    """

    def __init__(self) -> None:
        self._noted: dict[int, tuple[weakref.ref[TrainerLike], Loop]] = {}
        self._wrappers: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        # Of the trainings that an exception has ended before their end.
        self._cut: set[int] = set()

    def __bool__(self) -> bool:
        return bool(self._noted)

    @property
    def is_cut(self) -> bool:
        """True where an exception has ended a training before its end."""
        return any(trainer.is_in_train for trainer in self._living().values())

    def note(self, number: int, loop: Loop) -> None:
        """Remembers a Trainer that is about to be steered.

        Args:
            number: Which training of this session it is.
            loop: The parts that steer it. It does not refer to the Trainer after `let_go`.
        """
        trainer = loop.trainer
        self._noted = {n: noted for n, noted in self._noted.items() if noted[0]() not in (None, trainer)}
        self._noted[number] = weakref.ref(trainer), loop

    def note_wrapper(self, model: nn.Module) -> None:
        """Remembers the wrapper that a plain loop trains, which holds the process group."""
        if isinstance(model, nn.parallel.DistributedDataParallel):
            self._wrappers.add(model)

    def retire(self) -> None:
        """Lets no Trainer and no wrapper of this group train again: its optimizer may be a step ahead of other ranks'.

        A Trainer still evaluates and saves.
        """
        self._cut = {number for number, trainer in self._living().items() if trainer.is_in_train}
        for number, trainer in self._living().items():
            self._noted[number][1].let_go()  # An exception may have interrupted an earlier `let_go`.
            trainer.is_in_train = False
            trainer.train = _refuse_old_trainer
            _take_ddp_off(trainer)
        for wrapper in self._wrappers:
            ddp = cast(Any, wrapper)
            ddp._remove_autograd_hooks()
            ddp.forward = _refuse_old_wrapper
        self._wrappers.clear()

    def send_weights(self, manager: DDPManager, *, is_broken: bool) -> None:
        """Gives every rank rank 0's trainable weights and buffers, and forgets the Trainers. Collective.

        Weights in parts stay where they are, unless ranks may have been cut off a step apart: then the model is lost.

        Args:
            manager: Of the new group.
            is_broken: The ranks have not all left the last cell at the same point.

        Raises:
            DivergenceError: On all ranks: a model differs between ranks in more than its values.
        """
        models = {number: trainer.model for number, trainer in self._living().items()}
        self._noted.clear()
        mine = {number: [*_facts(model), number in self._cut] for number, model in models.items()}
        ranks = [json.loads(text) for text in manager.gather_texts(json.dumps(mine))]
        # A Trainer that is gone on one rank cannot be asked for its model.
        for number in sorted(n for n in map(int, ranks[0]) if all(str(n) in rank for rank in ranks)):
            facts = [rank[str(number)][:2] for rank in ranks]
            if is_broken and has_shards(models[number]) and any(rank[str(number)][2] for rank in ranks):
                lose(models[number], CUT)
            if any(of_rank != facts[0] for of_rank in facts):
                raise DivergenceError(
                    f"The model of training number {number + 1} of this notebook has other weights on each rank (how "
                    f"many tensors, and a digest of their names, shapes and types): {facts}.",
                    hint="Load the model again and make a new Trainer.",
                )
            manager.broadcast_tensors(tensor for _, tensor in _shared(models[number]))

    def _living(self) -> dict[int, TrainerLike]:
        return {n: trainer for n, (found, _) in self._noted.items() if (trainer := found()) is not None}


def become_one_process() -> None:
    """Makes accelerate forget the other ranks, also in objects that were made for several processes."""
    state = sys.modules.get("accelerate.state")
    if state is None or not state.PartialState._shared_state:
        return
    kept = dict(state.AcceleratorState._shared_state)
    # transformers does the same for every TrainingArguments. All objects of these classes share one state, so this
    # changes those that trainers hold as well. Settings such as the precision are kept.
    is_cpu = state.PartialState._shared_state["_cpu"]
    state.AcceleratorState._reset_state(reset_partial_state=True)
    # A kernel that was started as a group of one has a launcher's variables, by which accelerate would open a group.
    with RankVariables({}, dict.fromkeys(SINGLE_PROCESS.variables())).without():
        alone = vars(state.PartialState(cpu=is_cpu))
    if kept:
        state.AcceleratorState._shared_state.update({**kept, **alone})


def _refuse_old_trainer(*_args: Any, **_kwargs: Any) -> Any:
    raise SetupError(
        "This Trainer belongs to ranks that are gone: a cell failed or was stopped, or this kernel is alone now.",
        hint="Make a new Trainer, with new arguments. The model has rank 0's weights.",
    )


def _refuse_old_wrapper(*_args: Any, **_kwargs: Any) -> Any:
    raise DistributedError(
        "This model was wrapped for a process group that is gone, since a cell failed or was stopped.",
        hint="Wrap what unwrap_model(model) returns, and make a new optimizer. Alone, train that model.",
    )


def _take_ddp_off(trainer: TrainerLike) -> None:
    """Removes the wrapper, whose group has ended: its hooks would act in the next wrapper of the same model."""
    accelerator = trainer.accelerator
    for model in (trainer.model_wrapped, *accelerator._models):
        if (ddp := _ddp_in(model)) is not None:
            ddp._remove_autograd_hooks()
    accelerator._models = [model for model in accelerator._models if _ddp_in(model) is None]
    trainer.model_wrapped = trainer.model
    trainer.model.zero_grad(set_to_none=True)  # The gradients are views into its buckets.


def _ddp_in(model: nn.Module) -> nn.parallel.DistributedDataParallel | None:
    while not isinstance(model, nn.parallel.DistributedDataParallel):
        if (name := inner_name(model)) is None:
            return None
        model = getattr(model, name)
    return model


def _facts(model: nn.Module) -> list[Any]:
    """What must be equal on two ranks before one can take the weights of the other."""
    shared = [(name, tuple(tensor.shape), str(tensor.dtype)) for name, tensor in _shared(model)]
    return [len(shared), digest_of(shared)]


def _shared(model: nn.Module) -> list[tuple[str, torch.Tensor]]:
    return [*replicated_tensors(model), *persistent_buffers(model)]
