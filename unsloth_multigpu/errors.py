"""The exceptions of this package. Each has a message, a hint and an exit code. Pure.

`docs/errors.md` lists the codes, which are stable, and has a section for each class. Each class also derives from the
builtin exception that a caller would expect, so that `except ValueError` around a wrong argument works.
"""

from __future__ import annotations

import functools
from typing import Any


class MultiGPUError(Exception):
    """Base of all errors that this package raises.

    Its text is the message, followed by `Hint: ` and the next action.

    Args:
        message: What happened, the value given, what was expected.
        hint: The next action.
    """

    exit_code = 70

    def __init__(self, message: str, *, hint: str) -> None:
        super().__init__(message)
        self.hint = hint.strip()

    def __reduce__(self) -> tuple[Any, ...]:
        # Errors are pickled in worker processes. Exception's own method would lose the keyword argument.
        return functools.partial(type(self), hint=self.hint), self.args, vars(self)

    def __str__(self) -> str:
        # Not `super()`, because some builtin bases build their text from their fields.
        return f"{BaseException.__str__(self)}\nHint: {self.hint}"


class ConfigError(MultiGPUError, ValueError):
    """An argument or an UNSLOTH_MULTIGPU_* variable has an invalid value.

    Args:
        most_ranks: If a step has too few samples for all ranks: the largest number of ranks that it is enough for.
    """

    exit_code = 64

    def __init__(self, message: str, *, hint: str, most_ranks: int | None = None) -> None:
        super().__init__(message, hint=hint)
        self.most_ranks = most_ranks


class SetupError(MultiGPUError, RuntimeError):
    """This machine, or this place in the script, does not allow what was asked for."""

    exit_code = 69


class VersionError(MultiGPUError, ImportError):
    """An installed library is outside the range that this package supports."""

    exit_code = 72


class PatchError(MultiGPUError, TypeError):
    """A function that this package patches has another signature than expected, or was replaced.

    Not a RuntimeError, which the lazy imports of transformers turn into "Could not import module".
    """

    exit_code = 73


class LaunchError(MultiGPUError, RuntimeError):
    """The ranks could not be started."""

    exit_code = 71


class GeneratorError(LaunchError):
    """The generation server of `generators` was not started, or ended while ranks needed it."""

    exit_code = 82


class DistributedError(MultiGPUError, RuntimeError):
    """The ranks do not form one run."""

    exit_code = 76
    # On ranks above 0, if rank 0 has raised an error: the text of that error. This one has the same class.
    of_rank_0 = ""


class RankTimeoutError(DistributedError, TimeoutError):
    """A wait for another rank has timed out, or the supervisor found a hung rank."""

    exit_code = 124


class NonFiniteGradientError(MultiGPUError, ArithmeticError):
    """The gradient of a step is infinite or NaN."""

    exit_code = 78


class ResumeError(MultiGPUError, ValueError):
    """A training cannot resume from a checkpoint."""

    exit_code = 79


class SaveError(MultiGPUError, OSError):
    """A checkpoint was not saved, because another run is saving to the same folder."""

    exit_code = 81


class DivergenceError(DistributedError):
    """The ranks have different settings, data or weights, or a run differs from the one it is compared with."""

    exit_code = 77


class FederatedError(MultiGPUError, RuntimeError):
    """A federated round has failed: too many clients failed, or their results cannot be aggregated."""

    exit_code = 80


# Errors that one process would not have raised, at any step.
_OF_SEVERAL_RANKS = (ConfigError, SetupError, VersionError, PatchError, ResumeError, DivergenceError)


def is_refusal(error: BaseException, num_steps: int) -> bool:
    """True for an error of `train()` that one process would not have raised. `num_steps` are those that it has made."""
    if isinstance(error, DistributedError) and error.of_rank_0:
        return False  # Rank 0 decides about its own error.
    if isinstance(error, _OF_SEVERAL_RANKS):
        return True
    # A NaN gradient also occurs in one process. A script may handle a lost rank after the first step.
    return isinstance(error, MultiGPUError) and not isinstance(error, NonFiniteGradientError) and num_steps == 0
