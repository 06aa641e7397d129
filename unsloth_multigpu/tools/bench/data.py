"""The samples of a benchmark: rows of tokens that every rank of every arm generates from the seed."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from unsloth_multigpu.errors import ConfigError
from unsloth_multigpu.tools.bench.option import MAX_TEST_ROWS, TEXT_KINDS, BenchOptions

# This many standard deviations are between median and maximum. With lognormal:150:1024, 60 % of what random batches of
# 8 compute is padding, as in instruction data.
_MAX_AT = 2.1
NUM_ID_TOKENS = 2
_TEST_SHARE = 0.1
# Shorter ends of paragraphs are left out.
_MIN_BYTES = 8


def make_rows(options: BenchOptions) -> list[list[int]]:
    """Rows of token ids, longer than 2. The first two tokens are the row's number, so that it can be told in a batch.

    Raises:
        ConfigError: The file has no rows, or one that cannot be read.
    """
    if options.lengths.startswith(TEXT_KINDS):
        texts = _texts(options)
        texts = texts[_num_test_rows(options, texts) :]
        return _numbered(options, [texts[i % len(texts)] for i in range(options.num_rows)])
    draw = random.Random(options.seed)
    kind, _, rest = options.lengths.partition(":")
    lengths = _lengths(kind, [int(n) for n in rest.split(":")], options.num_rows, draw)
    return _numbered(options, [draw.choices(range(options.vocab_size), k=length - NUM_ID_TOKENS) for length in lengths])


def make_test_rows(options: BenchOptions) -> list[list[int]]:
    """Rows that the model does not learn, numbered after those that it does; none where it learns nothing."""
    if options.num_epochs is None:
        return []
    texts = _texts(options)
    return _numbered(options, texts[: _num_test_rows(options, texts)], first=options.num_rows)


def _num_test_rows(options: BenchOptions, texts: Sequence[list[int]]) -> int:
    if options.num_epochs is None:
        return 0
    if len(texts) < 2:
        raise ConfigError(
            f"--lengths {options.lengths}: one text cannot be learned and tested.", hint="Give a file of several texts."
        )
    return min(MAX_TEST_ROWS, max(1, int(_TEST_SHARE * len(texts))))


def _numbered(options: BenchOptions, bodies: Sequence[list[int]], first: int = 0) -> list[list[int]]:
    return [[*divmod(number, options.vocab_size), *body] for number, body in enumerate(bodies, first)]


def _texts(options: BenchOptions) -> list[list[int]]:
    kind, _, rest = options.lengths.partition(":")
    draw = random.Random(options.seed)
    if kind == "file":
        return _file_bodies(Path(rest), draw, range(options.vocab_size))
    pieces = _help_pieces(int(rest) - NUM_ID_TOKENS)
    draw.shuffle(pieces)
    return pieces


def _help_pieces(max_bytes: int) -> list[list[int]]:
    """The help texts that come with Python, paragraph by paragraph; a paragraph that is longer gives several pieces."""
    from pydoc_data.topics import topics

    paragraphs = [" ".join(p.split()).encode() for text in topics.values() for p in text.split("\n\n")]
    pieces = [p[i : i + max_bytes] for p in paragraphs for i in range(0, len(p), max_bytes)]
    # Some paragraphs occur in several texts; none may be in both the training and the test rows.
    return [list(piece) for piece in dict.fromkeys(pieces) if len(piece) >= min(_MIN_BYTES, max_bytes)]


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
