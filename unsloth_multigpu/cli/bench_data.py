"""The samples of a benchmark: rows of tokens that every rank of every arm makes anew from the seed."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path
from typing import Any

from unsloth_multigpu.cli.bench_option import BenchOptions
from unsloth_multigpu.errors import ConfigError

# So many standard deviations lie between median and maximum. With lognormal:150:1024, 60 % of what random batches of
# 8 compute is padding, as in instruction data.
_MAX_AT = 2.1
NUM_ID_TOKENS = 2


def make_rows(options: BenchOptions) -> list[list[int]]:
    """Rows of token ids, longer than 2. The first two tokens are the row's number, so that it can be told in a batch.

    Raises:
        ConfigError: The file has no rows, or one that cannot be read.
    """
    draw = random.Random(options.seed)
    vocabulary = range(options.vocab_size)
    kind, _, rest = options.lengths.partition(":")
    if kind == "file":
        bodies = _file_bodies(Path(rest), draw, vocabulary)
        bodies = [bodies[i % len(bodies)] for i in range(options.num_rows)]
    else:
        lengths = _lengths(kind, [int(n) for n in rest.split(":")], options.num_rows, draw)
        bodies = [draw.choices(vocabulary, k=length - NUM_ID_TOKENS) for length in lengths]
    return [[*divmod(number, options.vocab_size), *body] for number, body in enumerate(bodies)]


def _lengths(kind: str, numbers: list[int], num_rows: int, draw: random.Random) -> list[int]:
    if kind == "fixed":
        return numbers * num_rows
    median, longest = numbers
    sigma = math.log(longest / median) / _MAX_AT
    drawn = (round(draw.lognormvariate(math.log(median), sigma)) for _ in range(num_rows))
    return [min(longest, max(NUM_ID_TOKENS + 1, length)) for length in drawn]


def _file_bodies(path: Path, draw: random.Random, vocabulary: range) -> list[list[int]]:
    lines = [line for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    if not lines:
        raise ConfigError(f"{path} has no text.", hint="Give a file with one text per line.")
    if path.suffix != ".jsonl":
        return [list(line.encode()) for line in lines]
    return [_json_body(line, f"{path}:{number}", draw, vocabulary) for number, line in enumerate(lines, 1)]


def _json_body(line: str, place: str, draw: random.Random, vocabulary: range) -> list[int]:
    try:
        value: Any = json.loads(line)
    except json.JSONDecodeError as error:
        raise ConfigError(f"{place}: {error}", hint="Give one JSON value per line.") from error
    if isinstance(value, dict) and isinstance(value.get("text"), str) and value["text"]:
        return list(value["text"].encode())
    if isinstance(value, int) and value > NUM_ID_TOKENS:
        return draw.choices(vocabulary, k=value - NUM_ID_TOKENS)
    raise ConfigError(
        f'{place}: {line[:80]!r}; expected an object with "text", or a length above {NUM_ID_TOKENS}.',
        hint='Write {"text": "..."} or a number of tokens in each line.',
    )
