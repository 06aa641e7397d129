"""The samples of a benchmark: rows of tokens that every rank of every arm generates from the seed."""

from __future__ import annotations

import math
import random

from unsloth_multigpu.tools.bench.bench_option import BenchOptions

# This many standard deviations are between median and maximum. With lognormal:150:1024, 60 % of what random batches of
# 8 compute is padding, as in instruction data.
_MAX_AT = 2.1
NUM_ID_TOKENS = 2


def make_rows(options: BenchOptions) -> list[list[int]]:
    """Rows of token ids, longer than 2. The first two tokens are the row's number, by which it is told in a batch."""
    draw = random.Random(options.seed)
    kind, *numbers = options.lengths.split(":")
    lengths = _lengths(kind, list(map(int, numbers)), options.num_rows, draw)
    bodies = [draw.choices(range(options.vocab_size), k=length - NUM_ID_TOKENS) for length in lengths]
    return [[*divmod(number, options.vocab_size), *body] for number, body in enumerate(bodies)]


def _lengths(kind: str, numbers: list[int], num_rows: int, draw: random.Random) -> list[int]:
    if kind == "fixed":
        return numbers * num_rows
    median, longest = numbers
    sigma = math.log(longest / median) / _MAX_AT
    drawn = (round(draw.lognormvariate(math.log(median), sigma)) for _ in range(num_rows))
    return [min(longest, max(NUM_ID_TOKENS + 1, length)) for length in drawn]
