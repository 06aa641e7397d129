"""The samples of a benchmark: rows of tokens that every rank of every arm generates from the seed."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence

from unsloth_multigpu.tools.bench.bench_option import MAX_TEST_ROWS, BenchOptions

# This many standard deviations are between median and maximum. With lognormal:150:1024, 60 % of what random batches of
# 8 compute is padding, as in instruction data.
_MAX_AT = 2.1
NUM_ID_TOKENS = 2
# Shorter ends of paragraphs are left out.
_MIN_BYTES = 8


def make_rows(options: BenchOptions) -> list[list[int]]:
    """Rows of token ids, longer than 2. The first two tokens are the row's number, by which it is told in a batch."""
    draw = random.Random(options.seed)
    kind, *numbers = options.lengths.split(":")
    if kind == "text":
        texts = _texts(options)[MAX_TEST_ROWS if options.is_learning else 0 :]
        return _numbered(options, [texts[i % len(texts)] for i in range(options.num_rows)])
    lengths = _lengths(kind, list(map(int, numbers)), options.num_rows, draw)
    return _numbered(options, [draw.choices(range(options.vocab_size), k=length - NUM_ID_TOKENS) for length in lengths])


def make_test_rows(options: BenchOptions) -> list[list[int]]:
    """Rows that the model does not learn, numbered after those that it does; none where it learns nothing."""
    texts = _texts(options)[:MAX_TEST_ROWS] if options.is_learning else []
    return _numbered(options, texts, first=options.num_rows)


def _numbered(options: BenchOptions, bodies: Sequence[list[int]], first: int = 0) -> list[list[int]]:
    return [[*divmod(number, options.vocab_size), *body] for number, body in enumerate(bodies, first)]


def _texts(options: BenchOptions) -> list[list[int]]:
    """The help texts that come with Python, paragraph by paragraph; a paragraph that is longer gives several pieces."""
    from pydoc_data.topics import topics

    max_bytes = int(options.lengths.partition(":")[2]) - NUM_ID_TOKENS
    paragraphs = [" ".join(p.split()).encode() for text in topics.values() for p in text.split("\n\n")]
    pieces = [p[i : i + max_bytes] for p in paragraphs for i in range(0, len(p), max_bytes)]
    # Some paragraphs occur in several texts; none may be in both the training and the test rows.
    texts = [list(piece) for piece in dict.fromkeys(pieces) if len(piece) >= min(_MIN_BYTES, max_bytes)]
    random.Random(options.seed).shuffle(texts)
    return texts


def _lengths(kind: str, numbers: list[int], num_rows: int, draw: random.Random) -> list[int]:
    if kind == "fixed":
        return numbers * num_rows
    median, longest = numbers
    sigma = math.log(longest / median) / _MAX_AT
    drawn = (round(draw.lognormvariate(math.log(median), sigma)) for _ in range(num_rows))
    return [min(longest, max(NUM_ID_TOKENS + 1, length)) for length in drawn]
