"""The tiny model and text of the examples, and data set rows made from that text."""

from __future__ import annotations

from collections.abc import Sequence

from examples.tiny_model import build_tiny, topics

__all__ = ["SMALLEST", "build_tiny", "preference_rows", "text_rows", "topics"]

# Of `build_tiny`, for what does not depend on the model: half of the time of a step of the usual one.
SMALLEST = {"hidden_size": 32, "num_layers": 1, "vocab_size": 400}


def text_rows(n: int, *, max_words: int = 40, seed: int = 0) -> list[dict[str, str]]:
    """`{"text": ...}` rows of ragged lengths."""
    return [{"text": text} for text in topics(n, max_words=max_words, seed=seed)]


def preference_rows(n: int, *, max_words: int = 40, seed: int = 0) -> list[dict[str, str]]:
    """`{"prompt", "chosen", "rejected"}` rows: the continuation, and the same backwards with its last word left out."""
    return [
        {"prompt": start, "chosen": f" {rest}", "rejected": " " + " ".join(rest.split()[::-1][1:])}
        for start, rest in _halves(topics(n, max_words=max_words, seed=seed))
    ]


def _halves(texts: Sequence[str]) -> list[tuple[str, str]]:
    words = [text.split() for text in texts]
    return [(" ".join(w[: len(w) // 2]), " ".join(w[len(w) // 2 :])) for w in words]
