"""Random generators that a script does not seed: the same on all ranks of a run, different in each run."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Mapping
from types import ModuleType

from unsloth_multigpu.wire.digest import digest_hex, digest_of


def generator_digests() -> dict[str, str]:
    """A digest of each global random generator that this process has loaded: Python's, NumPy's and torch's."""
    return {name: read() for name, (read, _) in _generators().items()}


def seed_unseeded(run_seed: int, seeded: Mapping[str, str]) -> None:
    """Seeds those generators that the script has not seeded itself.

    A generator without a seed starts with a different state in each process. If this process finds the state that its
    supervisor had at the same line of the script, the script has seeded the generator.

    Args:
        run_seed: 0 .. 2^32 - 1.
        seeded: The supervisor's `generator_digests`.
    """
    import numpy  # noqa: F401  # If it were loaded later, its state would differ between ranks.

    for name, (read, seed) in _generators().items():
        if read() != seeded.get(name):
            seed(run_seed)


def _generators() -> dict[str, tuple[Callable[[], str], Callable[[int], object]]]:
    """Name -> what digests the generator's state and what seeds it; of loaded libraries only."""
    found: dict[str, tuple[Callable[[], str], Callable[[int], object]]] = {
        "random": (lambda: digest_of(random.getstate()), random.seed)
    }
    numpy, torch = sys.modules.get("numpy"), sys.modules.get("torch")
    if numpy is not None:
        found["numpy"] = (lambda: digest_of(_numpy_state(numpy)), numpy.random.seed)
    if torch is not None:
        # Its `manual_seed` seeds the devices as well, once they are opened.
        found["torch"] = (lambda: digest_hex(torch.get_rng_state().numpy().tobytes()), torch.manual_seed)
    return found


def _numpy_state(numpy: ModuleType) -> tuple[object, ...]:
    name, words, *place = numpy.random.get_state()
    return (name, words.tobytes(), *place)


def same_random_choices() -> None:
    """Lets a script that shuffles, splits or makes LoRA weights without a seed do the same in several runs."""
    import numpy
    import torch

    random.seed(0)
    numpy.random.seed(0)
    torch.manual_seed(0)
