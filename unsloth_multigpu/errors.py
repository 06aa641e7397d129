"""The exception tree. Every error says what happened and what to do next, and has an exit code.

`docs/errors.md` lists the codes, which are stable, and has a section for each class. An error derives from the builtin
that a caller would expect as well, so that `except ValueError` around a wrong argument works.
"""

from __future__ import annotations

import contextlib
import functools
from typing import Any


class MultiGPUError(Exception):
    """Base of all errors that this package raises.

    Its text is the message, then `Hint: ` with the next action and, where the package was built with an address of
    `docs/errors.md`, `More: ` with the section of its class.

    Args:
        message: What happened, the value given, what was expected.
        hint: The next action.
    """

    exit_code = 70

    def __init__(self, message: str, *, hint: str) -> None:
        super().__init__(message)
        self.hint = hint

    def __reduce__(self) -> tuple[Any, ...]:
        # Errors travel from worker processes; without it the keyword would be missing when they are made again.
        return functools.partial(type(self), hint=self.hint), self.args

    def __str__(self) -> str:
        documented = next(kind for kind in type(self).__mro__ if kind.__module__ == __name__)
        # Not that of a builtin that it derives from as well: some make a text of their own from their fields.
        more = f"\nMore: {page()}#{documented.__name__.lower()}" if page() else ""
        return f"{BaseException.__str__(self)}\nHint: {self.hint}{more}"


@functools.cache
def page() -> str:
    """The address where errors are explained; "" where the package was built without one."""
    import importlib.metadata as metadata

    with contextlib.suppress(metadata.PackageNotFoundError):  # The sources alone, without an installation.
        for url in metadata.metadata("unsloth_multigpu").get_all("Project-URL", ()):
            label, _, address = url.partition(", ")
            if label == "Errors":
                return str(address)
    return ""


class ConfigError(MultiGPUError, ValueError):
    """An argument or an UNSLOTH_MULTIGPU_* variable has a value that cannot be used.

    Args:
        most_ranks: Where a step cannot be shared by all ranks: the largest number of ranks that can share it.
    """

    exit_code = 64

    def __init__(self, message: str, *, hint: str, most_ranks: int | None = None) -> None:
        super().__init__(message, hint=hint)
        self.most_ranks = most_ranks

    def __reduce__(self) -> tuple[Any, ...]:
        return functools.partial(type(self), hint=self.hint, most_ranks=self.most_ranks), self.args


class SetupError(MultiGPUError, RuntimeError):
    """What was asked cannot be done on this machine, or at this place of the script."""

    exit_code = 69


class VersionError(MultiGPUError, ImportError):
    """An installed library is outside the range that this package supports."""

    exit_code = 72


class PatchError(MultiGPUError, TypeError):
    """A function that this package steers has another shape than expected, or was replaced.

    Not a RuntimeError: the lazy imports of transformers turn those into "Could not import module".
    """

    exit_code = 73


class LaunchError(MultiGPUError, RuntimeError):
    """The ranks could not be started."""

    exit_code = 71


class GeneratorError(LaunchError):
    """The server that generates, `generators`, was not started, or has ended while the ranks needed it."""

    exit_code = 82


class DistributedError(MultiGPUError, RuntimeError):
    """The ranks do not form one run."""

    exit_code = 76
    # Where rank 0 has met an error, and this one, of its class as well, tells the other ranks: that error as text.
    of_rank_0 = ""


class RankTimeoutError(DistributedError, TimeoutError):
    """Another rank did not arrive within the limit, or the supervisor found a rank hung."""

    exit_code = 124


class NonFiniteGradientError(MultiGPUError, ArithmeticError):
    """The gradient of a step is infinite or NaN."""

    exit_code = 78


class ResumeError(MultiGPUError, ValueError):
    """A training cannot resume from a checkpoint."""

    exit_code = 79


class SaveError(MultiGPUError, OSError):
    """A checkpoint is not saved, because another run saves in the same folder or its files were taken away."""

    exit_code = 81


class DivergenceError(DistributedError):
    """The ranks run with different settings, data or weights, or a run is not the one that it was compared with."""

    exit_code = 77


class FederatedError(MultiGPUError, RuntimeError):
    """A federated round cannot be finished: too many clients failed, or what they sent cannot be put together."""

    exit_code = 80
