"""Seeds the random generators that a script does not seed: equally on all ranks, differently in each run."""

from __future__ import annotations

import random
import sys
from collections.abc import Mapping

from unsloth_multigpu.wire.digest import digest_hex, digest_of


def generator_digests() -> dict[str, str]:
    """Returns a digest of the state of each loaded global random generator: Python's, NumPy's and torch's."""
    digests = {"random": digest_of(random.getstate())}
    if (numpy := sys.modules.get("numpy")) is not None:
        digests["numpy"] = digest_of(numpy.random.get_state())
    if (torch := sys.modules.get("torch")) is not None:
        digests["torch"] = digest_hex(torch.get_rng_state().numpy().tobytes())
    return digests


def seed_unseeded(run_seed: int, seeded: Mapping[str, str]) -> None:
    """Seeds the generators that the script has not seeded; `run_seed` is 0 .. 2^32 - 1.

    An unseeded generator has a different state in each process. If the state equals that of the supervisor at the same
    line of the script, by its `generator_digests`, the script has seeded the generator.
    """
    import numpy  # If it were loaded later, its state would differ between ranks.

    for name, digest in generator_digests().items():
        if digest == seeded.get(name):
            continue
        if name == "torch":
            sys.modules["torch"].manual_seed(run_seed)  # Also seeds devices that are opened later.
        else:
            (random if name == "random" else numpy.random).seed(run_seed)
