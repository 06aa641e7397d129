"""The one loop: parts act on a Trainer in the order of one table, by one override per method and one callback.

The loop itself is Hugging Face's. This module decides the order of the parts in it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from operator import attrgetter
from typing import Any

from unsloth_multigpu.part import EVENTS, Override, Part
from unsloth_multigpu.seam import SEAMS, Steered, owner_of
from unsloth_multigpu.trainer_protocol import ArgumentsLike, CallbackHandlerLike, ControlLike, StateLike, TrainerLike

_MISSING: Any = object()

# Name of each place, and why it is there. The override of the first row is the innermost one, next to the library's own
# method; each later row is called before it and gets its result. Events reach the rows from the first to the last.
PLACES: tuple[tuple[str, str], ...] = (
    ("recorder", "Records what the script's own methods are given and return, with nothing of ours in between."),
    ("decision", "Its events come first: what the ranks have agreed on is what the parts behind it act on."),
    ("faults", "Planted inside of all that guards, which then meets them as faults of the script."),
    ("waits", "Next to the micro-batches: behind the last gradient of each it measures the wait for other ranks."),
    ("log", "Its numbers are in the line before all that writes it, or hands it on, adds to it."),
    ("completions", "A micro-batch is dealt before anything counts or computes it."),
    ("feed", "From here outwards the Trainer's batch is one whole optimizer step, which callbacks do not see."),
    ("metrics", "Reads what the feed has noted, before the Trainer logs, evaluates or saves."),
    ("figures", "Counts what the feed gives the loss, and writes the page before a line."),
    ("check", "Sees the loss of every micro-batch with its weight, and the gradient before it is sent."),
    ("exchange", "Gradients meet once the check has judged them. Saving waits until weights have met."),
    ("trained", "DDP must be rebuilt before a step computes, so it is around all that computes."),
    ("buffers", "Buffers are made equal behind the last update of a step, and before an evaluation reads them."),
    ("resume", "What the training resumes from is known before anything is saved."),
    ("checkpoints", "Saves what the exchange has made equal on all ranks."),
    ("phases", "Marks on the rank's page what the parts inside of it do: to the supervisor it is one phase."),
    ("progress", "Compares the ranks behind everything that changes weights, and before a checkpoint of them."),
    ("preemption", "Has the last word on what happens behind a step: a stop overrules an evaluation."),
)
_ORDER = {name: i for i, (name, _) in enumerate(PLACES)}


class Loop:
    """Steers one training of one Trainer by parts.

    Args:
        parts: In any order.

    Raises:
        KeyError: A part has a place that is not in `PLACES`.
    """

    def __init__(self, trainer: TrainerLike, parts: Iterable[Part]) -> None:
        self.trainer: Any = trainer  # None once it was let go.
        self.parts = tuple(sorted(parts, key=lambda part: _ORDER[part.place]))
        # What is restored after the training: the object, the attribute's name, its value, and whether it is restored
        # even if other code has set it meanwhile.
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
                # Some methods are replaced for a moment only, and an exception may interrupt that.
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
        """Restores the Trainer. Call it again if an exception has interrupted it."""
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
        """Moves our callback after those that the script has added since: parts act on what callbacks decide."""
        handler: CallbackHandlerLike = self.trainer.callback_handler
        if handler.callbacks[-1] is not self._callback:
            # A new list: the old one is being walked through.
            handler.callbacks = [*(c for c in handler.callbacks if c is not self._callback), self._callback]


def _callback_of(loop: Loop) -> Any:
    """The one callback, which passes each event to the parts that handle it."""
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
