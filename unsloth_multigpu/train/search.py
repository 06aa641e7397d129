"""A search for hyperparameters is one search: rank 0 chooses the trials, and all ranks train each of them."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import Any, cast

from unsloth_multigpu.errors import SetupError
from unsloth_multigpu.group.manager import DDPManager
from unsloth_multigpu.seam import steered
from unsloth_multigpu.trainer_protocol import CallbackHandlerLike, OptionalTrainer, TrainerLike

# What rank 0 sends before a trial. Any other text is the end of the search.
_TRIAL = "trial"
# The outcome of a report to rank 0's study.
_GOES_ON, _PRUNED, _FAILED = range(3)


class TrialCutOff(Exception):
    """Rank 0 has left a trial before its end."""


def run_search(
    trainer: TrainerLike, manager: DDPManager, search: Callable[..., Any], backend: Any, options: Any
) -> Any:
    """`Trainer.hyperparameter_search` on all ranks; each returns what rank 0 has found. Collective.

    transformers lets rank 0 choose trials and sends each to the others, which expect `n_trials` of them. Here they
    follow until rank 0 says that it is done: a search may end by its time limit, and a trial by its pruner.

    Args:
        trainer: A `transformers.Trainer` or subclass.
        manager: This rank's manager.
        search: The trainer's own, with its arguments.
        backend: What the script asked for, None = transformers chooses.
        options: Other arguments, of the backend.

    Raises:
        SetupError: A backend that starts its trials on one rank only.
    """
    from transformers.hyperparameter_search import default_hp_search_backend

    name = str(getattr(backend, "value", backend) or default_hp_search_backend())
    if name != "optuna":
        raise SetupError(
            f"hyperparameter_search(backend={name!r}) starts its trials on one rank; the others hear nothing of them.",
            hint="Use backend='optuna', or search with num_gpus=1.",
        )
    if options.get("n_jobs", 1) != 1:
        raise SetupError(
            f"hyperparameter_search(n_jobs={options['n_jobs']}) trains several trials at once in one process.",
            hint="Leave n_jobs out: each trial is trained by all ranks.",
        )
    manager.open_group()
    is_rank_0 = manager.identity.rank == 0
    with ExitStack() as stack:
        stack.enter_context(steered(trainer, "_report_to_hp_search", functools.partial(_report, trainer, manager)))
        stack.enter_context(steered(trainer, "call_model_init", functools.partial(_make_model, manager)))
        stack.enter_context(_backend_run(functools.partial(_lead if is_rank_0 else _follow, trainer, manager)))
        return search()


@contextmanager
def _backend_run(run: Callable[..., Any]) -> Iterator[None]:
    """Lets `Trainer.hyperparameter_search` call `run` with the backend's own `run` and what that is given."""
    from transformers.hyperparameter_search import ALL_HYPERPARAMETER_SEARCH_BACKENDS as BACKENDS
    from transformers.trainer_utils import HPSearchBackend

    name = HPSearchBackend.OPTUNA
    before = BACKENDS[name]

    class OneSearch(before):  # type: ignore[misc, valid-type]
        def run(self, _trainer: TrainerLike, *args: Any, **kwargs: Any) -> Any:
            return run(super().run, *args, **kwargs)

    BACKENDS[name] = OneSearch
    try:
        yield
    finally:
        BACKENDS[name] = before


def _lead(trainer: TrainerLike, manager: DDPManager, run: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Rank 0's part: says before each trial that there is one, and at the end what is best."""
    searching, announced = cast(OptionalTrainer, trainer), []
    space = searching.hp_space

    def announcing(trial: Any) -> Any:
        # This is the first use of a trial. transformers sends it to the other ranks right after it.
        if trial.number not in announced:
            announced.append(trial.number)
            manager.broadcast_text(_TRIAL)
        return space(trial)

    searching.hp_space = announcing
    best = run(trainer, *args, **kwargs)
    runs = best if isinstance(best, list) else [best]
    found = [[r.run_id, r.objective, r.hyperparameters] for r in runs]
    end = {"is_list": isinstance(best, list), "found": found, "is_model_released": trainer.model is None}
    manager.broadcast_text(json.dumps(end, default=float))
    return best


def _follow(
    trainer: TrainerLike, manager: DDPManager, run: Callable[..., Any], _num_trials: int, *args: Any, **kwargs: Any
) -> Any:
    """The part of the others: trains what rank 0 trains, until it says what it has found."""
    from transformers.trainer_utils import BestRun

    while (text := manager.broadcast_text("")) == _TRIAL:
        # Transformers' own part for these ranks, which takes over one trial and trains it.
        with suppress(TrialCutOff):
            run(trainer, 1, *args, **kwargs)
    end = json.loads(text)
    if end["is_model_released"]:
        trainer.model = trainer.model_wrapped = None
    best = [BestRun(*row) for row in end["found"]]
    return best if end["is_list"] else best[0]


def _make_model(manager: DDPManager, original: Callable[..., Any], trial: Any = None) -> Any:
    """`Trainer.call_model_init`, in which a model may ask the trial for more than the arguments did. Collective."""
    if trial is None:
        return original(trial)
    if manager.identity.rank == 0:
        model = original(trial)
        manager.broadcast_text(json.dumps(trial.params))
        return model
    # What transformers has sent is a trial with the choices that had been made until then.
    return original(type(trial)(json.loads(manager.broadcast_text("")), trial.number))


def _report(trainer: TrainerLike, manager: DDPManager, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """`Trainer._report_to_hp_search`, in which rank 0's study may prune the trial. Collective."""
    if manager.identity.rank == 0:
        return _reported(trainer.callback_handler, manager, functools.partial(original, *args, **kwargs))
    result = original(*args, **kwargs)
    outcome = manager.gather_int64([_GOES_ON])[0][0]
    if outcome == _PRUNED:
        trainer.callback_handler.on_train_end(trainer.args, trainer.state, trainer.control)
    if outcome != _GOES_ON:
        raise TrialCutOff
    return result


def _reported(handler: CallbackHandlerLike, manager: DDPManager, report: Callable[[], Any]) -> Any:
    """Rank 0's part: tells the other ranks the outcome of the report before it acts on it."""
    is_told = False

    def tell(outcome: int) -> None:
        nonlocal is_told
        if not is_told:
            is_told = True
            manager.gather_int64([outcome])

    def on_train_end(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        tell(_PRUNED)  # The callbacks are called before the exception, and those of this package meet the other ranks.
        return original(*args, **kwargs)

    try:
        with steered(handler, "on_train_end", on_train_end):
            result = report()
        tell(_GOES_ON)
    finally:
        tell(_FAILED)  # An error ends the trial on all ranks, too. Rank 0's study decides what follows.
    return result


@contextmanager
def trial_set_up(trainer: TrainerLike, trial: Any) -> Iterator[None]:
    """Lets the arguments and the accelerator of a trial be there before its training is steered.

    `Trainer.train` would make both in its midst: the trial's batch size and accumulation would come too late, and what
    was put on the accelerator would be gone.

    Args:
        trainer: A `transformers.Trainer` or subclass.
        trial: Of a search; None = a training by itself.
    """
    if trial is None or getattr(trainer, "hp_search_backend", None) is None:
        yield
        return
    args = trainer.args
    seed = args.seed
    trainer._hp_search_setup(trial)
    # One process makes the model of a trial with the seed of the one before.
    args.seed, seed_of_trial = seed, args.seed

    def set_up(_original: Any, _trial: Any) -> None:
        args.seed = seed_of_trial

    with ExitStack() as stack:
        stack.enter_context(steered(trainer, "_hp_search_setup", set_up))
        yield
