"""Seeds the random generators that a script does not seed: equally on all ranks, differently in each run."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Mapping

from unsloth_multigpu.wire.digest import digest_hex, digest_of


def generator_digests() -> dict[str, str]:
    """Returns a digest of the state of each loaded global random generator: Python's, NumPy's and torch's."""
    return {name: read() for name, (read, _) in _generators().items()}


def seed_unseeded(run_seed: int, seeded: Mapping[str, str]) -> None:
    """Seeds the generators that the script has not seeded; `run_seed` is 0 .. 2^32 - 1.

    An unseeded generator has a different state in each process. If the state equals that of the supervisor at the same
    line of the script, by its `generator_digests`, the script has seeded the generator.
    """
    import numpy  # noqa: F401  # If it were loaded later, its state would differ between ranks.

    for name, (read, seed) in _generators().items():
        if read() != seeded.get(name):
            seed(run_seed)


def _generators() -> dict[str, tuple[Callable[[], str], Callable[[int], object]]]:
    """Returns, for each generator of a loaded library, a function that digests its state and one that seeds it."""
    found: dict[str, tuple[Callable[[], str], Callable[[int], object]]] = {
        "random": (lambda: digest_of(random.getstate()), random.seed)
    }
    numpy, torch = sys.modules.get("numpy"), sys.modules.get("torch")
    if numpy is not None:
        found["numpy"] = (lambda: digest_of(numpy.random.get_state()), numpy.random.seed)
    if torch is not None:
        # `manual_seed` also applies to devices that are opened later.
        found["torch"] = (lambda: digest_hex(torch.get_rng_state().numpy().tobytes()), torch.manual_seed)
    return found


def same_random_choices() -> None:
    """Seeds all generators with 0, so that unseeded shuffles, splits and LoRA weights are equal in several runs."""
    import numpy  # noqa: F401
    import torch  # noqa: F401

    for _, seed in _generators().values():
        seed(0)
