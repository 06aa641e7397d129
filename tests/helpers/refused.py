"""Errors that tell the user what to do next."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from unsloth_multigpu.errors import MultiGPUError


@contextmanager
def refused(kind: type[MultiGPUError], message: str, hint: str = "") -> Iterator[pytest.ExceptionInfo[MultiGPUError]]:
    """The block raises this error, with `message` in its text and `hint` in its hint, which is never empty."""
    with pytest.raises(kind) as error:
        yield error
    text, _, told = str(error.value).partition("\nHint: ")
    assert message in text
    assert told
    assert hint in told
