"""A search for hyperparameters is one search: rank 0 chooses the trials, and all ranks train each of them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

from unsloth_multigpu.core.manager import DDPManager
from unsloth_multigpu.core.steps import instance_attribute
from unsloth_multigpu.errors import SetupError

# What came of a report to rank 0's study.
_GOES_ON, _PRUNED, _FAILED = range(3)


class TrialCutOff(Exception):
    """Rank 0 has left a trial before its end."""


@dataclass(frozen=True)
class _End:
    """Rank 0's last message of a search."""

    best: Any
    is_model_released: bool


def run_search(trainer: Any, manager: DDPManager, search: Callable[..., Any], backend: Any, options: Any) -> Any:
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
    report = functools.partial(_report, trainer, manager, trainer._report_to_hp_search)
    make = functools.partial(_make_model, manager.identity.rank == 0, trainer.call_model_init)
    with (
        instance_attribute(trainer, "_report_to_hp_search", report),
        instance_attribute(trainer, "call_model_init", make),
    ):
        if manager.identity.rank > 0:
            backends = _Followers(trainer)
            with backends.in_place():
                return search()
        best = search()
    dist.broadcast_object_list([_End(best, trainer.model is None)], src=0)
    return best


class _Followers:
    """What ranks above 0 run in the place of the backend.

    Args:
        trainer: A `transformers.Trainer` or subclass.
    """

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Lets `hyperparameter_search` call `run` instead of the backend's, meanwhile."""
        from transformers.hyperparameter_search import ALL_HYPERPARAMETER_SEARCH_BACKENDS as BACKENDS
        from transformers.trainer_utils import HPSearchBackend

        name, run = HPSearchBackend.OPTUNA, self.run
        before = BACKENDS[name]

        class Following(before):  # type: ignore[misc, valid-type]
            def run(self, *_: Any, **__: Any) -> Any:
                return run()

        BACKENDS[name] = Following
        try:
            yield
        finally:
            BACKENDS[name] = before

    def run(self) -> Any:
        """Trains what rank 0 trains, until it says what it has found."""
        trainer = self._trainer
        while True:
            message = [None]
            dist.broadcast_object_list(message, src=0)
            if isinstance(message[0], _End):
                if message[0].is_model_released:
                    trainer.model = trainer.model_wrapped = None
                return message[0].best
            trainer.objective = None
            try:
                trainer.train(resume_from_checkpoint=None, trial=message[0])
                if getattr(trainer, "objective", None) is None:
                    trainer.objective = trainer.compute_objective(trainer.evaluate())
            except TrialCutOff:
                continue


def _make_model(is_rank_0: bool, original: Callable[..., Any], trial: Any = None) -> Any:
    """`Trainer.call_model_init`, in which a model may ask the trial for more than the arguments did. Collective."""
    if trial is None:
        return original(trial)
    params = [None]
    if is_rank_0:
        model = original(trial)
        params = [trial.params]
    dist.broadcast_object_list(params, src=0)
    # What rank 0 has sent before is a trial with the choices that had been made until then.
    return model if is_rank_0 else original(type(trial)(params[0], trial.number))


def _report(trainer: Any, manager: DDPManager, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
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


def _reported(handler: Any, manager: DDPManager, report: Callable[[], Any]) -> Any:
    """Rank 0's part: what comes of the report is told before anything follows from it."""
    is_told = False

    def tell(outcome: int) -> None:
        nonlocal is_told
        if not is_told:
            is_told = True
            manager.gather_int64([outcome])

    def on_train_end(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        tell(_PRUNED)  # Before the exception the callbacks hear of the end, and ours meet the other ranks' there.
        return original(*args, **kwargs)

    ends = functools.partial(on_train_end, handler.on_train_end)
    try:
        with instance_attribute(handler, "on_train_end", ends):
            result = report()
        tell(_GOES_ON)
    finally:
        tell(_FAILED)  # An error leaves the trial on all ranks, too: what it means is for rank 0's study to say.
    return result


@contextmanager
def trial_set_up(trainer: Any, trial: Any) -> Iterator[None]:
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

    def set_up(_trial: Any) -> None:
        args.seed = seed_of_trial

    with ExitStack() as stack:
        stack.enter_context(instance_attribute(trainer, "_hp_search_setup", set_up))
        yield
