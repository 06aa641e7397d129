"""Whether a checkpoint has the weights of a model under the names that the model has for them. Pure.

transformers 5 writes some models under other names (ViT, LLaVA), and `Trainer` does not find them again: it loads what
fits, warns of the rest, and goes on from the weights that the script has loaded.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

_FILE, _INDEX = "model.safetensors", "model.safetensors.index.json"


def names_in(folder: Path) -> set[str] | None:
    """Names of the weights in a checkpoint; None where it has no whole model, but adapters or parts."""
    if (folder / _INDEX).is_file():
        return set(json.loads((folder / _INDEX).read_text(encoding="utf-8"))["weight_map"])
    if not (folder / _FILE).is_file():
        return None
    with (folder / _FILE).open("rb") as file:
        num_bytes = int.from_bytes(file.read(8), "little")
        return set(json.loads(file.read(num_bytes))) - {"__metadata__"}


def lost_weights(weights: Iterable[tuple[str, int]], names: set[str]) -> list[str]:
    """Weights that the checkpoint has under none of their names.

    Args:
        weights: Name and identity of each that is trained. Shared ones have several names, and one is enough.
        names: See `names_in`.
    """
    aliases: dict[int, list[str]] = {}
    for name, identity in weights:
        aliases.setdefault(identity, []).append(name)
    return [mine[0] for mine in aliases.values() if names.isdisjoint(mine)]
