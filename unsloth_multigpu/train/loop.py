"""Attaches parts to a Trainer in the order of one table, with one override per method and one callback.

The training loop is Hugging Face's. This module only decides in which order parts act in it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from operator import attrgetter
from typing import Any

from unsloth_multigpu.part import (
    EVENTS,
    ArgumentsLike,
    CallbackHandlerLike,
    ControlLike,
    Override,
    Part,
    StateLike,
    TrainerLike,
)
from unsloth_multigpu.seam import SEAMS, Steered, owner_of

_MISSING: Any = object()

# The parts in order, and the reason for the order. The override of the first row is the innermost: it calls the
# library's own method. The override of a later row wraps those of the earlier rows. Events go from first to last.
PLACES: tuple[tuple[str, str], ...] = (
    ("recorder", "Records arguments and results of the script's own methods, so nothing may be in between."),
    ("callbacks", "Ends the time of the script's callbacks before any part handles the event."),
    ("decision", "Handles events before later parts, which act on the decision that all ranks agreed on."),
    ("faults", "Injects faults inside all guards, which see them as faults of the script."),
    ("waits", "Close to the micro-batches: measures the wait for other ranks from the last gradient on."),
    ("log", "Adds its numbers to a log line before the time of the script's callbacks begins."),
    ("completions", "Deals micro-batches before any part counts or computes them."),
    ("feed", "For all later parts, a batch of the Trainer is a complete optimizer step."),
    ("metrics", "Reads the records of the feed before the Trainer logs, evaluates or saves."),
    ("figures", "Counts the inputs that the feed gives to the loss, and updates the heartbeat before a log line."),
    ("check", "Sees the weighted loss of every micro-batch, and the gradient before the all-reduce."),
    ("exchange", "Synchronizes gradients after the check has seen them."),
    ("trained", "Rebuilds DDP before a step is computed, so it wraps all parts that compute."),
    ("buffers", "Synchronizes buffers after the update of a step and before an evaluation."),
    ("resume", "Finds the checkpoint to resume from before anything is saved."),
    ("checkpoints", "Lets the exchange make weights equal, then saves them in a temporary folder."),
    ("phases", "Records one phase in the heartbeat for everything that earlier parts do."),
    ("progress", "Compares the ranks after all parts that change weights, and before a checkpoint."),
    ("preemption", "Handles events last, so that a stop overrules an evaluation."),
)
_ORDER = {name: i for i, (name, _) in enumerate(PLACES)}


class Loop:
    """Attaches parts, given in any order, to one Trainer for one training.

    Raises:
        KeyError: A part has a place that is not in `PLACES`.
    """

    def __init__(self, trainer: TrainerLike, parts: Iterable[Part]) -> None:
        self.trainer: Any = trainer  # None after `let_go`.
        self.parts = tuple(sorted(parts, key=lambda part: _ORDER[part.place]))
        # Attributes to restore after the training: object, name, value, and whether to restore it even if other code
        # has set it meanwhile.
        self._before: dict[tuple[int, str], tuple[Any, str, Any, bool]] = {}
        self._callback: Any = None

    @contextmanager
    def steering(self) -> Iterator[None]:
        """Attaches the parts to the Trainer while the context is open."""
        trainer: TrainerLike = self.trainer
        with ExitStack() as stack:
            stack.callback(self.let_go)
            self._callback = _callback_of(self)
            for seam in SEAMS.values():
                # Some methods are replaced only for a moment, which an exception may interrupt.
                if (owner := owner_of(seam, trainer)) is not None:
                    self._keep(owner, seam.name, is_ours=False)
            for part in self.parts:
                for name in part.keeps:
                    path, _, attribute = name.rpartition(".")
                    self._keep(attrgetter(path)(trainer) if path else trainer, attribute)
                stack.enter_context(part.around())
                for name, method in part.overrides().items():
                    self._put(name, method, is_needed=part.is_needed(name))
            trainer.add_callback(self._callback)
            yield

    def let_go(self) -> None:
        """Restores the Trainer. Call it again if an exception interrupted it."""
        if self.trainer is None:
            return
        handler: CallbackHandlerLike = self.trainer.callback_handler
        if self._callback in handler.callbacks:
            handler.remove_callback(self._callback)
        while self._before:
            key, (owner, name, value, is_ours) = next(reversed(self._before.items()))
            if is_ours or isinstance(vars(owner).get(name), Steered):
                if value is not _MISSING:
                    setattr(owner, name, value)
                elif name in vars(owner):
                    delattr(owner, name)
            del self._before[key]
        self.trainer, self.parts = None, ()

    def _keep(self, owner: Any, name: str, *, is_ours: bool = True) -> None:
        *_, value, _ = self._before.get((id(owner), name), (vars(owner).get(name, _MISSING), False))
        self._before[id(owner), name] = (owner, name, value, is_ours)

    def _put(self, name: str, method: Override, *, is_needed: bool) -> None:
        owner = owner_of(SEAMS[name], self.trainer)
        self._keep(owner, name)
        replacement = Steered(method, getattr(owner, name))
        replacement.is_needed = is_needed
        setattr(owner, name, replacement)

    def go_last(self) -> None:
        """Moves our callback behind those that the script has added, since parts act on the decisions of callbacks."""
        handler: CallbackHandlerLike = self.trainer.callback_handler
        if handler.callbacks[-1] is not self._callback:
            # A new list, because the old one is being iterated.
            handler.callbacks = [*(c for c in handler.callbacks if c is not self._callback), self._callback]


def _callback_of(loop: Loop) -> Any:
    from transformers import TrainerCallback

    def answering(event: str) -> Callable[..., None]:
        methods = [getattr(part, event) for part in loop.parts if hasattr(part, event)]
        may_be_late = event in ("on_train_begin", "on_epoch_begin", "on_step_begin")

        def answer(_self: Any, args: ArgumentsLike, state: StateLike, control: ControlLike, **kwargs: Any) -> None:
            if may_be_late:
                loop.go_last()
            for method in methods:
                method(args, state, control, **kwargs)

        return answer

    return type("LoopCallback", (TrainerCallback,), {event: answering(event) for event in EVENTS})()
